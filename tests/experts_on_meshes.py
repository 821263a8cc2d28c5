"""A mixture of experts on meshes of 8 simulated devices against one, as JSON; run by tests/test_qwen3_moe.py."""

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
from rpg_jax.training.update import init_state, make_update
from rpg_jax.types import Policy, TrainBatch

CONFIG = qwen3_moe.Config(
    32, 16, 12, 1, 4, 2, 8, rope_theta=1e3, max_length=64, experts=8, experts_per_token=3, expert_size=12
)
MESHES = {}, dict(fsdp=2, tensor=2, expert=2), dict(fsdp=2, expert=4)
PROMPTS, SAMPLES, COLUMNS, NEW = 8, 2, 4, 8
KEY = jax.random.key(3, impl="threefry2x32")


def answered(mesh, model, params):
    """Responses of each prompt, with routes, from a sampler whose cache is too small for all."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, 32, (PROMPTS, COLUMNS)).astype(np.int32)
    prompts = parallel.to_global(mesh, parallel.ROWS, (tokens, np.full(PROMPTS, COLUMNS), np.arange(PROMPTS)))
    sizes = dict(samples=SAMPLES, max_new=NEW)
    rows = prompts_to_answer(*prompts, **sizes, routes=routes.width(CONFIG))
    params = unstack_layers(params)
    params = jax.device_put(params, parallel.shardings(mesh, params, parallel.SAMPLING))
    sampling, decoding = Sampling.make(stop_ids=range(3)), Decoding(8, page_size=4, segment=8)
    return generate(model, params, rows, key=KEY, step=0, sampling=sampling, decoding=decoding, **sizes)


def updated(mesh, model, params, batch, policies, **more):
    """(Loss, gradient, parameters) of an update: Adam's first moment is the gradient, and its epsilon is as large."""
    optimizer = make_optimizer("adamw", learning_rate=1e-2, epsilon=1e-3)
    state = init_state(optimizer, mesh, params)
    update = make_update(
        model, objectives.make("rpg", divergence="rkl", kl="full", beta=0.1), optimizer, mesh, state, rows=8,
        temperature=1.0, clip_norm=1e9, logprob_chunk=8, router_balance=0.01, **more,
    )  # fmt: skip
    plan = packing.plan(batch.length, 8, more.get("packed_columns"))
    state, metrics = update(state, parallel.to_global(mesh, parallel.ROWS, batch), plan, policies)
    return jax.device_get((metrics["loss"].value(), state.opt_state[0].mu, state.params))


def measured(sizes, rollout=None) -> dict:
    mesh = parallel.make_mesh(data=1, devices=jax.devices()[: int(np.prod([*sizes.values()]))], **sizes)
    functions = (parallel.make_constrain, parallel.make_per_shard, parallel.make_per_expert)
    functions = dict(zip(("constrain", "per_shard", "per_expert"), (make(mesh) for make in functions), strict=True))
    model = Model(CONFIG, **functions)
    parallel.check_model(mesh, model)
    params, other = (
        jax.jit(model.init, out_shardings=parallel.shardings(mesh, model.shapes))(jax.random.key(n)) for n in (0, 1)
    )
    found = {"shards": [params["layers"]["experts"]["up"]["kernel"], params["layers"]["q"]["kernel"]]}
    found["shards"] = [leaf.addressable_shards[0].data.shape for leaf in found["shards"]]
    drawn = answered(mesh, model, params)
    names = ("tokens", "routes", "length", "loss_mask", "model_logp")
    found["drawn"] = {name: parallel.local_rows(getattr(drawn, name)) for name in names}
    drawn = (rollout or found)["drawn"]  # of one device
    weights = np.random.default_rng(1).uniform(0.5, 1.5, drawn["tokens"].shape).astype(np.float32)
    behavior, advantage = drawn["model_logp"], weights[:, :1] - 1
    batch = TrainBatch(
        drawn["tokens"], drawn["length"], drawn["loss_mask"], behavior, behavior, advantage, weights,
        routes=drawn["routes"],
    )  # fmt: skip
    reference = {"reference": Policy(model, other, jnp.int32(0))}
    found["packed"] = updated(mesh, model, jax.tree.map(jnp.copy, params), batch, reference, packed_columns=16)
    adapted = Model(CONFIG, lora=LoRA(4, 8.0, ("q", "k", "v", "o")), **functions)
    adapters = [adapted.lora.init(params, jax.random.key(n)) for n in (2, 3)]
    adapters = [jax.tree.map(lambda leaf, n=n: leaf + 0.01 * n, tree) for n, tree in enumerate(adapters, 1)]
    adapters = [jax.device_put(tree, parallel.shardings(mesh, tree)) for tree in adapters]
    policies = {"base": Policy(model, params, jnp.int32(0)), "reference": Policy(adapted, adapters[1], jnp.int32(0))}
    found["adapted"] = updated(mesh, adapted, adapters[0], batch, policies)
    return found


def main():
    one = measured(MESHES[0])
    others = [measured(sizes, one) for sizes in MESHES[1:]]
    drawn = one.pop("drawn")
    report = {"shards": [found.pop("shards") for found in (one, *others)], "meshes": []}
    report |= {"tokens": int(drawn["loss_mask"].sum()), "replayed": int((drawn["routes"] > 0).sum())}
    for other in others:
        theirs = other.pop("drawn")
        same = {name: bool((theirs[name] == drawn[name]).all()) for name in ("tokens", "routes", "length")}
        logp = float(np.abs(theirs["model_logp"] - drawn["model_logp"]).max())
        report["meshes"].append(dict(same=same, logp=logp, **{name: distance(one[name], other[name]) for name in one}))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
