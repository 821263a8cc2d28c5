"""The RL loop: rollouts, rewards, log-probs of the fixed policies, epochs of minibatches, reference, evaluation."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rpg_jax import InputError
from rpg_jax.data import Problem, ProblemStream
from rpg_jax.training import evaluation
from rpg_jax.training.collect import Preempted
from rpg_jax.training.evaluation import Answered
from rpg_jax.training.experience import Experience, Score, take_rows
from rpg_jax.training.phases import Clock, CompilationCounter, phase, say
from rpg_jax.training.policies import REFERENCE, Policies, followed, held, renewed, scored
from rpg_jax.training.record import Record
from rpg_jax.training.reference import ReferenceSchedule
from rpg_jax.training.rollouts import Rollouts
from rpg_jax.training.settings import LoopSettings
from rpg_jax.training.update import Update, check_finite
from rpg_jax.types import Checkpoint

WARNINGS = 3  # failed rewards of a step, or of an evaluation, that are printed
SHOWN = ("accuracy", "reward", "entropy")  # metrics beside the progress of a run
COLLAPSED = 1e-6  # nats a token: with less entropy, all responses to a prompt are the same
WARMUP_STEPS = 2  # RL steps of a process in which programs may compile


class Look(NamedTuple):
    """What a run keeps for `rpg_jax.look`, of a step's last minibatch."""

    program: Callable[..., tuple[Any, tuple]]  # its jitted function, and the arguments of a checkpoint, batch and plan
    rows: Callable[..., list[dict]]  # of look.parquet


@dataclasses.dataclass(frozen=True)
class Parts:
    """The jitted and host functions of a step, built by `run.build.build_parts`."""

    policies: Policies
    rollouts: Rollouts
    score: Score
    source: str  # of the behavior policy's log-probs: trainer, sampler or proximal
    experience: Experience
    update: Update
    evaluate: Callable[..., Iterator[Answered]]  # that of `make_evaluate` on the held-out problems
    heldout: int  # responses of an evaluation
    vote: Callable[[Problem, str], str | None]  # the answer of a response to a problem, which is counted in maj@k
    reference: ReferenceSchedule
    stream: ProblemStream
    checkpoints: Any  # `storage.checkpoints.Checkpoints`: save, latest_step
    log: Any  # `storage.logs.RunLog`: write, rows, progress
    should_stop: Callable[[], bool]
    traced: Callable[[range], Any]  # a generator of the steps, which writes a trace of those that are to be profiled
    look: Look | None = None  # None: the run keeps none


def rl_step(parts: Parts, settings: LoopSettings, checkpoint: Checkpoint, step: int) -> tuple[Checkpoint, Record]:
    """One RL step: what the next one goes on from, and what is logged of it."""
    checkpoint = renewed(parts.policies, parts.reference, checkpoint)
    groups = parts.rollouts.of_step(checkpoint, step)
    record = Record(settings, groups)
    with record.phase("experience"):
        policies = scored(parts.policies, checkpoint, parts.source)
        scores = parts.score(policies, groups.sequences, settings.plan(groups.lengths, settings.scoring_rows))
        batch, before = parts.experience(groups.sequences, groups.rewards, scores, checkpoint.state.step)
        record.before = before
        jax.block_until_ready(batch)
    with record.phase("update"):
        for number, rows in enumerate(settings.minibatches(step), 1):
            plan = settings.plan(groups.lengths[rows], settings.microbatch_rows)
            if parts.look is not None and number == settings.updates:
                record.look = parts.look.rows(checkpoint, batch, groups, rows, step)
            state, metrics = parts.update(checkpoint.state, take_rows(batch, rows), plan, held(checkpoint))
            record.add_update(number, plan, metrics)
            checkpoint = dataclasses.replace(checkpoint, state=state)
            checkpoint = followed(parts.policies, checkpoint, settings.is_kept(number))
    return dataclasses.replace(checkpoint, pending=groups.pending), record


def evaluated(parts: Parts, checkpoint: Checkpoint) -> tuple[dict[str, float], list[dict]] | None:
    """An evaluation's log row and example responses; None if it was told to stop, and part of the problems is left."""
    parts.rollouts.settle()
    clock = Clock()
    with phase("evaluation"), parts.log.progress("responses of the evaluation", 0, parts.heldout) as progress:
        params = parts.policies.sampling_params(parts.policies.current(checkpoint.state), checkpoint.frozen)
        answers = parts.evaluate(params, should_stop=parts.should_stop, progress=progress)  # a generator
        answered = parts.rollouts.call(lambda: list(answers))
    if parts.should_stop():
        return None
    clock.lap("evaluation")
    warn_of([line for answer in answered for line in answer.failures])
    row = {f"eval/{name}": value for name, value in evaluation.metrics(answered, parts.vote).items()}
    return row | {"time/evaluation": clock.seconds["evaluation"]}, evaluation.examples(answered, parts.vote)


def new_totals(seconds: float = 0.0) -> dict[str, Any]:
    """Running sums of a run that survive a resume, and the last step that was evaluated."""
    return {"seconds": seconds, "tokens": 0, "compilations_after_warmup": 0, "evaluated": -1}


