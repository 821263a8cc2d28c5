"""The method (arXiv 2505.17508) and its baselines: arrays in, a loss and metrics out. Imports jax only.

Reading order: `divergences` (one function each), `surrogates` and `baselines` (per-token losses), `objective` (the
contract around them), `own` (a loss from a file), `registry` (`make`), `reductions`, `advantages`, `corrections`,
`metrics`.
"""

from rpg_jax.objectives import advantages, baselines, corrections, divergences, metrics, own, reductions, surrogates
from rpg_jax.objectives.divergences import DIVERGENCES, Divergence
from rpg_jax.objectives.objective import Claim, Objective
from rpg_jax.objectives.registry import RECIPES, make

__all__ = [
    "DIVERGENCES",
    "RECIPES",
    "Claim",
    "Divergence",
    "Objective",
    "advantages",
    "baselines",
    "corrections",
    "divergences",
    "make",
    "metrics",
    "own",
    "reductions",
    "surrogates",
]
