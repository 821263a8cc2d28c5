"""The examination itself: that it adds up, that it reaches every bound, and that it catches what is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_objectives import RHO

from rpg_jax.exact import CONDITIONS, MOVED, SPACES, VERDICTS, Target, examine, level_gap, targets, worst
from rpg_jax.exact.enumeration import MIXTURES, every_sequence, random_problems, token_logprobs
from rpg_jax.exact.generators import divergence_faults
from rpg_jax.objectives import DIVERGENCES, Divergence, make

EXACT, EXACT_MEAN, BIASED = VERDICTS


def verdicts(objective, target=None, **kwargs):
    """(on policy, off policy), each the worst over spaces, distances and references."""
    target = target or Target(objective.level, objective.divergence, objective.beta, objective.z_old)
    gaps = examine(objective, target, count=3, **kwargs)
    off, on = [], []
    for (_, condition), each in gaps.items():
        (on if condition.on_policy else off).extend(each)
    return worst(on).verdict, worst(off).verdict


def constant(name="rpg", **settings):
    return make(name, reduction="constant", **settings)


def problems_in_numpy(space, condition, count, **more):
    with jax.enable_x64():
        return jax.tree.map(np.asarray, random_problems(space, condition, count, **more))


def logs_in_numpy(space, logits):
    """log p(token | history), [S, H, V] -> [S, N, T]; 0 where masked."""
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.where(space.mask, logs[:, space.history, space.token], 0)


def test_sequences_are_all_there_and_problems_off_policy_reach_every_bound():
    assert [len(space.mask) for space in SPACES] == [8, 27, 15, 16]
    stopped = every_sequence("", 3, 3, stop=0)
    assert sorted(stopped.mask.sum(1)) == [1] + [2] * 2 + [3] * 12
    for space in SPACES:
        policy = problems_in_numpy(space, CONDITIONS[-1], 3).policy
        with jax.enable_x64():
            logp = np.asarray(jax.jit(token_logprobs, static_argnums=0)(space, policy[0]))
        assert np.exp(logp.sum(1)).sum() == pytest.approx(1, rel=1e-13)
        np.testing.assert_allclose(logp, logs_in_numpy(space, policy)[0], rtol=1e-13)
        logp, mu = (logs_in_numpy(space, x) for x in problems_in_numpy(space, CONDITIONS[-1], 6)[:2])
        w = np.exp(logp - mu)
        assert (w > 3).any() and (w < 0.8).any() and ((w > 1.28) & (w < 3)).any() and ((w > 0.8) & (w < 1.28)).any()


@pytest.mark.parametrize("mixture", MIXTURES)
def test_an_earlier_policy_draws_the_first_token_of_a_mixture(mixture):
    """The newest one draws the rest, and is assumed to have drawn all where log-probs are computed again."""
    for space in SPACES:
        on, off = (problems_in_numpy(space, CONDITIONS[i], 3, mixture=mixture) for i in (0, -1))
        apart = on.behavior != on.policy  # on policy, the newest policy is the current one
        assert apart[:, 0].all() and not apart[:, 1:].any()
        assumed = on.behavior if mixture == "recorded" else on.policy
        np.testing.assert_array_equal(on.assumed, assumed)
        np.testing.assert_array_equal(on.reference, assumed)
        np.testing.assert_array_equal(off.behavior, on.behavior)
        assert (off.policy != on.policy).all() and (off.reference != on.reference).all()


def test_problems_are_as_far_as_they_say():
    for space in SPACES:
        for condition in MOVED:
            logp, mu = (logs_in_numpy(space, x).sum(-1) for x in problems_in_numpy(space, condition, 3)[:2])
            np.testing.assert_allclose((np.exp(mu) * (mu - logp)).sum(-1), condition.distance, rtol=1e-9)


def test_exact_gradient_is_the_slope_of_the_objective():
    """Against differences of numpy's J along a random direction, in the softmax space, where the levels are one."""
    space = SPACES[0]
    problem = jax.tree.map(lambda x: x[0], problems_in_numpy(space, CONDITIONS[-1], 3))
    theta, advantage = problem.policy, problem.advantage[:, 0]
    q = 0.7 * np.exp(problem.reference[0]) / np.exp(problem.reference[0]).sum()
    direction = np.random.default_rng(1).normal(size=theta.shape)
    parts = lambda x: [f(space, x, problem, 0.7, tuple(DIVERGENCES)) for f in targets.PARTS.values()]  # noqa: E731
    with jax.enable_x64():
        gradients = jax.jit(jax.jacrev(parts))(theta)

    def numpy_parts(x):
        p = np.exp(x[0]) / np.exp(x[0]).sum()
        divergences = {name: q @ [rho(u) for u in p / q] for name, rho in RHO.items()}
        return {"reward": p @ advantage} | divergences

    up, down = numpy_parts(theta + 1e-5 * direction), numpy_parts(theta - 1e-5 * direction)
    assert set(up) == set(gradients[0])
    for name in up:
        for gradient in gradients:
            slope = float((np.asarray(gradient[name]) * direction).sum())
            assert slope == pytest.approx((up[name] - down[name]) / 2e-5, rel=1e-6, abs=1e-9)


