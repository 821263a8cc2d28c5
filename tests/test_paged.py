"""The paged KV cache: kernels against one reference, pages that change hands, and responses that do not notice."""

import dataclasses
import functools
import importlib

import emulated_cudnn
import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rpg_jax import models, parallel
from rpg_jax.models import cudnn
from rpg_jax.models.attention import AttentionKind
from rpg_jax.sampling import Decoding, Sampling, decode, generate, make_sampler, pages, prompts_to_answer
from rpg_jax.sampling.paged_attention import BLOCKS, CUDNN, RAGGED, copy_page
from rpg_jax.sampling.running_softmax import SHORT, capped, sees, table_width

CONFIG = models.ModelConfig(53, 32, 48, 1, 4, 2, 8, qk_norm=True, max_length=512)
MODEL = models.Model(CONFIG)
module = importlib.import_module("rpg_jax.sampling.generate")  # the package has a function of that name
KEY = jax.random.key(0, impl="threefry2x32")
STOPS = (5, 6, 7)
attend = jax.jit(BLOCKS.attend, static_argnums=(4, 5))
PLAIN = AttentionKind()
KINDS = [PLAIN, AttentionKind(scale=0.5, soft_cap=3.0, window=7), AttentionKind(window=140)]


@functools.cache
@jax.jit
def params():
    tree = MODEL.init(jax.random.key(1))
    tree["embed"]["embedding"] *= 0.02 * CONFIG.hidden_size**0.5
    return models.unstack_layers(jax.tree.map(lambda leaf: 2.0 * leaf, tree))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def pool_of(kernel, config, dtype, k, v):
    """A pool with these keys and values, [pages, page_size, kv_heads, head_dim]."""
    page, offset = np.divmod(np.arange(k.shape[0] * k.shape[1]), k.shape[1])
    flat = (x.reshape(-1, *x.shape[2:]).astype(dtype) for x in (k, v))
    return kernel.write(kernel.empty(config, dtype, *k.shape[:2]), *flat, page, offset)


def filled(kernel, config, rows, width, page_size, seed=0, dtype="float32"):
    """A pool and a table of random pages, and the same keys and values as [pages, page_size, kv_heads, head_dim]."""
    rng = np.random.default_rng(seed)
    count = rows * width + 3
    k, v = (rng.normal(size=(count, page_size, config.kv_heads, config.head_dim)).astype(np.float32) for _ in "kv")
    table = rng.permutation(count)[: rows * width].reshape(rows, width).astype(np.int32)
    return pool_of(kernel, config, dtype, k, v), table, k, v


