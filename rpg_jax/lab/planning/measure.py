"""A plan as numbers: the memory and collectives of each phase, as compiled, and the time of an RL step."""

import contextlib
import dataclasses
import math
import pathlib
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from ml_collections import ConfigDict

from rpg_jax import InputError
from rpg_jax.lab.planning import decoding, floor, hlo
from rpg_jax.lab.planning.chips import CUDNN, GIB, Topology
from rpg_jax.lab.planning.programs import Program, device_bytes, programs
from rpg_jax.lab.planning.sketch import Sketch
from rpg_jax.lab.planning.workload import PHASES, SAMPLED, Workload
from rpg_jax.models import active_parameter_count, cudnn, parameter_count

FILLED = 0.95  # of a device's memory by the largest KV cache; the rest is for what a slot takes beside its pages
ROWS = 8  # slots of a shard are a multiple of it: a register of a TPU has so many rows


def measure(topology: Topology, sketch: Sketch) -> dict:
    """The plan of one topology: sizes in bytes, times in seconds, everything of one device."""
    sides, workload, device = sketch.sides, sketch.workload, sketch.run.mesh.devices.flat[0]
    lowers: Any = contextlib.nullcontext()
    if device.platform == "gpu":
        lowers = cudnn.without_gpu(float(device.compute_capability), CUDNN)
    with lowers, ThreadPoolExecutor() as pool:  # compilation runs on one core and releases Python's lock
        made = programs(sketch)
        memories = list(pool.map(lambda phase: memory(topology, phase, made[phase], sides[phase]), PHASES))
    phases = {}
    for phase, measured in zip(PHASES, memories, strict=True):
        cost, side = floor.costs(sides[phase])[phase], sides[phase]
        cost = cost if measured["sent"] is None else cost._replace(sent=measured["sent"])
        limits = cost.seconds(topology)
        times = dict(limits=limits, roofline_seconds=max(limits.values()))
        times["estimate"] = estimate(topology, measured, cost, floor.attention(side)[phase], 1 / side.expert)
        phases[phase] = measured | cost._asdict() | times
    return {
        "topology": topology.name,
        "devices": topology.devices,
        "mesh": dict(workload.mesh),
        "sampler": dict(sides["decode"].mesh) if sketch.is_split else None,
        "memory": topology.chip.memory,  # that programs may use
        "source": topology.chip.source,
        "parameters": parameter_count(workload.shape),
        "active": active_parameter_count(workload.shape),  # those that a token meets
        "trained": workload.trained,  # of them, or of adapters
        "rows": {
            "microbatch": workload.loop.microbatch_rows,
            "minibatch": workload.minibatch_rows,
            "slots": workload.rollout.slots,
        },
        "length": workload.length,
        "phases": phases,
        "step": step(sketch, phases),
        "cache": largest_cache(topology, sides["decode"], phases["decode"]["peak"], made["decode"].cache),
        "fits": all(phase["fits"] for phase in phases.values()),
    }


def estimate(topology, measured: dict, cost: floor.Cost, attention: floor.Cost, here: float = 1) -> dict | None:
    """What the compiler estimates a phase to take; None where it made no estimate, as for GPUs.

    xla: seconds for all but custom kernels and waiting for collectives; kernels: seconds of the custom kernels at the
    chip's peak; seconds: both, or what collectives take if that is more. `here`: the share of the rows of experts that
    have their expert on the device; no other is computed.
    """
    if measured["cycles"] is None or topology.chip.clock is None:
        return None
    xla, kernels = measured["cycles"] / topology.chip.clock, 0.0
    if measured["kernels"]:
        work = attention._replace(flops=measured["kernel_flops"] or attention.flops)
        kernels = max(work.seconds(topology).values())
    experts = floor.Cost(here * measured["grouped_flops"], measured["grouped_bytes"])
    kernels += max(experts.seconds(topology).values())
    return {"xla": xla, "kernels": kernels, "seconds": max(xla + kernels, cost.seconds(topology)["interconnect"])}


def with_sum(seconds: dict[str, float], split: bool) -> dict[str, float]:
    """The seconds of each phase in an RL step, those of both sides, `sampler` and `learner`, and `sum`, the step's:
    with a split the longer side, because one samples while the other learns."""
    sampler = sum(value for phase, value in seconds.items() if phase in SAMPLED)
    sides = {"sampler": sampler, "learner": sum(seconds.values()) - sampler}
    return seconds | sides | {"sum": max(sides.values()) if split else sum(sides.values())}


def step(sketch: Sketch, phases: dict) -> dict:
    """How often each phase runs in an RL step, and the seconds that it takes (`with_sum`): at least, and by the
    estimate."""
    workload, estimated, split = sketch.workload, {}, sketch.is_split
    times = {phase: side.times()[phase] for phase, side in sketch.sides.items()}
    seconds = {phase: times[phase] * phases[phase]["roofline_seconds"] for phase in phases}
    if all(phase["estimate"] for phase in phases.values()):
        estimated = {phase: times[phase] * phases[phase]["estimate"]["seconds"] for phase in phases}
        estimated = with_sum(estimated, split)
    return {
        "response_length": decoding.mean(workload.lengths),
        "prompt_length": workload.prompt_length,
        "times": times,
        "seconds": with_sum(seconds, split),
        "estimated": estimated,
        "generated": workload.generated_rows,
        "learned": workload.step_rows,
    }


