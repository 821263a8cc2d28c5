"""Rollouts of which unfinished responses go on in the next step (`rollout.carry_over`; docs/method.md 9.5).

Always O = `rollout.oversample` x prompts groups are under way. A step ends when `prompts` of them are complete: it
trains the oldest complete ones, and the next step adds as many fresh ones. What has been drawn stays, with the log-prob
and the policy version of each token, and goes on under the new parameters.

`rollout.max_age` is kept by waiting for old groups. To drop them would be a bias against long responses.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from rpg_jax import InputError, parallel
from rpg_jax.data import ProblemStream, Tokenizer
from rpg_jax.models import Model
from rpg_jax.parallel import REPLICATED, multihost
from rpg_jax.rewards import Scorer, signed_reward
from rpg_jax.training.experience import take_rows
from rpg_jax.training.optimizer import Optimizer, layout
from rpg_jax.training.phases import Clock
from rpg_jax.training.rollout import (
    Collect,
    Collected,
    Graded,
    RolloutSettings,
    check_batches,
    logged,
    make_draw,
    make_grade_groups,
    read_responses,
)
from rpg_jax.types import Params, Pending, Sequences


class Group(NamedTuple):
    """The responses to one problem that are under way or complete."""

    position: int  # of the problem in the stream's order
    begun: int  # RL step
    place: int  # in the rollout: rows place * samples, place * samples + 1, ...; -1 for no tokens yet


def steps_to_wait(max_age: int | None, updates: int, delay: int) -> int | None:
    """How many steps after the one that drew it a token may be trained; None for any number.

    Step s trains tokens that were drawn in step s - k at ages up to (k + 1) * updates - 1 + delay.
    """
    return None if max_age is None else (max_age + 1 - delay) // updates - 1


def check(settings: RolloutSettings, source: str, updates: int, delay: int) -> None:
    """Raises ValueError for settings with which nothing can be carried over, or not without a bias."""
    if not settings.carry_over:
        if settings.max_age is not None:
            raise InputError(
                f"rollout.max_age is {settings.max_age} and rollout.carry_over is off: no response is carried over, so "
                f"there is no age to bound; unset rollout.max_age, or set rollout.carry_over=True"
            )
        return
    if source != "sampler":
        raise InputError(
            f"rollout.carry_over and behavior.source={source}: several policies draw one response, and the trainer "
            f"computes the log-probs of the newest alone, which is biased; set behavior.source=sampler"
        )
    total, prompts = settings.fresh_prompts, settings.prompts
    if total == prompts:
        raise InputError(
            f"rollout.carry_over with rollout.oversample={settings.oversample} leaves nothing to carry over: a step "
            f"trains {prompts} groups, and so many are under way; set rollout.oversample above 1, such as 2.0"
        )
    least = -(-total // prompts) * updates - 1 + delay
    if settings.max_age is not None and settings.max_age < least:
        raise InputError(
            f"rollout.max_age is {settings.max_age} optimizer updates; with {total} groups under way, {prompts} "
            f"of them trained in a step of {updates} updates, and rollout.delay={delay}, it must be at least {least}"
        )


def must_finish(begun: Sequence[int], step: int, prompts: int, wait: int | None) -> int:
    """How many of the oldest groups this step has to train, so that no group is trained more than `wait` steps late.

    Of the groups that are due in `ahead` more steps, those steps take `prompts` each; this one must take the others.
    """
    if wait is None:
        return 0
    due = np.asarray(begun, int) + wait
    return max(0, *(int((due <= step + ahead).sum()) - prompts * ahead for ahead in range(wait + 1)))


def nothing_pending(settings: RolloutSettings, optimizer: Optimizer, mesh: Mesh) -> Pending:
    """What is pending before the first step: no group. It is laid out as a part of the state."""
    count = settings.fresh_prompts - settings.prompts
    rows, columns = count * settings.samples, settings.max_prompt + settings.max_new

    def build():
        tokens, mask, logp = (jnp.zeros((rows, columns), dtype) for dtype in (jnp.int32, bool, jnp.float32))
        ids, finished = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool)
        rollout = Sequences(tokens, ids, ids, mask, logp, logp, tokens, ids, ids, finished)
        return {"pending": Pending(rollout, jnp.full(count, -1, jnp.int32), jnp.zeros(count, jnp.int32))}

    return jax.jit(build, out_shardings=layout(optimizer, mesh, jax.eval_shape(build)))()["pending"]


@partial(jax.jit, static_argnames=("mesh", "samples", "max_new"))
def _account(mesh, rollout, samples, max_new):
    """(tokens of each response i32[O * samples], which groups are complete bool[O]), whole on every process."""
    drawn = rollout.length - rollout.prompt_length
    complete = rollout.finished | (drawn == max_new)
    shared = drawn, complete.reshape(-1, samples).all(1)
    return jax.lax.with_sharding_constraint(shared, NamedSharding(mesh, REPLICATED))


def make_collect(
    model: Model, tokenizer: Tokenizer, scorer: Scorer, mesh: Mesh, settings: RolloutSettings, key: jax.Array,
    should_stop: Callable[[], bool], scale: Callable[[np.ndarray], np.ndarray] = signed_reward,
    weights: Mapping[str, float] | None = None, *, wait: int | None,
) -> Collect:  # fmt: skip
    """Builds `collect(params, stream, step, version, pending)`, as `rollout.make_collect` does without carry-over.

    `version` is that of `params`, i32[], and `wait` is `steps_to_wait`. What is pending is not donated.

    With dynamic sampling, groups whose rewards are all equal leave, and fresh ones take their places in the same
    step. A generation batch is what is drawn until enough groups are complete.
    """
    prompts, samples, total = settings.prompts, settings.samples, settings.fresh_prompts
    draw = make_draw(model, tokenizer, mesh, settings, key, should_stop)
    grade_groups = make_grade_groups(scorer, settings, scale, weights)
    # Age rank of the group in each place: the oldest are first in the queue of each data shard.
    ranks = np.arange(total).reshape(-1, parallel.row_shards(mesh)).T.reshape(-1)
    places, local = np.argsort(ranks), multihost.row_indices(mesh, total)

    def rows_of(groups: Sequence[Group]) -> np.ndarray:
        """The rows of these groups in the rollout, i64; -1 where they have none."""
        rows = np.array([group.place for group in groups], int)[:, None] * samples + np.arange(samples)
        return np.maximum(rows, -1).reshape(-1)

    def arranged(rollout: Sequences, groups: Sequence[Group]) -> Sequences:
        """The rows of these groups, without tokens where they have none."""
        rows = rows_of(groups)
        return take_rows(rollout, np.where(rows < 0, rollout.tokens.shape[0], rows))

    def collect(params: Params, stream: ProblemStream, step: int, version: jax.Array, pending: Pending) -> Collected:
        clock, tokens = Clock(rollout=0.0, reward=0.0), 0
        seen: list[Graded] = []
        kept: list[Group] = []  # what this step trains
        rewards: list[np.ndarray] = []  # f32[G] of each
        drawn, _ = map(np.asarray, _account(mesh, pending.rollout, samples, settings.max_new))
        rollout, stored = pending.rollout, zip(pending.position.tolist(), pending.begun.tolist(), strict=True)
        open_groups = [Group(*group, place) for place, group in enumerate(stored) if group[0] >= 0]  # oldest first
        while len(kept) < prompts:
            check_batches(settings, step, len(kept), seen)
            cursor = stream.get_state()
            fresh = range(cursor, cursor + total - len(kept) - len(open_groups))
            stream.next(len(fresh), ())
            groups = kept + open_groups + [Group(position, step, -1) for position in fresh]
            oldest = must_finish([group.begun for group in groups[len(kept) :]], step, prompts, wait)
            placed = [groups[rank] for rank in ranks]
            positions = [placed[place].position for place in local]
            problems = stream.at(positions)
            resume = rollout, rows_of(placed)
            begun, must = np.array([group.begun for group in placed]), ranks < len(kept) + oldest
            had = np.where(resume[1] < 0, 0, np.append(drawn, 0)[resume[1]])
            rollout = draw(params, problems, positions, begun, version=version, resume=resume, until=prompts, must=must)
            drawn, complete = map(np.asarray, _account(mesh, rollout, samples, settings.max_new))
            tokens += int((drawn - had).sum())
            groups = [group._replace(place=int(place)) for group, place in zip(groups, places, strict=True)]
            kept, open_groups = groups[: len(kept)], groups[len(kept) :]
            chosen = [group for group in open_groups if complete[group.place]][: prompts - len(kept)]
            mine = np.array([n for n, group in enumerate(chosen) if group.place in local], int)
            own = np.searchsorted(local, [chosen[n].place for n in mine])
            responses = read_responses(tokenizer, rollout, samples, own)
            clock.lap("rollout")
            batch = grade_groups(mine, [problems[n] for n in own], *responses)
            clock.lap("reward")
            seen.append(batch)
            usable = np.flatnonzero(settings.usable(batch.unpunished))
            kept += [chosen[n] for n in usable]
            rewards += [batch.reward[n] for n in usable]
            open_groups = [group for group in open_groups if group not in chosen]
        position, begun = (np.array([group[field] for group in open_groups], np.int32) for field in (0, 1))
        pending = Pending(arranged(rollout, open_groups), *parallel.to_global(mesh, REPLICATED, (position, begun)))
        return Collected(
            arranged(rollout, kept), np.stack(rewards), *logged(settings, seen), clock.seconds, tokens, pending
        )

    return collect
