"""Decoder-only transformers: shapes, the forward pass, and log-probabilities of a batch's tokens."""

from rpg_jax.models.attention import AttentionKind
from rpg_jax.models.config import ModelConfig
from rpg_jax.models.families import SIZES, named
from rpg_jax.models.logprobs import (
    token_logprobs,
    token_logprobs_and_divergence,
    token_logprobs_and_entropy,
    token_logprobs_of_two,
)
from rpg_jax.models.lora import LoRA, join, merge
from rpg_jax.models.quantization import quantize_params
from rpg_jax.models.transformer import (
    Model,
    active_parameter_count,
    expert_parameter_count,
    parameter_count,
    stack_layers,
    unstack_layers,
    with_head,
)