def test_a_wrong_gradient_is_caught_and_published_grpo_has_that_of_a_forward_kl():
    """On policy, of the KL's surrogate, unnormalized: 1 − 1/u is kappa/u of ufkl. What everything built in is shows in
    tests/test_verify.py."""
    assert verdicts(constant("grpo", beta=0.3, clip="none"), Target("token", "fkl", 0.3))[0] == EXACT_MEAN
    right = constant(divergence="rkl", beta=0.3)
    for target in (Target("token", "rkl", 0.3001), Target("token", "urkl", 0.3), Target("sequence", "rkl", 0.3)):
        assert EXACT not in verdicts(right, target)
    assert verdicts(right, Target("token", "fkl", 0.3)) == (BIASED, BIASED)
    # log Z moves rkl by a zero-mean term only
    assert verdicts(right, Target("token", "rkl", 0.3, 2.0))[0] == EXACT_MEAN


def test_a_divergence_is_added_by_one_function(monkeypatch):
    monkeypatch.setitem(DIVERGENCES, "mine", Divergence(lambda log_u, w, r: 0.5 * (w * jnp.exp(log_u) - 2 * w + r)))
    with jax.enable_x64():
        parts = jax.jit(targets.integrand("mine"))(np.array([0.2, 0.8]), np.array([0.5, 0.5]))
        assert np.sum(parts) == pytest.approx(0.5 * 0.09 / 0.5 * 2)
    for clip in ("none", "rpg"):
        objective = constant(divergence="mine", clip=clip, beta=0.3)
        assert verdicts(objective, seed=7) == objective.declares


def test_a_wrong_divergence_is_caught(monkeypatch):
    right = DIVERGENCES["hellinger"]
    assert divergence_faults("hellinger") == divergence_faults("alpha", 1.5) == []
    wrong = {
        "kappa_over_u is not": right._replace(kappa_over_u=lambda log_u: -7 * right.kappa_over_u(log_u)),
        "product form rho": right._replace(rho=lambda log_u, w, r: 2 * right.rho(log_u, w, r)),
    }
    wrong["kappa_over_u is lost"] = right._replace(  # the same function, but exp(60)² overflows in float32
        kappa_over_u=lambda log_u: 0.5 - 0.5 * jnp.sqrt(jnp.exp(-2 * log_u)) ** 0.5
    )
    for words, divergence in wrong.items():
        monkeypatch.setitem(DIVERGENCES, "hellinger", divergence)
        assert any(words in fault for fault in divergence_faults("hellinger")), words
    monkeypatch.setitem(DIVERGENCES, "mine", Divergence(lambda log_u, w, r: r * jnp.sin(log_u)))
    assert "its generator f(u) is not convex" in divergence_faults("mine")
    triangular = Divergence(lambda log_u, w, r: (w - r) * jnp.tanh(log_u / 2))  # rho = (u - 1)^2 / (u + 1)
    monkeypatch.setitem(DIVERGENCES, "mine", triangular)  # the derivative of tanh cancels where u is small
    [fault] = divergence_faults("mine")
    assert fault.endswith("give it in closed form, the second field of Divergence")
    closed = triangular._replace(kappa_over_u=lambda log_u: 1 - 4 * jax.nn.sigmoid(-log_u) ** 2)
    monkeypatch.setitem(DIVERGENCES, "mine", closed)
    assert divergence_faults("mine") == []


def test_levels_agree_on_the_reward_at_old_only():
    gaps = level_gap("urkl", count=3)
    for condition, (reward, divergence) in gaps.items():
        assert (reward < 1e-12) == condition.on_policy
        assert (divergence < 1e-12) == (condition.on_policy and condition.reference_is_behavior)
