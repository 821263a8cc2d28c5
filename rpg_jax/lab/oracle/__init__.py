"""Bias, variance and direction of stale gradients in a transformer, against the gradient of fresh responses.

`tradeoff` sums over every response of tiny policies; here responses are sampled from a transformer and may be long.
Reading order: task (prompts, a reward, its exact conditional expectations), policies (the behavior policy and those
some updates later), estimators (what is compared), gradients (their means and moments), tables, figures, and command
(`python -m rpg_jax.study oracle`).
"""
