"""From sampled responses to what an update learns from: log-probs of the fixed policies, rewards, advantages."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from rpg_jax import parallel
from rpg_jax.models import token_logprobs_and_entropy, token_logprobs_of_two
from rpg_jax.objectives import Objective
from rpg_jax.objectives import metrics as metric
from rpg_jax.objectives.advantages import begins_turn
from rpg_jax.training.packing import Plan, map_rows
from rpg_jax.training.policies import BASE, BEHAVIOR, REFERENCE, joined
from rpg_jax.types import Policy, Sequences, TrainBatch

Tree = TypeVar("Tree")
# Of a policy's name: log-probs and entropy f32[B, T], 0 off the mask; of a teacher's the others of `OF_REFERENCE`, too.
Scores = dict[str, tuple[jax.Array, ...]]
OF_REFERENCE = ("reference_entropy", "kl_reference_reverse", "kl_reference_forward", "greedy_agreement")
Score = Callable[[Mapping[str, Policy], Sequences, Plan], Scores]
Experience = Callable[..., tuple[TrainBatch, metric.Metrics]]


def make_score(
    mesh: Mesh, *, rows: int, temperature: float, logprob_chunk: int, packed_columns: int | None = None,
    teacher: bool = False,
) -> Score:  # fmt: skip
    """Builds the jitted `score(policies, rollout, plan)`: what each named policy but the base gives to the responses.

    At the sampling temperature. The plan is that of `packing.plan` over all responses, in microbatches of `rows`;
    `packed_columns` are those of a packed row, T if None. With `teacher` the reference is compared with the behavior
    policy, if that one is scored, over the whole vocabulary (`token_logprobs_of_two`).
    """
    by_rows = NamedSharding(mesh, parallel.ROWS)

    def score(policies, rollout, plan):
        arrays = rollout.tokens, rollout.length, rollout.loss_mask, rollout.routes
        tokens, length, mask, routes = jax.lax.with_sharding_constraint(arrays, by_rows)

        def scored(measure, *names):
            (model, params), *others = ((policies[name].model, joined(policies, name)) for name in names)
            measure = partial(measure, model, params, *others, temperature=temperature, chunk=logprob_chunk)
            return map_rows(measure, mesh, plan, tokens, length, mask, rows, packed_columns, routes)

        if teacher and BEHAVIOR in policies:
            logp, entropy, *of_teacher = scored(token_logprobs_of_two, BEHAVIOR, REFERENCE)
            return {BEHAVIOR: (logp, entropy), REFERENCE: tuple(of_teacher)}
        return {name: scored(token_logprobs_and_entropy, name) for name in policies if name != BASE}

    return jax.jit(score, out_shardings=by_rows)


def make_experience(objective: Objective, mesh: Mesh, source: str = "trainer") -> Experience:
    """Builds the jitted `experience(rollout, rewards, scores, step) -> (TrainBatch, metrics)`.

    The behavior policy's log-probs are those of `scores`, or where it has none those that were recorded as each token
    was drawn (docs/method.md 9.1), which with `source` "proximal" are kept beside them; the reference's are those of
    `scores`, or else the behavior policy's. Advantages and corrections are the objective's, over all P·G responses at
    once. `step` i32[] counts the updates so far. Every process gives the same rewards: those of responses f32[P, G],
    and with an environment, whose part of them it is, those of each episode's turns f32[P, G, K], else None. The
    rollout is donated, but for what no batch has room for.

    Metrics that need the behavior policy's forward pass, `entropy` and `sampler_logp_gap`, are left out without it;
    `surprisal`, the mean −log p of the tokens as they were drawn, estimates the entropy without one.
    """
    by_rows, replicated = NamedSharding(mesh, parallel.ROWS), NamedSharding(mesh, parallel.REPLICATED)

    def experience(rollout, kept, rewards, scores, step):
        rollout, (prompt_length, finished) = jax.lax.with_sharding_constraint((rollout, kept), by_rows)
        reward, turn_reward = jax.lax.with_sharding_constraint(rewards, replicated)
        mask = rollout.loss_mask
        trained = mask.any(-1)  # a failed episode may be left out
        metrics: metric.Metrics = {
            "response_length": metric.mean_of(mask.sum(-1).astype(jnp.float32), trained),
            "finished": metric.mean_of(finished.astype(jnp.float32)),
            "surprisal": metric.mean_of(-rollout.model_logp, mask),
        }
        if turn_reward is not None:
            observed = rollout.length - prompt_length - mask.sum(-1)
            metrics |= {
                "turns": metric.mean_of(begins_turn(mask).sum(-1).astype(jnp.float32), trained),
                "observation_tokens": metric.mean_of(observed.astype(jnp.float32), trained),
            }
        behavior = rollout.sampler_logp
        if BEHAVIOR in scores:
            behavior, entropy = scores[BEHAVIOR]
            gap = jnp.abs(behavior - rollout.model_logp)
            metrics |= {
                "entropy": metric.mean_of(entropy, mask),
                "sampler_logp_gap": metric.mean_of(gap, mask),
                "sampler_logp_gap_max": metric.max_of(gap, mask),
            }
        reference, *more = scores.get(REFERENCE, (behavior,))
        metrics |= {name: metric.mean_of(x, mask) for name, x in zip(OF_REFERENCE, more, strict=False)}
        kl = dict(zip(OF_REFERENCE, more, strict=False)).get("kl_reference_reverse")
        weight, corrected = objective.corrections(behavior, rollout.sampler_logp, mask)
        batch = TrainBatch(
            tokens=rollout.tokens,
            length=rollout.length,
            loss_mask=mask,
            behavior_logp=behavior,
            reference_logp=reference,
            advantage=objective.advantages(reward, behavior, reference, mask, step, turn_reward, kl),
            weight=weight,
            version=rollout.version,
            routes=rollout.routes,
            drawn_logp=rollout.sampler_logp if source == "proximal" else None,
        )
        return batch, metrics | corrected

    program = jax.jit(experience, donate_argnums=0, out_shardings=(by_rows, replicated))

    @functools.wraps(program)
    def without_flags(rollout, rewards, scores, step):
        """Donating an array of which no result has the shape is worth nothing, and JAX warns of it."""
        kept = rollout.prompt_length, rollout.finished
        return program(dataclasses.replace(rollout, prompt_length=None, finished=None), kept, rewards, scores, step)

    return without_flags


def take_rows(tree: Tree, rows: ArrayLike) -> Tree:
    """The given rows of every [B, ...] leaf, spread over the mesh that the leaves lie on; zeros for an index of B."""
    return _take_rows(parallel.mesh_of(jax.tree.leaves(tree)[0]), tree, rows)


def merge_rows(kept: Tree, fresh: Any, source: ArrayLike) -> Tree:
    """Row i of the result is row source[i] of `fresh`, or row i of `kept` where source[i] is -1. `kept` is donated."""
    return _merge_rows(parallel.mesh_of(jax.tree.leaves(fresh)[0]), kept, fresh, source)


@partial(jax.jit, static_argnums=0)
def _take_rows(mesh, tree, rows):
    taken = jax.tree.map(lambda x: x.at[rows].get(mode="fill", fill_value=0), tree)
    return jax.lax.with_sharding_constraint(taken, NamedSharding(mesh, parallel.ROWS))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _merge_rows(mesh, kept, fresh, source):
    def merge(old, new):
        taken = new[jnp.maximum(source, 0)]
        return jnp.where((source >= 0).reshape(-1, *(1,) * (new.ndim - 1)), taken, old)

    merged = jax.tree.map(merge, kept, fresh)
    return jax.lax.with_sharding_constraint(merged, NamedSharding(mesh, parallel.ROWS))
