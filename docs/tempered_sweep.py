"""The sweep of adding_an_objective.md: powers of the importance ratio, and RPG-Style Clip beside them.

    launch/sweep.sh docs/tempered_sweep.py
    python -m rpg_jax.report runs/tempered_sweep

4 variants x 5 seeds = 20 runs of about 60 s on one core each: 10 minutes on 2 cores, and the warm start if no sweep of
`configs/sweeps` has made it.
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = (0, 1, 2, 3, 4)
MINE = "docs/tempered.py:tempered"
VARIANTS = {
    **{f"power-{power:g}": {"objective.name": MINE, "objective.power": power} for power in (0.0, 0.5, 1.0)},
    "rpg-clip": {"objective.name": "rpg", "objective.clip": "rpg", "objective.beta": 0.0},
}
