"""The RL loop: rollouts, rewards, log-probs of the fixed policies, epochs of minibatches, reference, evaluation."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import InputError
from rpg_jax.data import Problem, ProblemStream
from rpg_jax.objectives import metrics as metric
from rpg_jax.training import evaluation, packing
from rpg_jax.training.evaluation import Answered
from rpg_jax.training.experience import Experience, Score, take_rows
from rpg_jax.training.packing import Plan
from rpg_jax.training.phases import Clock, CompilationCounter, phase, say
from rpg_jax.training.policies import BEHAVIOR, Policies, held
from rpg_jax.training.reference import ReferenceSchedule
from rpg_jax.training.rollout import Collect, Collected, Preempted
from rpg_jax.training.skipped import split_finiteness
from rpg_jax.training.update import Update, check_finite
from rpg_jax.types import Checkpoint, Params, Policy

WARNINGS = 3  # failed rewards of a step, or of an evaluation, that are printed
SHOWN = ("accuracy", "reward", "entropy")  # metrics beside the progress of a run
COLLAPSED = 1e-6  # nats a token: with less entropy, all responses to a prompt are the same
WARMUP_STEPS = 2  # RL steps of a process in which programs may compile


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """How a step learns from its groups, and when to evaluate and save. Counts are RL steps unless named otherwise."""

    steps: int
    seed: int
    prompts: int  # groups a step
    samples: int  # responses a group
    minibatch_prompts: int
    microbatch_rows: int  # of a forward and backward pass
    scoring_rows: int  # of a forward pass for log-probs alone
    epochs: int
    packed_columns: int | None  # of a row of several sequences, in updates and log-prob passes; None: one a row
    evaluate_every: int
    save_every: int
    most_skipped: int  # non-finite updates in a row that end the run
    delay: int = 0  # optimizer updates, how old the policy is that responses are drawn from

    def __post_init__(self):
        rows = self.minibatch_prompts * self.samples
        if self.prompts % self.minibatch_prompts:
            raise InputError(
                f"learner.minibatch_prompts ({self.minibatch_prompts}) does not divide rollout.prompts ({self.prompts})"
            )
        if rows % self.microbatch_rows:
            raise InputError(
                f"learner.microbatch_rows ({self.microbatch_rows}) does not divide the {rows} rows of a minibatch "
                f"(learner.minibatch_prompts {self.minibatch_prompts} x rollout.samples {self.samples})"
            )
        if self.prompts * self.samples % self.scoring_rows:
            raise InputError(
                f"learner.scoring_rows ({self.scoring_rows}) does not divide the {self.prompts * self.samples} rows of "
                f"a rollout (rollout.prompts {self.prompts} x rollout.samples {self.samples})"
            )

    @property
    def updates(self) -> int:
        """Optimizer updates of an RL step."""
        return self.epochs * (self.prompts // self.minibatch_prompts)

    @property
    def policies_kept(self) -> int:
        """Policies of earlier updates that are kept for coming rollouts (`training.policies`)."""
        return self.delay // self.updates + 1 if self.delay else 0

    def is_kept(self, update: int) -> bool:
        """Whether the policy after this update of an RL step (1 is the first) is one that a coming rollout needs."""
        return self.delay > 0 and (update + self.delay) % self.updates == 0

    def minibatches(self, step: int) -> Iterator[np.ndarray]:
        """Row indices of each minibatch of each epoch; whole groups, shuffled anew every epoch."""
        for epoch in range(self.epochs):
            groups = np.random.default_rng([self.seed, step, epoch]).permutation(self.prompts)
            for chosen in groups.reshape(-1, self.minibatch_prompts):
                yield (chosen[:, None] * self.samples + np.arange(self.samples)).reshape(-1)

    def plan(self, lengths: np.ndarray) -> Plan:
        """`packing.plan` of rows with these lengths, in the microbatches of an update."""
        return packing.plan(lengths, self.microbatch_rows, self.packed_columns)

    def score_plan(self, lengths: np.ndarray) -> Plan:
        """`packing.plan` of rows with these lengths, in the microbatches of a log-prob pass."""
        return packing.plan(lengths, self.scoring_rows, self.packed_columns)


class EvaluateHeldOut(Protocol):
    """`evaluation.Evaluate` on the held-out problems."""

    def __call__(
        self, params: Params, *, should_stop: Callable[[], bool], progress: Callable[[int], None]
    ) -> Iterator[Answered]: ...


class Checkpoints(Protocol):
    """What the loop needs of `storage.checkpoints.Checkpoints`."""

    def save(self, step: int, state: Checkpoint, extra: dict, metric: float | None, wait: bool) -> None: ...

    def latest_step(self) -> int | None: ...


class Log(Protocol):
    """What the loop needs of `storage.logs.RunLog`."""

    def write(self, row: dict, samples: Sequence[dict] = (), heldout: Sequence[dict] = ()) -> None: ...

    def rows(self) -> dict[str, int]: ...

    def progress(
        self, label: str, start: int, total: int
    ) -> contextlib.AbstractContextManager[Callable[..., None]]: ...


@dataclasses.dataclass(frozen=True)
class Parts:
    """The jitted and host functions of a step, built by `run.build.build_parts`."""

    policies: Policies
    collect: Collect
    score: Score
    source: str  # of the behavior policy's log-probs, of `experience.SOURCES`
    experience: Experience
    update: Update
    evaluate: EvaluateHeldOut
    heldout: int  # responses of an evaluation
    vote: Callable[[Problem, str], str | None]  # the answer of a response to a problem, which is counted in maj@k
    reference: ReferenceSchedule
    stream: ProblemStream
    checkpoints: Checkpoints
    log: Log
    should_stop: Callable[[], bool]
    traced: Callable[[range], Any]  # a generator of the steps, which writes a trace of those that are to be profiled


def host(metrics: metric.Metrics) -> dict[str, float]:
    """Metrics as floats, for the log."""
    return {f"train/{name}": float(value) for name, value in metric.values(jax.device_get(metrics)).items()}


def renewed(parts: Parts, checkpoint: Checkpoint) -> Checkpoint:
    """With a new reference, a copy of the current policy, if the schedule says so."""
    if not parts.reference.is_due(checkpoint):
        return checkpoint
    with phase("reference"):
        reference = jax.block_until_ready(parts.policies.reference(parts.policies.current(checkpoint.state)))
    state = dataclasses.replace(checkpoint.state, kl_average=jnp.zeros_like(checkpoint.state.kl_average))
    return dataclasses.replace(checkpoint, state=state, reference=reference)


def followed(parts: Parts, settings: LoopSettings, checkpoint: Checkpoint, number: int) -> Checkpoint:
    """With the policies that an RL step's update of this number (1 is the first) renews: see `LoopSettings.is_kept`."""
    reference, past = checkpoint.reference, checkpoint.past
    if parts.reference.decay is not None:
        reference = parts.policies.moved(reference, checkpoint.state)
    if settings.is_kept(number):
        past = *past[1:], parts.policies.past(parts.policies.current(checkpoint.state))
    return dataclasses.replace(checkpoint, reference=reference, past=jax.block_until_ready(past))


