"""Responses that go on in the next step: which groups a step trains, how old they may be, and by whose log-probs."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_rollout import MODEL, PROBLEMS, FakeScorer, Tokenizer, settings

from rpg_jax import parallel
from rpg_jax.data import Problem, ProblemStream
from rpg_jax.models import token_logprobs, unstack_layers
from rpg_jax.rewards import Scores, signed_reward
from rpg_jax.sampling.turns import rows_of
from rpg_jax.training import collect as collecting
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.settings import check_carry_over, steps_to_wait

KEY = jax.random.key(7, impl="threefry2x32")
OPTIMIZER = make_optimizer("adamw", learning_rate=0.0)
SAMPLES, COLUMNS, NEW = 2, 12, 6


def carried(prompts=4, oversample=2.0, **changes):
    return settings(carry_over=True, dynamic_sampling=False, prompts=prompts, oversample=oversample, **changes)


def collector(mesh, stream, settings, scorer=None, max_age=None, updates=1, delay=0, model=MODEL):
    return collecting.make_collect(
        model, Stops(), scorer or FakeScorer(), stream, mesh, settings, key=KEY, should_stop=lambda: False,
        scale=signed_reward, weights={}, wait=steps_to_wait(max_age, updates, delay),
    )  # fmt: skip


class Stops(Tokenizer):
    """A third of all tokens end a response."""

    stop_ids = (2, 3, 4, 5, 6, 7, 8)


def reluctant(seed):
    """In place of `generate`: it completes the youngest groups that it may, and of others draws a few tokens.

    They are the position of the group's problem in the stream."""
    rng = np.random.default_rng(seed)

    def generate(model, params, rows, *, step, version, limits, until, must, watch, **_):
        sharding, rows = rows.tokens.sharding, jax.tree.map(np.asarray, rows)
        had, runs = (rows.length - rows.prompt_length).reshape(-1, SAMPLES), np.asarray(limits) > 0
        complete = (had == NEW).all(1) | ~runs
        missing = [group for group in np.argsort(-step, kind="stable") if not complete[group] and not must[group]]
        goal = max(0, until - (complete | must).sum()) + rng.integers(0, 3)
        complete[must], complete[missing[:goal]] = True, True
        has = np.maximum(had, np.where(complete[:, None], NEW, rng.integers(0, NEW, had.shape)))
        length = rows.prompt_length + np.where(runs[:, None], has, 0).reshape(-1)
        columns = np.arange(COLUMNS + NEW)
        mask = (columns >= rows.prompt_length[:, None]) & (columns < length[:, None])
        fresh = mask & ~rows.loss_mask
        tokens = np.where(fresh, rows.problem[:, None], rows.tokens)
        versions = np.where(fresh, version, rows.version)
        complete = length - rows.prompt_length == NEW
        drawn = dataclasses.replace(
            rows, tokens=tokens, length=length, loss_mask=mask, version=versions, complete=complete
        )
        drawn = parallel.to_global(sharding.mesh, parallel.ROWS, drawn)
        watch(rows_of(drawn, np.flatnonzero(complete)))
        return drawn

    return generate


class HalfUniform(FakeScorer):
    """Every third problem has groups that are all right."""

    def score(self, items):
        seen, correct = collections.Counter(), []
        for problem, _ in items:
            correct.append(float(problem.id % 3 == 0 or seen[problem.id] % 2))
            seen[problem.id] += 1
        return Scores(np.array(correct, np.float32), [])


