"""Plans: the chips' table, collectives of programs, work and memory against the model itself, and the command."""

import contextlib
import dataclasses
import json
import math
import pathlib
import re
import subprocess
import types
from unittest import mock

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from fuzzing import outcome
from processes import child
from test_rollout import loop_settings, settings

from configs import paper
from rpg_jax import parallel
from rpg_jax.lab.planning import calibration, chips, command, decoding, floor, hlo, measure, programs, report, sketch
from rpg_jax.lab.planning.workload import PHASES, Workload
from rpg_jax.models import SIZES, Model, cudnn, parameter_count, token_logprobs, unstack_layers
from rpg_jax.run import compiler
from rpg_jax.sampling.generate import make_sampler
from rpg_jax.sampling.paged_attention import BLOCKS

ROOT = pathlib.Path(__file__).parents[1]
SMOKE = "--config=configs/quickstart.py:smoke"


def workload(
    shape, remat="none", dtype=jnp.float32, mesh=None, loop=(), rollout=(), lengths="fixed:5", **facts
) -> Workload:
    sizes = dict(max_prompt=6, max_new=10, slots=4, oversample=2.0, max_batches=1, overlong_buffer=0) | dict(rollout)
    learning = dict(steps=1, prompts=4, samples=2, minibatch_prompts=2, microbatch_rows=2, epochs=1) | dict(loop)
    return Workload(
        model=Model(shape, dtype=dtype, remat=remat),
        mesh=mesh or dict(data=1, fsdp=1, tensor=1),
        rollout=settings(**sizes),
        loop=loop_settings(**learning),
        lengths=decoding.parse(lengths, 10),
        **dict(prompt_length=6, moments=2, reference_passes=0) | facts,
    )


def test_topologies_are_those_that_exist_and_others_are_refused_with_those_that_do():
    assert [one.devices for one in chips.parse("v5e:8x8, v5p:2x2x4,v6e:1x1,h100:16")] == [64, 16, 1, 16]
    shapes = {"v5p:4x4x4": "4x4x4", "a100:4": "1x1x4", "h100:8": "1x1x8", "h200:32": "1x4x8"}
    assert [one.shape for one in chips.parse(",".join(shapes))] == list(shapes.values())
    near, far = chips.parse("h100:8,h100:16")
    assert near.wire() == chips.CHIPS["h100"].links > far.wire() == chips.CHIPS["h100"].network
    for name, chip in chips.CHIPS.items():
        assert chip.source.startswith("https://"), name
        assert 10e9 < chip.memory < 200e9 < chip.bandwidth < 10e12 < chip.flops < 3e15 and chip.links < 1e12, name
    refused = {"v5e:3x3": "v5e:{1x1,2x2,2x4", "tpu9:2x2": "v5e, v5p, v6e", "h100:12": "multiple of 8", "": "''"}
    refused["h100:800000"] = "multiple of 8 below 100,000"
    for name, says in refused.items():
        with pytest.raises(ValueError, match=rf"--topology={name}.*{re.escape(says)}"):
            chips.parse(f"v5e:4x4,{name}")


def test_work_of_a_program_counts_as_often_as_it_is_done():
    """As libtpu writes it: a loop that the compiler counted, one of a counter raised by 2, one of a traced count."""
    text = (ROOT / "tests/data/step.hlo").read_text()
    found = hlo.work(text, traced=3, experts=4, within=2)
    sent = {
        "collective-permute": (4, 4 * 128),  # 0, 2, 4, 6; 8 x 4 float32 are 128 bytes
        "all-reduce": (3 + 5, 8 * 2 * 128 * 3 / 4),
        "all-gather": (1, 64 * 3 / 4),
        "reduce-scatter": (1, 16 * 7),
        "collective-broadcast": (3 * 2 + 5 * 3, 21 * 128),  # in a loop of a traced count within each of two loops
    }
    assert {kind: (found[f"{kind} times"], found[f"{kind} sent"]) for kind in sent} == sent
    assert found["sent"] == sum(size for _, size in sent.values())
    assert found["cycles"] == 4 * 70 + 9  # the largest int64 stands for unknown
    # Half of 8 x 8 pairs for each of 2 heads, three products of 16 multiplications and additions.
    assert found["kernels"] == 16 and found["kernel_flops"] == 8 * 2 * 32 * 3 * 2 * 16
    # A product of experts and the gradient of their kernels.
    assert found["grouped_flops"] == 2 * 2 * 16 * 8 * 3 and found["grouped_bytes"] == 2 * 2 * 4 * 8 * 3
    assert hlo.work(text, traced=3, experts=1)["grouped_bytes"] == 2 * 2 * 8 * 3
    # Outside of loops by its share, and what is apart not.
    found = hlo.work(text, traced=3, outside=0.25)
    assert found["cycles"] == 4 * 70 + 9 / 4 and found["reduce-scatter times"] == 1 / 4
    assert found["reduce-scatter sent"] == 16 * 7 / 4 and found["all-reduce times"] == 3 + 5
    rest = hlo.work(text, traced=3, apart=("prefill", "filters"))
    assert rest["all-reduce times"] == 5 and "reduce-scatter times" not in rest
    assert rest["kernels"] == 10 and rest["cycles"] == 4 * 70 + 9


