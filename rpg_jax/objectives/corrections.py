"""Constant weights that correct for the way samples were drawn: the `weight` argument of every objective."""

import jax
import jax.numpy as jnp


def truncated_importance_weight(
    behavior_logp: jax.Array, sampler_logp: jax.Array, mask: jax.Array, cap: float, level: str = "token"
) -> tuple[jax.Array, jax.Array]:
    """min(behavior / sampler, cap): truncated importance sampling (Ionides 2008; as "TIS" in verl and trl).

    The trainer and the sampler compute the probabilities of the same parameters differently (precision, kernels,
    batching); samples come from the sampler, and objectives are written for the behavior policy.

    Args:
      behavior_logp, sampler_logp, mask: [B, T]; log-probs of the sampled tokens by the trainer and by the sampler.
      cap: largest weight, above 0.
      level: "token", or "sequence" for the ratio of the whole response, one for each row.

    Returns weight [B, T], and where it was cut, bool [B, T].
    """
    log_ratio = jnp.where(mask, behavior_logp - sampler_logp, 0)
    if level == "sequence":
        log_ratio = jnp.broadcast_to(jnp.sum(log_ratio, axis=1, keepdims=True), log_ratio.shape)
    cut = log_ratio > jnp.log(cap)
    return jnp.where(cut, cap, jnp.exp(log_ratio)).astype(log_ratio.dtype), cut & mask
