"""What one RL step computes on meshes of 8 simulated devices, as JSON on stdout; run by tests/test_mesh.py."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import test_carry_over
from stepping import make_experienced

from rpg_jax import objectives, parallel
from rpg_jax.data import Problem, ProblemStream
from rpg_jax.models import Model, ModelConfig, token_logprobs, unstack_layers
from rpg_jax.sampling import Decoding, Sampling, generate, prompts_to_answer
from rpg_jax.training import packing
from rpg_jax.training.collect import nothing_pending
from rpg_jax.training.experience import take_rows
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.policies import make_policies
from rpg_jax.training.update import init_params, init_state, make_update

CONFIG = ModelConfig(264, 32, 64, 2, 8, 4, 8, qk_norm=True, max_length=64)
# Copies on two devices are also trained by the job of tests/test_multihost.py. One of the steps packs its rows.
MESHES = _, PACKED = (2, 4, 1), (2, 2, 2)
PROMPTS, SAMPLES, COLUMNS, NEW = 8, 4, 6, 10
KEY = jax.random.key(3, impl="threefry2x32")
COLLECTIVE = r"\[([\d,]*)\]\S* (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("


def on(mesh, config=CONFIG, **changes):
    """A model on a mesh."""
    functions = dict(constrain=parallel.make_constrain(mesh), per_shard=parallel.make_per_shard(mesh))
    return Model(config, **functions | changes)


def initial_params(mesh):
    """Random ones that predict something, on the host."""
    params = init_params(on(mesh), mesh, 0)
    params["embed"]["embedding"] *= 3.0
    return jax.device_get(params)


def rl_step(mesh, initial, columns=None) -> dict:
    """Responses, log-probs, loss, gradient (Adam's first moment) and update of one step on a mesh, packed or not."""
    # An epsilon of the size of gradients: without it, Adam's first step makes as much of the smallest as of any.
    model, optimizer = on(mesh), make_optimizer("adamw", learning_rate=1e-2, epsilon=1e-3)
    state = init_state(optimizer, mesh, jax.device_put(initial, parallel.shardings(mesh, initial)))
    rng = np.random.default_rng(0)
    mask = np.arange(COLUMNS) < rng.integers(1, COLUMNS + 1, (PROMPTS, 1))
    tokens = np.where(mask, rng.integers(0, CONFIG.vocab_size, mask.shape), 0).astype(np.int32)
    arrays = tokens, mask.sum(-1, dtype=np.int32), np.arange(PROMPTS, dtype=np.int32), np.arange(PROMPTS) + 3
    *prompts, limits = parallel.to_global(mesh, parallel.ROWS, arrays)
    sizes = dict(samples=SAMPLES, max_new=NEW)
    policies = make_policies(model, optimizer, mesh, state)
    # 32 requests of different lengths: at least two slots a shard, and every shard refills them.
    rollout = generate(
        model, policies.sampling_params(policies.current(state), {}), prompts_to_answer(*prompts, **sizes),
        key=KEY, step=0, limits=limits, sampling=Sampling.make(stop_ids=range(8)), decoding=Decoding(8, segment=4),
        **sizes,
    )  # fmt: skip
    found = dict(tokens=parallel.local_rows(rollout.tokens), mask=parallel.local_rows(rollout.loss_mask))
    found["sampled_logp"] = parallel.local_rows(rollout.model_logp)
    objective = objectives.make("rpg", divergence="urkl", estimator="reinforce", clip="rpg", beta=0.01)
    scoring = dict(rows=8, temperature=1.0, logprob_chunk=5, packed_columns=columns)
    reward = np.cos(np.arange(PROMPTS * SAMPLES, dtype=np.float32)).reshape(PROMPTS, SAMPLES)
    lengths = packing.on_host(rollout.length)
    experienced = make_experienced(model, objective, optimizer, mesh, state, **scoring)
    batch, _ = experienced(state, rollout, reward, packing.plan(lengths, 8, columns))
    found["logp"] = parallel.local_rows(batch.behavior_logp)
    policy = policies.past(policies.current(state))
    found["remembered"] = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(policy))
    found["recalled"] = jax.device_get(policies.sampling_params(policy, {}))
    update = make_update(model, objective, optimizer, mesh, state, clip_norm=1e9, **scoring)
    batch = take_rows(batch, np.arange(PROMPTS * SAMPLES)[::-1])
    plan = packing.plan(lengths[::-1], 8, columns)
    found["microbatches"] = int(plan[0])
    compiled = update.lower(state, batch, plan, {}).compile()
    gathered = [math.prod(shape) for kind, shape in collectives(compiled.as_text())[0] if kind == "all-gather"]
    found["gathered"] = sorted(gathered)[::-1][:2]
    bytes_of_state = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    found["donated"] = compiled.memory_analysis().alias_size_in_bytes / bytes_of_state
    state, metrics = compiled(state, batch, plan, {})
    found |= {"loss": np.asarray(metrics["loss"].value()), "gradient": jax.device_get(state.opt_state[0].mu)}
    found["params"] = jax.device_get(state.params)
    # What was compiled serves any number of microbatches.
    state, metrics = compiled(state, batch, plan._replace(count=jnp.int32(2)), {})
    found["loss_of_half"] = np.asarray(metrics["loss"].value())
    return found


