"""Collecting groups: dynamic sampling, its error, shaping, evaluation's metrics, reference schedules."""

import contextlib
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stepping import Begun

from rpg_jax import parallel
from rpg_jax.data import Problem, ProblemStream
from rpg_jax.models import Model, ModelConfig, quantize_params, token_logprobs, unstack_layers
from rpg_jax.objectives.metrics import mean_of
from rpg_jax.rewards import Scorer, Scores, scale_named, signed_reward, voted_answer
from rpg_jax.run import warm_start
from rpg_jax.sampling import Decoding, Sampling, generate, prompts_to_answer
from rpg_jax.training import loop
from rpg_jax.training.collect import Preempted, make_collect
from rpg_jax.training.evaluation import Answered, examples, metrics
from rpg_jax.training.record import Record
from rpg_jax.training.reference import ReferenceSchedule
from rpg_jax.training.settings import LoopSettings, RolloutSettings
from rpg_jax.training.skipped import SKIPPED, NothingLearned
from rpg_jax.types import Checkpoint, TrainState

MODEL = Model(ModelConfig(32, 16, 32, 1, 2, 1, 8, max_length=64))
PROBLEMS = [Problem(i, "task", f"prompt {i}", "", str(i)) for i in range(12)]


class Tokenizer:
    """Letters and digits as numbers; token 1 begins and 2 ends."""

    pad_id, stop_ids = 0, (2,)

    def encode_prompt(self, text):
        return [1, *(3 + ord(c) % 29 for c in text)]

    def decode(self, ids):
        return " ".join(map(str, ids))


class FakeScorer:
    """Problems with an odd id have groups that differ; those of the others are all wrong."""

    environment = None

    def submit(self, items, lengths, rewards, outcomes=()):
        return Begun(self.score, items)

    def score(self, items):
        seen, correct = {}, []
        for problem, _ in items:
            seen[problem.id] = seen.get(problem.id, -1) + 1
            correct.append(float(problem.id % 2 and seen[problem.id] % 2))
        return Scores(np.array(correct, np.float32), [])


def settings(**changes):
    base = dict(
        prompts=4, samples=2, max_prompt=12, max_new=6, slots=8, temperature=1.0, dynamic_sampling=True, oversample=1.5,
        max_batches=3, overlong_buffer=2, overlong_factor=1.0,
    )  # fmt: skip
    return RolloutSettings(**(base | changes))


@pytest.fixture(scope="module")
def setup():
    init = jax.jit(lambda: unstack_layers(MODEL.init(jax.random.key(0, impl="threefry2x32"))))
    return parallel.make_mesh(), init()


def collector(setup, settings, should_stop=lambda: False, scorer=None, **options):
    mesh, params = setup
    options = dict(scale=signed_reward, weights={}, wait=None) | options
    key, scorer = jax.random.key(7, impl="threefry2x32"), scorer or FakeScorer()

    def collect(stream, step=0):
        arguments = MODEL, Tokenizer(), scorer, stream, mesh, settings
        made = make_collect(*arguments, key=key, should_stop=should_stop, **options)
        return made(params, jnp.int32(step), None, step)

    return collect


def test_dynamic_sampling_keeps_the_groups_that_differ_and_says_what_to_change_where_it_starves(setup):
    stream, order = ProblemStream(PROBLEMS, 0), ProblemStream(PROBLEMS, 0).next(12)
    collected = collector(setup, settings())(stream)
    kept = np.asarray(collected.sequences.problem).reshape(4, 2)
    assert (kept[:, 0] == kept[:, 1]).all()
    odd = [position for position, p in enumerate(order) if p.id % 2]
    assert kept[:, 0].tolist() == odd[:4]
    assert np.asarray(collected.sequences.sample).tolist() == [0, 1] * 4
    batches = next(n for n in (1, 2) if sum(p.id % 2 for p in order[: 6 * n]) >= 4)
    assert stream.cursor == 6 * batches
    seen = order[: 6 * batches]
    assert collected.metrics["kept_fraction"] == pytest.approx(np.mean([p.id % 2 for p in seen]))
    assert collected.metrics["accuracy"] == pytest.approx(np.mean([p.id % 2 for p in seen]) / 2)
    # Rewards are +-1 and the overlong punishment of that very row.
    lengths = np.asarray(collected.sequences.loss_mask).sum(-1).reshape(4, 2)
    expected = np.tile([-1.0, 1.0], (4, 1)) - np.clip((lengths - 4) / 2, 0, 1)
    np.testing.assert_allclose(collected.rewards[0], expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"kept 0 of the 4 groups.*3 generation.*rollout.max_batches"):
        collector(setup, settings())(ProblemStream(PROBLEMS[::2], 0))