def drawing(parts: Parts, checkpoint: Checkpoint) -> Policy:
    """The policy that draws the coming responses: with `rollout.delay` an earlier one."""
    return checkpoint.past[0] if checkpoint.past else parts.policies.current(checkpoint.state)


def scored(parts: Parts, checkpoint: Checkpoint) -> dict[str, Policy]:
    """The policies whose log-probs an update needs, and their base."""
    behavior = {BEHAVIOR: drawing(parts, checkpoint)} if parts.source == "trainer" else {}
    return held(checkpoint) | behavior


def rl_step(
    parts: Parts, settings: LoopSettings, checkpoint: Checkpoint, step: int
) -> tuple[Checkpoint, Collected, dict[str, float], list[str]]:
    """One RL step; returns what the next one goes on from, what was collected, the step's log row, and a line for each
    skipped update.

    With `rollout.carry_over`, the pending responses go on in it.
    """
    checkpoint = renewed(parts, checkpoint)
    with phase("rollout"):
        behavior = drawing(parts, checkpoint)
        version = jnp.copy(behavior.version)
        params = parts.policies.sampling_params(behavior, checkpoint.frozen)
        del behavior  # under schedule-free a tree of its own
        carried = () if checkpoint.pending is None else (checkpoint.pending,)
        collected = parts.collect(params, parts.stream, step, version, *carried)
        del params
    clock = Clock(**collected.seconds)
    with phase("experience"):
        lengths = packing.on_host(collected.rollout.length)
        scores = parts.score(scored(parts, checkpoint), collected.rollout, settings.score_plan(lengths))
        reward = jnp.asarray(collected.reward)
        batch, before = parts.experience(collected.rollout, reward, scores, checkpoint.state.step)
        jax.block_until_ready(batch)
    clock.lap("experience")
    during: metric.Metrics = {}
    microbatches, skipped = 0, []
    with phase("update"):
        for number, rows in enumerate(settings.minibatches(step), 1):
            plan = settings.plan(lengths[rows])
            state, metrics = parts.update(checkpoint.state, take_rows(batch, rows), plan, held(checkpoint))
            microbatches += int(plan.count)
            metrics = jax.device_get(metrics)  # waits: XLA's CPU client hangs when many programs are under way
            metrics, reason = split_finiteness(metrics)
            skipped += [f"update {number} of {settings.updates} was skipped: {reason}"] * bool(reason)
            during = metric.merge(during, metrics) if during else metrics
            checkpoint = followed(parts, settings, dataclasses.replace(checkpoint, state=state), number)
        row = {f"train/{name}": value for name, value in collected.metrics.items()} | host(before | during)
    clock.lap("update")
    trained = float(batch.loss_mask.sum()) * settings.epochs
    row |= {f"time/{name}": seconds for name, seconds in clock.seconds.items()}
    row["throughput/rollout_tokens_per_second"] = collected.tokens / clock.seconds["rollout"]
    row["throughput/update_tokens_per_second"] = trained / clock.seconds["update"]
    tokens = microbatches * settings.microbatch_rows * (settings.packed_columns or batch.tokens.shape[1])
    row["train/padding_waste"] = 1.0 - settings.epochs * int(lengths.sum()) / tokens
    row["train/updates"], row["train/skipped_updates"] = int(state.step), int(state.skipped[0])
    if checkpoint.reference is not None:
        row["train/reference_age"] = parts.reference.age(checkpoint)
    return dataclasses.replace(checkpoint, pending=collected.pending), collected, row, skipped


