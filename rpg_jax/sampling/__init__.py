"""Sampling responses: paged KV cache, continuous batching, and drawing tokens, all inside jitted programs."""

from rpg_jax.sampling.decode import Sampling
from rpg_jax.sampling.generate import Decoding, generate, make_sampler, no_sequences, prompts_to_answer
