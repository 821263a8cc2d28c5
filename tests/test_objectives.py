"""Losses and gradients against formulas written here from the paper, entry by entry, in numpy and float64."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg_jax.objectives import DIVERGENCES, RECIPES, baselines, make, reductions, surrogates

LOW, HIGH, CEILING, BETA = 0.2, 0.28, 3.0, 0.4

RHO = {
    "fkl": lambda u: -math.log(u),
    "rkl": lambda u: u * math.log(u),
    "ufkl": lambda u: u - math.log(u) - 1,
    "urkl": lambda u: u * math.log(u) - u + 1,
    "js": lambda u: 0.5 * (u * math.log(2 * u / (1 + u)) + math.log(2 / (1 + u))),
    "hellinger": lambda u: 0.5 * (math.sqrt(u) - 1) ** 2,
}
KAPPA = {
    "fkl": lambda u: -1.0,
    "rkl": lambda u: u * (math.log(u) + 1),
    "ufkl": lambda u: u - 1,
    "urkl": lambda u: u * math.log(u),
    "js": lambda u: 0.5 * u * math.log(2 * u / (1 + u)),
    "hellinger": lambda u: 0.5 * (u - math.sqrt(u)),
}


def ppo_bound(w, a, low=LOW, high=HIGH, c=math.inf):
    """The bound that PPO's (dual) clip puts in place of w, or None; from the min and max of its definition."""
    value = min(w * a, min(max(w, 1 - low), 1 + high) * a)
    if a < 0:
        value = max(value, c * a)
    return None if value == w * a else value / a


def expected_rpg(divergence, estimator, clip, logp, mu, ref, a, z):
    """(loss, dloss/dlogp) of one entry, from method.md 3 and 4."""
    w, u, r = math.exp(logp - mu), math.exp(logp - ref) / z, z * math.exp(ref - mu)
    rho, kappa = RHO[divergence](u), KAPPA[divergence](u)
    coefficient = w * a - BETA * r * kappa
    if clip == "none":
        return (-coefficient * logp if estimator == "reinforce" else -w * a + BETA * r * rho), -coefficient
    if clip == "truncate":
        w = min(max(w, 1 - LOW), 1 + HIGH)
        coefficient = w * a - BETA * r * KAPPA[divergence](w / r)
        return -coefficient * logp, -coefficient
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


def expected_baseline(name, logp, mu, ref, a, high):
    w, y = math.exp(logp - mu), math.exp(ref - logp)
    if name == "reinforce":
        return -a * logp, -a
    bound = ppo_bound(w, a, LOW, high)
    loss, gradient = -(bound or w) * a, 0.0 if bound else -w * a
    k3 = y - 1 - math.log(y)
    if name == "grpo":
        return loss + BETA * k3, gradient + BETA * (1 - y)
    if name == "grpo_corrected":
        return loss + BETA * w * k3, gradient + BETA * (w * k3 + w * (1 - y))
    return loss, gradient


def sample(rows=6, length=5, seed=0, spread=0.8):
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(size=(rows, length))
    mu, ref = logp + spread * rng.normal(size=(2, rows, length))
    mask = rng.random((rows, length)) < 0.7
    mask[0], mask[1] = True, False
    return logp, mu, ref, rng.normal(size=(rows, length)), mask


def run(objective, logp, mu, ref, advantage, mask, **rest):
    """(loss, gradient) in float64."""
    with jax.enable_x64():
        loss = lambda x: objective(x, mu, advantage, mask, reference_logp=ref, **rest)[0]  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(jnp.asarray(logp))
        return float(value), np.asarray(gradient)


