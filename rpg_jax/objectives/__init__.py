"""The method (arXiv 2505.17508) and its baselines: arrays in, a loss and metrics out. Imports jax only.

Reading order: `divergences` (one function each), `clips` (one rule each), `surrogates` and `baselines` (per-token
losses that take them), `objective` (all that is around a loss), `registry` (`make`: a recipe is all there is between
a name and its loss), `own` (a loss or an advantage from a file), `reductions`, `advantages`, `metrics`.
"""

from rpg_jax.objectives import metrics
from rpg_jax.objectives.clips import CLIPS, Clip, TrustRegion
from rpg_jax.objectives.divergences import DIVERGENCES, Divergence
from rpg_jax.objectives.objective import Claim, Objective
from rpg_jax.objectives.registry import RECIPES, make
