"""Collecting a step's groups: they are begun, advanced, graded once they are ready, and trained.

Without `rollout.carry_over` all groups under way are ready together: each generation batch runs to its end. With it,
always O = `rollout.oversample` x prompts groups are under way, those that the step keeps included, and as many are
ready as it still needs, the oldest complete ones. What has been drawn of the others stays, with the log-prob and the
policy version of each token, and goes on in the next step under the new parameters (docs/method.md 9.5).

Dynamic sampling drops ready groups whose rewards are all equal, and begins others.

`rollout.max_age` is kept by waiting for old groups. To drop them would be a bias against long responses.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from rpg_jax import InputError, parallel
from rpg_jax.data import Problem, ProblemStream, Tokenizer, prompt_rows
from rpg_jax.models import Model, quantize_params
from rpg_jax.parallel import REPLICATED, ROWS, multihost
from rpg_jax.rewards import Scorer
from rpg_jax.sampling import Sampling, generate, no_sequences, prompts_to_answer
from rpg_jax.training.episodes import Episodes
from rpg_jax.training.experience import merge_rows, take_rows
from rpg_jax.training.grading import Graded, Response, logged, make_grade, watcher
from rpg_jax.training.optimizer import Optimizer, layout
from rpg_jax.training.packing import on_host
from rpg_jax.training.phases import Clock
from rpg_jax.training.settings import RolloutSettings
from rpg_jax.types import Params, Pending, Sequences

NONE = -1  # the place of a group that has no rows yet


class Preempted(Exception):
    """Raised between decode segments when the job was asked to stop."""


class Group(NamedTuple):
    """The responses to one problem that are under way or complete."""

    position: int  # of the problem in the stream's order
    begun: int  # RL step, whose noise its responses have
    place: int  # its rows are place * samples, place * samples + 1, ...


@dataclasses.dataclass(frozen=True)
class Collected:
    """A full batch of groups, problem-major: row p * samples + s."""

    sequences: Sequences
    lengths: np.ndarray  # i32[B], of the sequences
    # f32[P, G], shaped; f32[P, G, K], what of them an episode's turns have, None without an environment
    rewards: tuple[np.ndarray, np.ndarray | None]
    graded: list[tuple[int, dict[str, np.ndarray]]]  # of each group: its problem's position, and scores f32[G] by name
    metrics: dict[str, float]
    examples: list[dict]  # rows of samples.jsonl
    failures: list[str]  # one line for each response that could not be scored
    seconds: dict[str, float]  # "rollout", of it "environment" waiting for answers, and "reward", then for verdicts
    tokens: int  # response tokens drawn, those of dropped groups included
    trained: int  # tokens of the sequences that are trained
    pending: Pending | None  # with carry_over, what the next step goes on with
    cursor: int  # of the problem stream, after them


Collect = Callable[[Params, int, Pending | None, int], Collected]


def must_finish(begun: Sequence[int], step: int, prompts: int, wait: int | None) -> int:
    """How many of the oldest groups this step has to train, so that no group is trained more than `wait` steps late.

    Of the groups that are due in `ahead` more steps, those steps take `prompts` each; this one must take the others.
    """
    if wait is None:
        return 0
    due = np.asarray(begun, int) + wait
    return max(0, *(int((due <= step + ahead).sum()) - prompts * ahead for ahead in range(wait + 1)))


def nothing_pending(settings: RolloutSettings, optimizer: Optimizer, mesh: Mesh, routes: int = 0) -> Pending:
    """What is pending before the first step: no group. It is laid out as a part of a checkpoint."""
    count = settings.fresh_prompts - settings.prompts

    def build():
        sequences = no_sequences(count * settings.samples, settings.max_prompt + settings.max_new, routes)
        return {"pending": Pending(sequences, jnp.full(count, -1, jnp.int32), jnp.zeros(count, jnp.int32))}

    return jax.jit(build, out_shardings=layout(optimizer, mesh, jax.eval_shape(build)))()["pending"]


def prompts_of(
    mesh: Mesh, tokenizer: Tokenizer, problems: Sequence[Problem], positions: Iterable[int], *,
    samples: int, max_prompt: int, max_new: int, routes: int = 0,
) -> Sequences:  # fmt: skip
    """The rows that `generate` answers, from this process's problems and their positions in the stream or the set."""
    prompts = prompt_rows(problems, positions, tokenizer, max_prompt)
    arrays = parallel.to_global(mesh, ROWS, prompts)
    return prompts_to_answer(*arrays, samples=samples, max_new=max_new, routes=routes)