FORMS = [("none", "reinforce", 1.0), ("none", "differentiable", 0.6), ("none", "reinforce", 1.7)]
FORMS += [("rpg", "reinforce", 1.0), ("truncate", "reinforce", 1.0), ("dual", "differentiable", 1.0)]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("clip, estimator, z", FORMS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_rpg_is_what_the_paper_says(divergence, clip, estimator, z, level):
    logp, mu, ref, advantage, mask = sample()
    objective = make(
        "rpg",
        divergence=divergence,
        clip=clip,
        estimator=estimator,
        z_old=z,
        level=level,
        beta=BETA,
        reduction="constant",
    )
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


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "rpg"])
def test_baselines_are_what_their_papers_say(name):
    logp, mu, ref, advantage, mask = sample(seed=1)
    beta = {"beta": BETA} if "grpo" in name else {}
    loss, gradient = run(make(name, **beta), logp, mu, ref, advantage, mask)
    high = 0.28 if name == "dapo" else 0.2
    values, slopes = np.zeros(mask.shape), np.zeros(mask.shape)
    for b, t in np.argwhere(mask):
        entry = logp[b, t], mu[b, t], ref[b, t], advantage[b, t]
        values[b, t], slopes[b, t] = expected_baseline(name, *entry, high)
    if "grpo" in name:  # mean over each response's tokens, then over responses that have any
        lengths = mask.sum(1, keepdims=True)
        scale = 1 / np.maximum(lengths, 1) / (lengths > 0).sum()
    else:
        scale = 1 / mask.sum()
    np.testing.assert_allclose(loss, (values * scale).sum(), rtol=1e-12)
    np.testing.assert_allclose(gradient, slopes * scale, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_rpg_clip_has_the_gradient_of_dual_clip_on_the_stopped_regularized_advantage(divergence):
    logp, mu, ref, advantage, _ = sample(20, 20, seed=2, spread=1.2)
    bounds = dict(clip_low=LOW, clip_high=HIGH, clip_c=CEILING)
    with jax.enable_x64():
        term = dict(divergence=DIVERGENCES[divergence], beta=BETA)
        shaped = surrogates.regularized_advantage(logp, ref, advantage, **term)

        def dual(x):  # Ye et al. 2020, from its min and max, where A' is a constant
            w = jnp.exp(x - mu)
            clipped = jnp.minimum(w * shaped, jnp.clip(w, 1 - LOW, 1 + HIGH) * shaped)
            return -jnp.sum(jnp.where(shaped < 0, jnp.maximum(clipped, CEILING * shaped), clipped))

        algorithm_2 = jax.grad(lambda x: jnp.sum(surrogates.rpg_clip(x, mu, ref, advantage, **term, **bounds)))
        expected = np.asarray(jax.grad(dual)(jnp.asarray(logp)))
        np.testing.assert_allclose(algorithm_2(jnp.asarray(logp)), expected, rtol=1e-10, atol=1e-12)
        clipped = surrogates.rpg_clipped(jnp.exp(logp - mu), shaped, **bounds)
        assert all(map(jnp.any, clipped))  # every branch was visited


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_divergence_is_one_function_of_log_u(divergence):
    with jax.enable_x64():
        log_u = jnp.linspace(-4.0, 4.0, 41)
        u, one = jnp.exp(log_u), jnp.ones_like(log_u)
        d = DIVERGENCES[divergence]
        np.testing.assert_allclose(d.rho(log_u, u, one), [RHO[divergence](float(x)) for x in u], rtol=1e-12, atol=1e-14)
        slope = jax.vmap(jax.grad(lambda x: d.rho(x, jnp.exp(x), 1.0)))(log_u)
        np.testing.assert_allclose(slope, [KAPPA[divergence](float(x)) for x in u], rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(d.kappa_over_u(log_u), slope / u, rtol=1e-11, atol=1e-13)
        derived = surrogates.kappa_over_u(d._replace(kappa_over_u=None), log_u)
        np.testing.assert_allclose(derived, slope / u, rtol=1e-11, atol=1e-13)


def test_k3_is_the_urkl_regularizer_with_the_ratio_in_front():
    logp, mu, ref, _, _ = sample(seed=3)
    with jax.enable_x64():
        weighted = jnp.exp(logp - mu) * baselines.k3(ref - logp)
        penalty = surrogates.regularizer(logp, mu, ref, divergence=DIVERGENCES["urkl"])
        np.testing.assert_allclose(weighted, penalty, rtol=1e-12, atol=1e-14)


ALL = [make(name) for name in RECIPES]
ALL += [
    make("rpg", divergence=d, clip=clip, level=level, beta=BETA)
    for d, clip, level in itertools.product(DIVERGENCES, ("none", "rpg", "dual", "truncate"), ("token", "sequence"))
] + [make("rpg", divergence=d, estimator="differentiable", beta=BETA) for d in DIVERGENCES]
GARBAGE = st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -1e30])


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(ALL), st.lists(GARBAGE, min_size=5, max_size=5), st.integers(0, 2**16))
def test_what_is_masked_does_not_matter(objective, garbage, seed):
    *arrays, mask = sample(4, 3, seed)
    weight = np.ones(mask.shape)
    clean = [np.where(mask, x, 0) for x in (*arrays, weight)]
    dirty = [np.where(mask, x, bad) for x, bad in zip((*arrays, weight), garbage, strict=True)]
    a, b = (run(objective, *x[:4], mask, weight=x[4]) for x in (clean, dirty))
    assert a[0] == b[0] and np.isfinite(a[0])
    np.testing.assert_array_equal(a[1], b[1])
    assert not a[1][~mask].any()


