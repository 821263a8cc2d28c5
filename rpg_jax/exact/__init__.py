"""Enumerated policies and exact objectives, and what they say of a loss.

Reading order: enumeration, generators, targets, certify, batches, verification. What a clip costs and saves:
`lab.tradeoff`.
"""

from rpg_jax.exact.certify import VERDICTS, Gap, Target, examine, level_gap, worst
from rpg_jax.exact.enumeration import CONDITIONS, MOVED, SPACES, Condition, every_sequence