class SeveralScorer(FakeScorer):
    """Odd ids: one right response of two. Ids 0, 4, 8, ...: both wrong, and one brief."""

    def score(self, items):
        first = np.arange(len(items)) % 2 == 0
        ids = np.array([problem.id for problem, _ in items])
        right, brief = np.float32(first & (ids % 2 == 1)), np.float32(first & (ids % 4 == 0))
        return Scores(right, [], {"right": right, "brief": brief})


def test_several_rewards_are_weighed_summed_and_logged_and_groups_differ_in_their_sum(setup):
    stream, options = ProblemStream(PROBLEMS, 0), dict(scale=scale_named("unit"), weights={"brief": -0.5})
    collected = collector(setup, settings(), scorer=SeveralScorer(), **options)(stream)
    seen = ProblemStream(PROBLEMS, 0).next(12)[:6]
    kept = np.array([seen[position].id for position in np.asarray(collected.sequences.problem)[::2]])
    assert kept.tolist() == [p.id for p in seen if p.id % 4 != 2][:4] and stream.cursor == 6
    lengths = np.asarray(collected.sequences.loss_mask).sum(-1).reshape(4, 2)
    expected = np.where(kept % 2, 1.0, -0.5)[:, None] * [1, 0] - np.clip((lengths - 4) / 2, 0, 1)
    np.testing.assert_allclose(collected.rewards[0], expected, rtol=1e-6)
    right, brief = (np.mean([p.id % 4 in ids for p in seen]) / 2 for ids in ((1, 3), (0,)))
    assert collected.metrics["reward/right"] == collected.metrics["accuracy"] == pytest.approx(right)
    assert collected.metrics["reward/brief"] == pytest.approx(brief)
    assert collected.metrics["kept_fraction"] == pytest.approx(np.mean([p.id % 4 != 2 for p in seen]))
    example = collected.examples[0]
    assert example["correct"] == example["reward/right"] == seen[0].id % 2


def test_every_response_is_drawn_with_noise_of_its_own_and_preemption_is_noticed_inside_a_rollout(setup):
    """One problem makes up a step, its redraws and the epochs after it: every group is kept."""
    collect = collector(setup, settings(dynamic_sampling=False, oversample=1.0, prompts=6))

    def responses(stream, step):
        first, rows = stream.cursor, collect(stream, step).sequences
        assert np.asarray(rows.problem)[::2].tolist() == list(range(first, first + 6))
        assert stream.cursor == first + 6
        return [bytes(row) for row in np.asarray(rows.model_logp)]

    stream = ProblemStream(PROBLEMS[:1], 0)
    drawn = [row for _ in range(3) for row in responses(stream, 0)]
    assert len(set(drawn)) > 30, "of 36; a few may end at once, all of them alike"
    assert responses(ProblemStream(PROBLEMS[:1], 0), 0) == drawn[:12] != responses(ProblemStream(PROBLEMS[:1], 0), 1)
    with pytest.raises(Preempted):
        collector(setup, settings(), should_stop=lambda: True)(ProblemStream(PROBLEMS, 0))


def test_quantized_rollouts_record_the_log_probs_of_the_policy_that_drew(setup):
    mesh, params = setup
    eight_bits = settings(dynamic_sampling=False, oversample=1.0, weights_dtype="int8", cache_dtype="float8_e4m3fn")
    rollout = jax.tree.map(np.asarray, collector(setup, eight_bits)(ProblemStream(PROBLEMS, 3)).sequences)
    tokens, mask = rollout.tokens, rollout.loss_mask
    prompts = tokens[::2, :12], rollout.prompt_length[::2], rollout.problem[::2]
    rows = prompts_to_answer(*parallel.to_global(mesh, parallel.ROWS, prompts), samples=2, max_new=6)
    quantized = jax.jit(quantize_params, static_argnums=1)(params, "int8")
    drawn = generate(
        MODEL, jax.device_put(quantized, parallel.shardings(mesh, quantized, parallel.SAMPLING)),
        rows, step=0, samples=2, max_new=6, key=jax.random.key(7, impl="threefry2x32"),
        sampling=Sampling.make(stop_ids=(2,)), decoding=Decoding(8, cache_dtype="float8_e4m3fn"),
    )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, rollout, drawn)
    plain = jax.jit(token_logprobs, static_argnums=0)(MODEL, params, tokens, mask)
    assert np.abs(rollout.sampler_logp - np.asarray(plain))[mask].max() > 1e-3


def loop_settings(**changes):
    base = dict(
        steps=2, seed=0, prompts=8, samples=4, minibatch_prompts=4, microbatch_rows=8, epochs=2, packed_columns=None,
        scoring_rows=2, evaluate_every=1, save_every=1, most_skipped=3,
    )  # fmt: skip
    return LoopSettings(**(base | changes))


