"""Rewards on the host: verifiers, shaping, and a pool for a user's own function. Nothing here imports JAX."""

from rpg_jax.rewards.answer import final_answer
from rpg_jax.rewards.pool import Scorer, Scores
from rpg_jax.rewards.shaping import overlong_penalty, signed_reward
from rpg_jax.rewards.verifiers import VERIFIERS

__all__ = ["VERIFIERS", "Scorer", "Scores", "final_answer", "overlong_penalty", "signed_reward"]