@pytest.mark.parametrize(
    "prompts, oversample, max_age, updates, delay, dynamic",
    [(4, 1.25, 3, 2, 0, False), (4, 2.5, None, 2, 0, False), (3, 3.0, 11, 3, 2, False), (4, 2.0, 5, 2, 1, True)],
)
def test_every_group_is_trained_once_and_in_time(monkeypatch, prompts, oversample, max_age, updates, delay, dynamic):
    """Whatever is complete first."""
    monkeypatch.setattr(collecting, "generate", reluctant(seed=prompts))
    mesh = parallel.make_mesh()
    chosen = dataclasses.replace(carried(prompts, oversample, max_batches=9), dynamic_sampling=dynamic)
    check_carry_over(dataclasses.replace(chosen, max_age=max_age), "sampler", updates, delay)
    source = [Problem(i, "task", "", "", "") for i in range(500)]
    stream, pending = ProblemStream(source, 0), collecting.nothing_pending(chosen, OPTIMIZER, mesh)
    collect = collector(mesh, stream, chosen, HalfUniform(), max_age, updates, delay)
    order, trained, oldest = [p.id for p in ProblemStream(source, 0).next(500)], [], 0
    for step in range(12):
        collected = collect(None, jnp.int32(max(0, step * updates - delay)), pending, step)
        rollout, pending = jax.tree.map(np.asarray, collected.sequences), collected.pending
        mask = rollout.loss_mask
        assert (mask.sum(-1) == NEW).all() and (rollout.tokens[mask] == np.repeat(rollout.problem, NEW)).all()
        positions = rollout.problem.reshape(prompts, SAMPLES)
        assert (positions[:, 0] == positions[:, 1]).all()
        trained += positions[:, 0].tolist()
        assert not dynamic or all(order[position] % 3 for position in trained)
        oldest = max(oldest, ((step + 1) * updates - 1 - rollout.version[mask]).max())
    waiting = np.asarray(pending.position)
    assert len(waiting) == chosen.fresh_prompts - prompts and (np.diff(waiting) > 0).all()
    dropped = [n for n in range(stream.cursor) if order[n] % 3 == 0 and dynamic and n not in waiting]
    assert sorted([*trained, *waiting, *dropped]) == list(range(stream.cursor))
    assert oldest > updates - 1 + delay, "nothing was carried over"
    assert max_age is None or oldest <= max_age
    assert max_age is not None or np.asarray(pending.begun).min() < 3, "nothing else makes a step wait for old groups"


def test_tokens_have_the_log_probs_of_the_policies_that_drew_them():
    """Against the trainer's forward pass with the parameters of each version, on rows that several of them drew."""
    mesh, chosen = parallel.make_mesh(), carried(max_age=5)
    init = jax.jit(lambda seed: jax.tree.map(lambda x: 3 * x, MODEL.init(jax.random.key(seed, impl="threefry2x32"))))
    policies, unstack = [init(seed) for seed in range(4)], jax.jit(unstack_layers)
    pending, mixed = collecting.nothing_pending(chosen, OPTIMIZER, mesh), 0
    collect = collector(mesh, ProblemStream(PROBLEMS, 0), chosen, max_age=5)
    score = jax.jit(lambda params, *rows: token_logprobs(MODEL, params, *rows, temperature=1.0, chunk=6))
    for step, params in enumerate(policies):
        collected = collect(unstack(params), jnp.int32(step), pending, step)
        rollout, before, pending = collected.sequences, pending, collected.pending
        logp = [np.asarray(score(params, rollout.tokens, rollout.loss_mask)) for params in policies]
        mask, version = np.asarray(rollout.loss_mask), np.asarray(rollout.version)
        expected = np.take_along_axis(np.stack(logp), version[None], axis=0)[0]
        np.testing.assert_allclose(np.asarray(rollout.sampler_logp)[mask], expected[mask], atol=2e-5)
        mixed += sum(len(set(row[keep])) > 1 for row, keep in zip(version, mask, strict=True))
        drawn = mask.sum() + np.asarray(pending.rollout.loss_mask).sum() - np.asarray(before.rollout.loss_mask).sum()
        assert collected.tokens == drawn
    assert mixed > 0


@pytest.mark.parametrize("change, message", [
    (dict(carry_over=False, max_age=4), "rollout.max_age is 4 and rollout.carry_over is off"),
    (dict(max_age=2), "must be at least 3$"),
    (dict(max_age=-1), "rollout.max_age is -1 .* at least 3$"),
    (dict(oversample=1.0), "leaves nothing to carry over"),
])  # fmt: skip
def test_settings_that_carry_nothing_over_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check_carry_over(dataclasses.replace(carried(), **change), "sampler", 2, 0)
    with pytest.raises(ValueError, match="set behavior.source=sampler"):
        check_carry_over(carried(), "trainer", 2, 0)