def run(
    parts: Parts, settings: LoopSettings, checkpoint: Checkpoint, start: int, totals: dict[str, Any]
) -> tuple[Checkpoint, int, bool]:
    """Trains from `start` to the last step, writing logs and checkpoints.

    Args:
      totals: those of `new_totals`, updated in place.

    Returns (what it ended with, steps done, whether it came to its end). Raises ValueError after too many non-finite
    updates in a row.
    """
    begin, seconds_before, compilations = time.perf_counter(), totals["seconds"], CompilationCounter()
    for params in (checkpoint.state.params, *(policy.params for policy in checkpoint.frozen.values())):
        check_finite(params, f"step {start}", "training cannot begin with them; start from other weights")
    collapsed, has_skipped = False, False
    cursor = parts.stream.cursor  # of the problem stream, after the groups that were trained

    def save(step: int, checkpoint: Checkpoint, score: float | None = None, wait: bool = False) -> None:
        mend = "it is not saved, and earlier checkpoints stay as they are"
        check_finite(checkpoint.state.params, f"step {step}", mend)
        parts.rollouts.settle()  # programs of both meshes follow
        totals["seconds"] = seconds_before + time.perf_counter() - begin
        extra = {"cursor": cursor, "totals": totals, "rows": parts.log.rows()}
        checksums = dict(checkpoint.checksums)
        if REFERENCE in checksums:  # apart, so that the policy can be restored without its teacher
            extra["teacher"] = np.asarray(checksums.pop(REFERENCE)).tolist()
        saved = dataclasses.replace(checkpoint, frozen={}, checksums=checksums)
        parts.checkpoints.save(step, saved, extra, metric=score, wait=wait)

    def evaluate_if_due(step: int, checkpoint: Checkpoint) -> tuple[dict[str, float], list[dict]] | None:
        """The evaluation's log row and examples: both empty when none is due; None when it was told to stop."""
        if not settings.is_evaluated(step) or totals["evaluated"] == step:
            return {}, []
        outcome = evaluated(parts, checkpoint)
        totals["evaluated"] = step if outcome else totals["evaluated"]
        return outcome

    outcome = evaluate_if_due(start, checkpoint)  # before the first step, or cut short by a SIGTERM before this resume
    if outcome is None:
        say(f"stopped in the evaluation of step {start}; the same command goes on")
        return checkpoint, start, False
    row, heldout = outcome
    if row:
        parts.log.write({"step": start, **row}, heldout=heldout)
        if start:
            save(start, checkpoint, accuracy(row), wait=True)
    traced = contextlib.closing(parts.traced(range(start, settings.steps)))
    with parts.log.progress("RL", start, settings.steps) as progress, traced as steps:
        for step in steps:
            try:
                if parts.should_stop():
                    raise Preempted
                checkpoint, record = rl_step(parts, settings, checkpoint, step)
            except Preempted:
                if parts.checkpoints.latest_step() != step:
                    save(step, checkpoint, wait=True)
                say(f"saved step {step}; the same command goes on")
                return checkpoint, step, False
            row, groups = record.row(checkpoint.state), record.groups
            cursor = groups.cursor
            if checkpoint.reference is not None:
                row["train/reference_age"] = parts.reference.age(checkpoint)
            warn_of(groups.failures)
            if record.skipped and not has_skipped:
                has_skipped = True
                warn(f"step {step + 1}: {record.skipped[0]}; train/skipped_updates counts them")
            entropy = row.get("train/entropy", row.get("train/surprisal", 1.0))
            if not collapsed and entropy < COLLAPSED:
                collapsed = True
                warn(f"step {step + 1}: the policy has collapsed, its entropy is {entropy:.1e} nats a token")
            totals["tokens"] += groups.tokens
            row["compilations"], compilations.count = compilations.count, 0
            if step >= start + WARMUP_STEPS:
                totals["compilations_after_warmup"] += row["compilations"]
            done, last = step + 1, step + 1 == settings.steps
            outcome = evaluate_if_due(done, checkpoint)
            heldout_row, heldout = outcome or ({}, [])
            row |= heldout_row
            parts.log.write({"step": done, **row}, samples=groups.examples, heldout=heldout, look=record.look)
            progress(done, **{name: row[f"train/{name}"] for name in SHOWN if f"train/{name}" in row})
            if (in_a_row := int(checkpoint.state.skipped[1])) >= settings.most_skipped:
                raise InputError(
                    f"step {done}: the last {in_a_row} updates had a non-finite loss, gradient or step "
                    f"and were skipped, so parameters are unchanged; lower optimizer.learning_rate, or look at "
                    f"train/ratio_max"
                )
            if outcome is None or heldout_row or done % settings.save_every == 0:
                save(done, checkpoint, accuracy(row), wait=last or outcome is None)
            if outcome is None:
                say(f"saved step {done}; the same command goes on")
                return checkpoint, done, False
    return checkpoint, settings.steps, True


def accuracy(row: dict[str, float]) -> float | None:
    """The mean@k over all held-out problems, which decides the best checkpoint."""
    return next((v for k, v in row.items() if k.startswith("eval/all/mean@") and k[-1].isdigit()), None)


def warn_of(failures: Sequence[str]) -> None:
    """Prints the first failed rewards of a step or an evaluation on stderr."""
    for line in failures[:WARNINGS]:
        warn(line)


def warn(text: str) -> None:
    """Says it as a warning."""
    say(f"warning: {text}")
