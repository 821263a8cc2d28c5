"""Bias and variance by enumeration: held against brute force, and as a command."""

import csv
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.exact import Target, every_sequence, targets
from rpg_jax.exact.enumeration import Problem, token_logprobs
from rpg_jax.exact.verification import Case
from rpg_jax.lab.tradeoff import tables
from rpg_jax.lab.tradeoff import measure as tradeoff
from rpg_jax.lab.tradeoff.moments import DIRECTIONS, Moments, kl, measurer, situations, with_settings
from rpg_jax.lab.tradeoff.settings import Grid
from rpg_jax.objectives import make

DISTANCES = (0.0, 0.05, 1.0)
SPACE = every_sequence("", 2, 3)
FAR = 2 * 9 + 3  # of distances × directions × 3 problems: the farthest, in the random direction
SMALL = Grid(
    vocab=2, length=3, problems=5, distances=(0.01, 1.0), samples=(1, 100), ceilings=(3.0,), betas=(0.1,),
    epsilons=((0.2, 0.28), (0.05, 0.05), (1.0, 2.0)), divergences=("urkl",), seed=0,
)  # fmt: skip
SMALL_FLAGS = ("--vocab=2", "--length=3", "--problems=5", "--distances=0.01,1", "--samples=1,100")
SMALL_FORMS = ("--epsilons=0.2:0.28,0.05,2", "--ceilings=3", "--betas=0.1")
measure_once = functools.cache(tradeoff.measure)
CLIPPED = dict(clip="rpg", beta=0.3)


@pytest.fixture(scope="module")
def where():
    with jax.enable_x64():
        return situations(SPACE, 3, DISTANCES, seed=1)


def one(where, index) -> Problem:
    return jax.tree.map(lambda x: np.asarray(x)[index], where.problem)


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
    with jax.enable_x64():
        measure = jax.jit(jax.vmap(functools.partial(kl, SPACE)))
        forth = np.asarray(measure(where.problem.behavior, where.problem.policy)).reshape(where.shape)
        reward = lambda p: targets.sequence_parts(SPACE, p.policy, p, 1.0, ())["reward"]  # noqa: E731
        gain = jax.jit(jax.vmap(reward))(where.problem)
    for distance, values in zip(DISTANCES, forth, strict=True):
        assert values == pytest.approx(np.full(values.shape, distance), rel=1e-9, abs=1e-15)
    gain = np.asarray(gain).reshape(where.shape)  # of E[A], 0 at the behavior policy
    assert np.abs(gain[0]).max() < 1e-12
    assert (gain[1:, DIRECTIONS.index("uphill")] > 0).all() and (gain[1:, DIRECTIONS.index("downhill")] < 0).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_moments_are_those_of_every_sample(where, measured, level):
    moments = measured(level, **CLIPPED)
    with jax.enable_x64():
        problem = one(where, FAR)
        probability, gradients = jax.device_get(sample_gradients(problem, level))
        own, whole = (np.asarray(ascent(problem, x, "urkl", 0.3)) for x in (level, "sequence"))
    mean = probability @ gradients
    spread = probability @ ((gradients - mean) ** 2).sum(axis=1)
    assert spread > 0 and np.sum((mean + own) ** 2) > 1e-6
    expected = dict(
        bias_squared=np.sum((mean + own) ** 2),
        sequence_bias_squared=np.sum((mean + whole) ** 2),
        variance=spread,
        gradient_squared=own @ own,
        sequence_gradient_squared=whole @ whole,
        cosine=-(mean @ own) / np.sqrt(mean @ mean * (own @ own)),
        best_scale=-(mean @ own) / (mean @ mean),
    )
    for name, value in expected.items():
        assert getattr(moments, name).ravel()[FAR] == pytest.approx(value, rel=1e-9), name
    if level == "sequence":
        with jax.enable_x64():
            logs = jax.jit(functools.partial(token_logprobs, SPACE))
            w = np.exp(np.subtract(logs(problem.policy), logs(problem.behavior)).sum(1))
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


def test_traced_numbers_are_the_objective_of_those_numbers(where, measured):
    base = make("rpg", clip="rpg", reduction="constant", beta=0.5)
    numbers = dict(beta=0.05, clip_low=0.1, clip_high=0.4, clip_c=2.0)
    with jax.enable_x64():
        traced = measurer(where, lambda x: with_settings(base, x), "token", "urkl")(numbers)
    for ours, theirs in zip(traced, measured("token", clip="rpg", **numbers), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-25)


GROUP = 3


def group_moments(problem, name, beta):
    """{dynamic sampling or not: the mean gradient of a group}, from every ordered draw; and ∇J of the token level."""
    objective = make("rpg", advantage=name, reduction="constant", beta=beta)
    with jax.enable_x64():
        behavior, mask = jax.jit(token_logprobs, static_argnums=0)(SPACE, problem.behavior), jnp.asarray(SPACE.mask)
        rewards = np.sign(problem.advantage[:, 0])
        total = np.exp(np.asarray(behavior).sum(1))
        rows = np.array(list(itertools.product(range(len(total)), repeat=GROUP)))

        def loss(policy, row):
            advantage = objective.advantages(jnp.asarray(rewards)[row][None], behavior[row], behavior[row], mask[row])
            logp = token_logprobs(SPACE, policy)[row]
            return objective(logp, behavior[row], advantage, mask[row], denominator=float(GROUP))[0]

        gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(problem.policy, rows)
        gradients = np.asarray(gradients).reshape(len(rows), -1)
        target = np.asarray(ascent(problem, "token", "urkl", beta))
    found = {}
    for dynamic in (False, True):
        probability = total[rows].prod(axis=1)
        if dynamic:
            probability = probability * (rewards[rows] != rewards[rows[:, :1]]).any(axis=1)
            probability /= probability.sum()
        found[dynamic] = probability @ gradients
    return found, target


