"""Generation and update on an accelerator: rpg_jax beside `transformers`, random Qwen3 weights, bfloat16 compute.

    python third_party/transformers/gpu_benchmark.py --peer_python=VENV/bin/python [--json=FILE]
    python third_party/transformers/gpu_benchmark.py --peer_python=VENV/bin/python --smoke    # tiny, on any machine

Decode is held against the bandwidth, and the update against the matrix throughput, that this very device reached a
minute before: bytes that a step must read (weights, and keys and values of the tokens there are) over bytes that a copy
moved in the same time, and operations of the model (no recomputation) over those of a large product. Each side has the
device for itself. Decode time is that of many new tokens less that of few, so that prefill is not in it.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Published shapes, written out because the peer's environment has no rpg_jax.
QWEN3 = dict(vocab=151936, layers=28, heads=16, kv_heads=8, head_dim=128)
SHAPES = {
    "qwen3-0.6b": dict(QWEN3, hidden=1024, mlp=3072),
    "qwen3-1.7b": dict(QWEN3, hidden=2048, mlp=6144),
    "smoke": dict(vocab=512, layers=2, heads=4, kv_heads=2, head_dim=32, hidden=64, mlp=128),
}
TASK = dict(batch=64, prompt=128, few=64, new=576, rows=32, length=1024, micro=8, copy=2**29, side=8192, rounds=5)
SMOKE = dict(batch=4, prompt=8, few=2, new=18, rows=4, length=32, micro=2, copy=2**20, side=256, rounds=2)


def parameters(shape) -> dict:
    """Numbers in the layers' matrices and in the vocabulary's, which is tied."""
    query, key = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    layer = shape["hidden"] * (2 * query + 2 * key + 3 * shape["mlp"])
    return dict(layers=shape["layers"] * layer, vocabulary=shape["vocab"] * shape["hidden"])


def decode_bytes(shape, task) -> float:
    """Bytes of bfloat16 that a decode step must read, averaged over the steps between `few` and `new` tokens."""
    present = task["prompt"] + (task["few"] + task["new"]) / 2
    cached = 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * present * task["batch"]
    return 2 * (sum(parameters(shape).values()) + cached)


def update_operations(shape, task) -> float:
    """Operations of an update: thrice the forward pass, attention over earlier tokens only, no recomputation."""
    tokens, trained = task["rows"] * task["length"], task["rows"] * (task["length"] - task["prompt"])
    sizes, width = parameters(shape), shape["heads"] * shape["head_dim"]
    attention = 2 * width * shape["layers"] * task["rows"] * task["length"] ** 2
    return 3 * (2 * sizes["layers"] * tokens + 2 * sizes["vocabulary"] * trained + attention)


def median_seconds(run, rounds) -> float:
    """Of calls after the first two, which compile; `run()` returns when the work is done."""
    seconds = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])


def ours(shape, task) -> dict:
    sys.path.insert(0, str(ROOT))
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rpg_jax import objectives, parallel
    from rpg_jax.models import Model, ModelConfig
    from rpg_jax.models.attention_kernels import make_attention
    from rpg_jax.sampling import Decoding, Sampling, generate, prompts_to_answer
    from rpg_jax.training.optimizer import make_optimizer
    from rpg_jax.training.packing import Plan
    from rpg_jax.training.policies import make_policies
    from rpg_jax.training.update import init_params, init_state, make_update
    from rpg_jax.types import TrainBatch

    mesh, rng = parallel.make_mesh(1, devices=jax.devices()[:1]), np.random.default_rng(0)
    names = dict(vocab="vocab_size", hidden="hidden_size", mlp="mlp_size")
    config = ModelConfig(**{names.get(name, name): size for name, size in shape.items()}, qk_norm=True)
    heads = parallel.sharding.ACTIVATIONS["heads"]
    attention = make_attention("auto", mesh, heads, dtype=jnp.bfloat16, head_dim=config.head_dim)
    model = Model(config, dtype=jnp.bfloat16, remat="dots", attention=attention)
    optimizer = make_optimizer("adamw", learning_rate=1e-6)

    numbers = jnp.ones(task["copy"], jnp.bfloat16)
    square = jnp.ones((task["side"], task["side"]), jnp.bfloat16)
    copy, product = jax.jit(lambda x: x + 1), jax.jit(lambda x: x @ x)
    found = {
        "device": mesh.devices.flat[0].device_kind,
        "bandwidth": 4 * task["copy"] / median_seconds(lambda: copy(numbers).block_until_ready(), 10),
        "matrix": 2 * task["side"] ** 3 / median_seconds(lambda: product(square).block_until_ready(), 10),
    }
    numbers = square = None  # their memory is free for the model

    state = init_state(optimizer, mesh, init_params(model, mesh, 0))
    policies = make_policies(model, optimizer, mesh, state)
    policy = policies.sampling_params(policies.current(state), {})
    tokens = rng.integers(1, shape["vocab"], (task["batch"], task["prompt"])).astype(np.int32)
    arrays = tokens, np.full(task["batch"], task["prompt"], np.int32), np.arange(task["batch"], dtype=np.int32)
    sizes = dict(samples=1, max_new=task["new"])
    prompts = prompts_to_answer(*parallel.to_global(mesh, parallel.ROWS, arrays), **sizes)
    key = jax.random.key(0, impl="threefry2x32")

    def decode(new):
        limits = parallel.to_global(mesh, parallel.ROWS, np.full(task["batch"], new, np.int32))
        settings = dict(sampling=Sampling.make(), decoding=Decoding(task["batch"]), **sizes)
        jax.block_until_ready(generate(model, policy, prompts, key=key, step=0, limits=limits, **settings))

    found |= {name: median_seconds(lambda new=task[name]: decode(new), task["rounds"]) for name in ("few", "new")}
    policy = prompts = None  # their memory is free for the update

    run = make_update(
        model, objectives.make("grpo", beta=0.0), optimizer, mesh, state,
        rows=task["micro"], temperature=1.0, clip_norm=1.0, logprob_chunk=256,
    )  # fmt: skip
    rows = (task["rows"], task["length"])
    logp = np.full(rows, -np.log(shape["vocab"]), np.float32)
    batch = TrainBatch(
        tokens=rng.integers(0, shape["vocab"], rows).astype(np.int32),
        length=np.full(task["rows"], task["length"], np.int32),
        loss_mask=np.broadcast_to(np.arange(task["length"]) >= task["prompt"], rows),
        behavior_logp=logp,
        reference_logp=logp,
        advantage=rng.normal(size=(task["rows"], 1)).astype(np.float32),
        weight=np.ones_like(logp),
    )
    batch = parallel.to_global(mesh, parallel.ROWS, batch)

    def update():
        nonlocal state
        state, _ = jax.block_until_ready(run(state, batch, Plan(np.int32(task["rows"] // task["micro"]), None), {}))

    return found | {"update": median_seconds(update, task["rounds"])}


def theirs(shape, task) -> dict:
    sys.path.insert(0, str(ROOT / "third_party" / "common"))
    import torch
    import torch_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch_model.build(shape).to(device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    policy = torch_model.build(shape).to(device, torch.bfloat16).eval()
    prompts = torch.randint(1, shape["vocab"], (task["batch"], task["prompt"]), device=device)
    settings = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, use_cache=True, pad_token_id=0)

    def decode(new):
        with torch.inference_mode():
            lengths = dict(max_new_tokens=new, min_new_tokens=new)
            policy.generate(prompts, attention_mask=torch.ones_like(prompts), **settings, **lengths)
        wait()

    found = {name: median_seconds(lambda new=task[name]: decode(new), task["rounds"]) for name in ("few", "new")}
    policy = None  # its memory is free for the update

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = torch.randint(0, shape["vocab"], (task["rows"], task["length"]), device=device)
    advantage = torch.randn(task["rows"], 1, device=device)
    trained = task["length"] - task["prompt"]

    def update():
        for part in range(0, task["rows"], task["micro"]):
            rows = slice(part, part + task["micro"])
            with torch.autocast(device, torch.bfloat16):
                logits = model(tokens[rows], logits_to_keep=trained + 1).logits[:, :-1]
            targets = tokens[rows, -trained:].flatten()
            logp = -torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none")
            ratio = torch.exp(logp - logp.detach()).view(-1, trained)
            (-(ratio * advantage[rows]).sum() / (task["rows"] * trained)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wait()

    return found | {"update": median_seconds(update, task["rounds"])}


def measured(side, size, task, peer_python) -> dict:
    """One side's timings, from a process of its own; ends with one line and status 2 when it fails."""
    python = peer_python if side == "theirs" else sys.executable
    command = [python, os.path.abspath(__file__), "--worker", side, "--sizes", size]
    command += ["--smoke"] if task is SMOKE else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{side} on {size}: {(done.stderr.strip().splitlines() or ['nothing said'])[-1]}", file=sys.stderr)
        sys.exit(2)
    return json.loads(done.stdout.splitlines()[-1])


