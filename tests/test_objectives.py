"""Losses and gradients against formulas written here from the paper, entry by entry, in numpy and float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.objectives import CLIPS, DIVERGENCES, RECIPES, Clip, TrustRegion, make, surrogates
from rpg_jax.objectives.divergences import kappa_over_u

LOW, HIGH, CEILING, BETA = 0.2, 0.28, 3.0, 0.4

RHO = {
    "fkl": lambda u: -math.log(u), "rkl": lambda u: u * math.log(u), "ufkl": lambda u: u - math.log(u) - 1,
    "urkl": lambda u: u * math.log(u) - u + 1,
    "js": lambda u: 0.5 * (u * math.log(2 * u / (1 + u)) + math.log(2 / (1 + u))),
    "hellinger": lambda u: 0.5 * (math.sqrt(u) - 1) ** 2, "jeffreys": lambda u: (u - 1) * math.log(u),
    "chi2": lambda u: 0.5 * (u - 1) ** 2, "alpha": lambda u: (math.sqrt(u) - 0.5 * u - 0.5) / -0.25,
}  # fmt: skip
KAPPA = {
    "fkl": lambda u: -1.0, "rkl": lambda u: u * (math.log(u) + 1), "ufkl": lambda u: u - 1,
    "urkl": lambda u: u * math.log(u), "js": lambda u: 0.5 * u * math.log(2 * u / (1 + u)),
    "hellinger": lambda u: 0.5 * (u - math.sqrt(u)), "jeffreys": lambda u: u * math.log(u) + u - 1,
    "chi2": lambda u: u * (u - 1), "alpha": lambda u: 2 * (u - math.sqrt(u)),
}  # fmt: skip


def ppo_bound(w, a, low=LOW, high=HIGH, c=math.inf):
    """The bound that PPO's (dual) clip puts in place of w, or None; from the min and max of its definition."""
    value = min(w * a, min(max(w, 1 - low), 1 + high) * a)
    if a < 0:
        value = max(value, c * a)
    return None if value == w * a else value / a


def expected_rpg(divergence, estimator, clip, logp, mu, ref, a, z):
    """(loss, dloss/dlogp) of one entry, from docs/method.md 3 and 4."""
    w, u, r = math.exp(logp - mu), math.exp(logp - ref) / z, z * math.exp(ref - mu)
    rho, kappa = RHO[divergence](u), KAPPA[divergence](u)
    coefficient = w * a - BETA * r * kappa
    if clip == "none":
        return (-coefficient * logp if estimator == "reinforce" else -w * a + BETA * r * rho), -coefficient
    if clip == "truncate":
        w = min(max(w, 1 - LOW), 1 + HIGH)
        coefficient = w * a - BETA * r * KAPPA[divergence](w / r)
        return -coefficient * logp, -coefficient
    if clip == "coefficient":
        shaped = a - BETA * kappa / u
        coefficient = (ppo_bound(w, shaped, c=CEILING) or w) * shaped
        return -coefficient * logp, -coefficient
    if clip == "sapo":
        tau = 1.0 if a > 0 else 1.05
        p = 1 / (1 + math.exp(-tau * (w - 1)))
        return -4 / tau * p * a + BETA * r * rho, -4 * p * (1 - p) * w * a + BETA * r * kappa
    if clip == "rpg":
        shaped = a - BETA * kappa / u
        if (shaped >= 0 and w < 1 + HIGH) or (shaped < 0 and 1 - LOW < w < CEILING):
            return -coefficient * logp, -coefficient
        bound = 1 + HIGH if shaped >= 0 else (1 - LOW if w <= 1 - LOW else CEILING)
        return (a * bound - BETA * r * kappa) * -logp, 0.0
    if divergence in ("rkl", "urkl"):
        shaped = a - BETA * (math.log(u) + (divergence == "rkl"))
        bound = ppo_bound(w, shaped, c=CEILING)
        if bound is None:
            return -w * shaped, -w * shaped + BETA * w
        return -bound * shaped, BETA * bound
    bound = ppo_bound(w, a, c=CEILING)
    return -(bound or w) * a + BETA * r * rho, (0.0 if bound else -w * a) + BETA * r * kappa


def sample(rows=6, length=5, seed=0, spread=0.8):
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(size=(rows, length))
    mu, ref = logp + spread * rng.normal(size=(2, rows, length))
    mask = rng.random((rows, length)) < 0.7
    mask[0], mask[1] = True, False
    return logp, mu, ref, rng.normal(size=(rows, length)), mask


@functools.cache
def compiled(objective):
    """(loss, gradient) of an objective as one program: op by op, hundreds of small programs would take gigabytes."""

    def loss(logp, mu, ref, advantage, mask, rest):
        return objective(logp, mu, advantage, mask, reference_logp=ref, **rest)[0]

    return jax.jit(jax.value_and_grad(loss))


def run(objective, logp, mu, ref, advantage, mask, **rest):
    """(loss, gradient) in float64."""
    with jax.enable_x64():
        value, gradient = compiled(objective)(logp, mu, ref, advantage, mask, rest)
        return float(value), np.asarray(gradient)


FORMS = [("none", "reinforce", 1.0), ("none", "differentiable", 0.6), ("none", "reinforce", 1.7)]
FORMS += [("rpg", "reinforce", 1.0), ("truncate", "reinforce", 1.0), ("dual", "differentiable", 1.0)]
FORMS += [("coefficient", "reinforce", 1.0), ("sapo", "differentiable", 1.0)]