@functools.partial(jax.jit, static_argnums=4)
def attention(q, k, v, first, kind):
    """What every kernel computes, in a few lines: all of each row's tokens, k and v [R, T, kv_heads, head_dim]."""
    position = first[:, None] + jnp.arange(q.shape[1])  # [R, C]
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = capped(jnp.einsum("rckgd,rtkd->rckgt", grouped, k), q.shape[-1], kind)
    visible = sees(position[..., None], jnp.arange(k.shape[1]), kind)  # [R, C, T]
    weights = jax.nn.softmax(jnp.where(visible[:, :, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("rckgt,rtkd->rckgd", weights, v).reshape(q.shape)


def reference(q, k, v, table, first, kind=PLAIN):
    """`attention` to the pages of a table, gathered before: one program for every page size."""
    return attention(q, *(x[table].reshape(len(table), -1, *x.shape[2:]) for x in (k, v)), first, kind)


# Each has a program: queries a row, page size, kind.
CASES = [(1, 4, KINDS[2]), (3, 4, PLAIN), (1, 16, PLAIN), (3, 16, KINDS[1]), (1, 128, KINDS[1]), (3, 128, KINDS[2])]


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=40), case=st.sampled_from(CASES), seed=st.integers(0, 99)
)
@example(lengths=[300] + [2] * 33, case=CASES[2], seed=0)
@example(lengths=[300] + [2] * 39, case=CASES[3], seed=0)
def test_running_softmax_is_the_reference_whatever_the_lengths(lengths, case, seed):
    count, page_size, kind = case
    width, rows = table_width(304, page_size), 40  # one shape for all lengths: nothing recompiles
    pool, table, k, v = filled(BLOCKS, CONFIG, rows, width, page_size, seed)
    q = np.random.default_rng(seed).normal(size=(rows, count, 4, 8)).astype(np.float32)
    first = np.resize(lengths, rows).astype(np.int32)
    out = attend(q, pool, table, first, page_size, kind)
    np.testing.assert_allclose(out, reference(q, k, v, table, first, kind), rtol=0, atol=2e-5)


def check_kernel(kernel, attend, dim, count, kind, dtype="float32"):
    """Against the reference of keys, values and queries as they are rounded."""
    config = models.ModelConfig(64, 64, 64, 1, 4, 2, dim)
    pool, table, k, v = filled(kernel, config, 4, 8, 16, dtype=dtype)
    assert all(array.dtype == dtype for array in pool)
    q = np.random.default_rng(1).normal(size=(4, count, 4, dim)).astype(dtype)
    first = np.array([0, 31, 32, 100], np.int32)
    out = attend(q, pool, table, first, 16, kind)
    wide, atol = (x.astype(dtype).astype(np.float32) for x in (q, k, v)), {"float32": 2e-5, "float16": 3e-3}[dtype]
    np.testing.assert_allclose(out.astype(np.float32), reference(*wide, table, first, kind), rtol=0, atol=atol)


@pytest.mark.parametrize("count, kind", [(1, PLAIN), (16, KINDS[1])])
def test_the_tpu_kernel_is_called_as_its_own_reference_reads_the_arguments(count, kind, monkeypatch):
    """JAX has a reference for the kernel's arguments; `rpg_jax.plan` compiles the kernel itself for TPUs.

    This version of JAX cannot interpret it on CPU: its interpreters lack a transformation that the kernel uses.
    """
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as kernels
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ref_ragged_paged_attention

    def by_reference(q, kv_pages, lengths, table, starts, count, *, sm_scale, sliding_window, soft_cap, **blocks):
        lengths, starts, count = map(np.asarray, (lengths, starts, count))  # it slices by them
        meant = dict(sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap)

        def function(q, kv_pages, table):
            return ref_ragged_paged_attention(q, kv_pages, lengths, table, starts, count, **meant)

        return jax.jit(function)(q, kv_pages, table)

    monkeypatch.setattr(kernels, "ragged_paged_attention", by_reference)
    check_kernel(RAGGED, RAGGED.attend, 128, count, kind)


@pytest.mark.parametrize("count, kind, dtype, single", [
    (1, PLAIN, "float16", True), (1, AttentionKind(0.5, None, 128), "float16", True), (1, PLAIN, "float32", False),
    (1, AttentionKind(soft_cap=3.0), "float16", False), (1, AttentionKind(window=127), "float16", False),
    (1, AttentionKind(window=17), "float32", False), (3, KINDS[1], "float32", False),
])  # fmt: skip
def test_the_gpu_kernel_is_called_for_single_queries_in_16_bits(count, kind, dtype, single, monkeypatch):
    called = []
    emulated = lambda *a, **k: called.append(a) or emulated_cudnn.paged_attention(*a, **k)  # noqa: E731
    monkeypatch.setattr(cudnn.wrapper, "paged_attention", emulated)
    check_kernel(CUDNN, jax.jit(lambda *a: CUDNN.attend(*a), static_argnums=(4, 5)), 64, count, kind, dtype)
    assert len(called) == single


@pytest.mark.parametrize("kernel", [BLOCKS, RAGGED, CUDNN], ids=lambda kernel: kernel.name)
def test_copying_a_page_and_writing_beyond_the_pool(kernel):
    pool, *_ = filled(kernel, CONFIG, 2, 2, 4)
    row, page = np.full((1, 2, 8), 9.0, np.float32), np.array([7])
    copied, beyond = jax.jit(copy_page)(pool, 5, 2), jax.jit(kernel.write)(pool, row, row, page, np.array([0]))
    pool, copied, beyond = ([np.asarray(x) for x in arrays] for arrays in (pool, copied, beyond))
    for array, same in zip(beyond, pool, strict=True):
        np.testing.assert_array_equal(array, same, "7 pages: there is no page 7")
    for array, whole in zip(pool, copied, strict=True):
        assert set(np.nonzero(array != whole)[0]) == {2}
        np.testing.assert_array_equal(whole[2], whole[5])


@settings(max_examples=50)
@given(st.data())
def test_pages_are_never_lost_nor_held_twice(data):
    width, rows, count = 4, 3, 9
    free, held = pages.Free(jnp.arange(count), jnp.full(1, count)), np.zeros(rows, np.int32)
    table = np.zeros((rows, width), np.int32)
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


def prompts_of(lengths, columns, samples=3, max_new=40):
    mask = np.arange(columns) < np.asarray(lengths)[:, None]
    tokens = np.where(mask, np.random.default_rng(0).integers(0, 53, mask.shape), 0)
    problem = np.arange(len(mask)) * 3 + 7
    return prompts_to_answer(tokens, mask.sum(-1), problem, samples=samples, max_new=max_new)


LENGTHS, COLUMNS, NEW, SLOTS = [1, 5, 9, 3, 7, 17], 17, 40, 5
LONG = SHORT - COLUMNS + 1  # with so many new tokens, attention takes its turns in a loop


def run(max_new=NEW, lengths=LENGTHS, stop_ids=STOPS, rows=None, segment=None, **changes):
    names = [name for name in changes if name in ("slots", "page_size", "cache_pages")]
    decoding = Decoding(**dict(slots=SLOTS, page_size=4) | {name: changes.pop(name) for name in names}, segment=segment)
    settings = dict(samples=3, max_new=max_new, limits=np.full(6, NEW), decoding=decoding) | changes
    rows = prompts_of(lengths, COLUMNS, max_new=max_new) if rows is None else jax.tree.map(jnp.asarray, rows)
    rollout = generate(MODEL, params(), rows, key=KEY, step=3, sampling=Sampling.make(stop_ids=stop_ids), **settings)
    return jax.tree.map(np.asarray, rollout)


@functools.cache
def expected(max_new=NEW):
    """With pages for all."""
    return run(max_new, page_size=4 if max_new == NEW else 128)


def least(page_size, max_new=NEW):
    """Pages for a longest response to a prompt of 17, and one for the prompt's last page."""
    return -(-(COLUMNS + max_new - 1) // page_size) + 1


LEAST = least(4)
assert_same = functools.partial(jax.tree.map, np.testing.assert_array_equal)


@pytest.mark.parametrize("page_size, spare, segment, max_new", [(4, 2, 1, NEW), (64, 0, 3, LONG)])
def test_responses_are_bit_for_bit_the_same_whatever_pages_segments_and_preemption(page_size, spare, segment, max_new):
    pages_ = least(page_size, max_new) + spare
    assert_same(run(max_new, page_size=page_size, cache_pages=pages_, segment=segment), expected(max_new))


def test_so_they_are_with_the_compiler_as_users_have_it():
    """A case with preemption, and products, in a process of its own; resumes are in test_train.py."""
    names = "4-2-1-40 or depend_on_its_place"
    done = processes.execute("-m", "pytest", __file__, "-n0", "-k", names, **processes.AS_USERS)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout


def test_prompts_of_fewer_samples_draw_the_same_by_the_same_program():
    """So a rollout and an evaluation of as many responses compile one."""
    whole, lengths = expected(), [*LENGTHS, 4, 2, 8]
    programs = module.decode_segment._cache_size()
    rows = prompts_of(lengths, COLUMNS, samples=2)
    pairs = run(rows=rows, samples=2, limits=np.full(9, NEW))
    assert module.decode_segment._cache_size() == programs
    for field in dataclasses.fields(pairs)[:-1]:
        ours, theirs = (
            getattr(x, field.name).reshape(-1, n, *getattr(x, field.name).shape[1:])
            for x, n in ((pairs, 2), (whole, 3))
        )
        np.testing.assert_array_equal(ours[:6], theirs[:, :2], err_msg=field.name)


def test_short_sequences_draw_what_long_ones_do():
    """Sums over the columns of a whole sequence and over those of a block differ by rounding alone."""
    short, long = expected(), expected(LONG)
    np.testing.assert_array_equal(short.tokens, long.tokens[:, : COLUMNS + NEW])
    np.testing.assert_allclose(short.model_logp, long.model_logp[:, : COLUMNS + NEW], rtol=0, atol=1e-5)


@pytest.mark.parametrize("hidden, rows", [(128, 48), (128, 70), (896, 33)])
def test_a_row_of_a_product_does_not_depend_on_its_place(hidden, rows):
    """What the promise of the same bits after a preemption rests on, for products as wide as those of real models."""
    rng = np.random.default_rng(0)
    x, matrix = rng.normal(size=(rows, hidden)).astype(np.float32), rng.normal(size=(hidden, 384)).astype(np.float32)
    order = rng.permutation(rows)
    product = jax.jit(jnp.matmul)
    np.testing.assert_array_equal(np.asarray(product(x, matrix))[order], product(x[order], matrix))


def cut(rollout, counts):
    """The first counts[row] response tokens of each row, as a rollout that stopped there returns them."""
    length = np.minimum(rollout.length, rollout.prompt_length + counts).astype(np.int32)
    kept = np.arange(rollout.tokens.shape[1]) < length[:, None]
    names = ("tokens", "loss_mask", "sampler_logp", "model_logp", "version")
    arrays = {name: np.where(kept, getattr(rollout, name), 0).astype(getattr(rollout, name).dtype) for name in names}
    arrays |= {name: getattr(rollout, name) & (length == rollout.length) for name in ("complete", "finished")}
    return dataclasses.replace(rollout, length=length, **arrays)


@pytest.mark.parametrize("max_new", [NEW, LONG])
@settings(max_examples=8)
@given(st.lists(st.integers(0, NEW), min_size=18, max_size=18), st.integers(0, 6), st.sets(st.integers(0, 5)))
@example([0] * 18, 6, set())
@example([NEW - 1] * 18, 0, {5})
def test_resumed_responses_go_on_as_if_they_had_never_stopped(max_new, counts, until, must):
    """The same tokens under the same parameters: from random tokens on, with a pool that sends rows back, and after a
    rollout that ended as soon as `until` prompts and those in `must` were complete. Keys and values of what a row had
    are computed by prefill then, so that log-probs may differ by rounding."""
    must = np.isin(np.arange(6), list(must))
    arguments, whole = dict(max_new=max_new, cache_pages=least(4, max_new) + 2), expected(max_new)
    stopped = run(rows=cut(whole, np.array(counts)), until=until, must=must, **arguments)
    lengths = stopped.length - stopped.prompt_length
    complete = (stopped.finished | (lengths == NEW)).reshape(6, 3).all(1)
    assert complete.sum() >= until and complete[must].all()
    for rollout, reference in (stopped, cut(whole, lengths)), (run(rows=stopped, **arguments), whole):
        for field in dataclasses.fields(rollout)[:-1]:  # no routes of a model without experts
            ours, theirs = getattr(rollout, field.name), getattr(reference, field.name)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * field.name.endswith("logp"))


@pytest.fixture
def segments(monkeypatch):
    """The states after each segment: (status, preemptions, free pages) of each."""
    seen, function = [], module.decode_segment

    def segment(*arguments):
        unfinished, ended, state = function(*arguments)
        kept = state.status, state.preemptions, state.free, state.rows.sampler_logp
        seen.append(jax.tree.map(np.array, kept))
        return unfinished, ended, state

    monkeypatch.setattr(module, "decode_segment", segment)
    return seen


def test_nothing_that_was_drawn_is_lost_when_a_rollout_ends_early_which_does_not_depend_on_segments(segments):
    """Not even of responses that wait because their pages were taken: to draw the tokens of long responses anew, by
    another policy, would be a bias."""
    waited = 0
    for until in range(1, 6):
        rollout = run(until=until, cache_pages=LEAST + 2)
        length, (status, _, _, logp) = rollout.loss_mask.sum(-1), segments[-1]
        np.testing.assert_array_equal(length, (logp != 0).sum(-1))
        waited += (length[status == decode.WAITING] > 0).sum()
        assert_same(run(until=until, cache_pages=LEAST + 2, segment=until), rollout)
    assert waited > 0


def test_segments_take_about_a_second_and_show_what_has_become_complete(monkeypatch):
    clock, steps, seen, function = [0.0], [], [], module.decode_segment

    def segment(sampler, mesh, inputs, state, number):
        steps.append(int(number))
        clock[0] += 0.25 * int(number)  # seconds
        return function(sampler, mesh, inputs, state, number)

    reference = expected()
    monkeypatch.setattr(module, "decode_segment", segment)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    rollout = run(watch=lambda rows: seen.append(len(rows)))
    assert steps[:2] == [16, 4] and set(steps[1:]) == {4} and len(steps) > 3
    assert sum(seen) == 18 and len(seen) == len(steps) and np.count_nonzero(seen) > 3
    assert_same(rollout, reference)
    expected_steps = {(16, 9.0): 4, (16, 0.01): 32, (100, 0.8): 125, (1, 9.0): 1, (800, 0.5): 1024}
    assert {asked: module.next_steps(*asked) for asked in expected_steps} == expected_steps


def test_each_complete_row_is_shown_once_with_its_tokens():
    shown, calls = {}, []

    def watch(rows):
        calls.append(len(rows))
        assert not shown.keys() & {row.number for row in rows}
        shown.update({row.number: row for row in rows})

    rollout = run(segment=3, watch=watch)
    assert sorted(shown) == list(range(18)) and len(calls) > 3
    for index, row in shown.items():
        length = rollout.length[index]
        assert row.tokens == rollout.tokens[index, :length].tolist()
        assert row.drawn == rollout.loss_mask[index, :length].tolist()


def test_a_small_pool_sends_the_youngest_back_and_a_large_one_nobody(segments):
    run()
    assert int(segments[-1][1][0]) == 0
    run(cache_pages=LEAST + 2)
    _, preemptions, free, _ = segments[-1]
    assert int(preemptions[0]) > 3
    assert int(free.count[0]) == LEAST + 2, "pages are left over"
    assert sorted(free.stack[: LEAST + 2].tolist()) == list(range(LEAST + 2))


def test_a_prompt_is_prefilled_once_for_its_group_and_shared(segments):
    """3 responses to each of six prompts of 3 full pages, five at a time: these pages are there once."""
    run(lengths=[14] * 6, stop_ids=(), limits=np.full(6, 3), segment=1)
    held = [free.stack.size - int(free.count[0]) for _, _, free, _ in segments]
    assert max(held) == 6 * 4 + 5, "four pages of each prompt, the last of them copied, and one of each response"


def test_rows_at_different_places_of_their_pages_get_them_together(segments):
    """As the prompts end at each place of a page of four, some row would come to the end of its page at every step."""
    run(lengths=[8, 9, 10, 11, 12, 13], slots=18, stop_ids=(), segment=1)
    counts = [int(free.count[0]) for _, _, free, _ in segments]
    assert (np.diff(counts) != 0).sum() <= NEW // 4 + 1


def test_work_and_memory_of_decoding_do_not_grow_with_the_longest_response():
    """With the same pool, the bytes that a decode step needs beside its arguments are those of the live tokens."""
    mesh, temporary = parallel.make_mesh(devices=jax.devices()[:1]), []
    for max_new in (40, 360):
        decoding = Decoding(SLOTS, page_size=4, cache_pages=3 * LEAST + 60)
        sampler, slots, pool = make_sampler(MODEL, mesh, decoding, COLUMNS, max_new, 18)
        rows, limits = prompts_of(LENGTHS, COLUMNS, max_new=max_new), np.full(6, 40, np.int32)
        keys, state = module.start(sampler, mesh, rows, KEY, np.int32(0), limits, 3, slots, pool)
        inputs = decode.Inputs(
            params(), keys, Sampling.make(), version=jnp.int32(0), until=jnp.int32(6), must=np.zeros(18, bool),
            stops=None,
        )  # fmt: skip
        compiled = module.decode_segment.lower(sampler, mesh, inputs, state, jnp.int32(9)).compile()
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    columns = 2 * 18 * (360 - 40) * 17  # what is written of each response: a token, two log-probs, version and mask
    assert temporary[1] - temporary[0] < columns  # whole sequences of all slots would be 0.2 MB


@pytest.mark.parametrize("changes, message", [
    (dict(page_size=0), "page_size is 0"), (dict(page_size=24), "page_size is 24; it must be a power of two"),
    (dict(page_size=256), "at most 128"),
    (dict(cache_pages=LEAST - 1), f"needs {LEAST} pages of 4 tokens.*at least {LEAST}$"),
    (dict(cache_pages=0), "cache_pages is 0"),
])  # fmt: skip
def test_caches_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        run(**changes)
