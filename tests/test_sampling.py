"""generate: the same responses whatever the batching, and log-probs that are those of the full forward pass."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.sharding import NamedSharding, PartitionSpec
from scipy.special import log_softmax, softmax

from rpg_jax import models, parallel
from rpg_jax.sampling import Decoding, Sampling, generate, prompts_to_answer

VOCAB, COLUMNS, NEW = 53, 9, 11
LENGTHS = np.array([1, 5, 9, 3, 7])
CONFIG = models.ModelConfig(VOCAB, 32, 48, 1, 4, 2, 8, qk_norm=True, max_length=64)
KEY = jax.random.key(0, impl="threefry2x32")


def make_model(dtype=jnp.float32):
    """A model and its params, stacked and not, scaled up so that distributions are far from uniform and depend on
    their context.

    Embeddings start small: tied, they would make nearly every distribution a single token.
    """
    model = models.Model(CONFIG, dtype=dtype)

    @jax.jit
    def init():
        params = model.init(jax.random.key(1))
        params["embed"]["embedding"] *= 0.02 * CONFIG.hidden_size**0.5
        params = jax.tree.map(lambda leaf: (2.0 * leaf).astype(dtype), params)
        return params, models.unstack_layers(params)

    return model, *init()


MODEL, PARAMS, UNSTACKED = make_model()
token_logprobs = jax.jit(models.token_logprobs, static_argnums=0)


def make_prompts(lengths=LENGTHS, seed=0):
    mask = np.arange(COLUMNS) < np.asarray(lengths)[:, None]
    tokens = np.where(mask, np.random.default_rng(seed).integers(0, VOCAB, mask.shape), 0)
    return tokens.astype(np.int32), mask.sum(-1, dtype=np.int32), np.arange(len(mask), dtype=np.int32) * 3 + 7


def answer(model, params, prompts, *, samples, max_new, slots, segment=None, **settings):
    """`generate` for prompts (tokens, length, problem), on the host."""
    rows = prompts_to_answer(*prompts, samples=samples, max_new=max_new)
    decoding = Decoding(slots, segment=segment)
    rollout = generate(model, params, rows, samples=samples, max_new=max_new, decoding=decoding, **settings)
    return jax.tree.map(np.asarray, rollout)


SETTINGS = dict(step=3, samples=3, max_new=NEW, sampling=Sampling.make(stop_ids=(5, 6, 7)), slots=4, segment=5)


def run(prompts=None, **changes):
    return answer(MODEL, UNSTACKED, prompts or make_prompts(), **dict(key=KEY) | SETTINGS | changes)


@functools.cache
def reference():
    return run()


@functools.cache
def without_stops():
    return run(sampling=Sampling.make())


def responses(rollout):
    return [row[mask].tolist() for row, mask in zip(rollout.tokens, rollout.loss_mask, strict=True)]


@jax.jit
def forward(tokens):
    return MODEL.logits(PARAMS, MODEL.hidden(PARAMS, tokens))


def full_logits(tokens):
    """float64[B, T, V] from the training forward pass; column t predicts token t."""
    logits = np.asarray(forward(tokens), np.float64)
    return np.pad(logits[:, :-1], ((0, 0), (1, 0), (0, 0)))


def filtered64(logits, sampling):
    """float64[..., V], log-probs of what is drawn: tempered, of it the `top_k` likeliest, and of these top-p."""
    scaled = logits / np.float64(sampling.temperature)
    order = np.argsort(-scaled, axis=-1)
    likeliest = np.arange(VOCAB) < (int(sampling.top_k) or VOCAB)
    mass = softmax(np.where(likeliest, np.take_along_axis(scaled, order, -1), -np.inf), -1)
    kept = np.zeros(scaled.shape, bool)
    np.put_along_axis(kept, order, likeliest & (mass.cumsum(-1) - mass < float(sampling.top_p)), -1)
    return log_softmax(np.where(kept, scaled, -np.inf), -1)


def test_rows_are_prompt_then_response_then_zeros():
    (tokens, lengths, problem), rollout = make_prompts(), reference()
    assert rollout.tokens.shape == (15, COLUMNS + NEW) and rollout.tokens.dtype == np.int32
    assert rollout.sampler_logp.dtype == rollout.model_logp.dtype == np.float32
    np.testing.assert_array_equal(rollout.problem, np.repeat(problem, 3))
    np.testing.assert_array_equal(rollout.sample, np.tile(np.arange(3), 5))
    np.testing.assert_array_equal(rollout.prompt_length, np.repeat(lengths, 3))
    np.testing.assert_array_equal(rollout.length, rollout.prompt_length + rollout.loss_mask.sum(-1))
    column = np.arange(COLUMNS + NEW)
    of_prompt, exists = column < rollout.prompt_length[:, None], column < rollout.length[:, None]
    np.testing.assert_array_equal(rollout.loss_mask, exists & ~of_prompt)
    padded = np.pad(np.repeat(tokens, 3, axis=0), ((0, 0), (0, NEW)))
    np.testing.assert_array_equal(np.where(rollout.loss_mask, 0, rollout.tokens), padded)
    off = ~rollout.loss_mask
    assert not rollout.sampler_logp[off].any() and not rollout.model_logp[off].any()


def test_logprobs_are_those_of_teacher_forcing():
    """15 requests in 4 slots: slots are refilled, and their pages change hands several times."""
    rollout = run(sampling=Sampling.make(temperature=0.7, stop_ids=(5, 6, 7)))
    expected = token_logprobs(MODEL, PARAMS, rollout.tokens, rollout.loss_mask, temperature=0.7)
    np.testing.assert_allclose(rollout.model_logp, expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(rollout.sampler_logp, expected, rtol=0, atol=2e-5)
    assert expected.std() > 0.5, "the model is too uniform for this test to mean anything"


def test_logprobs_of_a_filtered_and_tempered_distribution():
    sampling = Sampling.make(temperature=1.5, top_k=12, top_p=0.8)
    rollout = run(sampling=sampling)
    logits, mask, tokens = full_logits(rollout.tokens), rollout.loss_mask, rollout.tokens[..., None]
    filtered = filtered64(logits, sampling)
    kept = np.isfinite(filtered[mask]).sum(-1)
    assert kept.std() > 0 and (kept < 12).any() and kept.max() <= 12
    for found, expected in ((rollout.model_logp, log_softmax(logits / 1.5, -1)), (rollout.sampler_logp, filtered)):
        expected = np.take_along_axis(expected, tokens, -1)[..., 0]
        np.testing.assert_allclose(found[mask], expected[mask], rtol=0, atol=5e-5)


@pytest.mark.parametrize("slots, segment", [(4, 1), (100, 4)])
def test_responses_depend_on_slots_by_rounding_alone_and_on_segments_not_at_all(slots, segment):
    other = run(slots=slots, segment=segment)
    assert responses(other) == responses(reference())
    np.testing.assert_array_equal(other.finished, reference().finished)
    tolerance = 1e-5 if slots != 4 else 0
    np.testing.assert_allclose(other.model_logp, reference().model_logp, rtol=0, atol=tolerance)


def test_noise_depends_on_key_step_problem_and_sample_and_not_on_the_order_of_requests():
    tokens, lengths, problem = make_prompts()
    for changed in (run(key=jax.random.key(1, impl="threefry2x32")), run(step=4), run((tokens, lengths, problem + 1))):
        assert all(a != b for a, b in zip(responses(changed), responses(reference()), strict=True))
    order = np.array([3, 0, 4, 2, 1])
    permuted = responses(run([x[order] for x in make_prompts()]))
    assert permuted == [responses(reference())[p * 3 + s] for p in order for s in range(3)]
    alike = np.full(5, 1)
    drawn = responses(run((tokens[alike], lengths[alike], problem)))
    assert len({tuple(response) for response in drawn}) == 15
    assert drawn[3:6] == responses(reference())[3:6]


def test_stop_tokens_cut_what_would_have_been_drawn_without_them():
    free = without_stops()
    assert (free.loss_mask.sum(-1) == NEW).all() and not free.finished.any(), "capacity reached by every response"
    stop_ids = (0, 5)  # 0 pads rows, too
    stopped = run(sampling=Sampling.make(stop_ids=stop_ids))
    for cut, whole, finished in zip(responses(stopped), responses(free), stopped.finished, strict=True):
        ends = [index for index, token in enumerate(whole) if token in stop_ids]
        assert cut == (whole[: ends[0] + 1] if ends else whole)
        assert finished == bool(ends)
    assert 0 < stopped.finished.sum() < 15 and 0 in stopped.tokens[np.arange(15), stopped.length - 1]


def test_limits_cut_and_padding_requests_are_not_run():
    limits = np.array([0, 3, NEW, 1, 0])
    limited = run(sampling=Sampling.make(), limits=limits)
    for row, (cut, whole) in enumerate(zip(responses(limited), responses(without_stops()), strict=True)):
        assert cut == whole[: limits[row // 3]]
    assert not limited.finished.any()
    nothing = run(limits=np.zeros(5, int))
    assert not nothing.loss_mask.any() and not nothing.finished.any()


def test_greedy_is_the_argmax_of_the_full_forward_pass():
    rollout = run(sampling=Sampling.make(temperature=0))
    tokens = np.pad(make_prompts()[0], ((0, 0), (0, NEW)))
    for index in range(NEW):
        columns = LENGTHS + index
        tokens[np.arange(5), columns] = full_logits(tokens)[np.arange(5), columns].argmax(-1)
    tokens = np.repeat(tokens, 3, axis=0)
    np.testing.assert_array_equal(rollout.tokens, tokens)
    mask = rollout.loss_mask
    assert not rollout.sampler_logp.any()
    expected = np.take_along_axis(log_softmax(full_logits(tokens), -1), tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(rollout.model_logp[mask], expected[mask], rtol=0, atol=2e-5)


def test_drawn_tokens_have_the_models_distribution():
    """First and second tokens of 4,096 responses to one prompt against exact probabilities (chi-square)."""
    prompts, sampling = make_prompts([4]), Sampling.make(temperature=1.4, top_k=9, top_p=0.8)
    rollout = run(prompts, samples=4096, max_new=2, slots=256, segment=64, sampling=sampling)
    pairs = rollout.tokens[:, 4:6]
    rows = np.repeat(prompts[0][:, :6], VOCAB, axis=0)
    rows[:, 4] = np.arange(VOCAB)
    both = np.exp(filtered64(full_logits(rows), sampling))
    joint = both[0, 4][:, None] * both[:, 5]
    observed = np.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2)
    expected = 4096 * joint.reshape(-1)
    assert observed[expected == 0].sum() == 0
    frequent = expected >= 5
    assert frequent.sum() >= 10
    rest = [observed[~frequent].sum()], [expected[~frequent].sum()]
    observed, expected = (np.append(x[frequent], r) for x, r in zip((observed, expected), rest, strict=True))
    used = expected > 0
    assert scipy.stats.chisquare(observed[used], expected[used]).pvalue > 1e-3


def test_nothing_recompiles_for_new_settings_prompts_limits_or_steps(caplog):
    reference()
    for sampling in (Sampling.make(temperature=0.6, top_k=3, top_p=0.9), Sampling.make(temperature=0)):
        run(sampling=sampling)  # what is on is known when a program is compiled, and its values are not
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        run(sampling=Sampling.make(temperature=0.6))
        run(make_prompts(LENGTHS[::-1], seed=4), step=9, key=jax.random.key(8, impl="threefry2x32"), segment=2)
        changed = Sampling.make(temperature=0.3, top_k=4, top_p=0.5, stop_ids=(1,))
        run(sampling=changed, limits=np.array([2, 0, 1, 4, 9], np.int32))
        run(sampling=Sampling.make(temperature=1e-39), should_stop=lambda: False)  # greedy
        assert "Finished XLA compilation" not in caplog.text
        jax.jit(lambda x: x * 3)(2)
    assert "Finished XLA compilation" in caplog.text, "the log line this test relies on is gone"


def test_should_stop_is_asked_between_segments_and_keeps_what_is_complete():
    asked = []
    partial = run(sampling=Sampling.make(), segment=3, should_stop=lambda: asked.append(0) or len(asked) == 5)
    assert len(asked) == 5
    # 15 steps in 4 slots: four responses of 11 tokens are complete, four run, seven wait.
    np.testing.assert_array_equal(partial.loss_mask.sum(-1), [NEW] * 4 + [0] * 11)
    assert responses(partial)[:4] == responses(without_stops())[:4]


def test_global_arrays_on_a_mesh(caplog):
    mesh = parallel.make_mesh(data=1)
    params = jax.device_put(UNSTACKED, NamedSharding(mesh, PartitionSpec()))
    prompts = parallel.to_global(mesh, parallel.ROWS, make_prompts())
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        rollout = answer(MODEL, params, prompts, key=KEY, **SETTINGS)
        of_a_state = parallel.to_global(mesh, parallel.REPLICATED, np.int32(5))
        answer(MODEL, params, prompts, key=KEY, version=of_a_state, **SETTINGS)
    count = caplog.text.count("Finished XLA compilation of jit(decode_segment)")
    assert count == 1, "once for all segments, of an evaluation and of a rollout"
    assert responses(rollout) == responses(reference())


def test_bfloat16():
    model, params, unstacked = make_model(dtype=jnp.bfloat16)
    sizes = dict(samples=2, max_new=NEW, slots=3)
    rollout = answer(model, unstacked, make_prompts(), key=KEY, step=0, sampling=Sampling.make(), **sizes)
    expected = np.asarray(token_logprobs(model, params, rollout.tokens, rollout.loss_mask))
    assert rollout.model_logp.dtype == expected.dtype == np.float32
    assert (expected != expected.astype(jnp.bfloat16)).any(), "not a bfloat16 number cast afterwards"
    assert np.abs(np.asarray(rollout.model_logp) - expected).mean() < 0.02
    assert expected.std() > 0.5


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="max_length"):
        run(max_new=56)
    with pytest.raises(ValueError, match="threefry2x32"):
        run(key=jax.random.key(0, impl="rbg"))
    with pytest.raises(ValueError, match="unstack_layers"):
        answer(MODEL, PARAMS, make_prompts(), key=KEY, **SETTINGS)
    for settings in (dict(top_p=0.0), dict(stop_ids=range(9)), dict(stop_ids=(-1,))):
        with pytest.raises(ValueError, match=next(iter(settings))):
            Sampling.make(**settings)
