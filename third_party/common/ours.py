"""Our side of the benchmarks: the same functions that `rpg_jax.train` runs, on random prompts and parameters."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import interleave
import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import objectives, parallel
from rpg_jax.models import Model, ModelConfig, unstack_layers
from rpg_jax.sampling import Decoding, Sampling, generate, prompts_to_answer
from rpg_jax.training.experience import make_experience, make_score
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.packing import Plan
from rpg_jax.training.policies import BEHAVIOR, make_policies
from rpg_jax.training.update import init_params, init_state, make_update
from rpg_jax.types import TrainBatch

LEARNER = dict(rows=8, temperature=1.0, logprob_chunk=32)  # microbatches that stay in cache


def build_model(shape):
    """Few layers are unrolled, as in the quickstart; 30 are compiled as one, in a loop, as in configs/real_model.py."""
    sizes = dict(vocab_size="vocab", hidden_size="hidden", mlp_size="mlp")
    sizes |= {name: name for name in ("layers", "heads", "kv_heads", "head_dim")}
    config = ModelConfig(
        **{ours: shape[name] for ours, name in sizes.items()},
        qk_norm=shape.get("qk_norm", True),
        tied_embeddings=shape.get("tied", True),
    )
    return Model(config, scan=shape["layers"] > 8)


def random_prompts(shape, rows, length):
    tokens = np.random.default_rng(0).integers(1, shape["vocab"], (rows, length)).astype(np.int32)
    return tokens, np.full(rows, length), np.arange(rows)


def generation(shape, task):
    """Responses of given lengths, `rows` at once: a slot whose response is complete takes the next prompt."""
    model, key = build_model(shape), jax.random.key(0, impl="threefry2x32")
    params = jax.jit(lambda key: unstack_layers(model.init(key)))(key)
    lengths = interleave.response_lengths(task)
    samples = 1 if "mean" in task else task.get("samples", 1)  # a prompt has one limit for all of its responses
    sizes = dict(samples=samples, max_new=task["new"])
    prompts = prompts_to_answer(*random_prompts(shape, len(lengths) // samples, task["prompt"]), **sizes)
    settings = dict(sampling=Sampling.make(), decoding=Decoding(task["rows"]), limits=lengths[::samples], **sizes)
    steps = iter(range(10**9))

    def step():
        rollout = generate(model, params, prompts, key=key, step=jnp.int32(next(steps)), **settings)
        drawn = jax.block_until_ready(rollout)
        assert (np.asarray(drawn.length - drawn.prompt_length) == lengths).all()

    return step


def update(shape, task):
    model, mesh = build_model(shape), parallel.make_mesh()
    optimizer = make_optimizer("adamw", learning_rate=1e-6)
    state = init_state(optimizer, mesh, init_params(model, mesh, 0))
    run = make_update(model, objectives.make("grpo", beta=0.0), optimizer, mesh, state, clip_norm=1.0, **LEARNER)
    rows, length = task["rows"], task["prompt"] + task["new"]
    rng = np.random.default_rng(0)
    logp = jnp.full((rows, length), -float(np.log(shape["vocab"])))
    batch = TrainBatch(
        tokens=jnp.asarray(rng.integers(0, shape["vocab"], (rows, length)), jnp.int32),
        length=jnp.full(rows, length, jnp.int32),
        loss_mask=jnp.broadcast_to(jnp.arange(length) >= task["prompt"], (rows, length)),
        behavior_logp=logp,
        reference_logp=logp,
        advantage=jnp.asarray(rng.normal(size=(rows, 1)), jnp.float32),
        weight=jnp.ones_like(logp),
    )

    def step():
        nonlocal state
        state, _ = jax.block_until_ready(run(state, batch, Plan(jnp.int32(rows // LEARNER["rows"]), None), {}))

    return step


def rl_step(shape, task):
    """Prompts to responses, a rule reward on the host, advantages, one update."""
    model, mesh = build_model(shape), parallel.make_mesh()
    optimizer = make_optimizer("adamw", learning_rate=1e-6)
    state = init_state(optimizer, mesh, init_params(model, mesh, 0))
    shapes = jax.eval_shape(lambda: state)
    policies = make_policies(model, optimizer, mesh, state)
    objective = objectives.make("grpo", beta=0.0)
    score, experience = make_score(mesh, **LEARNER), make_experience(objective, mesh)
    run = make_update(model, objective, optimizer, mesh, shapes, clip_norm=1.0, **LEARNER)
    rows, samples = task["rows"], task["samples"]
    sizes = dict(samples=samples, max_new=task["new"])
    prompts = prompts_to_answer(*random_prompts(shape, rows // samples, task["prompt"]), **sizes)
    key, steps = jax.random.key(0, impl="threefry2x32"), iter(range(10**9))

    def step():
        nonlocal state
        settings = dict(sampling=Sampling.make(), decoding=Decoding(rows), **sizes)
        behavior = policies.current(state)
        params = policies.sampling_params(behavior, {})
        rollout = generate(model, params, prompts, key=key, step=jnp.int32(next(steps)), **settings)
        responses = np.asarray(rollout.tokens)[:, task["prompt"] :]
        reward = (responses % 2 == 0).mean(-1, dtype=np.float32).reshape(-1, samples)
        scores = score({BEHAVIOR: behavior}, rollout, Plan(jnp.int32(rows // LEARNER["rows"]), None))
        batch, _ = experience(rollout, (jnp.asarray(reward), None), scores, state.step)
        state, _ = jax.block_until_ready(run(state, batch, Plan(jnp.int32(rows // LEARNER["rows"]), None), {}))

    return step


BUILDERS = {"generation": generation, "long_tails": generation, "update": update, "rl_step": rl_step}
