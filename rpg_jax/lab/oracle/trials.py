"""Many short runs in one process: a sweep's variants on the task and the transformer of the oracle.

A run of seconds cannot afford a process and compilations of its own. Its policy, objective, advantages and sampler are
those of training; the loop around them is short. Runs of one seed draw with the same noise, so that they are paired.
"""

import dataclasses
import pathlib
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jax.scipy.special import logsumexp

from rpg_jax.lab.oracle import task
from rpg_jax.lab.oracle.policies import logprobs, respond
from rpg_jax.lab.reporting.runs import Run
from rpg_jax.models import Model
from rpg_jax.objectives import Objective, make
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.types import Params

EXPECTED, KL, ENTROPY = "eval/counting/mean@4", "eval/kl_reference", "train/entropy"


@dataclasses.dataclass(frozen=True)
class Budget:
    """What all runs have in common."""

    steps: int = 30
    prompts: int = 16
    samples: int = 8
    length: int = 32  # tokens of a response
    updates: int = 4  # of a step, each from so many of its groups
    learning_rate: float = 1e-4
    warmup_steps: int = 10  # updates
    clip_norm: float = 1.0
    evaluate_every: int = 15  # steps


@partial(jax.jit, static_argnums=0)
def evaluation(model: Model, params: Params, reference: Params, tokens: jax.Array) -> dict[str, jax.Array]:
    """Expected reward, KL(policy || reference) and entropy, both in nats a token, from responses of the policy.

    Each is the mean, over the drawn prefixes, of its conditional expectation: of the probability of the right token,
    and of the divergence and the entropy of whole distributions.
    """

    def distributions(params):
        return jax.nn.log_softmax(model.logits(params, model.hidden(params, tokens)[:, task.PROMPT - 1 : -1]))

    policy, held = distributions(params), distributions(reference)
    divergence = jnp.sum(jnp.exp(policy) * (policy - held), -1)
    entropy = -jnp.sum(jnp.exp(policy) * policy, -1)
    right = jnp.exp(logprobs(model, params, tokens)[1])
    return {EXPECTED: jnp.mean(right), KL: jnp.mean(divergence), ENTROPY: jnp.mean(entropy)}


def make_step(model: Model, objective: Objective, optimizer: optax.GradientTransformation, budget: Budget, fixed: bool):
    """The jitted updates of an RL step: (params, state, drawer, tokens, reference) -> (params, state, metrics).

    `drawer` are the parameters of the behavior policy, which drew `tokens`.
    """

    def step(params, state, drawer, tokens, reference):
        mask = jnp.ones((len(tokens), budget.length), bool)
        behavior = logprobs(model, drawer, tokens)[0]
        log_weights = jnp.sum(logprobs(model, params, tokens)[0] - behavior, -1)  # of whole responses
        effective = jnp.exp(2 * logsumexp(log_weights) - logsumexp(2 * log_weights)) / len(tokens)
        held = logprobs(model, reference, tokens)[0] if fixed else behavior
        rewards = task.rewards(tokens).reshape(budget.prompts, budget.samples)
        advantage = objective.advantages(rewards, behavior, held, mask)
        parts = jax.tree.map(
            lambda x: x.reshape(budget.updates, -1, *x.shape[1:]), (tokens, behavior, held, advantage, mask)
        )

        def update(carry, part):
            params, state = carry
            tokens, behavior, held, advantage, mask = part

            def loss(params):
                return objective(logprobs(model, params, tokens)[0], behavior, advantage, mask, reference_logp=held)

            gradient, metrics = jax.grad(loss, has_aux=True)(params)
            steps, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, steps), state), metrics["clip_fraction"].value()

        (params, state), clipped = jax.lax.scan(update, (params, state), parts)
        metrics = dict(reward=jnp.mean(rewards), clip_fraction=jnp.mean(clipped))
        return params, state, metrics | dict(effective_sample_size_sequence=effective)

    return jax.jit(step)


def variant(model: Model, settings: Mapping[str, Any], budget: Budget, base_rate: float = 1.0):
    """(step, optimizer, delay) of a variant's settings, keys as in a sweep whose base has the rate `base_rate`.

    A variant with another learning rate has as many times the rate of the budget. The delay is in RL steps, that of
    `rollout.delay` in updates.
    """
    own = {key.removeprefix("objective."): value for key, value in settings.items() if key.startswith("objective.")}
    objective, fixed = make(own.pop("name", "rpg"), **own), settings.get("reference.mode") == "fixed"
    rate = budget.learning_rate * settings.get("optimizer.learning_rate", base_rate) / base_rate
    adamw = make_optimizer("adamw", learning_rate=rate, warmup_steps=budget.warmup_steps).transformation
    optimizer = optax.chain(optax.clip_by_global_norm(budget.clip_norm), adamw)
    step = make_step(model, objective, optimizer, budget, fixed)
    return step, optimizer, settings.get("rollout.delay", 0) // budget.updates


def trial(
    model: Model, begun: Params, step, optimizer, delay: int, budget: Budget, seed: int
) -> tuple[list[dict[str, float]], float]:
    """(rows of the log, seconds) of one run from the parameters `begun`, which are the fixed reference.

    Responses are drawn by the policy of `delay` RL steps ago, at first by `begun`.
    """
    every, rng, started = task.prompts().tokens, np.random.default_rng(seed), time.monotonic()
    params, state, rows, past = begun, optimizer.init(begun), [], deque([begun], maxlen=delay + 1)
    for number in range(budget.steps + 1):
        row: dict[str, float] = {"step": number}
        if number:
            chosen = every[rng.integers(len(every), size=budget.prompts)]
            tokens = respond(model, past[0], chosen, budget.samples, budget.length, seed, number)
            params, state, metrics = step(params, state, past[0], tokens, begun)
            past.append(params)
            row |= {f"train/{name}": float(value) for name, value in metrics.items()}
        if number % budget.evaluate_every == 0 or number == budget.steps:
            tokens = respond(model, params, every, 4, budget.length, seed + 10_000, number)
            row |= {name: float(value) for name, value in evaluation(model, params, begun, tokens).items()}
        rows.append(row)
    return rows, time.monotonic() - started


def as_run(name: str, sweep: str, settings: Mapping[str, Any], seed: int, budget: Budget, rows, seconds: float) -> Run:
    """A trial as `report` sees a run."""
    steps = pd.Index([row.pop("step") for row in rows], dtype="int64", name="step")
    known = {f"trial.{key}": value for key, value in dataclasses.asdict(budget).items() if key != "steps"}
    flat = {"seed": seed, "steps": budget.steps, **known, **settings}
    summary = {"wall_seconds": seconds, "steps": budget.steps}
    metrics = pd.DataFrame(rows, index=steps, dtype="float64")
    return Run(pathlib.Path(sweep) / name / f"seed{seed}", flat, metrics, 0, [], summary)
