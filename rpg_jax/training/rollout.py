"""Collecting a step's groups: prompts, responses, rewards, and dynamic sampling until the batch is full."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from rpg_jax import parallel
from rpg_jax.data import Problem, ProblemStream, Tokenizer, prompt_rows
from rpg_jax.models import Model, quantize_params
from rpg_jax.models.quantization import check_dtype
from rpg_jax.parallel import multihost
from rpg_jax.rewards import Scorer, overlong_penalty, signed_reward
from rpg_jax.sampling import PAGE_SIZE, Sampling, generate
from rpg_jax.training.experience import merge_rows, take_rows
from rpg_jax.types import Params, Prompts, Rollout

EXAMPLES = 3  # responses of a step that are logged


class Preempted(Exception):
    """Raised between decode segments when the job was asked to stop."""


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """How responses are made; lengths in tokens."""

    prompts: int  # groups a step
    samples: int  # responses a group
    max_prompt: int
    max_new: int
    slots: int
    temperature: float
    dynamic_sampling: bool  # drop groups whose accuracies are all equal
    oversample: float  # prompts generated at a time, as a multiple of `prompts`
    max_batches: int  # generation batches a step at most
    overlong_buffer: int  # soft punishment over the last so many tokens
    overlong_factor: float
    page_size: int = PAGE_SIZE  # of the KV cache
    cache_pages: int | None = None  # of the KV cache; None is what the slots can need at most
    cache_dtype: str | None = None  # of the KV cache; None is the model's
    weights_dtype: str | None = None  # of the sampler's matrices; None is the model's

    def __post_init__(self):
        for name in ("prompts", "samples", "max_prompt", "max_new", "slots", "max_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("cache_dtype", "weights_dtype"):
            check_dtype(f"rollout.{name}", getattr(self, name))
        if self.samples < 2 and self.dynamic_sampling:
            raise ValueError(
                "rollout.dynamic_sampling needs rollout.samples of at least 2: one response is always uniform"
            )
        if self.oversample < 1:
            raise ValueError(f"rollout.oversample is {self.oversample}; it must be at least 1")
        if self.temperature <= 0:
            raise ValueError(
                f"rollout.temperature is {self.temperature}; training samples from the policy, so it must be above 0"
            )
        if not 0 <= self.overlong_buffer < self.max_new:
            raise ValueError(
                f"rollout.overlong_buffer ({self.overlong_buffer}) must be under rollout.max_new ({self.max_new})"
            )

    @property
    def decoding(self) -> dict[str, Any]:
        """The arguments of `generate` that say how much is decoded at a time; responses do not depend on them."""
        return dict(slots=self.slots, page_size=self.page_size, cache_pages=self.cache_pages)

    @property
    def fresh_prompts(self) -> int:
        """Prompts of one generation batch."""
        return math.ceil(self.prompts * self.oversample) if self.dynamic_sampling else self.prompts


class Generated(NamedTuple):
    """One generation batch, P problems by G responses; problems and texts are this process's share only."""

    rows: np.ndarray  # i64[N], which of the P are this process's
    problems: list[Problem]  # [N]
    rollout: Rollout
    texts: list[list[str]]  # [N][G]
    correct: np.ndarray  # f32[P, G], unshaped
    reward: np.ndarray  # f32[P, G], shaped
    lengths: np.ndarray  # i32[P, G], in tokens
    failures: list[str]  # one line for each response that could not be scored


@dataclasses.dataclass(frozen=True)
class Collected:
    """A full batch of groups, problem-major: row p * samples + s."""

    rollout: Rollout
    reward: np.ndarray  # f32[P, G], shaped
    metrics: dict[str, float]
    examples: list[dict]  # rows of samples.jsonl
    failures: list[str]  # one line for each response that could not be scored
    seconds: dict[str, float]  # of "rollout" and "reward"
    tokens: int  # response tokens generated, those of dropped groups included


Collect = Callable[[Params, ProblemStream, int], Collected]  # the int is the RL step


def respond(
    model: Model, params: Params, tokenizer: Tokenizer, mesh: Mesh, problems: Sequence[Problem], *,
    samples: int, max_prompt: int, max_new: int, run: int | None = None, **settings: Any,
) -> tuple[Rollout, list[list[str]]]:  # fmt: skip
    """Samples responses to problems; returns the Rollout (rows problem-major) and the response texts [P][G].

    Problems and texts are those of this process's rows. Only the first `run` problems are run (all if None): the others
    pad the batch, so that one compiled shape serves any remainder. `settings` are those of `generate`.
    """
    run = len(problems) if run is None else run
    prompts = Prompts(*prompt_rows(problems, tokenizer, max_prompt, key="rollout.max_prompt"))
    limits = np.where(np.arange(len(problems)) < run, max_new, 0).astype(np.int32)
    prompts, limits = parallel.to_global(mesh, parallel.ROWS, (prompts, limits))
    rollout = generate(model, params, prompts, samples=samples, max_new=max_new, limits=limits, **settings)
    tokens, mask = map(parallel.local_rows, (rollout.tokens, rollout.response_mask))
    texts = [tokenizer.decode(row[keep].tolist()) for row, keep in zip(tokens, mask, strict=True)]
    return rollout, [texts[p * samples : (p + 1) * samples] for p in range(run)]


@partial(jax.jit, static_argnames=("mesh", "dtype"))
def quantized(params: Params, mesh: Mesh, dtype: str) -> Params:
    """The sampler's parameters with their matrices in 8 bits, laid out for sampling."""
    params = quantize_params(params, dtype)
    return jax.lax.with_sharding_constraint(params, parallel.shardings(mesh, params, parallel.SAMPLING))