@pytest.mark.parametrize("objective", ALL, ids=lambda o: f"{o.name}-{'-'.join(map(str, o.settings.values()))}")
def test_nothing_overflows_in_float32(objective):
    """|log w|, |log u| and |log r| up to 60, and up to 120 between them, in loss, gradient and metrics."""
    far = [-60.0, 0.0, 60.0]
    log_w, log_r, advantage = (
        np.array(x, np.float32)[:, None] for x in zip(*itertools.product(far, far, (-2, 0, 2)), strict=True)
    )
    mu = np.full_like(log_w, -70)
    mask = np.ones(log_w.shape, bool)
    if objective.name == "grpo":  # the published k3 has y = r/w itself: at most 60 apart
        keep = np.abs(log_w - log_r)[:, 0] <= 60
        log_w, log_r, advantage, mu, mask = (x[keep] for x in (log_w, log_r, advantage, mu, mask))
    fun = lambda x: objective(x, mu, advantage, mask, reference_logp=mu + log_r)  # noqa: E731
    (loss, metrics), gradient = jax.value_and_grad(fun, has_aux=True)(jnp.asarray(mu + log_w))
    assert loss.dtype == gradient.dtype == jnp.float32
    assert np.isfinite(loss) and np.isfinite(gradient).all()
    assert np.isfinite(metrics["effective_sample_size"].value()) and np.isfinite(metrics["ratio_mean"].value())


@pytest.mark.parametrize("objective", ALL[:8], ids=lambda o: o.name)
def test_nothing_valid_is_zero_and_not_nan(objective):
    logp, mu, ref, advantage, mask = sample()
    for rest in ({}, {"denominator": objective.count(np.zeros(mask.shape))}):
        loss, gradient = run(objective, logp * np.nan, mu, ref, advantage, np.zeros(mask.shape), **rest)
        assert loss == 0 and not gradient.any()
    _, metrics = objective(logp, mu, advantage, np.zeros(mask.shape, bool))
    assert all(np.isfinite(metric.value()) for metric in metrics.values())


def test_dtypes_and_transformations():
    logp, mu, ref, advantage, mask = sample()
    objective = make("rpg", clip="rpg", beta=BETA)
    exact, gradient = run(objective, logp, mu, ref, advantage, mask)
    half = [jnp.asarray(x, jnp.bfloat16) for x in (logp, mu, ref, advantage)]
    loss, metrics = objective(half[0], half[1], half[3], mask, reference_logp=half[2])
    promoted = [x.astype(jnp.float32) for x in half]
    assert loss.dtype == jnp.float32 and metrics["ratio_mean"].total.dtype == jnp.float32
    assert loss == objective(promoted[0], promoted[1], promoted[3], mask, reference_logp=promoted[2])[0]
    assert jax.grad(lambda x: objective(x, mu, advantage, mask)[0])(half[0]).dtype == jnp.bfloat16
    with jax.enable_x64():
        assert objective(logp, mu, advantage, mask)[0].dtype == jnp.float64
        assert objective(np.float32(logp), np.float32(mu), np.float32(advantage), mask)[0].dtype == jnp.float32
        f = lambda *x: objective(x[0], x[1], x[3], mask, reference_logp=x[2])[0]  # noqa: E731
        jitted, slope = jax.jit(jax.value_and_grad(f))(logp, mu, ref, advantage)
        np.testing.assert_allclose(jitted, exact, rtol=1e-12)
        np.testing.assert_allclose(slope, gradient, rtol=1e-10, atol=1e-14)
        stacked = [np.stack([x, x + 0.1]) for x in (logp, mu, ref, advantage)]
        both = jax.vmap(f)(*stacked)
        np.testing.assert_allclose(both, [f(*(x[i] for x in stacked)) for i in range(2)], rtol=1e-12)


