"""Packing: where sequences go, the way back, and that an RL step learns from packed rows what it does from others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequences import sequences
from stepping import make_experienced
from test_models import randomized

from rpg_jax import objectives, parallel
from rpg_jax.models import Model, ModelConfig
from rpg_jax.training import packing
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.update import init_state, make_update

CONFIG = ModelConfig(24, 16, 32, 1, 4, 2, 8, qk_norm=True)
B, T, ROWS = 16, 12, 8
# Full rows, equal ones, the shortest that can be trained, and two without a trained token.
STOP = np.array([12, 2, 5, 0, 7, 12, 3, 3, 3, 2, 9, 4, 0, 6, 2, 11])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=24).map(np.array), st.integers(0, 9), st.integers(1, 4))
def test_first_fit_puts_each_sequence_whole_where_there_was_room(lengths, room, most):
    """In rows of any number of sequences, of at most so many, and in those of a plan."""
    columns, real = max(lengths.max() + room, 1), lengths > 0
    (start, used), (few, rows), same = (packing.first_fit(lengths, columns, at) for at in (None, most, columns))
    count, planned = packing.plan(lengths, 3, columns, most)
    assert same[0].tolist() == start.tolist() and -(-real.sum() // most) <= 3 * count <= rows + 2
    for at, within, places in (start, used, columns), (few, rows, most), (planned, 3 * count, most):
        assert at.dtype == np.int32 and (at[~real] == len(lengths) * columns).all()
        taken = np.zeros(within * columns, int)
        for begin, length in zip(at[real], lengths[real], strict=True):
            assert begin // columns == (begin + length - 1) // columns
            taken[begin : begin + length] += 1
        assert taken.sum() == lengths.sum() and taken.max(initial=0) <= 1
        held = np.bincount(at[real] // columns)  # no row is left out, and a plan fills up its last microbatch
        assert held.max(initial=0) <= places and (held > 0).all() and held.size >= within - 2 * (at is planned)
    full = np.bincount(start[real] // columns, lengths[real], minlength=1)
    for row in range(1, used):  # a row's first sequence, its longest, had no room in any row before
        longest = lengths[real & (start == row * columns)].item()
        assert (full[:row] + longest > columns).all()


packed = jax.jit(packing.packed, static_argnames=("rows", "columns"))
unpacked = jax.jit(packing.unpacked, static_argnames="columns")


@settings(max_examples=40)
@given(st.lists(st.integers(0, 9), min_size=12, max_size=12).map(np.array), st.integers(0, 99))
@pytest.mark.parametrize("columns, most", [(9, None), (20, None), (20, 3)])
def test_packed_rows_hold_the_sequences_and_give_their_values_back(columns, most, lengths, seed):
    """Rows as wide as those of the batch, and wider ones, also of at most so many sequences."""
    rng, width, rows = np.random.default_rng(seed), 9, 3
    tokens = rng.integers(1, 1000, (len(lengths), width)).astype(np.int32)
    mask = (np.arange(width) < lengths[:, None]) & (rng.random(tokens.shape) < 0.5)
    mask[lengths > 0, lengths[lengths > 0] - 1] = True
    routes = rng.integers(0, 9, (*tokens.shape, 4)).astype(np.uint8)
    count, start = packing.plan(lengths, rows, columns, most)
    assert 0 <= count <= len(lengths) // rows
    found = {}
    for index in range(count):
        first = np.int32(index * rows)
        micro = jax.tree.map(np.asarray, packed(start, lengths, tokens, mask, first, rows, columns, routes))
        assert all(array.shape[:2] == (rows, columns) for array in micro.values())
        assert not micro["mask"][micro["segment_ids"] < 0].any()
        for row in range(rows):
            ids = micro["segment_ids"][row]
            for sequence in set(ids[ids >= 0]):
                here = ids == sequence
                found[sequence] = {name: array[row][here] for name, array in micro.items()}
        back = np.asarray(unpacked(start - index * rows * columns, micro["tokens"], width))
        for sequence in np.flatnonzero(start // (rows * columns) == index):
            np.testing.assert_array_equal(back[sequence, : lengths[sequence]], tokens[sequence, : lengths[sequence]])
    assert sorted(found) == np.flatnonzero(lengths).tolist()
    for sequence, array in found.items():
        stop = lengths[sequence]
        np.testing.assert_array_equal(array["tokens"], tokens[sequence, :stop])
        np.testing.assert_array_equal(array["mask"], mask[sequence, :stop])
        np.testing.assert_array_equal(array["positions"], np.arange(stop))
        np.testing.assert_array_equal(array["routes"], routes[sequence, :stop])


def test_long_tailed_lengths_leave_little_padding():
    """A minibatch of the paper's size: log-normal lengths of mean a quarter of the row, in microbatches of 16 rows."""
    rng, columns = np.random.default_rng(0), 8192
    lengths = np.clip(rng.lognormal(np.log(columns / 4) - 0.5, 1.0, 512), 1, columns).astype(int)
    (count, _), (whole, start) = (packing.plan(lengths, 16, packed) for packed in (columns, None))
    assert start is None and whole == 32
    wastes = [1 - lengths.sum() / (n * 16 * columns) for n in (count, whole)]
    assert wastes[0] < 0.1 and wastes[1] > 0.7
    # In rows twice as long, with 8 places each, first fit takes six microbatches; spread evenly, they take four.
    assert packing.first_fit(lengths, 2 * columns, 8)[1] > 80 and packing.plan(lengths, 16, 2 * columns, 8).count == 4


