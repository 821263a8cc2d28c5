"""The contract of an objective beside its gradient: masks, denominator, weight, reference, constants."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.objectives.own import returned

FOR_FINITE_INPUTS = "for finite inputs"  # in the one fault that is returned alone: it explains all others
MASK = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], bool)


def contract_faults(objective: Callable) -> list[str]:
    """The ways in which a callable breaks the contract of `rpg_jax.objectives`, in a few words each; in float64.

    A loss or gradient that is not finite, off policy or on it, is the only fault then.

    Raises:
      TypeError: it does not return a scalar and a dict of metrics.
    """
    rng = np.random.default_rng(0)
    logp, behavior_logp, reference_logp = -rng.exponential(size=(3, *MASK.shape))
    advantage, weight = rng.normal(size=MASK.shape), np.ones(MASK.shape)
    arrays = dict(
        logp=logp, behavior_logp=behavior_logp, reference_logp=reference_logp, advantage=advantage, weight=weight
    )

    def loss_and_gradient(of="logp", denominator=3.0, rows=slice(None), **changed):
        inputs = {name: array if array is None else array[rows] for name, array in {**arrays, **changed}.items()}

        def loss(x):
            a = {**inputs, of: x}
            constants = dict(reference_logp=a["reference_logp"], weight=a["weight"], denominator=denominator)
            return returned(objective(a["logp"], a["behavior_logp"], a["advantage"], MASK[rows], **constants))[0]

        return jax.value_and_grad(loss)(jnp.asarray(inputs[of]))

    def gradient(*args, **changed):
        return loss_and_gradient(*args, **changed)[1]

    def same(a, b):
        return bool(jnp.allclose(a, b, rtol=1e-9, atol=1e-12))

    def defaults_to_behavior():
        try:
            return same(gradient(reference_logp=None), gradient(reference_logp=behavior_logp))
        except Exception:  # whatever a loss raises that cannot do without a reference, which training always gives
            return False

    with jax.enable_x64():
        for where, changed in {"": {}, ", on policy": dict(behavior_logp=logp, reference_logp=logp)}.items():
            for name, value in zip(("loss", "gradient"), loss_and_gradient(**changed), strict=True):
                if not np.isfinite(value).all():
                    what = "NaN" if np.isnan(value).any() else "infinite"
                    return [f"the {name} is {what} {FOR_FINITE_INPUTS}{where}"]
        plain = gradient()
        by_row = jnp.concatenate([gradient(rows=slice(b, b + 1)) for b in range(len(MASK))])
        dirty = {name: np.where(MASK, array, np.nan) for name, array in arrays.items()}
        kept = {
            "no gradient reaches logp": bool(jnp.any(plain != 0)),
            "what is masked changes the gradient (NaN there included)": same(gradient(**dirty), plain),
            "denominator= does not divide the loss": same(2 * gradient(denominator=6.0), plain),
            "the losses of microbatches do not add up": same(by_row, plain),
            "weight= does not multiply the loss": same(gradient(weight=2 * weight), 2 * plain),
            "reference_logp=None is not the behavior policy": defaults_to_behavior(),
            "gradients reach behavior_logp": same(gradient("behavior_logp"), 0),
            "gradients reach reference_logp": same(gradient("reference_logp"), 0),
            "gradients reach advantage": same(gradient("advantage"), 0),
            "gradients reach weight": same(gradient("weight"), 0),
        }
    return [fault for fault, fine in kept.items() if not fine]
