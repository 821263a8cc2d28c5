"""The stale estimators: objectives of the package, and the coefficients that they give to each token's ∇log policy.

Without a KL every coefficient is the advantage times a number that depends on the ratios and on the sign of the
advantage. So one gradient for each sign gives a response's gradient for every advantage, and with it every group.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rpg_jax.objectives import Objective, make

SIGNS = (1.0, -1.0)


class Estimator(NamedTuple):
    """An objective, and how its coefficients come about.

    signed: whether they depend on the sign of the advantage. like: an estimator whose coefficients they are a multiple
    of, a multiple for each response; None where they differ from token to token in a way of their own.
    """

    objective: Objective
    signed: bool = True
    like: str | None = None


def _rpg(level: str, clip: str, **bounds: float) -> Objective:
    return make("rpg", beta=0.0, level=level, clip=clip, **bounds)


UNBOUNDED = dict(clip_low=1.0, clip_high=1e30)  # leaves only c, the bound at negative advantages
ESTIMATORS = {
    "no ratio": Estimator(make("reinforce"), signed=False),
    "token": Estimator(_rpg("token", "none"), signed=False),
    "token, RPG-Style Clip": Estimator(_rpg("token", "rpg")),
    "token, truncated": Estimator(_rpg("token", "truncate"), signed=False),
    "token, c only": Estimator(_rpg("token", "rpg", **UNBOUNDED)),
    "token, IcePop": Estimator(_rpg("token", "icepop"), signed=False),
    "token, sequence mask": Estimator(_rpg("token", "sequence_mask"), signed=False, like="token"),
    "token, geometric mask": Estimator(
        _rpg("token", "geometric_mask", clip_low=0.02, clip_high=0.02), signed=False, like="token"
    ),
    "sequence": Estimator(_rpg("sequence", "none"), signed=False, like="no ratio"),
    "sequence, RPG-Style Clip": Estimator(_rpg("sequence", "rpg"), like="no ratio"),
    "sequence, truncated": Estimator(_rpg("sequence", "truncate"), signed=False, like="no ratio"),
    "sequence, c only": Estimator(_rpg("sequence", "rpg", **UNBOUNDED), like="no ratio"),
    "sequence, mask": Estimator(_rpg("sequence", "sequence_mask"), signed=False, like="no ratio"),
    "GSPO": Estimator(make("gspo"), like="no ratio"),
}


def coefficients(name: str, logp: jax.Array, behavior_logp: jax.Array, sign: float) -> jax.Array:
    """The factor of each token's ∇log policy in the gradient of J that a response has at advantage ±1, over ±1.

    Args:
      name: of `ESTIMATORS`; logp, behavior_logp: f32[B, T], all of it response; sign: of all advantages.

    Returns:
      f32[B, T], so that a response adds advantage · Σ_t coefficient_t ∇log policy_t. GSPO's ratio is of a mean over
      tokens: its coefficients are times T here, so that all estimators are of sums over tokens.
    """
    objective, mask = ESTIMATORS[name].objective, jnp.ones(logp.shape, bool)

    def loss(logp):  # summed over the batch, whatever the reduction
        return objective(logp, behavior_logp, jnp.full((len(logp), 1), sign), mask, denominator=1.0)[0]

    scale = logp.shape[1] if name == "GSPO" else 1
    return -sign * scale * jax.grad(loss)(logp)


class Coefficients(NamedTuple):
    """Of B responses of T tokens, for every estimator; sign is 0 where it does not matter."""

    cotangents: dict[tuple[str, float], jax.Array]  # (estimator, sign) -> f32[B, T], where it is like no other
    multiples: dict[tuple[str, float], jax.Array]  # (estimator, sign) -> f32[B], times the one that it is like


def every_coefficient(logp: jax.Array, behavior_logp: jax.Array) -> Coefficients:
    """`coefficients` of all estimators, each gradient that has to be computed once."""
    cotangents, multiples = {}, {}
    for name, estimator in ESTIMATORS.items():  # one that others are like comes before them
        for sign in SIGNS if estimator.signed else (0.0,):
            own = coefficients(name, logp, behavior_logp, sign or 1.0)
            if estimator.like is None:
                cotangents[name, sign], multiples[name, sign] = own, jnp.ones(len(logp))
            else:
                multiples[name, sign] = own[:, 0] / cotangents[estimator.like, 0.0][:, 0]
    return Coefficients(cotangents, multiples)
