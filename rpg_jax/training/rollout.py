"""Collecting a step's groups: prompts, responses, rewards, and dynamic sampling until the batch is full."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from rpg_jax import InputError, parallel
from rpg_jax.data import Problem, ProblemStream, Tokenizer, prompt_rows
from rpg_jax.models import Model, quantize_params
from rpg_jax.models.quantization import check_dtype
from rpg_jax.parallel import multihost
from rpg_jax.rewards import Scorer, overlong_penalty, signed_reward, weighted_sum
from rpg_jax.sampling import Decoding, Sampling, generate, prompts_to_answer
from rpg_jax.training.experience import merge_rows, take_rows
from rpg_jax.training.phases import Clock
from rpg_jax.types import Params, Pending, Sequences

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
    dynamic_sampling: bool  # drop groups whose rewards are all equal, before the overlong punishment
    oversample: float  # prompts generated at a time, or under way with carry_over, as a multiple of `prompts`
    max_batches: int  # generation batches a step at most
    overlong_buffer: int  # soft punishment over the last so many tokens
    overlong_factor: float
    page_size: int = Decoding.page_size  # of the KV cache
    cache_pages: int | None = None  # of the KV cache; None is what the slots can need at most
    cache_dtype: str | None = None  # of the KV cache; None is the model's
    weights_dtype: str | None = None  # of the sampler's matrices; None is the model's
    carry_over: bool = False  # unfinished responses go on in the next step
    max_age: int | None = None  # optimizer updates, of a trained token at most; None is no limit

    def __post_init__(self):
        for name in ("cache_dtype", "weights_dtype"):
            check_dtype(f"rollout.{name}", getattr(self, name))
        if self.samples < 2 and self.dynamic_sampling:
            raise InputError(
                "rollout.dynamic_sampling needs rollout.samples of at least 2: one response is always uniform"
            )
        if self.overlong_buffer >= self.max_new:
            raise InputError(
                f"rollout.overlong_buffer ({self.overlong_buffer}) must be under rollout.max_new ({self.max_new})"
            )

    @property
    def decoding(self) -> Decoding:
        """How much `generate` decodes at a time, and how it keeps keys and values."""
        return Decoding(self.slots, self.page_size, self.cache_pages, self.cache_dtype)

    @property
    def fresh_prompts(self) -> int:
        """Prompts of one generation batch."""
        return math.ceil(self.prompts * self.oversample) if self.dynamic_sampling or self.carry_over else self.prompts

    def usable(self, unpunished: np.ndarray) -> np.ndarray:
        """Which groups [P] have a signal: those whose rewards [P, G], before the overlong punishment, differ."""
        return (unpunished != unpunished[:, :1]).any(1) | (not self.dynamic_sampling)


class Graded(NamedTuple):
    """Responses to P problems, G each, that were scored; problems and texts are this process's share only."""

    rows: np.ndarray  # i64[N], which of the P are this process's
    problems: list[Problem]  # [N]
    texts: list[list[str]]  # [N][G]
    correct: np.ndarray  # f32[P, G], accuracy
    rewards: dict[str, np.ndarray]  # f32[P, G] of each named reward, before scale and weight
    unpunished: np.ndarray  # f32[P, G], their weighted sum
    reward: np.ndarray  # f32[P, G], that with the overlong punishment
    lengths: np.ndarray  # i32[P, G], in tokens
    failures: list[str]  # one line for each response that could not be scored


@dataclasses.dataclass(frozen=True)
class Collected:
    """A full batch of groups, problem-major: row p * samples + s."""

    rollout: Sequences
    reward: np.ndarray  # f32[P, G], shaped
    metrics: dict[str, float]
    examples: list[dict]  # rows of samples.jsonl
    failures: list[str]  # one line for each response that could not be scored
    seconds: dict[str, float]  # of "rollout" and "reward"
    tokens: int  # response tokens generated, those of dropped groups included
    pending: Pending | None = None  # with carry_over, what the next step goes on with


# Of parameters, problems, the RL step and the version of the parameters; with carry_over, also of what was pending.
Collect = Callable[..., Collected]
GradeGroups = Callable[[np.ndarray, list[Problem], list[list[str]], np.ndarray], Graded]


def respond(
    model: Model, params: Params, tokenizer: Tokenizer, mesh: Mesh, problems: Sequence[Problem],
    positions: Iterable[int], *, samples: int, max_prompt: int, max_new: int, run: int | None = None,
    resume: tuple[Sequences, np.ndarray] | None = None, **settings: Any,
) -> Sequences:  # fmt: skip
    """Samples responses to problems, which are those of this process's rows; rows are problem-major.

    A response's noise depends on the problem's position, in the stream or in the set that is evaluated. Only the first
    `run` problems are run (all if None): the others pad the batch, so that one compiled shape serves any remainder.
    `resume` has sequences to go on with, and for each row which of them it is, i64[rows]; -1 for a fresh one.
    `settings` are those of `generate`.
    """
    run = len(problems) if run is None else run
    prompts = prompt_rows(problems, positions, tokenizer, max_prompt, key="rollout.max_prompt")
    limits = np.where(np.arange(len(problems)) < run, max_new, 0).astype(np.int32)
    *prompts, limits = parallel.to_global(mesh, parallel.ROWS, (*prompts, limits))
    rows = prompts_to_answer(*prompts, samples=samples, max_new=max_new)
    rows = rows if resume is None else merge_rows(rows, *resume)
    return generate(model, params, rows, samples=samples, max_new=max_new, limits=limits, **settings)


