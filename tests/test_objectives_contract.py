"""What every objective does around its surrogate: masks, dtypes, extremes, microbatches, reductions, refusals."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_objectives import run, sample

from rpg_jax.objectives import CLIPS, DIVERGENCES, RECIPES, TrustRegion, make
from rpg_jax.objectives.reductions import REDUCTIONS

BETA = 0.4
REQUIRED = {"cispo": dict(clip_high=0.28), "dr_grpo": dict(reduction="token_mean")}
BASELINES = [make(name, **REQUIRED.get(name, {})) for name in RECIPES]
ALL = list(BASELINES)
ALL += [
    make("rpg", divergence=d, clip=clip, level=level, beta=BETA)
    for d, clip, level in itertools.product(DIVERGENCES, ("none", "rpg", "dual", "truncate"), ("token", "sequence"))
] + [make("rpg", divergence=d, estimator="differentiable", beta=BETA) for d in DIVERGENCES]
# Of all that runs operation by operation here: 27 extremes below, and each operation is compiled once for a shape.
SHAPE = (27, 1)
GARBAGE = st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -1e30])


@settings(max_examples=25)
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


OF_TOKENS = [o for o in ALL if not (o.name == "rpg" and o.level == "sequence")]  # a row has one token below


@pytest.mark.parametrize("objective", OF_TOKENS, ids=lambda o: f"{o.name}-{'-'.join(map(str, o.settings.values()))}")
def test_nothing_overflows_in_float32(objective):
    """|log w|, |log u| and |log r| up to 60, and up to 120 between them, in loss, gradient and metrics."""
    far = [-60.0, 0.0, 60.0]
    every = np.array(list(itertools.product(far, far, (-2, 0, 2))), np.float32)
    log_w, log_r, advantage = np.split(every, 3, axis=1)
    mu, mask = np.full(SHAPE, -70, np.float32), np.ones(SHAPE, bool)
    if objective.name == "grpo" or objective.divergence == "chi2":  # k3 has y = r/w itself, chi2 has u = w/r squared
        mask = np.abs(log_w - log_r) <= 60
        mask &= (objective.name == "grpo") | (2 * log_w - log_r < 80)
    fun = lambda x: objective(x, mu, advantage, mask, reference_logp=mu + log_r)  # noqa: E731
    (loss, metrics), gradient = jax.value_and_grad(fun, has_aux=True)(jnp.asarray(mu + log_w))
    assert loss.dtype == gradient.dtype == jnp.float32
    assert np.isfinite(loss) and np.isfinite(gradient).all()
    assert np.isfinite(metrics["effective_sample_size"].value()) and np.isfinite(metrics["ratio_mean"].value())


CLIPPED = [("ppo_clip", {}), ("gspo", {}), ("sapo", {}), ("rpg", dict(clip="rpg", level="sequence"))]
CLIPPED += [("rpg", dict(clip=name)) for name, clip in CLIPS.items() if isinstance(clip, TrustRegion)]


@pytest.mark.parametrize("name, given, far, advantage, most", [
    *((name, given, 100, 1.0, 0.0) for name, given in CLIPPED),
    ("rpg", dict(clip="dual", level="sequence"), 100, 1.0, 1e-3),  # beta · bound of its advantage's log u is left
    *(("rpg", dict(clip=clip, beta=0.0), 100, 0.0, np.inf) for clip in ("none", "dual", "dual_reward", "coefficient")),
    ("rpg", dict(clip="coefficient", divergence="fkl"), -100, -1.0, np.inf),
    ("rpg", dict(clip="truncate", clip_low=1.0), -200, 1.0, np.inf),
])  # fmt: skip
def test_a_ratio_may_be_too_large_or_too_small_for_a_float(name, given, far, advantage, most):
    mu, advantage = np.full((2, 4), -5, np.float32), np.array([[advantage], [0.5]], np.float32)
    logp = mu + np.array([[far], [0]], np.float32)
    fun = lambda x: make(name, **given)(x, mu, advantage, np.ones(mu.shape))[0]  # noqa: E731
    loss, gradient = jax.jit(jax.value_and_grad(fun))(logp)
    assert np.isfinite(loss) and np.isfinite(gradient).all() and gradient[1].all()
    assert np.abs(gradient[0]).max() <= most


@pytest.mark.parametrize("objective", BASELINES, ids=lambda o: o.name)
def test_nothing_valid_is_zero_and_not_nan(objective):
    logp, mu, ref, advantage, _ = sample(*SHAPE)
    nothing = np.zeros(SHAPE, bool)
    for rest in ({}, {"denominator": objective.count(nothing)}):
        fun = lambda x, rest=rest: objective(x, mu, advantage, nothing, reference_logp=ref, **rest)  # noqa: E731
        (loss, metrics), gradient = jax.value_and_grad(fun, has_aux=True)(jnp.asarray(logp * np.nan))
        assert loss == 0 and not np.any(gradient)
        assert all(np.isfinite(metric.value()) for metric in metrics.values())


def test_dtypes():
    *arrays, mask = sample(*SHAPE)
    objective = make("rpg", clip="rpg", beta=BETA)
    exact, gradient = run(objective, *arrays, mask)
    half = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    f = lambda *x: objective(x[0], x[1], x[3], mask, reference_logp=x[2])  # noqa: E731
    loss, metrics = f(*half)
    assert loss.dtype == jnp.float32 and metrics["ratio_mean"].total.dtype == jnp.float32
    assert loss == f(*(np.asarray(x, np.float32) for x in half))[0]
    slope = jax.grad(lambda *x: f(*x)[0])
    assert jax.eval_shape(slope, half[0], *arrays[1:]).dtype == jnp.bfloat16
    with jax.enable_x64():
        assert jax.eval_shape(f, *arrays)[0].dtype == jnp.float64
        assert jax.eval_shape(f, *map(np.float32, arrays))[0].dtype == jnp.float32
        np.testing.assert_allclose(f(*arrays)[0], exact, rtol=1e-12)
        np.testing.assert_allclose(jax.jit(slope)(*arrays), gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("objective", BASELINES, ids=lambda o: o.name)
def test_gradients_reach_logp_only(objective):
    logp, mu, ref, advantage, mask = sample(*SHAPE)
    weight = np.ones(SHAPE)
    fun = lambda m, r, a, w: objective(logp, m, a, mask, reference_logp=r, weight=w)[0]  # noqa: E731
    for gradient in jax.grad(fun, argnums=(0, 1, 2, 3))(*map(jnp.asarray, (mu, ref, advantage, weight))):
        assert not np.any(gradient)


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


@pytest.mark.parametrize("level, reduction", [("sequence", "sequence_mean"), *(("token", x) for x in REDUCTIONS)])
def test_microbatches_add_up(level, reduction):
    *arrays, mask = sample(8, 5, seed=4)
    objective = make("rpg", beta=BETA, clip="rpg", reduction=reduction, level=level)
    denominator = 8 * 5 if reduction == "constant" else objective.count(mask)
    whole = run(objective, *arrays, mask, denominator=denominator)
    if reduction != "constant":
        np.testing.assert_allclose(whole[0], run(objective, *arrays, mask)[0], rtol=1e-13)
    pairs = ([x[i : i + 2] for x in (*arrays, mask)] for i in range(0, 8, 2))
    parts = [run(objective, *pair, denominator=denominator) for pair in pairs]
    np.testing.assert_allclose(sum(loss for loss, _ in parts), whole[0], rtol=1e-12)
    np.testing.assert_allclose(np.concatenate([g for _, g in parts]), whole[1], rtol=1e-13)


@pytest.mark.parametrize("name, given, words", [
    ("rgp", {}, ["'rgp'", "'rpg'"]), ("rpg", {"divergnce": "fkl"}, ["divergnce", "divergence"]),
    ("rpg", {"clip": "rpg", "estimator": "differentiable"}, ["rpg", "reinforce"]),
    ("rpg", {"clip": "rpg", "z_old": 2.0}, ["z_old"]), ("rpg", {"clip_low": 0.2}, ["clip_low", "none"]),
    ("rpg", {"level": "sequence", "reduction": "token_mean"}, ["token_mean", "sequence"]),
    ("rpg", {"clip": "ppo"}, ["ppo", "truncate"]), ("rpg", {"beta": "1e-4"}, ["beta", "number"]),
    ("rpg", {"clip": "rpg", "clip_low": 1.5}, ["clip_low"]),
    ("dapo", {"reduction": "mean"}, ["reduction", "token_mean"]), ("cispo", {}, ["cispo", "clip_high", "no default"]),
    ("rpg", {"advantage": "group_std"}, ["group_std", "group_mean_std"]),
    ("grpo", {"sampler_correction": 0.0}, ["sampler_correction", "above 0"]),
    ("rpg", dict(divergence="fkl", control=0.5), ["control=0.5", "'rkl' or 'urkl'", "'fkl'"]),
    ("rpg", dict(divergence="rkl", control="kl", level="sequence"), ["control='kl'", "level='token'"]),
    ("rpg", dict(control="best"), ["control='best'", "optimal"]),
    ("rpg", dict(divergence="rkl", kl="full", control=0.5), ["full", "control=0.5"]),
    ("rpg", dict(divergence="rkl", control=0.5, clip="dual"), ["control=0.5", "dual"]),
    ("rpg", dict(clip="icepop", clip_c=3.0), ["clip_c", "icepop"]), ("rpg", dict(kl="to_go", z_old=0.5), ["z_old=0.5"]),
    ("rpg", dict(divergence="alpha", alpha=1.0), ["alpha=1", "urkl"]),
])  # fmt: skip
def test_refusals_name_the_setting_and_the_mend(name, given, words):
    with pytest.raises(ValueError) as error:
        make(name, **given)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_unset_is_none_and_beta_may_be_zero():
    assert make("grpo", clip="default").settings == make("grpo", clip=None).settings == make("grpo").settings
    assert (make("grpo").settings["clip"], make("rpg", clip="default").settings["clip"]) == ("ppo", "none")
    assert make("rpg", clip="none", clip_low=None, clip_c=None, estimator=None).settings["estimator"] == "reinforce"
    assert make("rpg", clip="dual").settings["estimator"] == "differentiable"
    assert make("rpg", level="sequence").reduction == "sequence_mean"
    assert make("rpg", clip="rpg", z_old=1.0, clip_c=10).settings["clip_c"] == 10
    logp, mu, ref, advantage, mask = sample()
    bare = run(make("rpg", beta=0.0, divergence="fkl"), logp, mu, ref - 200, advantage, mask)  # u = e^200: 0 · inf
    again = run(make("rpg", beta=0.0, divergence="rkl"), logp, mu, ref, advantage, mask)
    np.testing.assert_array_equal(bare[1], again[1])


@pytest.mark.parametrize("change, words", [
    ({"logp": np.zeros(5)}, ["logp", "(5,)", "[B, T]"]),
    ({"behavior_logp": np.zeros((6, 1))}, ["behavior_logp", "(6, 1)", "(6, 5)"]),
    ({"advantage": np.zeros(6)}, ["advantage", "(6,)", "(6, 1)"]), ({"mask": np.ones((5, 6))}, ["mask", "(5, 6)"]),
    ({"weight": np.ones(5)}, ["weight", "(5,)"]), ({"denominator": 0}, ["denominator", "0"]),
    ({"denominator": None}, ["'constant'", "denominator="]),
])  # fmt: skip
def test_inputs_that_do_not_fit_are_named(change, words):
    logp, mu, ref, advantage, mask = sample()
    inputs = dict(logp=logp, behavior_logp=mu, advantage=advantage, mask=mask, reference_logp=ref, denominator=1.0)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(lambda: make("rpg", reduction="constant")(**inputs | change))  # before anything is computed
    assert all(word in str(error.value) for word in words)
