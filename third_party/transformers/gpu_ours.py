"""Our side of gpu_benchmark.py: the functions that `rpg_jax.train` runs, on random prompts and parameters."""

import collections
import functools
import importlib.metadata
import pathlib
import platform
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from gpu_benchmark import decode_seconds, seconds_of, serve

from rpg_jax import objectives, parallel
from rpg_jax.models import Model, ModelConfig, cudnn
from rpg_jax.models.attention_kernels import make_attention
from rpg_jax.sampling import Decoding, Sampling, generate, prompts_to_answer
from rpg_jax.training import packing
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.policies import make_policies
from rpg_jax.training.update import init_params, init_state, make_update
from rpg_jax.types import TrainBatch

TOP = 25  # kernels of a trace


def limits(task) -> dict:
    """The device, its versions, and what it reaches: bytes/s of a copy, operations/s of a product in bfloat16."""
    device = jax.devices()[0]

    def per_second(function, x, amount):
        def run():
            y = x
            for _ in range(task["calls"]):  # in a row, so that the host's part is hidden
                y = function(y)
            y.block_until_ready()

        run()
        return amount * task["calls"] / min(seconds_of(run) for _ in range(3))

    copy, multiply = jax.jit(lambda x: x + 1), jax.jit(lambda x, y: x @ y * task["side"] ** -0.5)  # of y's size
    square = jax.random.normal(jax.random.key(0), (task["side"],) * 2, jnp.bfloat16)  # zeros would be faster
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu")
    installed = {distribution.name: distribution.version for distribution in importlib.metadata.distributions()}
    return dict(
        device=device.device_kind,
        versions={"python": platform.python_version()} | {n: installed[n] for n in names if n in installed},
        bandwidth=per_second(copy, jnp.ones(task["copy"], jnp.bfloat16), 4 * task["copy"]),
        matrix=per_second(functools.partial(multiply, square), square, 2 * task["side"] ** 3),
    )


def setting(shape, pack=False):
    """(mesh, model, optimizer, state) of random parameters, on the first device."""
    mesh = parallel.make_mesh(1, devices=jax.devices()[:1])
    names = dict(vocab="vocab_size", hidden="hidden_size", mlp="mlp_size")
    config = ModelConfig(**{names.get(name, name): size for name, size in shape.items()}, qk_norm=True)
    heads = parallel.sharding.ACTIVATIONS["heads"]
    attention = make_attention("auto", mesh, heads, dtype=jnp.bfloat16, head_dim=config.head_dim, pack=pack)
    model = Model(config, dtype=jnp.bfloat16, remat="dots", attention=attention)
    optimizer = make_optimizer("adamw", learning_rate=1e-6)
    return mesh, model, optimizer, init_state(optimizer, mesh, init_params(model, mesh, 0))


def make_decode(shape, task):
    """`decode(new)` draws so many tokens for each row."""
    mesh, model, optimizer, state = setting(shape)
    policies = make_policies(model, optimizer, mesh, state)
    policy = policies.sampling_params(policies.current(state), {})
    rows = task["rows"]
    tokens = np.random.default_rng(0).integers(1, shape["vocab"], (rows, task["prompt"])).astype(np.int32)
    arrays = tokens, np.full(rows, task["prompt"], np.int32), np.arange(rows, dtype=np.int32)
    sizes = dict(samples=1, max_new=task["new"])
    prompts = prompts_to_answer(*parallel.to_global(mesh, parallel.ROWS, arrays), **sizes)
    settings = dict(sampling=Sampling.make(), decoding=Decoding(rows), step=0, **sizes)
    key = jax.random.key(0, impl="threefry2x32")

    def decode(new):
        limits = parallel.to_global(mesh, parallel.ROWS, np.full(rows, new, np.int32))
        jax.block_until_ready(generate(model, policy, prompts, key=key, limits=limits, **settings))

    return decode


def make_updates(shape, task, pack):
    """`update()` learns from a batch once; its sequences have rows of their own, or share those of a plan."""
    mesh, model, optimizer, state = setting(shape, pack)
    columns = task["columns"] if pack else None
    settings = dict(rows=task["microbatch_rows"], temperature=1.0, clip_norm=1.0, logprob_chunk=256)
    objective = objectives.make("grpo", beta=0.0)
    run = make_update(model, objective, optimizer, mesh, state, packed_columns=columns, **settings)
    length, rng = np.array(task["lengths"], np.int32), np.random.default_rng(0)
    rows = (len(length), int(length.max()))
    position, logp = np.arange(rows[1]), np.full(rows, -np.log(shape["vocab"]), np.float32)
    batch = TrainBatch(
        tokens=rng.integers(0, shape["vocab"], rows).astype(np.int32),
        length=length,
        loss_mask=(position >= task["prompt"]) & (position < length[:, None]),
        behavior_logp=logp,
        reference_logp=logp,
        advantage=rng.normal(size=(rows[0], 1)).astype(np.float32),
        weight=np.ones_like(logp),
    )
    batch = parallel.to_global(mesh, parallel.ROWS, batch)
    plan = packing.plan(length, task["microbatch_rows"], columns, cudnn.SEQUENCES)

    def update():
        nonlocal state
        state, _ = jax.block_until_ready(run(state, batch, plan, {}))

    return update


def kernels(planes) -> dict:
    """Kernels of a GPU in a trace: seconds that they took and spanned, launches, [name, seconds, launches] of the top.

    Streams alone: other lines of a device say again what was launched, by program, operation or source.
    """
    seconds, counts, begin, end = collections.Counter(), collections.Counter(), float("inf"), 0.0
    for plane in planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            for event in line.events if line.name.startswith("Stream") else ():
                seconds[event.name] += event.duration_ns / 1e9
                counts[event.name] += 1
                begin, end = min(begin, event.start_ns), max(end, event.start_ns + event.duration_ns)
    if not seconds:
        return dict(failed="it has no stream of a GPU")
    top = [[name, spent, counts[name]] for name, spent in seconds.most_common(TOP)]
    return dict(busy=sum(seconds.values()), span=(end - begin) / 1e9, launches=sum(counts.values()), top=top)


def traced(run) -> dict:
    """`kernels` of a call. XLA records none of its command buffers while it is traced, so that each kernel is seen."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        return kernels(plane for file in files for plane in jax.profiler.ProfileData.from_file(str(file)).planes)


def build(work, shape, task) -> dict:
    """Steps of a work by name, each () -> the reply."""
    if work == "limits":
        return dict(ours=lambda: limits(task) | dict(seconds=0.0, peak=None))
    if work.startswith("decode"):
        decode = make_decode(shape, task)
        step, short = lambda: decode_seconds(decode, task), lambda: decode(task["few"])
    else:
        update = make_updates(shape, task, pack=work == "update:packed")
        step, short = lambda: seconds_of(update), update

    def ours():
        seconds = step()
        memory = jax.devices()[0].memory_stats() or {}  # the CPU's has none
        return dict(seconds=seconds, peak=memory.get("peak_bytes_in_use"))

    return dict(ours=ours, trace=lambda: traced(short))


if __name__ == "__main__":
    serve(build)