def read_responses(
    tokenizer: Tokenizer, rollout: Sequences, samples: int, chosen: np.ndarray
) -> tuple[list[list[str]], np.ndarray]:
    """Texts [N][G] and lengths i32[N, G] of the chosen ones, i64[N], of this process's groups."""
    tokens, begin, end = (
        parallel.local_rows(x).reshape(-1, samples, *x.shape[1:])[chosen]
        for x in (rollout.tokens, rollout.prompt_length, rollout.length)
    )
    texts = [
        [tokenizer.decode(row[first:last].tolist()) for row, first, last in zip(*group, strict=True)]
        for group in zip(tokens, begin, end, strict=True)
    ]
    return texts, end - begin


@partial(jax.jit, static_argnames=("mesh", "dtype"))
def quantized(params: Params, mesh: Mesh, dtype: str) -> Params:
    """The sampler's parameters with their matrices in 8 bits, laid out for sampling."""
    params = quantize_params(params, dtype)
    return jax.lax.with_sharding_constraint(params, parallel.shardings(mesh, params, parallel.SAMPLING))


def grade(
    scorer: Scorer, problems: Sequence[Problem], texts: list[list[str]], lengths: np.ndarray, rewards: bool = True
) -> list[tuple[list[float], dict[str, list[float]], list[str]]]:
    """Scores this process's texts [N][G] of lengths i32[N, G] in tokens.

    For each problem its accuracies [G], its named rewards [G] (none if `rewards` is false), and lines that name what
    could not be scored. An error on one process is raised on all of them.
    """
    items = [(one, text) for one, group in zip(problems, texts, strict=True) for text in group]
    with multihost.together():
        scores = scorer.score(items, lengths.reshape(-1).tolist(), rewards)
    named = {name: values.reshape(lengths.shape) for name, values in scores.rewards.items()}
    return [
        (correct, {name: values[row].tolist() for name, values in named.items()}, [] if row else scores.failures)
        for row, correct in enumerate(scores.correct.reshape(lengths.shape).tolist())
    ]


def make_grade_groups(
    scorer: Scorer, settings: RolloutSettings, scale: Callable[[np.ndarray], np.ndarray],
    weights: Mapping[str, float] | None = None,
) -> GradeGroups:  # fmt: skip
    """Builds `grade_groups(rows, problems, texts, lengths)`, to which each process gives its share of P groups.

    `scale` turns scores in 0..1 into rewards (`rewards.shaping.SCALES`), whose sum has the `weights`, and the overlong
    punishment is added to it.
    """

    def grade_groups(rows: np.ndarray, problems: list[Problem], texts: list[list[str]], lengths: np.ndarray) -> Graded:
        graded = zip(grade(scorer, problems, texts, lengths), lengths.tolist(), strict=True)
        # From here on every process knows all verdicts, and so decides as the others do.
        scores, counts = zip(*multihost.gather_rows(rows, graded), strict=True)
        accuracies, named, lines = zip(*scores, strict=True)
        correct, tokens = np.array(accuracies, np.float32), np.array(counts, np.int32)  # [P, G]
        rewards = {name: np.array([row[name] for row in named], np.float32) for name in named[0]}
        unpunished = reward = weighted_sum(rewards or dict(one=correct), weights or {}, scale)
        if settings.overlong_buffer:
            penalty = overlong_penalty(tokens, settings.max_new, settings.overlong_buffer, settings.overlong_factor)
            reward = reward + penalty
        return Graded(rows, problems, texts, correct, rewards, unpunished, reward, tokens, sum(lines, []))

    return grade_groups


def make_draw(
    model: Model, tokenizer: Tokenizer, mesh: Mesh, settings: RolloutSettings, key: jax.Array,
    should_stop: Callable[[], bool],
) -> Callable[..., Sequences]:  # fmt: skip
    """Builds `draw(params, problems, positions, step, **arguments)`: `respond` by the settings; raises Preempted."""
    sampling = Sampling.make(temperature=settings.temperature, stop_ids=tokenizer.stop_ids)

    def draw(
        params: Params, problems: Sequence[Problem], positions: Iterable[int], step: int | np.ndarray, **arguments: Any
    ) -> Sequences:
        if settings.weights_dtype:
            params = quantized(params, mesh, settings.weights_dtype)
        rollout = respond(
            model, params, tokenizer, mesh, problems, positions, samples=settings.samples,
            max_prompt=settings.max_prompt, max_new=settings.max_new, key=key, step=step, sampling=sampling,
            should_stop=should_stop, decoding=settings.decoding, **arguments,
        )  # fmt: skip
        if should_stop():
            raise Preempted
        return rollout

    return draw