def test_what_a_turn_of_the_innermost_large_loop_launches():
    sequence = (ROOT / "tests/data/decode.thunks").read_text()
    inner = dict(kernels=4, outside=3, command_buffers=1, conditionals=1, loops=0)
    assert hlo.launches(sequence) == inner
    outer = dict(kernels=8, outside=6, command_buffers=2, conditionals=1, loops=2)
    wider = "".join(f"    {n}: kCustomKernel [source | sink] loop_add_fusion\n" for n in range(100, 103))
    more = dict(kernels=3, outside=3)
    assert hlo.launches(sequence + wider) == {name: count + more.get(name, 0) for name, count in outer.items()}
    buffered = "".join(f"    {line}\n" for line in sequence.strip().splitlines())
    assert hlo.launches("000: kCommandBuffer [source | sink]\n" + buffered)["outside"] == 0


def operations(jaxpr, chunks) -> float:
    """Multiplications and additions of a function's matrix products; a loop of no fixed length has `chunks` turns."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        elif equation.primitive.name == "cond":
            total += max(operations(branch.jaxpr, chunks) for branch in equation.params["branches"])
        else:
            turns = {"scan": equation.params.get("length"), "while": chunks}.get(equation.primitive.name, 1)
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                total += turns * operations(inner, chunks)
    return total


@pytest.mark.parametrize(("size", "remat"), [("tiny", "none"), ("tiny", "dots"), ("qwen2.5-0.5b", "full")])
def test_operations_of_an_update_are_those_of_the_model(size, remat):
    """Without attention, whose blocks depend on the length; its own share is tested by hand below."""
    shape = dataclasses.replace(SIZES[size], vocab_size=512, layers=3)
    model = Model(shape, scan=True, remat=remat, attention=lambda q, k, v, **_: q + 0 * k[:, :, :1] + 0 * v[:, :, :1])
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((4, 16), jnp.int32)

    def loss(params, tokens):
        return token_logprobs(model, params, tokens, tokens > 0, chunk=8).sum()

    counted = operations(jax.make_jaxpr(jax.grad(loss))(params, tokens).jaxpr, chunks=2)
    cost = floor.costs(workload(shape, remat))["update"]
    # Half of all pairs of 16 tokens, two products forward and five backward, and forward again where it is not kept.
    passes = 3.5 + {"none": 0, "dots": 1, "full": 1}[remat]
    attention = passes * 2 * shape.heads * shape.head_dim * 16**2 * 4 * shape.layers
    assert cost.flops - attention == pytest.approx(counted, rel=1e-6)


def test_the_largest_cache_fills_the_memory_that_is_left():
    shape = SIZES["tiny"]
    pool = jax.eval_shape(lambda: BLOCKS.empty(shape, jnp.bfloat16, 4, 16))  # of 4 slots with a page of 16 tokens each
    held = shape.layers * sum(leaf.size * leaf.dtype.itemsize for leaf in pool)
    assert floor.kv_bytes(workload(shape, dtype=jnp.bfloat16)) * 4 * 16 == held
    [topology] = chips.parse("h100:8")
    sizes = dict(prompts=4096, slots=64, page_size=4)
    w = workload(SIZES["m1"], lengths="uniform", rollout=sizes, mesh=dict(data=8, fsdp=1, tensor=1))
    page, found = floor.kv_bytes(w) * 4, []
    for memory in (2e6, 4e6):
        small = topology._replace(chip=topology.chip._replace(memory=memory))
        found.append(measure.largest_cache(small, w, peak=1.2e6, cache=1e6))
        slots, pages = found[-1]["slots"] // 8, found[-1]["pages"] // 8
        assert slots % 8 == 0 and abs(0.2e6 + pages * page - 0.95 * memory) < page
        assert slots <= decoding.slots_that_fit(w.lengths, w.prompt_length, pages, 4) < slots + 8
    assert found[0]["slots"] < found[1]["slots"] and found[0]["seconds"] > found[1]["seconds"]
    full = topology._replace(chip=topology.chip._replace(memory=1e6))
    assert measure.largest_cache(full, w, peak=1.2e6, cache=0.0)["slots"] == 0


def test_a_checkpoint_that_is_not_here_is_planned_as_the_size_of_its_name(tmp_path):
    config = paper.get_config("qwen2.5-7b,grpo,2k")
    known = {config.model.checkpoint: "qwen2.5-7b", "elsewhere/Qwen3-0.6B-base": "qwen3-0.6b", str(tmp_path): None}
    for folder, size in known.items():
        config.model.checkpoint = folder
        assert sketch.planned_size(config) == size
    config.model.checkpoint = "elsewhere/mine"
    with pytest.raises(ValueError, match=r"elsewhere/mine is not here.*one of: .*qwen3-4b"):
        sketch.planned_size(config)


BENCHMARK = ROOT / "tests/data/gpu_benchmark.json"
MEASURED = json.loads(BENCHMARK.read_text())
DECODE = MEASURED["works"]["decode:64"]


@pytest.mark.parametrize(("slots", "packed", "times"), [(64, None, (0.00318, 0.5)), (500, 2048, (0.00683, 0.7))])
def test_a_plan_of_what_was_measured_takes_the_time_that_it_took(slots, packed, times):
    rows, [topology] = calibration.read(str(BENCHMARK)), chips.parse("h100:1")
    decode, update = (next(row for row in rows if row["seconds"] == time) for time in times)
    rollout = dict(max_prompt=int(update["length"]) - 10, max_new=10, slots=decode["rows"], dynamic_sampling=False)
    loop = dict(samples=1) | dict.fromkeys(("prompts", "minibatch_prompts", "microbatch_rows"), update["rows"])
    w = workload(SIZES["qwen3-0.6b"], "dots", jnp.bfloat16, None, loop, rollout, prompt_length=221)  # and 3 by then
    least = {phase: max(cost.seconds(topology).values()) for phase, cost in floor.costs(w).items()}
    rollout, loop = dataclasses.replace(w.rollout, slots=slots), dataclasses.replace(w.loop, packed_columns=packed)
    sides = dict.fromkeys(PHASES, dataclasses.replace(w, rollout=rollout, loop=loop))
    found = calibration.applied(rows, sides, least)["seconds"]
    assert (found["decode"], found["update"]) == pytest.approx(times)
    assert found["prefill"] / least["prefill"] == pytest.approx(times[1] / least["update"])


@pytest.mark.parametrize("change", [
    {"device": "NVIDIA L4"}, {"size": "mine"}, {"works": {}}, {"works": 3}, {"works": {"decode:64": DECODE}},
    {"device": "NVIDIA H100 PCIe"}, "[" * 99999,
    *({"works": MEASURED["works"] | {"decode:64": DECODE | wrong}}
      for wrong in ({"rows": 0}, {"rows": "x"}, {"seconds": 1.0}, {"seconds": {"median": math.nan}})),
])  # fmt: skip
def test_measurements_of_something_else_are_refused(change, tmp_path):
    path = tmp_path / "measured.json"
    path.write_text(change if isinstance(change, str) else json.dumps(MEASURED | change))
    with pytest.raises(ValueError, match=f"--measured={path}: expected what gpu_benchmark.py --json writes"):
        calibration.read(str(path))


def has_compiler(topology):
    with contextlib.suppress(ValueError):
        return command.check_compilers(chips.parse(topology)) is None


@pytest.mark.skipif(not has_compiler("h100:1"), reason="needs the CUDA plugin of the installed jax")
def test_the_command_compiles_for_gpus(tmp_path):
    """A small model, for a GPU and for a machine of them: all programs of a step."""
    path, weights = tmp_path / "out.json", 4 * parameter_count(SIZES["tiny"])
    small = "model.scan=True model.dtype=bfloat16 mesh.data=1 mesh.fsdp=-1 rollout.slots=16 rollout.prompts=8 "
    small += "learner.microbatch_rows=8 rollout.dynamic_sampling=True rollout.oversample=2"
    flags = ["--lengths=fixed:9", "--prompt_length=7", "--topology=h100:1,h100:8", f"--measured={BENCHMARK}"]
    flags += [f"--config.{key}" for key in small.split()]
    text = child("-m", "rpg_jax.plan", SMOKE, *flags, f"--json={path}")
    for plan, devices in zip(json.loads(path.read_text()), (1, 8), strict=True):
        phases, update = plan["phases"], plan["phases"]["update"]
        assert plan["mesh"] == dict(data=1, fsdp=devices, tensor=1, expert=1) and tuple(phases) == PHASES
        # Float32 parameters, the averaged iterate and the second moment; then at least their gradient.
        assert 3 < update["arguments"] / (weights / devices) < 3.1 and update["temporaries"] > weights / devices
        # A decode step is a CUDA graph without branches; of one GPU only the loop's condition is outside of it, and of
        # eight what runs beside the all-reduce is a second one.
        launches, (outside, graphs) = dict(phases["decode"]["launches"]), (1, 1) if devices == 1 else (6, 2)
        assert 10 * SIZES["tiny"].layers < launches.pop("kernels") <= 80 and launches.pop("outside") <= outside
        assert launches == dict(command_buffers=graphs, conditionals=0, loops=0)
        assert plan["measured"]["seconds"]["sum"] > plan["step"]["seconds"]["sum"] and not plan["step"]["estimated"]
        assert ("all-gather" in update["collectives"]) == (devices > 1) == any(one["sent"] for one in phases.values())
        assert plan["fits"] and f"{plan['topology']}: it fits" in text
        tight = plan | {"fits": False, "phases": {name: one | {"fits": False} for name, one in phases.items()}}
        assert f"{plan['topology']}: it does NOT fit: prefill" in report.text(tight)
    assert "7 + 9 tokens a response" in text and "estimate s" not in text and "nothing is autotuned" in text


@pytest.mark.skipif(not has_compiler("h100:1"), reason="needs the CUDA plugin of the installed jax")
@pytest.mark.parametrize(("size", "max_new", "most"), [("qwen3-0.6b", 160, 420), ("gemma3-270m", 1024, 440)])
def test_a_decode_step_for_an_h100_is_one_graph_without_branches(size, max_new, most):
    """256 rows, also longer than a window: of so many kernels only the loop's condition is outside of the graph."""
    [topology] = chips.parse("h100:1")
    mesh = parallel.make_mesh(data=1, devices=command.topology_devices(topology))
    sizes = dict(prompts=32, samples=8, slots=256, max_prompt=128, max_new=max_new, dynamic_sampling=False)
    w = workload(SIZES[size], dtype=jnp.bfloat16, rollout=sizes)
    model = dataclasses.replace(w.model, constrain=parallel.make_constrain(mesh))
    shapes = jax.eval_shape(unstack_layers, model.shapes)
    layout = parallel.shardings(mesh, shapes, parallel.SAMPLING)
    params = jax.tree.map(lambda x, at: x.update(dtype=jnp.bfloat16, sharding=at), shapes, layout)
    decode = programs.sampler_programs(model, mesh, params, w.rollout)["decode"]
    with cudnn.without_gpu():
        found = measure.memory(topology, "decode", programs.Program(*decode, beside=0.0, turns=1), w)["launches"]
    assert found.pop("kernels") <= most and found == dict(outside=1, command_buffers=1, conditionals=0, loops=0), found


