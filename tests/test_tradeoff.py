"""Bias and variance by enumeration: held against brute force, and as a command."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from rpg_jax.exact import Target, every_sequence, targets
from rpg_jax.exact.enumeration import Problem, token_logprobs
from rpg_jax.exact.verification import Case
from rpg_jax.lab.tradeoff import measure as tradeoff
from rpg_jax.lab.tradeoff import tables
from rpg_jax.lab.tradeoff.moments import DIRECTIONS, Moments, kl, measurer, situations
from rpg_jax.lab.tradeoff.settings import Grid
from rpg_jax.objectives import make

DISTANCES = (0.0, 0.05, 1.0)
SPACE = every_sequence("", 2, 3)
FAR = 2 * 9 + 3  # of distances × directions × 3 problems: the farthest, in the random direction
SMALL = Grid(
    vocab=2, length=3, problems=5, distances=(0.01, 1.0), samples=(1, 100), ceilings=(3.0, 2.0), betas=(0.1, 0.05),
    epsilons=((0.2, 0.28), (0.05, 0.05), (1.0, 2.0)), divergences=("urkl",), seed=0,
)  # fmt: skip
SMALL_FLAGS = ("--vocab=2", "--length=3", "--problems=5", "--distances=0.01,1", "--samples=1,100")
SMALL_FORMS = ("--epsilons=0.2:0.28,0.05,2", "--ceilings=3,2", "--betas=0.1,0.05")
measure_once = functools.cache(tradeoff.measure)
GROUP = 3  # responses
CLIPPED = dict(clip="rpg", beta=0.3)


@pytest.fixture(scope="module")
def where():
    with jax.enable_x64():
        return situations(SPACE, 3, DISTANCES, seed=1)


@pytest.fixture(scope="module")
def far(where) -> Problem:
    return jax.tree.map(lambda x: np.asarray(x)[FAR], where.problem)


@pytest.fixture(scope="module")
def measured(where):
    """`measured(level, **settings)`: the moments of an objective at `where`."""

    @functools.cache
    def measure_at(level, **settings):
        objective = make("rpg", level=level, divergence="urkl", reduction="constant", **settings)
        with jax.enable_x64():
            return measurer(where, lambda _: objective, level, "urkl")({"beta": objective.beta})

    return measure_at


@functools.partial(jax.jit, static_argnums=1)
def sample_gradients(problem, level):
    """(probabilities [N], gradients [N, H·V]) of every sequence, each differentiated on its own down to the logits."""
    objective = make("rpg", level=level, reduction="constant", **CLIPPED)

    def loss(policy, row):
        logs = [token_logprobs(SPACE, x)[row][None] for x in (policy, problem.behavior, problem.reference)]
        mask = jnp.asarray(SPACE.mask)[row][None]
        advantage = problem.advantage[row][None]
        return objective(logs[0], logs[1], advantage, mask, reference_logp=logs[2], denominator=1.0)[0]

    gradient = jax.vmap(jax.grad(loss), (None, 0))(problem.policy, jnp.arange(len(SPACE.mask)))
    probability = jnp.exp(token_logprobs(SPACE, problem.behavior).sum(axis=1))
    return probability, gradient.reshape(len(gradient), -1)


@functools.partial(jax.jit, static_argnums=(1, 2))
def ascent(problem, level, divergence, beta):
    """∇J [H·V]."""

    def value(policy):
        parts = targets.PARTS[level](SPACE, policy, problem, 1.0, (divergence,))
        return parts["reward"] - beta * parts[divergence]

    return jax.grad(value)(problem.policy).ravel()


def test_policies_are_as_far_as_asked(where):
    def measure(p):
        return kl(SPACE, p.behavior, p.policy), targets.sequence_parts(SPACE, p.policy, p, 1.0, ())["reward"]

    with jax.enable_x64():
        forth, gain = (x.reshape(where.shape) for x in jax.device_get(jax.jit(jax.vmap(measure))(where.problem)))
    assert forth == pytest.approx(np.broadcast_to(np.reshape(DISTANCES, (-1, 1, 1)), where.shape), rel=1e-9, abs=1e-15)
    # The gain is of E[A], 0 at the behavior policy.
    assert np.abs(gain[0]).max() < 1e-12
    assert (gain[1:, DIRECTIONS.index("uphill")] > 0).all() and (gain[1:, DIRECTIONS.index("downhill")] < 0).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_moments_are_those_of_every_sample(far, measured, level):
    moments = measured(level, **CLIPPED)
    with jax.enable_x64():
        probability, gradients = jax.device_get(sample_gradients(far, level))
        own, whole = (np.asarray(ascent(far, x, "urkl", 0.3)) for x in (level, "sequence"))
    mean = probability @ gradients
    spread = probability @ ((gradients - mean) ** 2).sum(axis=1)
    assert spread > 0 and np.sum((mean + own) ** 2) > 1e-6
    expected = dict(
        bias_squared=np.sum((mean + own) ** 2), sequence_bias_squared=np.sum((mean + whole) ** 2), variance=spread,
        gradient_squared=own @ own, sequence_gradient_squared=whole @ whole,
        cosine=-(mean @ own) / np.sqrt(mean @ mean * (own @ own)), best_scale=-(mean @ own) / (mean @ mean),
    )  # fmt: skip
    for name, value in expected.items():
        assert getattr(moments, name).ravel()[FAR] == pytest.approx(value, rel=1e-9), name
    if level == "sequence":
        with jax.enable_x64():
            logs = jax.jit(functools.partial(token_logprobs, SPACE))
            w = np.exp(np.subtract(logs(far.policy), logs(far.behavior)).sum(1))
        assert moments.effective_sample_size.ravel()[FAR] == pytest.approx(1 / (probability @ w**2), rel=1e-9)
        dead = probability @ ~gradients.any(axis=1)
        assert moments.dead_mass.ravel()[FAR] == pytest.approx(dead) and 0 < dead < 1


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clips_are_unbiased_at_old_and_pay_beyond(measured, level):
    exact = measured(level, beta=0.3)
    assert (exact.bias_squared < 1e-24 * exact.gradient_squared).all() and not exact.dead_mass.any()
    assert (np.abs(exact.effective_sample_size[0] - 1) < 1e-12).all() and (exact.effective_sample_size[2] < 0.99).all()
    for clip in ("rpg", "truncate", "dual"):
        clipped = measured(level, clip=clip, beta=0.3)
        assert (clipped.bias_squared[0] < 1e-24 * clipped.gradient_squared[0]).all()
        assert (clipped.bias_squared[2] > 1e-6 * clipped.gradient_squared[2]).all()
        # N* is where the two errors meet.
        star = tables.crossing(clipped, exact)
        at = (star > 0) & np.isfinite(star)
        assert at.any()
        for n in star[at][:3]:
            ours, theirs = (tables.error(m, n)[star == n] for m in (clipped, exact))
            assert ours == pytest.approx(theirs, rel=1e-9)
    assert np.isinf(tables.crossing(exact, exact)).all()


def group_moments(problem, name, beta):
    """The mean gradient of a group, and of one that dynamic sampling keeps, from every ordered draw."""
    objective = make("rpg", advantage=name, reduction="constant", beta=beta)
    behavior, mask = jax.jit(token_logprobs, static_argnums=0)(SPACE, problem.behavior), jnp.asarray(SPACE.mask)
    rewards, total = np.sign(problem.advantage[:, 0]), np.exp(np.asarray(behavior).sum(1))
    rows = np.array(list(itertools.product(range(len(total)), repeat=GROUP)))

    def loss(policy, row):
        advantage = objective.advantages(jnp.asarray(rewards)[row][None], behavior[row], behavior[row], mask[row])
        logp = token_logprobs(SPACE, policy)[row]
        return objective(logp, behavior[row], advantage, mask[row], denominator=float(GROUP))[0]

    gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(problem.policy, rows)
    every = total[rows].prod(axis=1)
    kept = every * (rewards[rows] != rewards[rows[:, :1]]).any(axis=1)
    return [weight @ np.asarray(gradients).reshape(len(rows), -1) for weight in (every, kept / kept.sum())]


def turned(mean, target):
    """How far −mean points away from the target, whatever its length: 0 where it does not."""
    return np.linalg.norm(target + mean * (-(mean @ target) / (mean @ mean))) / np.linalg.norm(target)


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_each_advantage_is_as_published(far, beta):
    """docs/method.md 6.2 and 6.3, from every group of three draws."""
    with jax.enable_x64():
        target = np.asarray(ascent(far, "token", "urkl", beta))
        names = ("leave_one_out", "group_mean", "group_mean_std")
        (alone, _), (mean, kept), (deviation, _) = (group_moments(far, name, beta) for name in names)
    assert alone == pytest.approx(-target, rel=1e-9, abs=1e-12)
    if beta:  # the divergence part keeps its length, and dynamic sampling turns it
        assert min(turned(each, target) for each in (mean, kept, deviation)) > 1e-6
    else:  # scaled by (G − 1) / G, turned nowhere; of the groups that are kept, by 1 / p more
        assert mean == pytest.approx(-target * (GROUP - 1) / GROUP, rel=1e-9, abs=1e-12)
        assert turned(kept, target) < 1e-9 and np.linalg.norm(kept) > 1.05 * np.linalg.norm(mean)


def test_an_objective_of_ones_own_is_measured_as_the_built_in_one():
    """Whose numbers are traced, and here other ones than those of the form that was compiled first."""
    numbers = dict(beta=0.05, clip_low=0.05, clip_high=0.05, clip_c=2.0)
    mine, result = make("rpg", clip="rpg", reduction="constant", **numbers), measure_once(SMALL)
    case = Case("_a$b$_{.py:mine", "urkl", "-", "-", "token", ((mine, Target("token", "urkl", 0.05)),), None)
    ours = tradeoff.measure(SMALL, case)
    built_in = result[(result["clip"] == "rpg") & (result.level == "token")].merge(pd.DataFrame([numbers]))
    own = ours[ours["clip"] == "-"]
    assert len(own) == len(built_in) > 0
    for name in Moments._fields:
        assert own[name].to_numpy() == pytest.approx(built_in[name].to_numpy(), rel=1e-9, abs=1e-25)
    drawn = tables.draw(ours, tables.tradeoff(ours, SMALL.samples), SMALL.samples)
    assert "_a$b$_{.py:mine" in drawn["error_token"]  # its name is no formula


@pytest.mark.parametrize("changed, words", [
    (dict(length=30), ["2^30", "2e+07", "--length"]), (dict(vocab=10, length=10**9), ["10^1000000000", "limit"]),
    (dict(vocab=4, length=6, epsilons=tuple((x, x) for x in np.arange(1, 900) / 1000)),
     ["forms", "1e+09", "--epsilons"]),
    (dict(samples=(10**30,)), ["samples 1000", "1e+15"]), (dict(divergences=("kl",)), ["kl", "urkl"]),
])  # fmt: skip
def test_a_grid_that_cannot_be_enumerated_is_refused_before_anything_is_done(changed, words):
    with pytest.raises(ValueError) as error:
        tradeoff.measure(SMALL._replace(**changed))
    assert all(word in str(error.value) for word in words), error.value


MINE = """
import jax.numpy as jnp