def report(size, shape, task, found) -> dict:
    """What the timings mean, printed and returned."""
    mine, peer = found["ours"], found["theirs"]
    steps, tokens = task["new"] - task["few"], task["rows"] * task["length"]
    rows = {"size": size, **found}
    print(
        f"{size} on {mine['device']}: a copy moves {mine['bandwidth'] / 1e9:,.0f} GB/s, "
        f"a product of bfloat16 makes {mine['matrix'] / 1e12:,.1f} TFLOP/s"
    )
    for side, one in (("rpg_jax", mine), ("transformers", peer)):
        step = (one["new"] - one["few"]) / steps
        roofline = decode_bytes(shape, task) / mine["bandwidth"] / step
        peak = update_operations(shape, task) / mine["matrix"] / one["update"]
        rows[side] = dict(decode_tokens=task["batch"] / step, roofline=roofline, update_tokens=tokens / one["update"])
        rows[side]["peak"] = peak
        print(
            f"  {side:12s} decode {task['batch'] / step:10,.0f} tokens/s, {roofline:5.1%} of the memory roofline   "
            f"update {tokens / one['update']:10,.0f} tokens/s, {peak:5.1%} of the matrix throughput"
        )
    decode = (peer["new"] - peer["few"]) / (mine["new"] - mine["few"])
    print(f"  ours is {decode:.2f} x as fast in decode, {peer['update'] / mine['update']:.2f} x in the update")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", help="comma-separated; qwen3-0.6b and qwen3-1.7b if not given")
    parser.add_argument("--peer_python", default=sys.executable, help="the Python that has transformers and torch")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that the benchmark runs")
    parser.add_argument("--json", metavar="FILE", help="write every timing there as well")
    parser.add_argument("--worker", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    task = SMOKE if args.smoke else TASK
    sizes = (args.sizes or ("smoke" if args.smoke else "qwen3-0.6b,qwen3-1.7b")).split(",")
    unknown = [size for size in sizes if size not in SHAPES]
    if unknown:
        parser.error(f"unknown size {unknown[0]!r}; known: {', '.join(SHAPES)}")
    if args.worker == "theirs" and importlib.util.find_spec("transformers") is None:
        parser.exit(
            2,
            f"transformers is not installed in {sys.executable}: install third_party/transformers/requirements.txt, "
            "with torch for this device, into a virtual environment and pass its Python as --peer_python\n",
        )
    if args.worker:
        print(json.dumps({"ours": ours, "theirs": theirs}[args.worker](SHAPES[sizes[0]], task)))
        return
    results = []
    for size in sizes:
        found = {side: measured(side, size, task, args.peer_python) for side in ("theirs", "ours")}
        results.append(report(size, SHAPES[size], task, found))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
