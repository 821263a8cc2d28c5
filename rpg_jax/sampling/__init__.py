"""Sampling responses: prefill, continuous batching over slots, and drawing tokens, all inside jitted programs."""

from rpg_jax.sampling.decode import Sampling
from rpg_jax.sampling.generate import generate