def limits_of(mesh: Mesh, runs: np.ndarray, max_new: int) -> jax.Array:
    """The `limits` of `generate` where only those of this process's groups that `runs` (bool[N]) names are run."""
    return parallel.to_global(mesh, ROWS, np.where(runs, max_new, 0).astype(np.int32))


@partial(jax.jit, static_argnames=("mesh", "dtype"))
def quantized(params: Params, mesh: Mesh, dtype: str) -> Params:
    """The sampler's parameters with their matrices in 8 bits, laid out for sampling."""
    params = quantize_params(params, dtype)
    return jax.lax.with_sharding_constraint(params, parallel.shardings(mesh, params, parallel.SAMPLING))


@partial(jax.jit, static_argnames=("mesh", "samples"))
def _account(mesh, sequences, samples):
    """(Tokens drawn i32[], which groups are complete bool[O]), whole on every process."""
    shared = sequences.loss_mask.sum(), sequences.complete.reshape(-1, samples).all(1)
    return jax.lax.with_sharding_constraint(shared, NamedSharding(mesh, REPLICATED))


@partial(jax.jit, static_argnames="mesh", donate_argnames="sequences")
def without_rows(mesh: Mesh, sequences: Sequences, rows: np.ndarray) -> Sequences:
    """Sequences with no token to train in these rows, bool[B]."""
    left = dataclasses.replace(sequences, loss_mask=sequences.loss_mask & ~rows[:, None])
    return jax.lax.with_sharding_constraint(left, NamedSharding(mesh, ROWS))


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


