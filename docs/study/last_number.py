"""The reward of real_model.md: by itself, because it also judges where reasoning-gym is not installed."""

import re

from rpg_jax import gym


def right(response: str, answer: str) -> bool:
    """Whether the last number of the response is that of a problem's record, as `rpg_jax.gym` writes it."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", response.replace(",", ""))
    return bool(numbers) and float(numbers[-1]) == float(gym.own_answer(answer))