def turned(mean, target):
    """How far −mean points away from the target, whatever its length: 0 where it does not."""
    return np.linalg.norm(target + mean * (-(mean @ target) / (mean @ mean))) / np.linalg.norm(target)


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_each_advantage_is_as_published(where, beta):
    """docs/method.md 6.2 and 6.3, from every group of three draws."""
    problem = one(where, FAR)
    alone, target = group_moments(problem, "leave_one_out", beta)
    assert alone[False] == pytest.approx(-target, rel=1e-9, abs=1e-12)
    mean, _ = group_moments(problem, "group_mean", beta)
    deviation, _ = group_moments(problem, "group_mean_std", beta)
    if beta:  # the divergence part keeps its length, and dynamic sampling turns it
        assert min(turned(mean[False], target), turned(mean[True], target), turned(deviation[False], target)) > 1e-6
    else:  # scaled by (G − 1) / G, turned nowhere; of the groups that are kept, by 1 / p more
        assert mean[False] == pytest.approx(-target * (GROUP - 1) / GROUP, rel=1e-9, abs=1e-12)
        assert turned(mean[True], target) < 1e-9 and np.linalg.norm(mean[True]) > 1.05 * np.linalg.norm(mean[False])


@pytest.fixture(scope="module")
def result():
    return measure_once(SMALL)


def test_an_objective_of_ones_own_is_measured_as_the_built_in_one(result):
    mine = make("rpg", clip="rpg", beta=0.1, reduction="constant")
    case = Case("_a$b$_{.py:mine", "urkl", "-", "-", "token", ((mine, Target("token", "urkl", 0.1)),), None)
    ours = tradeoff.measure(SMALL, case)
    built_in = result[(result["clip"] == "rpg") & (result.level == "token")]
    built_in = built_in[(built_in.beta == 0.1) & (built_in.clip_low == SMALL.epsilons[0][0])]
    own = ours[ours["clip"] == "-"]
    assert len(own) == len(built_in)
    for name in Moments._fields:
        assert own[name].to_numpy() == pytest.approx(built_in[name].to_numpy(), rel=1e-9, abs=1e-25)
    drawn = tables.draw(ours, tables.tradeoff(ours, SMALL.samples), SMALL.samples)
    assert "_a$b$_{.py:mine" in drawn["error_token"]  # its name is no formula


@pytest.mark.parametrize("changed, words", [
    (dict(length=30), ["2^30", "2e+07", "--length"]), (dict(vocab=10, length=10**9), ["10^1000000000", "limit"]),
    (dict(vocab=4, length=6, epsilons=tuple((x, x) for x in np.arange(1, 900) / 1e3)), ["forms", "1e+09", "--epsilons"]),
    (dict(samples=(10**30,)), ["samples 1000", "1e+15"]), (dict(divergences=("kl",)), ["kl", "urkl"]),
])  # fmt: skip
def test_a_grid_that_cannot_be_enumerated_is_refused_before_anything_is_done(changed, words):
    with pytest.raises(ValueError) as error:
        tradeoff.measure(SMALL._replace(**changed))
    assert all(word in str(error.value) for word in words), error.value


MINE = """
import jax.numpy as jnp
from rpg_jax.objectives import make

made = make("rpg", clip="rpg", beta=0.1)

def infinite(logp, advantage):
    return jnp.sqrt(logp - logp) * advantage
"""


@pytest.fixture
def study(tmp_path, call_command):
    """The command, in a folder with objectives of its own."""
    (tmp_path / "mine.py").write_text(MINE)
    return lambda *arguments: call_command("tradeoff", *arguments)


def test_the_command_writes_tables_and_figures(study, tmp_path, monkeypatch):
    monkeypatch.setattr(tradeoff, "measure", lambda grid, case: measure_once(grid))  # what its flags describe is SMALL
    status, out, err = study("--out=deep/out", "--json=out.json", *SMALL_FLAGS, *SMALL_FORMS)
    assert status == 0, err
    assert measure_once.cache_info().currsize == 1
    assert all(label in out for label in ("N*", "no clip", "rpg 0.2/0.28, c 3", "truncate 0.2/0.28"))
    names = {path.name for path in (tmp_path / "deep/out").iterdir()}
    assert names == {"error_token.svg", "error_sequence.svg", "levels.svg", "tradeoff.csv"}
    with (tmp_path / "deep/out/tradeoff.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(r["clip_low"], r["clip_high"]) for r in rows} == {("", ""), ("0.05", "0.05"), ("0.2", "0.28"), ("1", "2")}
    report = json.loads((tmp_path / "out.json").read_text(), parse_constant=lambda x: pytest.fail(f"{x} in JSON"))
    assert len(report["tradeoff"]) == len(rows)


@pytest.mark.parametrize("arguments, words", [
    (["--betas=x"], ["--betas=x", "numbers"]), (["--out=mine.py/deep"], ["mine.py", "no folder"]),
    (["--divergence=rkl"], ["--divergence", "--objective"]),
    (["--objective=mine.py:made", "--epsilons=0.1"], ["--epsilons", "cannot matter"]),
    (["--objective=mine.py:infinite", *SMALL_FLAGS], ["mine.py:infinite", "not finite", "30"]),
])  # fmt: skip
def test_mistakes_are_one_line_and_leave_nothing(study, tmp_path, arguments, words):
    before = set(tmp_path.iterdir())
    status, out, err = study(*arguments)
    assert status == 2 and not out
    *_, line = err.splitlines()  # after progress, if there was any
    assert line.startswith("error: ") and all(word in line for word in words), err
    assert {path for path in tmp_path.iterdir() if path.name != "__pycache__"} == before