def make_collect(
    model: Model, tokenizer: Tokenizer, scorer: Scorer, mesh: Mesh, settings: RolloutSettings, key: jax.Array,
    should_stop: Callable[[], bool], scale: Callable[[np.ndarray], np.ndarray] = signed_reward,
    weights: Mapping[str, float] | None = None,
) -> Collect:  # fmt: skip
    """Builds `collect(params, stream, step, version)`, which advances the stream by whole generation batches.

    `key` is the run's threefry key of rollouts; `scale` and `weights` are those of `make_grade_groups`.

    Raises ValueError when `max_batches` generation batches do not fill a step, Preempted when asked to stop.
    """
    groups, samples, fresh = settings.prompts, settings.samples, settings.fresh_prompts
    draw = make_draw(model, tokenizer, mesh, settings, key, should_stop)
    grade_groups = make_grade_groups(scorer, settings, scale, weights)

    def collect(params: Params, stream: ProblemStream, step: int, version: jax.Array) -> Collected:
        clock, filled = Clock(rollout=0.0, reward=0.0), 0
        seen: list[Graded] = []
        kept: Any = None  # the Sequences of the groups kept so far
        kept_reward = np.zeros((groups, samples), np.float32)
        while filled < groups:
            check_batches(settings, step, filled, seen)
            rows = multihost.row_indices(mesh, fresh)
            positions = stream.get_state() + rows
            problems = stream.next(fresh, rows)
            rollout = draw(params, problems, positions, step, version=version)
            responses = read_responses(tokenizer, rollout, samples, np.arange(len(rows)))
            clock.lap("rollout")
            batch = grade_groups(rows, problems, *responses)
            clock.lap("reward")
            seen.append(batch)
            chosen = np.flatnonzero(settings.usable(batch.unpunished))[: groups - filled]
            source = np.full((groups, samples), -1)
            source[filled : filled + len(chosen)] = chosen[:, None] * samples + np.arange(samples)
            kept_reward[filled : filled + len(chosen)] = batch.reward[chosen]
            kept = take_rows(rollout, np.arange(groups * samples)) if kept is None else kept
            kept = merge_rows(kept, rollout, source.reshape(-1))
            filled += len(chosen)
        tokens = sum(int(batch.lengths.sum()) for batch in seen)
        return Collected(kept, kept_reward, *logged(settings, seen), clock.seconds, tokens)

    return collect


def check_batches(settings: RolloutSettings, step: int, filled: int, seen: list[Graded]) -> None:
    """Raises ValueError if the generation batches of a step are used up and it has `filled` groups only."""
    if len(seen) < settings.max_batches:
        return
    correct, unpunished = (np.concatenate([getattr(b, name) for b in seen]) for name in ("correct", "unpunished"))
    raise InputError(
        f"step {step}: dynamic sampling kept {filled} of the {settings.prompts} groups that a step needs after "
        f"{len(seen)} generation batches ({settings.usable(unpunished).sum()} of {len(correct)} groups were not "
        f"uniform; mean accuracy {correct.mean():.3f}); raise rollout.max_batches or rollout.oversample, or change the "
        f"tasks' difficulty"
    )


def logged(settings: RolloutSettings, seen: list[Graded]) -> tuple[dict[str, float], list[dict], list[str]]:
    """The metrics, examples and failures of a step in which these groups were graded."""
    correct, unpunished, reward = (
        np.concatenate([getattr(batch, name) for batch in seen]) for name in ("correct", "unpunished", "reward")
    )
    rewards = {name: [batch.rewards[name] for batch in seen] for name in seen[0].rewards}
    failures = [line for batch in seen for line in batch.failures]
    metrics = {
        "accuracy": float(correct.mean()),
        "reward": float(reward.mean()),
        **{f"reward/{name}": float(np.concatenate(values).mean()) for name, values in rewards.items()},
        "kept_fraction": float(settings.usable(unpunished).mean()),
        "generation_batches": len(seen),
        "reward_failures": len(failures),
    }
    return metrics, examples(seen[0]), failures


def examples(batch: Graded) -> list[dict]:
    """The first response to each of this process's first few problems, for the log."""
    rows = zip(batch.rows.tolist(), batch.problems[:EXAMPLES], batch.texts, strict=False)
    return [
        dict(problem=p.id, task=p.task, prompt=p.prompt, response=text[0], answer=p.answer)
        | dict(correct=float(batch.correct[row, 0]), reward=float(batch.reward[row, 0]))
        | {f"reward/{name}": float(values[row, 0]) for name, values in batch.rewards.items()}
        for row, p, text in rows
    ]