@pytest.mark.parametrize("objective", ALL[:8], ids=lambda o: o.name)
def test_gradients_reach_logp_only(objective):
    logp, mu, ref, advantage, mask = sample()
    weight = np.ones(mask.shape)
    fun = lambda m, r, a, w: objective(logp, m, a, mask, reference_logp=r, weight=w)[0]  # noqa: E731
    for gradient in jax.grad(fun, argnums=(0, 1, 2, 3))(*map(jnp.asarray, (mu, ref, advantage, weight))):
        assert not gradient.any()


def test_no_reference_is_the_behavior_policy_and_a_column_is_broadcast():
    logp, mu, _, advantage, mask = sample()
    for level in ("token", "sequence"):
        objective = make("rpg", beta=BETA, level=level)
        a = run(objective, logp, mu, None, advantage[:, :1], mask, weight=np.full((len(mask), 1), 0.5))
        b = run(objective, logp, mu, mu, np.repeat(advantage[:, :1], 5, 1), mask, weight=np.full(mask.shape, 0.5))
        c = run(objective, logp, mu, mu, advantage[:, :1], mask)
        np.testing.assert_allclose(a[0], b[0], rtol=1e-13)
        np.testing.assert_allclose(a[1], b[1], rtol=1e-13)
        np.testing.assert_allclose(a[1], 0.5 * c[1], rtol=1e-13)


@pytest.mark.parametrize(
    "level, reduction", [("sequence", "sequence_mean"), *itertools.product(["token"], reductions.REDUCTIONS)]
)
def test_microbatches_add_up(level, reduction):
    *arrays, mask = sample(8, 5, seed=4)
    objective = make("rpg", beta=BETA, clip="rpg", reduction=reduction, level=level)
    denominator = 8 * 5 if reduction == "constant" else objective.count(mask)
    whole = run(objective, *arrays, mask, denominator=denominator)
    if reduction != "constant":
        np.testing.assert_allclose(whole[0], run(objective, *arrays, mask)[0], rtol=1e-13)
    size = 2
    parts = [
        run(objective, *(x[i : i + size] for x in (*arrays, mask)), denominator=denominator) for i in range(0, 8, size)
    ]
    np.testing.assert_allclose(sum(loss for loss, _ in parts), whole[0], rtol=1e-12)
    np.testing.assert_allclose(np.concatenate([g for _, g in parts]), whole[1], rtol=1e-13)


def test_reductions_by_hand():
    logp = np.log([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]])
    mask = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    advantage = np.array([[1.0, 3.0, 9.0], [5.0, 9.0, 9.0], [9.0, 9.0, 9.0]])  # on policy loss is −A
    means = {"token_mean": 9 / 3, "sequence_mean": 9 / 2, "sequence_mean_token_mean": (2 + 5) / 2, "constant": 9 / 6}
    for reduction, mean in means.items():
        objective = make("rpg", estimator="differentiable", beta=0, reduction=reduction)
        rest = {"denominator": 6} if reduction == "constant" else {}
        assert run(objective, logp, logp, None, advantage, mask, **rest)[0] == pytest.approx(-mean, rel=1e-14)


