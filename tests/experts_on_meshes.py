"""A mixture of experts on meshes of 8 simulated devices against one, as JSON; run by tests/test_qwen3_moe.py."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from mesh_equivalence import distance

from rpg_jax import objectives, parallel
from rpg_jax.models import LoRA, Model, routes, unstack_layers
from rpg_jax.models.families import qwen3_moe
from rpg_jax.sampling import Decoding, Sampling, generate, prompts_to_answer
from rpg_jax.training import packing
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.policies import make_policies
from rpg_jax.training.update import init_state, make_update
from rpg_jax.types import Policy, TrainBatch

CONFIG = qwen3_moe.Config(
    32, 16, 12, 1, 4, 2, 8, rope_theta=1e3, max_length=64, experts=8, experts_per_token=3, expert_size=12
)
LORA = LoRA(4, 8.0, ("q", "k", "v", "o"))
WITH_TENSOR, OF_FOUR = dict(fsdp=2, tensor=2, expert=2), dict(fsdp=2, expert=4)
PROMPTS, SAMPLES, COLUMNS, NEW = 8, 2, 4, 8
KEY = jax.random.key(3, impl="threefry2x32")
SAID = "tokens", "routes", "length", "loss_mask", "model_logp"


def on(sizes):
    """A mesh, and a model on it."""
    mesh = parallel.make_mesh(data=1, devices=jax.devices()[: int(np.prod([*sizes.values()]))], **sizes)
    functions = (parallel.make_constrain, parallel.make_per_shard, parallel.make_per_expert)
    constrain, per_shard, per_expert = (make(mesh) for make in functions)
    model = Model(CONFIG, constrain=constrain, per_shard=per_shard, per_expert=per_expert)
    parallel.check_model(mesh, model)
    return mesh, model


def laid_out(mesh, tree):
    return jax.device_put(tree, parallel.shardings(mesh, tree))


def answered(sizes, params) -> dict:
    """Responses and their routes."""
    mesh, model = on(sizes)
    tokens = np.random.default_rng(0).integers(4, 32, (PROMPTS, COLUMNS)).astype(np.int32)
    prompts = parallel.to_global(mesh, parallel.ROWS, (tokens, np.full(PROMPTS, COLUMNS), np.arange(PROMPTS)))
    counts = dict(samples=SAMPLES, max_new=NEW)
    rows = prompts_to_answer(*prompts, **counts, routes=routes.width(CONFIG))
    params = jax.device_get(unstack_layers(params))
    params = jax.device_put(params, parallel.shardings(mesh, params, parallel.SAMPLING))
    sampling, decoding = Sampling.make(stop_ids=range(3)), Decoding(8, page_size=4, segment=8)
    drawn = generate(model, params, rows, key=KEY, step=0, sampling=sampling, decoding=decoding, **counts)
    return {name: parallel.local_rows(getattr(drawn, name)) for name in SAID}


def updated(sizes, drawn, params, adapters=None) -> dict:
    """An update of the weights or, with kl="full" against others, of adapters; its rows are packed, and replay routes.

    Adam's first moment is the gradient, and its epsilon is as large.
    """
    mesh, model = on(sizes)
    optimizer, settings, policies = make_optimizer("adamw", learning_rate=1e-2, epsilon=1e-3), {}, {}
    base = laid_out(mesh, params)
    if adapters:
        policies["base"] = Policy(model, base, jnp.int32(0))
        model, settings = dataclasses.replace(model, lora=LORA), dict(kl="full")
        base, reference = (laid_out(mesh, tree) for tree in adapters)
        policies["reference"] = Policy(model, reference, jnp.int32(0))
    weight = np.random.default_rng(1).uniform(0.5, 1.5, drawn["tokens"].shape).astype(np.float32)
    batch = TrainBatch(
        *(drawn[name] for name in ("tokens", "length", "loss_mask", "model_logp", "model_logp")), weight[:, :1] - 1,
        weight, routes=drawn["routes"],
    )  # fmt: skip
    state = init_state(optimizer, mesh, base)
    update = make_update(
        model, objectives.make("rpg", divergence="rkl", beta=0.1, **settings), optimizer, mesh, state, rows=8,
        temperature=1.0, clip_norm=1e9, logprob_chunk=8, router_balance=0.01, packed_columns=16,
    )  # fmt: skip
    plan = packing.plan(batch.length, 8, 16)
    state, metrics = update(state, parallel.to_global(mesh, parallel.ROWS, batch), plan, policies)
    found = dict(loss=metrics["loss"].value(), gradient=state.opt_state[0].mu, params=state.params)
    if adapters:
        merging = make_policies(model, optimizer, mesh, state)
        found["merged"] = merging.sampling_params(merging.current(state), policies)
    return jax.device_get(found)


def main():
    mesh, model = on(OF_FOUR)
    params = jax.jit(model.init, out_shardings=parallel.shardings(mesh, model.shapes))(jax.random.key(0))
    kernels = params["layers"]["experts"]["up"]["kernel"], params["layers"]["q"]["kernel"]
    found = {"shards": [leaf.addressable_shards[0].data.shape for leaf in kernels]}
    params, rng = jax.device_get(params), np.random.default_rng(2)
    shapes = jax.eval_shape(LORA.init, params, KEY)
    adapters = [jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / 4, shapes) for _ in range(2)]
    one, other = (answered(sizes, params) for sizes in ({}, WITH_TENSOR))
    found["tokens"], found["replayed"] = int(one["loss_mask"].sum()), int((one["routes"] > 0).sum())
    found["same"] = {name: bool((one[name] == other[name]).all()) for name in SAID[:4]}
    found["logp"] = float(np.abs(one["model_logp"] - other["model_logp"]).max())
    for name, sizes, more in (("weights", OF_FOUR, ()), ("adapters", WITH_TENSOR, (adapters,))):
        one_device, mesh = (updated(axes, one, params, *more) for axes in ({}, sizes))
        found[name] = {key: distance(one_device[key], mesh[key]) for key in mesh}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