def carried_over(mesh, steps=3):
    """Of each response that is trained in a few steps with carry-over: (problem, sample) -> tokens and versions."""
    stream = ProblemStream([Problem(i, "task", f"prompt {i}", "", "") for i in range(40)], 0)
    chosen = test_carry_over.carried(prompts=8)
    collect = test_carry_over.collector(mesh, stream, chosen)
    params = unstack_layers(jax.device_get(test_carry_over.MODEL.init(KEY)))
    params = jax.device_put(params, parallel.shardings(mesh, params, parallel.SAMPLING))
    pending = nothing_pending(chosen, make_optimizer("adamw", learning_rate=0.0), mesh)
    found = {}
    for step in range(steps):
        collected = collect(params, jnp.int32(step), pending, step)
        rollout, pending = collected.sequences, collected.pending
        rows = zip(*map(parallel.local_rows, (rollout.tokens, rollout.version, rollout.loss_mask)), strict=True)
        names = zip(*(parallel.local_rows(x).tolist() for x in (rollout.problem, rollout.sample)), strict=True)
        for name, (tokens, version, mask) in zip(names, rows, strict=True):
            found[str(name)] = [tokens[mask].tolist(), version[mask].tolist()]
    return found


def distance(one, other) -> float:
    """The largest difference over all leaves, relative to the largest number of a leaf."""
    apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-6)), one, other)
    return max(jax.tree.leaves(apart))


def collectives(hlo: str):
    """Of a compiled program, (all collectives, those inside its loops), each as (kind, shape of a result)."""
    bodies, name = {}, None
    for line in hlo.splitlines():
        if line and not line.startswith((" ", "}")):
            name = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
        bodies.setdefault(name, []).append(line)
    calls = {name: set(re.findall(r"%([\w.\-]+)", "\n".join(lines))) & bodies.keys() for name, lines in bodies.items()}
    todo, inside = list(re.findall(r"body=%([\w.\-]+)", hlo)), set()
    while todo:
        if (name := todo.pop()) not in inside:
            inside.add(name)
            todo.extend(calls[name])
    found = {
        name: [(kind, [int(n) for n in dims.split(",") if n]) for dims, kind in re.findall(COLLECTIVE, " ".join(lines))]
        for name, lines in bodies.items()
    }
    return sum(found.values(), []), sum((found[name] for name in inside), [])