def grade(
    scorer: Scorer, problems: Sequence[Problem], texts: list[list[str]]
) -> tuple[list[list[float]], list[list[str]]]:
    """Scores this process's texts [N][G]: (accuracies [N][G], lines [N][...] that name what could not be scored).

    An error on one process is raised on all of them.
    """
    with multihost.together():
        scores = scorer.score([(one, text) for one, group in zip(problems, texts, strict=True) for text in group])
    verdicts = iter(scores.correct.tolist())
    lines = [scores.failures if row == 0 else [] for row in range(len(problems))]
    return [[next(verdicts) for _ in group] for group in texts], lines


def make_collect(
    model: Model, tokenizer: Tokenizer, scorer: Scorer, mesh: Mesh, settings: RolloutSettings, key: jax.Array,
    should_stop: Callable[[], bool], scale: Callable[[np.ndarray], np.ndarray] = signed_reward,
) -> Collect:  # fmt: skip
    """Builds `collect(params, stream, step)`, which advances the stream by whole generation batches.

    `key` is the run's threefry key of rollouts. `scale` turns verdicts into rewards (`rewards.shaping.SCALES`), and the
    overlong punishment is added to them.

    Raises RuntimeError when `max_batches` generation batches do not fill a step, Preempted when asked to stop.
    """
    groups, samples, fresh = settings.prompts, settings.samples, settings.fresh_prompts
    sampling = Sampling.make(temperature=settings.temperature, stop_ids=tokenizer.stop_ids)

    def generated(params: Params, stream: ProblemStream, step: int, seconds: dict[str, float]) -> Generated:
        begin = time.perf_counter()
        rows = multihost.row_indices(mesh, fresh)
        problems = stream.next(fresh, rows)
        rollout, texts = respond(
            model, params, tokenizer, mesh, problems, samples=samples, max_prompt=settings.max_prompt,
            max_new=settings.max_new, key=key, step=step, sampling=sampling, should_stop=should_stop,
            cache_dtype=settings.cache_dtype, **settings.decoding,
        )  # fmt: skip
        if should_stop():
            raise Preempted
        counts = parallel.local_rows(rollout.response_mask).sum(-1).reshape(-1, samples)
        scored = time.perf_counter()
        # From here on every process knows all verdicts, and so decides as the others do.
        graded = zip(*grade(scorer, problems, texts), counts.tolist(), strict=True)
        verdicts, lines, tokens = zip(*multihost.gather_rows(rows, graded), strict=True)
        correct, lengths = np.array(verdicts, np.float32), np.array(tokens, np.int32)  # [P, G]
        reward = scale(correct)
        if settings.overlong_buffer:
            penalty = overlong_penalty(lengths, settings.max_new, settings.overlong_buffer, settings.overlong_factor)
            reward = reward + penalty
        seconds["rollout"] += scored - begin
        seconds["reward"] += time.perf_counter() - scored
        return Generated(rows, problems, rollout, texts, correct, reward, lengths, sum(lines, []))

    def collect(params: Params, stream: ProblemStream, step: int) -> Collected:
        if settings.weights_dtype:
            params = quantized(params, mesh, settings.weights_dtype)
        seconds, filled = {"rollout": 0.0, "reward": 0.0}, 0
        seen: list[Generated] = []
        kept: Any = None  # a Rollout of the groups kept so far
        kept_reward = np.zeros((groups, samples), np.float32)
        while filled < groups:
            if len(seen) == settings.max_batches:
                raise RuntimeError(starved(step, filled, seen))
            batch = generated(params, stream, step, seconds)
            seen.append(batch)
            chosen = np.flatnonzero(usable(batch.correct))[: groups - filled]
            source = np.full((groups, samples), -1)
            source[filled : filled + len(chosen)] = chosen[:, None] * samples + np.arange(samples)
            kept_reward[filled : filled + len(chosen)] = batch.reward[chosen]
            kept = take_rows(batch.rollout, np.arange(groups * samples)) if kept is None else kept
            kept = merge_rows(kept, batch.rollout, source.reshape(-1))
            filled += len(chosen)
        correct = np.concatenate([batch.correct for batch in seen])
        failures = [line for batch in seen for line in batch.failures]
        metrics = {
            "accuracy": float(correct.mean()),
            "reward": float(np.concatenate([batch.reward for batch in seen]).mean()),
            "kept_fraction": float(usable(correct).mean()),
            "generation_batches": len(seen),
            "reward_failures": len(failures),
        }
        tokens = sum(int(batch.lengths.sum()) for batch in seen)
        return Collected(kept, kept_reward, metrics, examples(seen[0]), failures, seconds, tokens)

    def usable(correct):
        """Which groups [P] have a signal: those whose accuracies, before shaping, differ."""
        return (correct != correct[:, :1]).any(1) | (not settings.dynamic_sampling)

    def starved(step, filled, seen):
        accuracy = np.concatenate([batch.correct for batch in seen])
        return (
            f"step {step}: dynamic sampling kept {filled} of the {groups} groups that a step needs after {len(seen)} "
            f"generation batches ({usable(accuracy).sum()} of {len(accuracy)} groups were not uniform; mean accuracy "
            f"{accuracy.mean():.3f}); raise rollout.max_batches or rollout.oversample, or change the tasks' difficulty"
        )

    return collect


def examples(batch: Generated) -> list[dict]:
    """The first response to each of this process's first few problems, for the log."""
    scores = batch.correct[batch.rows], batch.reward[batch.rows]
    rows = zip(batch.problems[:EXAMPLES], batch.texts, *scores, strict=False)
    return [
        dict(problem=p.id, task=p.task, prompt=p.prompt, response=text[0], answer=p.answer)
        | dict(correct=float(correct[0]), reward=float(reward[0]))
        for p, text, correct, reward in rows
    ]