def make_collect(
    model: Model, tokenizer: Tokenizer, scorer: Scorer, stream: ProblemStream, mesh: Mesh, settings: RolloutSettings,
    should_stop: Callable[[], bool], *, key: jax.Array, scale: Callable[[np.ndarray], np.ndarray],
    weights: Mapping[str, float], wait: int | None,
) -> Collect:  # fmt: skip
    """Builds `collect(params, version, pending, step)`, which advances the stream by the groups that it begins.

    `version` is that of the policy that `params` are of. `key` is the run's threefry key of rollouts; `scale` and
    `weights` are those of `make_grade`; `wait` is `settings.steps_to_wait`. What is pending is not donated.

    Raises ValueError when `max_batches` generation batches do not fill a step, Preempted when asked to stop.
    """
    prompts, samples, total = settings.prompts, settings.samples, settings.fresh_prompts
    sizes: dict[str, Any] = dict(samples=samples, max_new=settings.max_new)
    of_prompts = dict(max_prompt=settings.max_prompt, routes=settings.recorded(model.config))
    sampling = Sampling.make(temperature=settings.temperature, stop_ids=tokenizer.stop_ids)
    grade = make_grade(scorer, settings, scale, weights)
    # Age rank of the group in each place: the oldest are first in the queue of each data shard.
    ranks = np.arange(total).reshape(-1, parallel.row_shards(mesh)).T.reshape(-1)
    places, local = np.argsort(ranks), multihost.row_indices(mesh, total)
    begun: dict[tuple[int, int], Response] = {}  # what is being scored, by position and sample

    def rows_of(groups: Sequence[Group]) -> np.ndarray:
        """The rows of these groups, i64; -1 where they have none."""
        rows = np.array([group.place for group in groups], int)[:, None] * samples + np.arange(samples)
        return np.maximum(rows, -1).reshape(-1)

    def advance(params, version, groups, sequences, until, oldest):
        """Draws until so many of the groups are complete, and so many of the oldest.

        Returns (sequences, the groups with their places in them, which of them are complete, tokens drawn, seconds of
        waiting for environments, None without one).
        """
        padding = [groups[0]._replace(place=NONE)] * (total - len(groups))
        placed = [(groups + padding)[rank] for rank in ranks]
        positions, runs = [placed[place].position for place in local], (ranks < len(groups))[local]
        problems = stream.at(positions)
        fresh = prompts_of(mesh, tokenizer, problems, positions, **of_prompts, **sizes)
        before = fresh if sequences is None else merge_rows(fresh, sequences, rows_of(placed))
        had, _ = _account(mesh, before, samples)
        names = [(placed[place].begun, placed[place].position) for place in local]
        episodes = scorer.environment and Episodes(scorer.environment, tokenizer, problems, names, **sizes)
        after = generate(
            model, params, before, key=key, step=np.array([group.begun for group in placed]), version=version,
            decoding=settings.decoding, sampling=sampling, limits=limits_of(mesh, runs, settings.max_new),
            until=until + len(padding), must=ranks < oldest, should_stop=should_stop,
            watch=watcher(scorer, tokenizer, problems, positions, runs, samples, begun, episodes=episodes),
            conversation=episodes, **sizes,
        )  # fmt: skip
        if should_stop():
            raise Preempted
        has, complete = _account(mesh, after, samples)
        groups = [group._replace(place=place) for group, place in zip(groups, places.tolist(), strict=False)]
        waited = None if episodes is None else episodes.waited
        return after, groups, np.asarray(complete)[places[: len(groups)]], int(has) - int(had), waited

    def collect(params, version, pending, step):
        clock, seen, tokens = Clock(rollout=0.0, reward=0.0), list[Graded](), 0
        params = quantized(params, mesh, settings.weights_dtype) if settings.weights_dtype else params
        names = zip(pending.position.tolist(), pending.begun.tolist(), strict=True) if pending else ()
        groups = [Group(*name, place) for place, name in enumerate(names) if name[0] >= 0]  # oldest first
        sequences = pending and pending.rollout
        kept = list[tuple[int, Graded, int]]()  # of each group that is trained: its problem's position, its scores' row
        trained: Any = None  # their Sequences
        while (filled := len(kept)) < prompts:
            check_batches(settings, step, filled, seen)
            room = total - filled if settings.carry_over else total
            first, stream.cursor = stream.cursor, stream.cursor + room - len(groups)
            groups += [Group(position, step, NONE) for position in range(first, stream.cursor)]
            until = prompts - filled if settings.carry_over else room
            oldest = must_finish([group.begun for group in groups], step, prompts, wait)
            sequences, groups, complete, drawn, waited = advance(params, version, groups, sequences, until, oldest)
            ready = [group for group, is_complete in zip(groups, complete, strict=True) if is_complete][:until]
            clock.lap("rollout")
            if waited is not None:
                clock.seconds["environment"] = clock.seconds.get("environment", 0.0) + waited
            mine = [number for number, group in enumerate(ready) if group.place in local]
            responses = [[begun.pop((ready[n].position, sample)) for sample in range(samples)] for n in mine]
            seen.append(grade(np.array(mine, int), responses))
            clock.lap("reward")
            usable = np.flatnonzero(settings.usable(seen[-1].unpunished))[: prompts - filled]
            rows, new = np.full(prompts * samples, NONE), rows_of([ready[n] for n in usable])
            rows[filled * samples : filled * samples + len(new)] = new
            trained = take_rows(sequences, np.maximum(rows, 0)) if trained is None else trained
            trained = merge_rows(trained, sequences, rows)
            kept += [(ready[n].position, seen[-1], n) for n in usable]
            tokens += drawn
            groups = [group for group in groups if group not in ready]
        if settings.carry_over:
            names = tuple(np.array(groups, np.int32).T[:2])  # positions and steps, i32[G] each
            pending = Pending(take_rows(sequences, rows_of(groups)), *parallel.to_global(mesh, REPLICATED, names))
        under_way = {group.position for group in groups}
        for name in [name for name in begun if name[0] not in under_way]:  # of a group that another process has now
            del begun[name]
        failed = np.concatenate([batch.failed[n] for _, batch, n in kept])
        if failed.any():
            trained = without_rows(mesh, trained, failed)
        turns = [batch.turn_reward[n] for _, batch, n in kept if batch.turn_reward is not None]
        rewards = np.stack([batch.reward[n] for _, batch, n in kept]), np.stack(turns) if turns else None
        graded = [(position, {name: x[n] for name, x in batch.scores.items()}) for position, batch, n in kept]
        lengths, said = on_host(trained.length), logged(settings, seen)
        spent = clock.seconds, tokens, int(trained.loss_mask.sum())
        return Collected(trained, lengths, rewards, graded, *said, *spent, pending, stream.cursor)

    return collect
