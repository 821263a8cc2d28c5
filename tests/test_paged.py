"""The paged KV cache: kernels against one reference, pages that change hands, and responses that do not notice."""

import dataclasses
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rpg_jax import models, parallel
from rpg_jax.sampling import Sampling, check_cache, decode, generate, paged_attention, pages, running_softmax
from rpg_jax.sampling.paged_attention import BLOCKS, PAGED_GPU, RAGGED
from rpg_jax.sampling.running_softmax import table_width
from rpg_jax.types import Prompts, Rollout

CONFIG = models.ModelConfig(53, 32, 48, 1, 4, 2, 8, qk_norm=True, max_length=512)
MODEL = models.Model(CONFIG)
module = importlib.import_module("rpg_jax.sampling.generate")  # the package has a function of that name
KEY = jax.random.key(0, impl="threefry2x32")
STOPS = (5, 6, 7)
attend = jax.jit(BLOCKS.attend, static_argnums=4)


@functools.cache
@jax.jit
def params():
    tree = MODEL.init(jax.random.key(1))
    tree["embed"]["embedding"] *= 0.02 * CONFIG.hidden_size**0.5
    return models.unstack_layers(jax.tree.map(lambda leaf: 2.0 * leaf, tree))


@functools.partial(jax.jit, static_argnums=(0, 1))
def pool_of(kernel, config, k, v):
    """A pool with these keys and values, [pages, page_size, kv_heads, head_dim]."""
    page, offset = np.divmod(np.arange(k.shape[0] * k.shape[1]), k.shape[1])
    flat = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    return kernel.write(kernel.empty(config, k.dtype, *k.shape[:2]), *flat, page, offset)


def filled(kernel, config, rows, width, page_size, seed=0):
    """A pool and a table of random pages, and the same keys and values as [pages, page_size, kv_heads, head_dim]."""
    rng = np.random.default_rng(seed)
    count = rows * width + 3
    k, v = (rng.normal(size=(count, page_size, config.kv_heads, config.head_dim)).astype(np.float32) for _ in "kv")
    table = rng.permutation(count)[: rows * width].reshape(rows, width).astype(np.int32)
    return pool_of(kernel, config, k, v), table, k, v


def reference(q, k, v, table, first):
    """`running_softmax.reference` of pages that are each a whole sequence: one program for every page size."""
    k, v = (x[table].reshape(len(table), -1, *x.shape[2:]) for x in (k, v))
    return jax.jit(running_softmax.reference)(q, k, v, np.arange(len(table))[:, None], first)


