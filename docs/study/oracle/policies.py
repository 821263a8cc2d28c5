"""The behavior policy, and the policies that training makes of it: a transformer of 18 thousand parameters."""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from oracle import task
from rpg_jax.models import Model, ModelConfig, unstack_layers
from rpg_jax.objectives import Objective
from rpg_jax.objectives.advantages import leave_one_out
from rpg_jax.sampling import Decoding, Sampling, generate, prompts_to_answer
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.types import Params

DEMONSTRATIONS = dict(rows=16, length=256, updates=250, learning_rate=3e-3, warmup_steps=20)
TRAINING = dict(prompts=16, samples=8, length=64, learning_rate=1e-4, warmup_steps=10)


def transformer() -> Model:
    """Two layers of 32 hidden units: small enough for the gradients of ten thousands of single responses."""
    shape = ModelConfig(task.VOCABULARY, 32, 64, 2, 4, 2, 8, qk_norm=True, rope_theta=1e4, max_length=512)
    return Model(shape, scan=False)


def logprobs(model: Model, params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probs of the response tokens of i32[B, PROMPT + T], and of the right tokens in their places; each [B, T]."""
    hidden = model.hidden(params, tokens)[:, task.PROMPT - 1 : -1]
    logp = jax.nn.log_softmax(model.logits(params, hidden))  # [B, T, V]; few enough tokens to hold all of them
    pair = jnp.stack([tokens, task.right_tokens(tokens)], -1)[:, task.PROMPT :]  # [B, T, 2]
    drawn, right = jnp.moveaxis(jnp.take_along_axis(logp, pair, -1), -1, 0)
    return drawn, right


def respond(model: Model, params: Params, prompts: np.ndarray, samples: int, length: int, seed: int, step: int):
    """i32[P · samples, PROMPT + length]: `samples` responses to each prompt i32[P, PROMPT], drawn by the sampler."""
    rows = len(prompts)
    sizes = dict(samples=samples, max_new=length)
    batch = prompts_to_answer(prompts, np.full(rows, prompts.shape[1]), np.arange(rows), **sizes)
    rollout = generate(
        model, unstack_layers(params), batch, key=jax.random.key(seed, impl="threefry2x32"), step=step,
        sampling=Sampling.make(), decoding=Decoding(min(rows * samples, 512)), **sizes,
    )  # fmt: skip
    return rollout.tokens


@lru_cache(maxsize=1)
def warm_start(model: Model, seed: int, rows: int, length: int, updates: int, **optimizer: Any) -> Params:
    """Parameters after supervised learning from demonstrations, which are right as often as `task.SURE` says."""
    params = jax.jit(model.init)(jax.random.key(seed))
    adamw, rng = make_optimizer("adamw", total_steps=updates, decay="cosine", **optimizer), np.random.default_rng(seed)

    @jax.jit
    def update(params, state, tokens):
        gradient = jax.grad(lambda params: -jnp.mean(logprobs(model, params, tokens)[0]))(params)
        steps, state = adamw.transformation.update(gradient, state, params)
        return optax.apply_updates(params, steps), state

    state = adamw.transformation.init(params)
    for _ in range(updates):
        params, state = update(params, state, task.demonstrations(rng, rows, length))
    return params


def training(
    model: Model, params: Params, ages: Sequence[int], seed: int, prompts: int, samples: int, length: int,
    maker: Objective | None = None, **optimizer: Any,
) -> Iterator[tuple[int, Params]]:  # fmt: skip
    """(updates, parameters) at each of `ages`, in order, of training with a leave-one-out baseline.

    Without a maker it is REINFORCE on policy: no staleness, clip or KL, so that none of the estimators that are
    compared has made these policies. With one, every update learns by it from new responses of the first policy.
    """
    adamw, rng, every = make_optimizer("adamw", **optimizer), np.random.default_rng(seed), task.prompts().tokens
    first = params

    def loss(params, tokens):
        logp = logprobs(model, params, tokens)[0]
        advantage = leave_one_out(task.rewards(tokens).reshape(prompts, samples)).reshape(-1, 1)
        if maker is None:
            return -jnp.mean(advantage * logp)
        return maker(logp, logprobs(model, first, tokens)[0], advantage, jnp.ones(logp.shape, bool))[0]

    @partial(jax.jit, donate_argnums=1)
    def update(params, state, tokens):
        steps, state = adamw.transformation.update(jax.grad(loss)(params, tokens), state, params)
        return optax.apply_updates(params, steps), state

    state = adamw.transformation.init(params)
    for age in range(max(ages) + 1):
        if age in ages:
            yield age, params
        chosen = every[rng.integers(len(every), size=prompts)]
        drawn = respond(model, params if maker is None else first, chosen, samples, length, seed, age)
        params, state = update(params, state, drawn)
