"""Environments: what answers a policy's turns and rewards them, in worker processes, and how an answer becomes tokens.

An environment is a class with three methods, a user's (FILE.py:CLASS) or one of `environment.NAMED`; `Guess` in
`guess.py` is the shortest. Nothing here imports JAX.
"""

from rpg_jax.environments.environment import Environment, Outcome
from rpg_jax.environments.observations import Observations