@pytest.mark.parametrize(("arguments", "says"), [
    ((SMOKE,), "--topology=CHIP:SHAPE"), (("--topology=v5e:4x4",), "--config=FILE.py"),
    ((SMOKE, "--topology=h100:8", "--lengths=fixed:37"), "at most 36"),
    ((SMOKE, "--topology=h100:8", "--prompt_length=0"), "--prompt_length=0.0"),
    ((SMOKE, "--topology=h100:8", "--measured=none.json"), "--measured=none.json: expected what gpu_benchmark"),
    ((SMOKE, "--topology=h100:8,v5e:2x2", "--measured=none.json"), "--topology=h100:8,v5e:2x2 has TPUs"),
    ((SMOKE, "--topology=h100:8", "--config.mesh.fsdp=3"), "h100:8: mesh data=-1, fsdp=3, tensor=1"),
])  # fmt: skip
def test_mistakes_are_one_line(arguments, says, monkeypatch):
    """Also those that the process of a topology finds, which here is this one."""

    def worker(words, env, **_):
        assert env["XLA_CLIENT_MEM_FRACTION"] == "0.95"  # of a GPU, as for every command
        status, out, err = outcome("plan", *words[words.index("rpg_jax.plan") + 1 :])
        return subprocess.CompletedProcess(words, status, out, err)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command.subprocess, "run", worker)
    monkeypatch.setattr(command, "check_compilers", lambda topologies: None)
    monkeypatch.setattr(command, "topology_devices", lambda topology: jax.devices()[: topology.devices])
    status, out, err = outcome("plan", *arguments)
    assert status == 2 and not out and err.startswith("error: ") and err.count("\n") == 1, err
    assert says in err