@pytest.mark.parametrize("hidden, mlp", [(32, 48), (256, 768), (896, 4864)])
def test_few_rows_are_decoded_alone_where_that_changes_no_bit(hidden, mlp):
    config = dataclasses.replace(CONFIG, hidden_size=hidden, mlp_size=mlp)
    heads = config.heads * config.head_dim
    shapes = [(hidden, heads), (hidden, heads // 2), (heads, hidden), (hidden, mlp), (mlp, hidden), (hidden, 53)]
    rng = np.random.default_rng(1)

    def same(inner, outer):
        x, matrix = (rng.normal(size=shape).astype(np.float32) for shape in ((32, inner), (inner, outer)))
        product = jax.jit(jnp.matmul, compiler_options=module.SAME_SUMS)
        return (np.asarray(product(x, matrix))[:4] == np.asarray(product(x[:4], matrix))).all()

    expected = all(same(*shape) for shape in shapes)
    assert module.same_bits(config, jnp.dtype(jnp.float32), 32, 4) == expected
    sampler = module.make_sampler(models.Model(config), parallel.make_mesh(devices=jax.devices()[:1]), 8, 8, 128)
    assert sampler.tiles == ((32, 4) if expected else (32,))


@functools.cache
def doubled_in_tiles(rows, sizes):
    """bool[rows] -> (rows that were computed, i32[rows] twice each live row's number and -1 for those left out)."""

    def double(computed, tile):
        return computed + tile.size, 2 * tile

    def run(live):
        numbers = jnp.arange(rows)
        return decode.in_tiles(double, jnp.int32(0), numbers, live, jnp.full(rows, -1), sizes)

    mesh = parallel.make_mesh(devices=jax.devices()[:1])
    return jax.jit(parallel.over_rows(mesh, run, parallel.ROWS, (parallel.REPLICATED, parallel.ROWS)))


@settings(max_examples=60, deadline=None)
@given(rows=st.sampled_from([9, 20, 32, 70]), data=st.data())
def test_idle_slots_cost_nothing_in_tiles(rows, data):
    live = np.array(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    live[data.draw(st.integers(0, rows)) :] = False  # few live rows, too
    computed, doubled = map(np.asarray, doubled_in_tiles(rows, (32, 4))(live))
    np.testing.assert_array_equal(doubled[live], 2 * np.flatnonzero(live))
    assert computed < live.sum() + min(rows, 32) // 2 + 4
    assert (live.any() or computed == 0) and (live.sum() > 4 or computed <= 4)


def test_so_few_slots_that_tiles_would_save_little_are_computed_at_once():
    for rows, sizes in ((1, (32, 4)), (5, (32, 4)), (8, (32, 4)), (32, (32,))):
        computed, doubled = map(np.asarray, doubled_in_tiles(rows, sizes)(np.arange(rows) == 0))
        assert computed == rows and doubled[0] == 0
    computed, doubled = map(np.asarray, doubled_in_tiles(33, (32,))(np.arange(33) == 0))
    assert computed == 32 and doubled[0] == 0


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    count=st.sampled_from([1, 3]),
    page_size=st.sampled_from([4, 16, 64, 128]),
    seed=st.integers(0, 99),
)
@example(lengths=[300] + [2] * 33, count=1, page_size=16, seed=0)
def test_running_softmax_is_the_reference_whatever_the_lengths(lengths, count, page_size, seed):
    width, rows = table_width(304, page_size), 40  # one shape for all lengths: nothing recompiles
    pool, table, k, v = filled(BLOCKS, CONFIG, rows, width, page_size, seed)
    q = np.random.default_rng(seed).normal(size=(rows, count, 4, 8)).astype(np.float32)
    first = np.resize(lengths, rows).astype(np.int32)
    out = attend(q, pool, table, first, page_size)
    np.testing.assert_allclose(out, reference(q, k, v, table, first), rtol=0, atol=2e-5)


def test_running_softmax_is_bit_for_bit_the_same_for_every_page_size():
    rng, capacity, rows = np.random.default_rng(0), 304, 40  # and three pages more: the programs of the test above
    k, v = (rng.normal(size=(rows, 384, 2, 8)).astype(np.float32) for _ in "kv")
    q, first = rng.normal(size=(rows, 1, 4, 8)).astype(np.float32), rng.integers(0, capacity, rows).astype(np.int32)
    outs = []
    for page_size in (4, 16, 64, 128):
        width = table_width(capacity, page_size)
        table = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
        pool = pool_of(BLOCKS, CONFIG, *(np.resize(x, (rows * width + 3, page_size, 2, 8)) for x in (k, v)))
        outs.append(np.asarray(attend(q, pool, table, first, page_size)))
    for out in outs[1:]:
        np.testing.assert_array_equal(outs[0], out)


@pytest.mark.parametrize("count", [1, 16])
def test_the_tpu_kernel_is_called_as_its_own_reference_reads_the_arguments(count, monkeypatch):
    """JAX has a reference for the kernel's arguments; `rpg_jax.plan` compiles the kernel itself for TPUs.

    This version of JAX cannot interpret it on CPU: its interpreters lack a transformation that the kernel uses.
    """
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as kernels
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ref_ragged_paged_attention

    def by_reference(q, kv_pages, lengths, table, starts, count, *, sm_scale, **blocks):
        lengths, starts, count = map(np.asarray, (lengths, starts, count))  # it slices by them

        def function(q, kv_pages, table):
            return ref_ragged_paged_attention(q, kv_pages, lengths, table, starts, count, sm_scale=sm_scale)

        return jax.jit(function)(q, kv_pages, table)

    monkeypatch.setattr(kernels, "ragged_paged_attention", by_reference)
    config = models.ModelConfig(64, 64, 64, 1, 4, 2, 128)
    pool, table, k, v = filled(RAGGED, config, 3, 8, 16)
    q = np.random.default_rng(1).normal(size=(3, count, 4, 128)).astype(np.float32)
    first = np.array([0, 37, 100], np.int32)
    out = RAGGED.attend(q, pool, table, first, 16)
    np.testing.assert_allclose(out, reference(q, k, v, table, first), rtol=0, atol=2e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_the_gpu_kernel_is_the_reference(count):
    config = models.ModelConfig(64, 64, 64, 1, 4, 2, 64)
    pool, table, k, v = filled(PAGED_GPU, config, 3, 8, 16)
    q = np.random.default_rng(1).normal(size=(3, count, 4, 64)).astype(np.float32)
    first = np.array([0, 37, 100], np.int32)
    out = jax.jit(functools.partial(paged_attention.paged_gpu, page_size=16, interpret=True))(q, pool, table, first)
    np.testing.assert_allclose(out, reference(q, k, v, table, first), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kernel", [BLOCKS, RAGGED, PAGED_GPU], ids=lambda kernel: kernel.name)
def test_copying_a_page_and_writing_beyond_the_pool(kernel):
    pool, *_ = filled(kernel, CONFIG, 2, 2, 4)
    row, page = np.full((1, 2, 8), 9.0, np.float32), np.array([7])
    copied, beyond = jax.jit(kernel.copy)(pool, 5, 2), jax.jit(kernel.write)(pool, row, row, page, np.array([0]))
    pool, copied, beyond = ([np.asarray(x) for x in arrays] for arrays in (pool, copied, beyond))
    for array, same in zip(beyond, pool, strict=True):
        np.testing.assert_array_equal(array, same, "7 pages: there is no page 7")
    axis = 1 if kernel is PAGED_GPU else 0
    for array, whole in zip(pool, copied, strict=True):
        assert set(np.nonzero(array != whole)[axis]) == {2}
        np.testing.assert_array_equal(np.take(whole, 2, axis), np.take(whole, 5, axis))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_pages_are_never_lost_nor_held_twice(data):
    width, rows, count = 4, 3, 9
    free, table, held = pages.all_free(count), np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    for _ in range(data.draw(st.integers(1, 12))):
        new = np.array([data.draw(st.integers(0, width)) for _ in range(rows)], np.int32)
        if np.maximum(new - held, 0).sum() > int(free.count[0]):
            continue
        if data.draw(st.booleans()):
            new = np.maximum(new, held)
            free, table = jax.jit(pages.take)(free, table, held, new)
        else:
            new = np.minimum(new, held)
            free = jax.jit(pages.give_back)(free, table, new, held)
        free, table, held = jax.tree.map(np.asarray, (free, table, new))
        in_use = [page for row, n in enumerate(held) for page in table[row, :n]]
        left = free.stack[: free.count[0]].tolist()
        assert sorted(in_use + left) == list(range(count))


def prompts_of(lengths, columns):
    mask = np.arange(columns) < np.asarray(lengths)[:, None]
    tokens = np.where(mask, np.random.default_rng(0).integers(0, 53, mask.shape), 0)
    return Prompts(*map(jnp.asarray, (tokens.astype(np.int32), mask, np.arange(len(mask), dtype=np.int32) * 3 + 7)))


LENGTHS, COLUMNS, NEW = [1, 5, 9, 3, 7, 17], 17, 40
LONG = running_softmax.SHORT - COLUMNS + 1  # if so many new tokens are allowed, decoding reads pages, not sequences


def run(max_new=NEW, lengths=LENGTHS, stop_ids=STOPS, **changes):
    settings = dict(samples=3, max_new=max_new, limits=np.full(6, NEW), slots=18, page_size=4) | changes
    settings["sampling"] = Sampling.make(stop_ids=stop_ids)
    rollout = generate(MODEL, params(), prompts_of(lengths, COLUMNS), key=KEY, step=3, **settings)
    return jax.tree.map(np.asarray, rollout)


@functools.cache
def expected(max_new=NEW):
    """All responses at once, with pages for all."""
    return run(max_new, page_size=4 if max_new == NEW else 128)


def least(page_size, max_new=NEW):
    """Pages for a longest response to a prompt of 17, and one for the prompt's last page."""
    return -(-(COLUMNS + max_new - 1) // page_size) + 1


LEAST = least(4)


@pytest.mark.parametrize(
    "slots, page_size, spare, max_new",
    [(1, 64, 0, NEW), (2, 4, 0, NEW), (5, 4, 2, NEW), (5, 16, 1, NEW), (18, 4, 3, NEW)]
    + [(1, 64, 0, LONG), (18, 4, 3, LONG), (5, 16, 1, LONG)],
)
def test_responses_are_bit_for_bit_the_same_whatever_slots_pages_and_preemption(slots, page_size, spare, max_new):
    rollout = run(max_new, slots=slots, page_size=page_size, cache_pages=least(page_size, max_new) + spare)
    for field in dataclasses.fields(rollout):
        ours, theirs = (getattr(x, field.name) for x in (rollout, expected(max_new)))
        np.testing.assert_array_equal(ours, theirs, err_msg=field.name)


def test_short_sequences_draw_what_long_ones_do():
    """Sums over the columns of a whole sequence and over those of a block differ by rounding alone."""
    short, long = expected(), expected(LONG)
    np.testing.assert_array_equal(short.tokens, long.tokens[:, : COLUMNS + NEW])
    np.testing.assert_allclose(short.model_logp, long.model_logp[:, : COLUMNS + NEW], rtol=0, atol=1e-5)


WIDE = models.Model(models.ModelConfig(53, 128, 384, 1, 4, 2, 32))
wide_params = functools.cache(jax.jit(lambda: models.unstack_layers(WIDE.init(jax.random.key(1)))))


@functools.cache
def wide(slots):
    """Of a model whose products XLA adds up in another order when they have 64 rows; 70 responses."""
    prompts = prompts_of([1 + n % 5 for n in range(14)], 5)
    settings = dict(samples=5, max_new=6, sampling=Sampling.make(stop_ids=STOPS), page_size=4)
    return jax.tree.map(np.asarray, generate(WIDE, wide_params(), prompts, key=KEY, step=3, slots=slots, **settings))


@pytest.mark.parametrize("slots", [33, 48, 64, 70])
def test_many_slots_give_what_few_give_bit_for_bit(slots):
    for field in dataclasses.fields(Rollout):
        np.testing.assert_array_equal(getattr(wide(slots), field.name), getattr(wide(3), field.name), field.name)


def cut(rollout, counts):
    """The first counts[row] response tokens of each row, as a rollout that stopped there returns them."""
    mask = rollout.response_mask & (rollout.response_mask.cumsum(-1) <= counts[:, None])
    tokens, *logps = (
        np.where(rollout.response_mask & ~mask, 0, x)
        for x in (rollout.tokens, rollout.sampler_logp, rollout.model_logp)
    )
    whole = mask.sum(-1) == rollout.response_mask.sum(-1)
    return Rollout(tokens, mask, *logps, rollout.problem, rollout.sample, rollout.finished & whole)


@pytest.mark.parametrize("max_new", [NEW, LONG])
@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, NEW), min_size=18, max_size=18), st.integers(0, 6), st.sets(st.integers(0, 5)))
@example([0] * 18, 6, set())
@example([NEW - 1] * 18, 0, {5})
def test_resumed_responses_go_on_as_if_they_had_never_stopped(max_new, counts, until, must):
    """Bit for bit, under the same parameters: from random tokens on, with a pool that sends responses back, and after a
    rollout that ended as soon as `until` prompts and those in `must` were complete."""
    must = np.isin(np.arange(6), list(must))
    arguments, whole = dict(max_new=max_new, slots=5, cache_pages=least(4, max_new) + 2), expected(max_new)
    stopped = run(resume=cut(whole, np.array(counts)), until=until, must=must, **arguments)
    lengths = stopped.response_mask.sum(-1)
    complete = (stopped.finished | (lengths == NEW)).reshape(6, 3).all(1)
    assert complete.sum() >= until and complete[must].all()
    for rollout, reference in (stopped, cut(whole, lengths)), (run(resume=stopped, **arguments), whole):
        for field in dataclasses.fields(rollout):
            np.testing.assert_array_equal(
                getattr(rollout, field.name), getattr(reference, field.name), err_msg=field.name
            )


def test_nothing_that_was_drawn_is_lost_when_a_rollout_ends_early(monkeypatch):
    """Not even of responses that wait because their pages were taken: to draw the tokens of long responses anew, by
    another policy, would be a bias."""
    final, function = {}, module.segment_on("cpu")

    def segment(*arguments):
        unfinished, final["state"] = function(*arguments)
        return unfinished, final["state"]

    monkeypatch.setattr(module, "segment_on", lambda platform: segment)
    waited = 0
    for until in range(1, 6):
        start = cut(expected(), np.zeros(18, int))
        length = run(resume=start, until=until, slots=5, cache_pages=LEAST + 2).response_mask.sum(-1)
        np.testing.assert_array_equal(length, (final["state"].responses.sampler_logp != 0).sum(-1))
        waited += (length[np.asarray(final["state"].status) == decode.WAITING] > 0).sum()
    assert waited > 0


def test_segments_take_about_a_second_and_progress_counts_complete_responses(monkeypatch):
    clock, steps, seen, function = [0.0], [], [], module.segment_on("cpu")

    def segment(sampler, mesh, inputs, state, number):
        steps.append(int(number))
        clock[0] += 0.25 * int(number)  # seconds
        return function(sampler, mesh, inputs, state, number)

    reference = run(slots=5)
    monkeypatch.setattr(module, "segment_on", lambda platform: segment)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    rollout = run(slots=5, segment=None, progress=seen.append)
    assert steps[:2] == [16, 4] and set(steps[1:]) == {4} and len(steps) > 3
    assert seen == sorted(seen) and seen[-1] < 18 and len(seen) == len(steps) - 1 and len(set(seen)) > 2
    jax.tree.map(np.testing.assert_array_equal, rollout, reference)


@pytest.mark.parametrize(
    ("steps", "seconds", "following"), [(16, 9.0, 4), (16, 0.01, 32), (100, 0.8, 125), (1, 9.0, 1), (800, 0.5, 1024)]
)
def test_steps_of_the_next_segment(steps, seconds, following):
    assert module.next_steps(steps, seconds) == following


def test_when_a_rollout_ends_early_does_not_depend_on_segments():
    start = cut(expected(), np.zeros(18, int))
    few, many = (run(resume=start, until=3, slots=5, cache_pages=LEAST + 2, segment=n) for n in (2, 500))
    jax.tree.map(np.testing.assert_array_equal, few, many)


def test_a_small_pool_sends_the_youngest_back_and_a_large_one_nobody(monkeypatch):
    final, function = {}, module.segment_on("cpu")

    def segment(*arguments):
        unfinished, final["state"] = function(*arguments)
        return unfinished, final["state"]

    monkeypatch.setattr(module, "segment_on", lambda platform: segment)
    run()
    assert int(final["state"].preemptions[0]) == 0
    run(slots=5, cache_pages=LEAST + 2)
    state = final["state"]
    assert int(state.preemptions[0]) > 3
    assert int(state.free.count[0]) == LEAST + 2, "pages are left over"
    assert sorted(np.asarray(state.free.stack)[: LEAST + 2].tolist()) == list(range(LEAST + 2))


def test_a_prompt_is_prefilled_once_for_its_group_and_shared(monkeypatch):
    """18 slots with 3 responses to each of six prompts of 3 full pages: these pages are there once."""
    held = []
    function = module.segment_on("cpu")

    def segment(sampler, mesh, inputs, state, steps):
        unfinished, state = function(sampler, mesh, inputs, state, jnp.int32(1))
        held.append(state.free.stack.size - int(state.free.count[0]))
        return unfinished, state

    monkeypatch.setattr(module, "segment_on", lambda platform: segment)
    run(lengths=[14] * 6, stop_ids=(), limits=np.full(6, 3))
    assert max(held) == 6 * 4 + 18, "four pages of each prompt, the last of them copied, and one of each response"


def test_work_and_memory_of_decoding_do_not_grow_with_the_longest_response():
    """With the same pool, the bytes that a decode step needs beside its arguments are those of the live tokens."""
    mesh, temporary = parallel.make_mesh(devices=jax.devices()[:1]), []
    for max_new in (40, 360):  # the first with the slots and pages of a test above, whose program it is then
        sampler = module.make_sampler(MODEL, mesh, COLUMNS, max_new, 4, None)
        prompts, limits = prompts_of(LENGTHS, COLUMNS), np.full(6, 40, np.int32)
        requests, state = module.start(sampler, mesh, prompts, KEY, jnp.int32(0), limits, 3, max_new, 5, LEAST + 2)
        everything = jnp.int32(6), np.zeros(6, bool)
        inputs = decode.Inputs(params(), prompts, requests, Sampling.make(), jnp.float32(1), *everything)
        compiled = module.segment_on("cpu").lower(sampler, mesh, inputs, state, jnp.int32(9)).compile()
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    columns = 2 * 18 * (360 - 40) * 12  # what is written down of each response: a token and two log-probs
    assert temporary[1] - temporary[0] < columns  # whole sequences of all slots would be 0.2 MB


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(page_size=0), "page_size is 0"),
        (dict(page_size=24), "page_size is 24; it must be a power of two"),
        (dict(page_size=256), "at most 128"),
        (dict(cache_pages=LEAST - 1), f"needs {LEAST} pages of 4 tokens.*at least {LEAST}$"),
        (dict(cache_pages=0), "cache_pages is 0"),
    ],
)
def test_caches_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        run(**changes)
    arguments = dict(max_prompt=COLUMNS, max_new=NEW, slots=4, page_size=4, cache_pages=None) | changes
    with pytest.raises(ValueError, match=re.compile(message)):
        check_cache(MODEL, parallel.make_mesh(devices=jax.devices()[:1]), **arguments)
