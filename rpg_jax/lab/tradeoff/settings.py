"""The settings of `python -m rpg_jax.study tradeoff`, with the flags of them. It imports nothing that is slow."""

from typing import NamedTuple

WHOLE = {  # flags of a whole number each, and what they mean
    "vocab": "tokens to choose from",
    "length": "tokens of a sequence",
    "problems": "random ones, of which medians are taken",
    "group": "draws that share a baseline, in the table of group baselines",
    "seed": "of the problems",
}
LISTS = {  # flags of a list each
    "distances": "KL(behavior || policy), nats a sequence",
    "samples": "N, sequences that a gradient is averaged over",
    "epsilons": "clip bounds, EPSILON or LOW:HIGH; the first is that of tables and figures",
    "ceilings": "clip_c; the first is that of tables and figures",
    "betas": "coefficients of the divergence; the first is that of tables and figures",
    "divergences": "divergences to the behavior policy",
}


class Grid(NamedTuple):
    """What is enumerated and compared. Of betas, epsilons and ceilings, tables and figures show the first."""

    vocab: int = 3
    length: int = 4
    problems: int = 100
    distances: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)  # KL(behavior || policy), nats a sequence
    samples: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096)  # N
    epsilons: tuple[tuple[float, float], ...] = (  # (low, high)
        (0.2, 0.28), (0.05, 0.05), (0.1, 0.1), (0.2, 0.2), (0.4, 0.4), (0.8, 0.8),
    )  # fmt: skip
    ceilings: tuple[float, ...] = (3.0, 10.0)  # clip_c
    betas: tuple[float, ...] = (0.01, 0.1, 0.0)
    divergences: tuple[str, ...] = ("urkl",)
    group: int = 4  # G of the group baselines
    seed: int = 0


def default(name: str) -> int | str:
    """The default of the flag of that name, as it is written on a command line."""
    values = getattr(Grid(), name)
    if name in WHOLE:
        return values
    if name == "epsilons":
        return ",".join(f"{high:g}" if low == high else f"{low:g}:{high:g}" for low, high in values)
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