def logprob_collectives(mesh):
    """Of the gradient of token_logprobs, whose only loops are those over chunks: its layer is unrolled."""
    model = on(mesh, dataclasses.replace(CONFIG, layers=1), scan=False)
    shaped = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    params = jax.tree.map(shaped, model.shapes, parallel.shardings(mesh, model.shapes))
    rows = jax.sharding.NamedSharding(mesh, parallel.ROWS)
    tokens, mask = (jax.ShapeDtypeStruct((8, 32), dtype, sharding=rows) for dtype in (jnp.int32, bool))
    gradient = jax.jit(jax.grad(lambda p, t, m: token_logprobs(model, p, t, m, chunk=2).sum()))
    every, inside = collectives(gradient.lower(params, tokens, mask).compile().as_text())
    matrix = ([CONFIG.vocab_size // mesh.shape["tensor"], CONFIG.hidden_size], [CONFIG.vocab_size, CONFIG.hidden_size])
    gathered = [shape for kind, shape in every if kind == "all-gather" and shape in matrix]
    return {"gathered": gathered, "in_loops": sorted({kind for kind, _ in inside})}


def largest_collective(mesh, batch: int, length: int) -> int:
    """Numbers in the largest array that devices exchange to put the microbatches of a packed batch together."""
    rows = jax.sharding.NamedSharding(mesh, parallel.ROWS)
    tokens, mask = (jax.ShapeDtypeStruct((batch, length), dtype, sharding=rows) for dtype in (jnp.int32, bool))
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=rows)

    def read(tokens, lengths, mask, plan):
        count_tokens = lambda tokens, positions, segment_ids, **_: (tokens + positions + segment_ids,)  # noqa: E731
        return packing.map_rows(count_tokens, mesh, plan, tokens, lengths, mask, 8)

    plan = packing.Plan(np.int32(1), np.zeros(batch, np.int32))
    text = jax.jit(read).lower(tokens, lengths, mask, plan).compile().as_text()
    return max(math.prod(shape) for _, shape in collectives(text)[0])


def initialization(mesh):
    """(bytes of all parameters, most that one device holds while it makes its share)."""
    model = on(mesh, ModelConfig(1024, 256, 512, 4, 4, 4, 64))
    memory = jax.jit(lambda: init_params(model, mesh, 0)).lower().compile().memory_analysis()
    whole = sum(x.size * 4 for x in jax.tree.leaves(jax.eval_shape(model.init, KEY)))
    return whole, memory.temp_size_in_bytes + memory.output_size_in_bytes


def main():
    single, mesh = parallel.make_mesh(1, devices=jax.devices()[:1]), parallel.make_mesh(2, 2, 2)
    initial = initial_params(single)
    one = rl_step(single, initial)
    found = {"meshes": {}, "response_tokens": int(one["mask"].sum())}
    for sizes in MESHES:
        other = rl_step(parallel.make_mesh(*sizes), initial, COLUMNS + NEW if sizes == PACKED else None)
        rows = (one["tokens"] == other["tokens"]).all(1)
        found["meshes"][str(sizes)] = {
            **{name: distance(one[name], other[name]) for name in ("loss", "gradient", "params", "loss_of_half")},
            "other_tokens": int((~rows).sum()),
            "logp": float(np.abs(one["logp"] - other["logp"])[rows].max()),
            "sampler_gap": float(np.abs(other["logp"] - other["sampled_logp"])[other["mask"]].max()),
            "recalled": distance(one["recalled"], other["recalled"]),
            "remembered": other["remembered"] / one["remembered"],
            **{name: other[name] for name in ("donated", "gathered", "microbatches")},
        }
    found["carried_over"] = [carried_over(on) for on in (single, parallel.make_mesh(devices=jax.devices()[:2]))]
    found["initial"] = distance(initial, initial_params(mesh))
    found["largest_collective"] = largest_collective(parallel.make_mesh(2, 4), 64, 32)
    found["initialization"] = initialization(parallel.make_mesh(1, 8))
    found["fsdp"], found["tensor"] = map(logprob_collectives, (parallel.make_mesh(2, 4), parallel.make_mesh(1, 2, 4)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
