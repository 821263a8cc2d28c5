"""Rewards on the host: verifiers, rules, worker processes for other functions, shaping. Nothing here imports JAX."""

from rpg_jax.answer import boxed_answer, final_answer, stated_answer
from rpg_jax.rewards.rules import RULES, voted_answer
from rpg_jax.rewards.scorer import ENVIRONMENT, Scorer, Scores, Submitted
from rpg_jax.rewards.shaping import overlong_penalty, scale_named, signed_reward, weighted_sum
from rpg_jax.rewards.verifiers import VERIFIERS