def test_minibatches_cover_each_epoch_once_in_whole_groups():
    batches = list(loop_settings().minibatches(step=5))
    assert len(batches) == 4
    for epoch in (batches[:2], batches[2:]):
        assert sorted(np.concatenate(epoch)) == list(range(32))
    for rows in batches:
        assert (rows.reshape(4, 4) - rows.reshape(4, 4)[:, :1] == np.arange(4)).all()
    others = [(batches, loop_settings(seed=seed).minibatches(step=step)) for seed, step in ((0, 6), (1, 5))]
    for one, other in [(batches[:2], batches[2:]), *others]:
        assert any((a != b).any() for a, b in zip(one, other, strict=True))


def test_a_step_counts_what_every_epoch_trains_and_the_last_is_evaluated():
    """Two epochs of 20 tokens, in 3 microbatches of 8 rows and 4 columns."""
    of_step = dict(seconds=dict(rollout=4.0, update=2.0), metrics={}, tokens=12, trained=10, lengths=np.full(10, 2))
    of_step["sequences"] = types.SimpleNamespace(tokens=np.zeros((10, 4)))
    record = Record(loop_settings(), types.SimpleNamespace(**of_step))
    record.microbatches = 3
    row = record.row(types.SimpleNamespace(step=7, skipped=[1, 0]))
    assert row["throughput/rollout_tokens_per_second"] == 3 and row["throughput/update_tokens_per_second"] == 10
    assert row["train/padding_waste"] == pytest.approx(1 - 2 * 20 / (3 * 8 * 4))
    evaluated = loop_settings(steps=5, evaluate_every=2).is_evaluated
    assert [done for done in range(6) if evaluated(done)] == [0, 2, 4, 5]


@pytest.mark.parametrize("make, change, name", [
    (settings, dict(samples=1), "rollout.dynamic_sampling"),
    (settings, dict(overlong_buffer=6), "rollout.overlong_buffer"),
    (loop_settings, dict(minibatch_prompts=3), "minibatch_prompts"),
    (loop_settings, dict(microbatch_rows=6), "microbatch_rows"), (loop_settings, dict(scoring_rows=5), "scoring_rows"),
])  # fmt: skip
def test_settings_that_make_no_sense(make, change, name):
    with pytest.raises(ValueError, match=name):
        make(**change)


def test_what_is_not_a_number_is_not_saved_and_a_collapse_is_said(monkeypatch, capsys):
    """Step 1 is fine but for its entropy; after step 2 a parameter is NaN."""
    zero, saved = jnp.zeros((), jnp.int32), []
    first = Checkpoint(TrainState(zero, {"a": jnp.ones(3)}, None, jnp.zeros(2, jnp.int32), jnp.zeros(())))
    groups = types.SimpleNamespace(failures=[], tokens=0, examples=[], cursor=0)
    of_step = dict(groups=groups, skipped=["skipped"], look=[])
    record = types.SimpleNamespace(**of_step, row=lambda state: {"train/entropy": 0.0})

    def step(parts, settings, checkpoint, number):
        params = {"a": checkpoint.state.params["a"] / (1 - number)}
        return Checkpoint(dataclasses.replace(checkpoint.state, params=params)), record

    monkeypatch.setattr(loop, "rl_step", step)
    names = [field.name for field in dataclasses.fields(loop.Parts)]
    parts = loop.Parts(**dict.fromkeys(names) | dict(
        should_stop=lambda: False, traced=lambda steps: (i for i in steps),
        policies=types.SimpleNamespace(current=lambda state: None, sampling_params=lambda policy, frozen: None),
        rollouts=types.SimpleNamespace(settle=lambda: None, call=lambda function: function()),
        evaluate=lambda params, should_stop, progress: [], stream=types.SimpleNamespace(cursor=0),
        checkpoints=types.SimpleNamespace(save=lambda step, *_, **__: saved.append(step)),
        log=types.SimpleNamespace(
            write=lambda *_, **__: None, progress=lambda *_: contextlib.nullcontext(lambda *_, **__: None), rows=dict
        ),
    ))  # fmt: skip
    settings = loop_settings(evaluate_every=9, steps=3)
    with pytest.raises(ValueError, match="^step 2: parameters are NaN or infinite .*it is not saved"):
        loop.run(parts, settings, first, 0, loop.new_totals() | {"evaluated": 0})
    err = capsys.readouterr().err
    assert saved == [1] and err.count("the policy has collapsed, its entropy is 0.0e+00") == 1
    assert err.count("warning: step 1: skipped; train/skipped_updates counts them") == err.count("skipped;") == 1