def splits(topology: Topology, config: ConfigDict, sketched: Callable[[ConfigDict], Sketch], most: int) -> list[dict]:
    """What an RL step takes at least with 0 to `most` devices of a process that only sample (`with_sum`), by `sampler`
    devices; `refused` says why a number of them is not possible."""
    found = []
    for count in range(most + 1):
        changed = config.copy_and_resolve_references()
        changed.mesh.sampler = count
        try:
            sides = sketched(changed).sides
        except InputError as error:
            found.append({"sampler": count, "refused": str(error)})
            continue
        least = {phase: max(floor.costs(side)[phase].seconds(topology).values()) for phase, side in sides.items()}
        seconds = {phase: side.times()[phase] * least[phase] for phase, side in sides.items()}
        found.append({"sampler": count, "seconds": with_sum(seconds, count > 0)})
    return found


def largest_cache(topology: Topology, w: Workload, peak: float, cache: float) -> dict[str, float]:
    """The KV cache that fills the memory which decoding leaves, and the slots that it rarely preempts.

    Slots and pages over all shards, for rollout.slots and rollout.cache_pages, on which no response depends; seconds:
    what decoding for one RL step then takes at least. Of `peak` bytes while decoding as configured `cache` are the KV
    cache.
    """
    page_size, requests = w.rollout.page_size, w.generated_rows // w.row_shards
    pages = max(int((FILLED * topology.chip.memory - (peak - cache)) / (floor.kv_bytes(w) * page_size)), 0)
    slots = min(decoding.slots_that_fit(w.lengths, w.prompt_length, pages, page_size), requests)
    slots -= slots % ROWS if slots > ROWS else 0
    if not slots:
        return {"slots": 0, "pages": 0, "seconds": math.inf}
    slots, pages = slots * w.row_shards, pages * w.row_shards
    changed = dataclasses.replace(w, rollout=dataclasses.replace(w.rollout, slots=slots, cache_pages=None))
    a_step = max(floor.costs(changed)["decode"].seconds(topology).values())
    return {"slots": slots, "pages": pages, "seconds": changed.times()["decode"] * a_step}


def memory(topology: Topology, phase: str, program: Program, workload: Workload) -> dict:
    """Memory and work of one phase, compiled, and whether it fits: bytes of a device, None where the compiler gave no
    number; `hlo.NUMBERS` as in `hlo.work`; collectives, kind -> {count, sent}; of decoding on GPUs `hlo.launches`; and
    `refused`, the compiler's words, if it said no.
    """
    launches = phase == "decode" and topology.chip.target is not None
    experts = workload.shape.experts // workload.expert  # of a layer, on a device
    with tempfile.TemporaryDirectory() as folder:
        try:
            options = {"xla_dump_to": folder} if launches else {}
            executable = program.function.lower(*program.arguments).compile(options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return _refused(str(error), program)
        counted = {"launches": hlo.launches(_sequence(pathlib.Path(folder)))} if launches else {}
    analysis = executable.memory_analysis()
    counted_as = program.turns, program.apart, program.outside, experts, program.chunks
    work = dict(hlo.work(executable.as_text(), *counted_as))
    arguments = analysis.argument_size_in_bytes
    output = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    sizes = {
        "arguments": arguments,
        # libtpu's temp_size counts buffers that share memory twice, and it accepts programs by their peak.
        "temporaries": max(analysis.peak_memory_in_bytes - arguments - output, 0),
        "output": output,  # without what is written over arguments
        "code": analysis.generated_code_size_in_bytes,
        # The compiler drops arguments that the program never reads, but they stay in memory.
        "beside": program.beside + max(device_bytes(program.arguments) - arguments, 0),
    }
    collectives = {
        kind: {"count": work.pop(f"{kind} times"), "sent": work.pop(f"{kind} sent")}
        for kind in hlo.KINDS
        if f"{kind} times" in work
    }
    peak = sum(sizes.values())
    return sizes | work | counted | dict(peak=peak, collectives=collectives, fits=peak <= topology.chip.memory)


def _sequence(folder: pathlib.Path) -> str:
    """The thunks of the one program that was compiled with `xla_dump_to=folder`."""
    found = {file.name.partition(".thunk_sequence")[2]: file for file in folder.glob("*.thunk_sequence*.txt")}
    return (found.get("_after_thunk_passes.txt") or found[".txt"]).read_text()  # the first if they changed anything


def _refused(message: str, program: Program) -> dict:
    """What the compiler's message tells of a program that is too large: the largest size that it names is the need."""
    units = {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
    named = [float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([KMGT])\b", message)]
    arguments, beside = device_bytes(program.arguments), program.beside
    unknown = dict.fromkeys(("temporaries", "output", "code", *hlo.NUMBERS))
    sizes = dict(arguments=arguments, beside=beside, peak=max(*(named or [math.inf]), arguments) + beside)
    return unknown | sizes | dict(collectives={}, fits=False, refused=" ".join(message.split())[:200])
