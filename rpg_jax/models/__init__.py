"""Decoder-only transformers: shapes, the forward pass, and log-probabilities of a batch's tokens."""

from rpg_jax.models.config import SIZES, ModelConfig, named, parameter_count
from rpg_jax.models.logprobs import token_logprobs, token_logprobs_and_divergence, token_logprobs_and_entropy
from rpg_jax.models.lora import LoRA, join, merge
from rpg_jax.models.quantization import quantize_params
from rpg_jax.models.transformer import Model, stack_layers, unstack_layers, with_head