def evaluated(parts: Parts, checkpoint: Checkpoint) -> tuple[dict[str, float], list[dict]] | None:
    """An evaluation's log row and example responses; None if it was told to stop, and part of the problems is left."""
    clock = Clock()
    with phase("evaluation"), parts.log.progress("responses of the evaluation", 0, parts.heldout) as progress:
        params = parts.policies.sampling_params(parts.policies.current(checkpoint.state), checkpoint.frozen)
        answered = list(parts.evaluate(params, should_stop=parts.should_stop, progress=progress))
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

    Returns:
      (what it ended with, steps done, whether it came to its end). Raises ValueError after too many non-finite updates
      in a row.
    """
    begin, seconds_before, compilations = time.perf_counter(), totals["seconds"], CompilationCounter()
    for params in (checkpoint.state.params, *(policy.params for policy in checkpoint.frozen.values())):
        check_finite(params, f"step {start}", "training cannot begin with them; start from other weights")
    collapsed, has_skipped = False, False

    def save(step: int, checkpoint: Checkpoint, score: float | None = None, wait: bool = False) -> None:
        mend = "it is not saved, and earlier checkpoints stay as they are"
        check_finite(checkpoint.state.params, f"step {step}", mend)
        totals["seconds"] = seconds_before + time.perf_counter() - begin
        extra = {"cursor": parts.stream.get_state(), "totals": totals, "rows": parts.log.rows()}
        saved = dataclasses.replace(checkpoint, frozen={})
        parts.checkpoints.save(step, saved, extra, metric=score, wait=wait)

    def evaluate_if_due(step: int, checkpoint: Checkpoint) -> tuple[dict[str, float], list[dict]] | None:
        """The evaluation's log row and examples: both empty when none is due; None when it was told to stop."""
        due = step % settings.evaluate_every == 0 or step == settings.steps
        if not due or totals["evaluated"] == step:
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
    traced = contextlib.closing(parts.traced(range(start, settings.steps)))
    with parts.log.progress("RL", start, settings.steps) as progress, traced as steps:
        for step in steps:
            cursor = parts.stream.get_state()
            try:
                if parts.should_stop():
                    raise Preempted
                checkpoint, collected, row, skipped = rl_step(parts, settings, checkpoint, step)
            except Preempted:
                if parts.checkpoints.latest_step() != step:
                    parts.stream.set_state(cursor)
                    save(step, checkpoint, wait=True)
                say(f"saved step {step}; the same command goes on")
                return checkpoint, step, False
            warn_of(collected.failures)
            if skipped and not has_skipped:
                has_skipped = True
                warn(f"step {step + 1}: {skipped[0]}; train/skipped_updates counts them")
            if not collapsed and row.get("train/entropy", 1.0) < COLLAPSED:
                collapsed = True
                warn(
                    f"step {step + 1}: the policy has collapsed, its entropy is {row['train/entropy']:.1e} nats a token"
                )
            totals["tokens"] += collected.tokens
            row["compilations"], compilations.count = compilations.count, 0
            if step >= start + WARMUP_STEPS:
                totals["compilations_after_warmup"] += row["compilations"]
            done, last = step + 1, step + 1 == settings.steps
            outcome = evaluate_if_due(done, checkpoint)
            heldout_row, heldout = outcome or ({}, [])
            row |= heldout_row
            parts.log.write({"step": done, **row}, samples=collected.examples, heldout=heldout)
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
        warn(f"{line}; counted as wrong")


def warn(text: str) -> None:
    """Says it as a warning."""
    say(f"warning: {text}")