def test_a_warm_start_that_only_skips_updates_ends(capsys):
    metrics = {"loss": np.nan, "grad_norm": np.nan, SKIPPED: 1.0}
    metrics = {name: mean_of(jnp.float32(value)) for name, value in metrics.items()}

    def update(state, batch):
        return types.SimpleNamespace(skipped=(0, state.skipped[1] + 1), step=0), metrics

    def start(steps):
        warm_start.learn(
            types.SimpleNamespace(skipped=(0, 0), step=0), 0, steps, update=update, next_batch=lambda: ("batch",),
            save=lambda *_: None, progress=lambda *_, **__: None, save_every=9, should_stop=lambda: False,
            most_skipped=3,
        )  # fmt: skip

    with pytest.raises(ValueError, match="warm start, update 3: the last 3 updates .* lower warm_start.learning_rate"):
        start(9)
    with pytest.raises(NothingLearned, match="no update of the warm start was applied, 2 were not finite"):
        start(2)
    assert capsys.readouterr().err.count("update 1 was skipped: the loss is NaN: all of its inputs are finite") == 2


def test_evaluation_metrics_by_task():
    problems = [Problem(i, task, "", "", "") for i, task in enumerate(["a", "b", "a"])]
    correct, texts = np.array([[1.0, 0], [0, 0], [1, 1]]), ["Answer: 1", "Answer: 2"]
    rest = np.array([4, 6]), np.array([True, False]), [], [None] * 2  # lengths, finished, failures, turns
    answered = [Answered(problem, texts, row, *rest) for problem, row in zip(problems, correct, strict=True)]
    found = metrics(answered, lambda problem, text: voted_answer(text))
    assert found["a/mean@2"] == 0.75 and found["b/mean@2"] == 0 and found["all/mean@2"] == 0.5
    assert found["a/pass@2"] == 1 and found["all/pass@2"] == pytest.approx(2 / 3)
    assert found["a/maj@2"] == 0.75 and found["b/response_length"] == 5 and found["all/finished"] == 0.5
    assert found["all/mean@2_low"] <= 0.5 <= found["all/mean@2_high"]


def test_votes_of_ones_own_function_are_whole_texts_and_partial_credit_is_no_pass(tmp_path):
    (tmp_path / "mine.py").write_text("def score(prompt, response, answer, task): return 0.0")
    problem = Problem(0, "a", "", "", "")
    texts, scores = ["It is  5", "It is 5\n", "It is 6", " "], np.array([0.5, 0.5, 0.25, 0.0])
    with Scorer(f"{tmp_path}/mine.py:score", workers=1) as scorer:
        assert [scorer.vote(problem, text) for text in texts] == ["It is 5", "It is 5", "It is 6", None]
        answered = [Answered(problem, texts, scores, np.ones(4), np.ones(4), [], [None] * 4)]
        found = metrics(answered, scorer.vote)
        (example,) = examples(answered, scorer.vote)
    assert found["a/mean@4"] == 0.3125 and found["a/maj@4"] == 0.5 and found["a/pass@4"] == 0
    assert example["response"] == "It is  5" and example["vote"] == "It is 5" and example["correct"] == 0.5
    many = [dataclasses.replace(answered[0], problem=Problem(n, "ab"[n > 2], "", "", "")) for n in range(6)]
    assert [row["problem"] for row in examples(many, lambda *_: None)] == [0, 3, 1, 4], "of each task in turn"


def state_of(step, refreshed_at, kl):
    state = types.SimpleNamespace(step=step, kl_average=kl)
    return types.SimpleNamespace(state=state, reference=types.SimpleNamespace(version=refreshed_at))


def test_reference_schedules():
    every = ReferenceSchedule("every", every=10)
    assert [every.is_due(state_of(s, 10, 9.0)) for s in (10, 19, 20, 25)] == [False, False, True, True]
    assert [every.is_due(state_of(s, 12, 9.0)) for s in (16, 20, 24)] == [False, True, True]  # as for 10: no drift
    target = ReferenceSchedule("kl_target", kl_target=0.1)
    assert [target.is_due(state_of(100, 0, kl)) for kl in (0.0, 0.1, 0.11)] == [False, False, True]
    assert all(target.is_due(state_of(100, 0, kl)) for kl in (np.inf, np.nan)), "one infinite KL asks for a renewal"
    for mode in ("iterative", "fixed"):
        assert not ReferenceSchedule(mode).is_due(state_of(1000, 0, 9.0))
    average = ReferenceSchedule("ema", decay=0.99)
    assert not average.is_due(state_of(1000, 0, 9.0)) and average.age(state_of(1000, 0, 9.0)) == pytest.approx(100)
    assert every.age(state_of(25, 20, 9.0)) == 5
    for wrong in (dict(mode="every"), dict(mode="fixed", every=3), dict(mode="no"), dict(mode="ema", every=3)):
        with pytest.raises(ValueError, match="reference"):
            ReferenceSchedule(**wrong)