# A divergence comes in by two functions, which have a test of their own, and verify has it in every form; dual clip
# tells rkl and urkl from the others. Of a sequence, sums stand in place of entries.
CASES = [(d, *form, "token") for d in DIVERGENCES for form in (FORMS if d in ("urkl", "js") else FORMS[:2])]
CASES += [("rkl", *form, "sequence") for form in FORMS]


@pytest.mark.parametrize("divergence, clip, estimator, z, level", CASES)
def test_rpg_is_what_the_paper_says(divergence, clip, estimator, z, level):
    logp, mu, ref, advantage, mask = sample()
    objective = make(
        "rpg", divergence=divergence, clip=clip, estimator=estimator, z_old=z, level=level, beta=BETA,
        reduction="constant",
    )  # fmt: skip
    loss, gradient = run(objective, logp, mu, ref, advantage, mask, denominator=7)
    expected_loss, expected_gradient = 0.0, np.zeros(mask.shape)
    for b in range(len(mask)):
        valid = mask[b]
        if level == "token":
            units = [((b, t), (logp[b, t], mu[b, t], ref[b, t], advantage[b, t])) for t in np.flatnonzero(valid)]
        else:
            sums = [x[b, valid].sum() for x in (logp, mu, ref)]
            units = [((b, valid), (*sums, advantage[b, valid].mean()))] if valid.any() else []
        for at, unit in units:
            value, slope = expected_rpg(divergence, estimator, clip, *unit, z)
            expected_loss += value / 7
            expected_gradient[at] = slope / 7
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("divergence", ["fkl", "urkl", "chi2"])
def test_rpg_clip_has_the_gradient_of_dual_clip_on_the_stopped_regularized_advantage(divergence):
    logp, mu, ref, advantage, _ = sample(20, 20, seed=2, spread=1.2)
    term = dict(divergence=DIVERGENCES[divergence], beta=BETA)
    clip = CLIPS["rpg"]._replace(bounds=dict(clip_low=LOW, clip_high=HIGH, clip_c=CEILING))

    def algorithm_2(x):
        losses, clipped = surrogates.reinforce(x, mu, ref, advantage, **term, clip=clip)
        return losses.sum(), clipped

    def dual(x):  # Ye et al. 2020, from its min and max, where A' is a constant
        shaped = jax.lax.stop_gradient(surrogates.regularized_advantage(x, ref, advantage, **term))
        w = jnp.exp(x - mu)
        clipped = jnp.minimum(w * shaped, jnp.clip(w, 1 - LOW, 1 + HIGH) * shaped)
        return -jnp.sum(jnp.where(shaped < 0, jnp.maximum(clipped, CEILING * shaped), clipped))

    with jax.enable_x64():
        gradient, clipped = jax.jit(jax.grad(algorithm_2, has_aux=True))(logp)
        np.testing.assert_allclose(gradient, jax.jit(jax.grad(dual))(logp), rtol=1e-10, atol=1e-12)
    assert all(map(np.any, clipped))  # every branch was visited


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_divergence_is_one_function_of_log_u(divergence):
    d, log_u = DIVERGENCES[divergence], np.linspace(-4.0, 4.0, 41)
    u, derived = np.exp(log_u), d._replace(kappa_over_u=None)
    rho = lambda x: d.rho(x, jnp.exp(x), jnp.ones_like(x))  # noqa: E731
    forms = lambda x: (rho(x), jax.vmap(jax.grad(rho))(x), kappa_over_u(d, x), kappa_over_u(derived, x))  # noqa: E731
    with jax.enable_x64():
        value, slope, *quotients = jax.device_get(jax.jit(forms)(log_u))
    np.testing.assert_allclose(value, [RHO[divergence](x) for x in u], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(slope, [KAPPA[divergence](x) for x in u], rtol=1e-11, atol=1e-13)
    for quotient in quotients:
        np.testing.assert_allclose(quotient, slope / u, rtol=1e-11, atol=1e-13)


def test_a_smooth_clip_is_one_function_and_one_line(monkeypatch):
    """As a clip it takes the place of the ratio, differentiated or not; as a trust region it weighs each entry."""

    def bump(w, advantage, *, clip_high):
        return 1 + clip_high * jnp.tanh((w - 1) / clip_high)

    def near(entries, tokens, advantage, *, width):
        return jnp.maximum(1 - ((entries.logp - entries.behavior_logp) / width) ** 2, 0)

    monkeypatch.setitem(CLIPS, "bump", Clip(bump, dict(clip_high=0.3), ("reinforce", "differentiable")))
    monkeypatch.setitem(CLIPS, "near", TrustRegion(near, dict(width=0.5)))
    monkeypatch.setitem(RECIPES, "rpg", RECIPES["rpg"]._replace(clips=("bump", "near")))
    logp, mu, ref, advantage, mask = sample()
    w, pull = np.exp(logp - mu), BETA * np.exp(logp - mu) * (logp - ref)
    bounded, slope = 1 + 0.3 * np.tanh((w - 1) / 0.3), w / np.cosh((w - 1) / 0.3) ** 2
    weight = np.maximum(1 - ((logp - mu) / 0.5) ** 2, 0)
    assert (weight[mask] == 0).any() and (weight[mask] > 0).any()
    for given, gradient in (
        (dict(clip="bump", estimator="differentiable"), pull - slope * advantage),
        (dict(clip="bump", estimator="reinforce"), pull - bounded * advantage),
        (dict(clip="near"), weight * (pull - w * advantage)),
    ):
        objective = make("rpg", beta=BETA, reduction="constant", **given)
        expected = np.where(mask, gradient, 0)
        np.testing.assert_allclose(run(objective, logp, mu, ref, advantage, mask, denominator=1.0)[1], expected)