@pytest.mark.parametrize(("topology", "package"), [("v5e:2x2", "libtpu"), ("h100:1", command.PLUGIN)])
def test_the_compiler_must_be_there_and_be_the_one_of_this_jax(topology, package, monkeypatch):
    missing = mock.Mock(side_effect=command.importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(command.importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=rf"{topology} is compiled by {package}.*pip install '{package}[<=]="):
        command.check_compilers(chips.parse(topology))
    monkeypatch.setattr(command.importlib.metadata, "version", lambda name: "0.0.1")
    with pytest.raises(ValueError, match=f"{package} 0.0.1 does not go with jax"):
        command.check_compilers(chips.parse(topology))


@pytest.mark.skipif(not has_compiler("v5e:1x1"), reason="needs the libtpu of the installed jax")
def test_the_command_compiles_for_tpus(tmp_path):
    """A small model for a slice of four, all programs of a step."""
    path, weights = tmp_path / "out.json", 4 * parameter_count(SIZES["tiny"]) / 4  # bytes of a device
    small = "model.scan=True model.dtype=bfloat16 mesh.data=1 mesh.fsdp=2 mesh.tensor=2".split()
    flags = [SMOKE, *(f"--config.{key}" for key in small), "--topology=v5e:2x2", f"--json={path}"]
    text, [found] = child("-m", "rpg_jax.plan", *flags), json.loads(path.read_text())
    update, decode = (found["phases"][name] for name in ("update", "decode"))
    assert found["fits"] and "compiled; usable are 15.75" in text
    assert 4 * weights < update["arguments"] < 1.2 * 4 * weights and update["temporaries"] > weights  # the gradient
    assert update["collectives"]["all-reduce"]["sent"] > 0 < decode["sent"]


def simulated(lengths, slots, prompt):
    """Continuous batching of one shard, step by step: steps, tokens read, most tokens held at once."""
    queue, left, drawn = list(lengths), np.zeros(slots, int), np.zeros(slots, int)
    count = read = most = 0
    while queue or left.any():
        for slot in np.flatnonzero(left == 0):
            if queue:
                left[slot], drawn[slot] = queue.pop(), 0
        drawn += left > 0
        held = (drawn + prompt)[left > 0].sum()
        count, read, most, left = count + 1, read + held, max(most, held), np.maximum(left - 1, 0)
    return count, read, most


@pytest.mark.parametrize(("kind", "requests"), [
    ("uniform", 400), ("lognormal:60,1.0", 8), ("lognormal:60,1.0", 400), ("fixed:80", 400),
])  # fmt: skip
def test_decoding_takes_as_long_as_a_simulation_of_it(kind, requests):
    rng, slots, prompt = np.random.default_rng(0), 16, 20
    lengths = decoding.parse(kind, 200)
    assert lengths.sum() == pytest.approx(1) and len(lengths) == 201 and lengths[0] == 0
    runs = [simulated(rng.choice(201, requests, p=lengths), slots, prompt) for _ in range(6400 // requests)]
    count, read, most = np.array(runs).T
    assert decoding.steps(lengths, requests, slots) == pytest.approx(count.mean(), rel=0.03)
    assert decoding.steps(lengths, requests, slots, 4) == pytest.approx(count.reshape(-1, 4).max(1).mean(), rel=0.03)
    tokens = requests * decoding.mean(lengths)  # each of which reads its prompt and what was drawn before it
    assert tokens * (prompt + decoding.age(lengths)) == pytest.approx(read.mean(), rel=0.03)
    if requests > slots and not kind.startswith("fixed"):  # responses of one length never spread over the ages
        fits = decoding.slots_that_fit(lengths, prompt, int(np.quantile(most, 0.9)), 1)
        assert slots - 3 <= fits <= slots + 1


def test_distributions_of_lengths():
    uniform = decoding.parse("uniform", 8192)
    assert decoding.mean(uniform) == 4096.5 and decoding.age(uniform) == pytest.approx(8192 / 3, rel=1e-3)
    assert decoding.mean(decoding.parse("fixed:9.25", 36)) == 9.25
    assert decoding.mean(decoding.parse("lognormal:100,1", 10**5)) == pytest.approx(100.5, rel=1e-3)  # rounded up
    assert decoding.parse("lognormal:100,1", 200)[200] > 0.1  # cut off
    for mistake in ("uniform:3", "fixed", "fixed:37", "fixed:0", "lognormal:100", "lognormal:100,x", "normal:3,4"):
        with pytest.raises(ValueError, match=f"--lengths={mistake}: expected uniform, lognormal:MEAN,SIGMA"):
            decoding.parse(mistake, 36)


# One layer of Qwen3-4B, forward, without attention: products with weights that are divided over 16 chips.
LAYER = """
import dataclasses, os
from rpg_jax.lab.planning import chips, command, floor, hlo
from rpg_jax.run import compiler

os.environ |= command.ENVIRONMENT | compiler.libtpu_arguments({})
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding
from rpg_jax import parallel
from rpg_jax.models import SIZES, Model

[topology] = chips.parse("v5p:2x2x4")
mesh = parallel.make_mesh(data=1, fsdp=-1, devices=command.topology_devices(topology))
shape = dataclasses.replace(SIZES["qwen3-4b"], layers=1, vocab_size=256)
functions = dict(constrain=parallel.make_constrain(mesh), per_shard=parallel.make_per_shard(mesh))
model = Model(shape, dtype=jnp.bfloat16, attention=lambda q, k, v, **_: q, **functions)
params = jax.eval_shape(model.init, jax.random.key(0))
of = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
params = jax.tree.map(of, params, parallel.shardings(mesh, params))
tokens = of(jax.ShapeDtypeStruct((16, 4096), jnp.int32), NamedSharding(mesh, parallel.ROWS))
text = jax.jit(lambda params, tokens: model.hidden(params, tokens).sum()).lower(params, tokens).compile().as_text()
limit = 2 * floor.layer_weights(shape) * 4096 / topology.chip.flops
print(limit / (hlo.work(text, 1)["cycles"] / topology.chip.clock))
"""


@pytest.mark.skipif(not has_compiler("v5e:1x1"), reason="needs the libtpu of the installed jax")
def test_the_estimate_of_a_layer_stays_near_the_limit_of_the_chip():
    """Share of the peak that XLA expects: 0.75 with the options of `compiler` and 0.30 without them."""
    assert float(child("-c", LAYER)) > 0.7


def test_options_of_the_compiler_give_way_to_those_of_the_environment():
    [ours] = compiler.libtpu_arguments({}).values()
    assert ours.split() == [f"--{name}={value}" for name, value in compiler.OPTIONS.items()]
    assert compiler.libtpu_arguments({"LIBTPU_INIT_ARGS": ours}) == {"LIBTPU_INIT_ARGS": ours}
    first = next(iter(compiler.OPTIONS))
    changed = compiler.libtpu_arguments({"LIBTPU_INIT_ARGS": f"--{first}=1 --other=2"})["LIBTPU_INIT_ARGS"].split()
    assert changed[-2:] == [f"--{first}=1", "--other=2"] and len(changed) == len(compiler.OPTIONS) + 1


def test_programs_for_tpus_tell_nothing_of_the_frames_that_traced_them():
    """libtpu crashes, or does not end, where it merges the frames of a large sampler with a tensor axis."""
    frames = jax.config.jax_traceback_in_locations_limit
    on_tpu = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform="tpu")]))

    def lowered():
        return jax.jit(lambda x: jnp.sin(x) + 1).lower(1.0).as_text(debug_info=True)

    try:
        assert "callsite" in lowered()
        with pytest.raises(AttributeError):  # after the platform it looks at the model, and there is none
            make_sampler(None, on_tpu, None, 1, 1, 1)
        assert "callsite" not in lowered()
    finally:
        jax.config.update("jax_traceback_in_locations_limit", frames)