def random_step(seed=0):
    """A rollout of B rows whose prompts and responses have various lengths, and rewards."""
    rng = np.random.default_rng(seed)
    stop = np.minimum(STOP + 3 * (seed % 2), T)
    column, begin = np.arange(T), np.minimum(rng.integers(1, 5, B), np.maximum(stop - 1, 1))
    mask = (column >= begin[:, None]) & (column < stop[:, None])
    values = rng.normal(-3, 0.3, (2, B, T)).astype(np.float32)
    tokens, ids = rng.integers(0, 24, (B, T)).astype(np.int32), np.arange(B, dtype=np.int32)
    rollout = sequences(tokens, mask, *np.where(mask, values, 0), ids, ids, ids % 3 == 0)
    return rollout, rng.normal(size=(B // 4, 4)).astype(np.float32)


def step(mesh, objective, *, columns, scoring_rows=ROWS, dtype=jnp.float32, steps=1, **changes):
    """Log-probs, metrics, gradient (Adam's first moment) and parameters after RL steps; programs that were compiled."""
    functions = dict(constrain=parallel.make_constrain(mesh), per_shard=parallel.make_per_shard(mesh))
    model, optimizer = Model(CONFIG, dtype=dtype, **functions | changes), make_optimizer("adamw", learning_rate=1e-2)
    params = jax.tree.map(lambda x: x.astype(dtype), randomized(model))
    params["embed"]["embedding"] *= 3.0  # far from uniform
    params = jax.device_put(params, parallel.shardings(mesh, params), may_alias=False)  # `init_state` donates them
    state = init_state(optimizer, mesh, params)
    settings = dict(temperature=0.8, logprob_chunk=5, packed_columns=columns)
    experience = make_experienced(model, objective, optimizer, mesh, state, rows=scoring_rows, **settings)
    update = make_update(model, objective, optimizer, mesh, state, rows=ROWS, clip_norm=1e9, **settings)
    counts = []
    for number in range(steps):
        rollout, reward = random_step(number)
        rollout = parallel.to_global(mesh, parallel.ROWS, rollout)
        lengths = packing.on_host(rollout.length)
        scoring, plan = (packing.plan(lengths, rows, columns) for rows in (scoring_rows, ROWS))
        counts.append(int(plan[0]))
        batch, metrics = experience(state, rollout, reward, scoring)
        batch = dataclasses.replace(batch, reference_logp=batch.behavior_logp - 0.1 * batch.loss_mask)
        state, more = update(state, batch, plan, {})
    found = dict(logp=parallel.local_rows(batch.behavior_logp), gradient=state.opt_state[0].mu, params=state.params)
    found |= {name: metric.value() for name, metric in (metrics | more).items()}
    found |= dict(microbatches=counts, programs={program._cache_size() for program in (*experience.programs, update)})
    return jax.tree.map(np.asarray, found)


def test_packed_steps_equal_unpacked_ones():
    """Three steps in other numbers of microbatches, of other sizes in the log-prob pass, by the same two programs."""
    settings = dict(divergence="urkl", estimator="reinforce", clip="none", beta=0.1)
    objective = objectives.make("rpg", level="sequence", reduction="sequence_mean", **settings)
    with jax.enable_x64():
        one, two = (
            step(parallel.make_mesh(), objective, columns=columns, scoring_rows=rows, dtype=jnp.float64, steps=3)
            for columns, rows in ((None, 16), (T + 1, 4))
        )
    assert one["gradient"]["layers"]["q"]["kernel"].dtype == np.float64
    assert np.abs(one["gradient"]["layers"]["q"]["kernel"]).max() > 1e-4 and {"loss", "entropy"} <= one.keys()
    assert [result.pop("microbatches") for result in (one, two)] == [[2, 2, 2], [1, 2, 1]]
    assert all(result.pop("programs") == {1} for result in (one, two))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), one, two)