@pytest.mark.parametrize(
    "name, given, words",
    [
        ("rgp", {}, ["'rgp'", "'rpg'"]),
        ("rpg", {"divergnce": "fkl"}, ["divergnce", "divergence"]),
        ("rpg", {"divergence": "ukl"}, ["divergence", "ufkl"]),
        ("rpg", {"clip": "rpg", "estimator": "differentiable"}, ["rpg", "reinforce"]),
        ("rpg", {"clip": "truncate", "estimator": "differentiable"}, ["truncate", "reinforce"]),
        ("rpg", {"clip": "dual", "estimator": "reinforce"}, ["dual", "differentiable"]),
        ("rpg", {"clip": "rpg", "z_old": 2.0}, ["z_old"]),
        ("rpg", {"clip": "dual", "z_old": 2.0}, ["z_old"]),
        ("rpg", {"clip": "truncate", "z_old": 0.5}, ["z_old"]),
        ("rpg", {"clip": "truncate", "clip_c": 3.0}, ["clip_c", "truncate"]),
        ("rpg", {"clip_low": 0.2}, ["clip_low", "none"]),
        ("rpg", {"clip": "none", "clip_high": 0.2}, ["clip_high", "none"]),
        ("rpg", {"clip_c": 3.0}, ["clip_c"]),
        ("rpg", {"level": "sequence", "reduction": "token_mean"}, ["token_mean", "sequence"]),
        ("rpg", {"level": "sequence", "reduction": "sequence_mean_token_mean"}, ["sequence_mean_token_mean"]),
        ("rpg", {"clip": "ppo"}, ["ppo", "truncate"]),
        ("rpg", {"beta": -1.0}, ["beta"]),
        ("rpg", {"beta": "1e-4"}, ["beta", "number"]),
        ("rpg", {"beta": True}, ["beta"]),
        ("rpg", {"clip": "rpg", "clip_low": 1.5}, ["clip_low"]),
        ("rpg", {"clip": "rpg", "clip_c": 1.0}, ["clip_c"]),
        ("rpg", {"z_old": 0.0}, ["z_old"]),
        ("grpo", {"clip": "none", "clip_low": 0.2}, ["clip_low"]),
        ("grpo", {"clip": "dual"}, ["dual", "ppo"]),
        ("ppo_clip", {"beta": 0.1}, ["ppo_clip", "beta"]),
        ("reinforce", {"clip_low": 0.1}, ["reinforce", "clip_low"]),
        ("dapo", {"reduction": "mean"}, ["reduction", "token_mean"]),
    ],
)
def test_refusals_name_the_setting_and_the_mend(name, given, words):
    with pytest.raises(ValueError) as error:
        make(name, **given)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_unset_is_none_and_beta_may_be_zero():
    assert make("rpg", clip="none", clip_low=None, clip_c=None, estimator=None).settings["estimator"] == "reinforce"
    assert make("rpg", clip="dual").settings["estimator"] == "differentiable"
    assert make("rpg", level="sequence").reduction == "sequence_mean"
    assert make("rpg", clip="rpg", z_old=1.0, clip_c=10).settings["clip_c"] == 10
    logp, mu, ref, advantage, mask = sample()
    bare = run(make("rpg", beta=0.0, divergence="fkl"), logp, mu, ref - 200, advantage, mask)  # u = e^200: 0 · inf
    again = run(make("rpg", beta=0.0, divergence="rkl"), logp, mu, ref, advantage, mask)
    np.testing.assert_array_equal(bare[1], again[1])
    for name in ("grpo", "grpo_corrected"):
        a = run(make(name, beta=0.0, reduction="token_mean"), logp, mu, ref, advantage, mask)
        b = run(make("ppo_clip"), logp, mu, ref, advantage, mask)
        np.testing.assert_array_equal(a[1], b[1])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"logp": np.zeros(5)}, ["logp", "(5,)", "[B, T]"]),
        ({"behavior_logp": np.zeros((6, 1))}, ["behavior_logp", "(6, 1)", "(6, 5)"]),
        ({"advantage": np.zeros(6)}, ["advantage", "(6,)", "(6, 1)"]),
        ({"advantage": np.zeros((1, 1))}, ["advantage", "(1, 1)"]),
        ({"mask": np.ones((5, 6))}, ["mask", "(5, 6)"]),
        ({"reference_logp": np.zeros((6, 4))}, ["reference_logp", "(6, 4)"]),
        ({"weight": np.ones(5)}, ["weight", "(5,)"]),
        ({"denominator": np.ones(2)}, ["denominator", "(2,)"]),
        ({"denominator": 0}, ["denominator", "0"]),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, words):
    logp, mu, ref, advantage, mask = sample()
    arrays = dict(logp=logp, behavior_logp=mu, advantage=advantage, mask=mask, reference_logp=ref)
    with pytest.raises(ValueError) as error:
        make("rpg")(**{**arrays, **change})
    assert all(word in str(error.value) for word in words)


def test_constant_wants_its_denominator():
    logp, mu, _, advantage, mask = sample()
    objective = make("rpg", reduction="constant")
    with pytest.raises(ValueError, match="denominator="):
        objective(logp, mu, advantage, mask)
    with pytest.raises(ValueError, match="denominator="):
        objective.count(mask)
