"""Recorded routes: the experts that processed each token, so that another forward pass sends it to the same ones.

They are u8[B, T, layers * k], column t of token t: 1 + the number of each of its k experts, layer by layer. 0 is no
record, and there the router decides. Layers and experts share an axis, because TPUs pad the last two of an array.
"""

import jax
import jax.numpy as jnp

from rpg_jax import InputError
from rpg_jax.models.config import ModelConfig

MOST = 255  # experts of a layer


def width(config: ModelConfig) -> int:
    """Numbers of a token's routes. Raises InputError for a model without experts, or with more than a byte tells."""
    if not 0 < config.experts <= MOST:
        raise InputError(
            f"rollout.routes=record keeps a token's experts in bytes, 1 to {MOST} experts a layer, and a "
            f"{config.model_type} has {config.experts or 'none'}; set rollout.routes=recompute"
        )
    return config.layers * config.experts_per_token


def recorded(chosen: list[jax.Array]) -> jax.Array:
    """The routes of the experts that each layer chose, i32[B, T, k]."""
    return (jnp.concatenate(chosen, axis=-1) + 1).astype(jnp.uint8)


def replayed(config: ModelConfig, routes: jax.Array) -> jax.Array:
    """i32[layers, B, T, k], as `Model.hidden_and_auxiliary` takes them: -1 where nothing is recorded."""
    by_layer = routes.astype(jnp.int32).reshape(*routes.shape[:2], config.layers, -1) - 1
    return jnp.moveaxis(by_layer, 2, 0)