def infinite(logp, advantage): return jnp.sqrt(logp - logp) * advantage
"""


def test_the_command_writes_tables_and_figures(call_command, tmp_path, monkeypatch):
    monkeypatch.setattr(tradeoff, "measure", lambda grid, case: measure_once(grid))  # what its flags describe is SMALL
    status, out, err = call_command("tradeoff", "--out=deep/out", "--json=out.json", *SMALL_FLAGS, *SMALL_FORMS)
    assert status == 0 and measure_once.cache_info().currsize == 1, err
    assert all(label in out for label in ("N*", "no clip", "rpg 0.2/0.28, c 3", "truncate 0.2/0.28"))
    files = {path.stem: path for path in (tmp_path / "deep/out").iterdir()}
    assert files.keys() == {"error_token", "error_sequence", "levels", "tradeoff"}
    rows = pd.read_csv(files["tradeoff"]).fillna({"clip_low": 0, "clip_high": 0})
    assert {*rows[["clip_low", "clip_high"]].itertuples(index=False, name=None)} == {(0, 0), *SMALL.epsilons}
    report = json.loads((tmp_path / "out.json").read_text(), parse_constant=lambda x: pytest.fail(f"{x} in JSON"))
    assert len(report["tradeoff"]) == len(rows)


@pytest.mark.parametrize("arguments, words", [
    (["--betas=x"], ["--betas=x", "numbers"]), (["--out=mine.py/deep"], ["mine.py", "no folder"]),
    (["--divergence=rkl"], ["--divergence", "--objective"]),
    (["--objective=mine.py:infinite", "--epsilons=0.1"], ["--epsilons", "cannot matter"]),
    (["--objective=mine.py:infinite", *SMALL_FLAGS], ["mine.py:infinite", "not finite", "30"]),
])  # fmt: skip
def test_mistakes_are_one_line_and_leave_nothing(call_command, tmp_path, arguments, words):
    (tmp_path / "mine.py").write_text(MINE)
    status, out, err = call_command("tradeoff", *arguments)
    *_, line = err.splitlines()  # after progress, if there was any
    assert status == 2 and not out and line.startswith("error: ") and all(word in line for word in words), err
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "__pycache__"}
