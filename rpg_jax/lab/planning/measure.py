"""A plan as numbers: memory of each phase, compiled or modelled, and the roofline time of an RL step."""

import math
import re
from concurrent.futures import ThreadPoolExecutor

import jax

from rpg_jax.lab.planning import decoding, estimates, hlo
from rpg_jax.lab.planning.cache import largest_cache
from rpg_jax.lab.planning.chips import GIB, Topology
from rpg_jax.lab.planning.estimates import Workload
from rpg_jax.lab.planning.needs import NEEDS
from rpg_jax.lab.planning.programs import Program, programs
from rpg_jax.lab.planning.sketch import Sketch
from rpg_jax.models import parameter_count


def measure(topology: Topology, sketch: Sketch) -> dict:
    """The plan of one topology: sizes in bytes, times in seconds, everything of one device.

    Keys: topology, compiled, devices, mesh, memory (bytes that programs may use), source, parameters, trained (of them,
    or of adapters), remat, rows, length, needs (temporaries of each phase), phases (memory and cost of each), step (an
    RL step), cache (the largest KV cache), fits.
    """
    made, workload = programs(sketch), sketch.workload
    with ThreadPoolExecutor() as pool:  # compilation runs on one core and releases Python's lock
        memories = list(pool.map(lambda phase: memory(topology, phase, made[phase], workload), made))
    phases = {}
    for phase, phase_memory in zip(made, memories, strict=True):
        cost = estimates.COSTS[phase](workload)
        if phase_memory["sent"] is not None:
            cost = cost._replace(sent=phase_memory["sent"])
        limits = cost.seconds(topology)
        phases[phase] = (
            phase_memory
            | cost._asdict()
            | {
                "limits": limits,
                "roofline_seconds": max(limits.values()),
                "estimate": estimate(topology, phase, phase_memory, workload),
            }
        )
    return {
        "topology": topology.name,
        "compiled": topology.compiled,
        "devices": topology.devices,
        "mesh": dict(workload.mesh),
        "memory": topology.chip.memory,
        "source": topology.chip.source,
        "parameters": parameter_count(workload.shape),
        "trained": workload.trained,
        "remat": workload.model.remat,
        "rows": {
            "microbatch": workload.loop.microbatch_rows,
            "minibatch": workload.minibatch_rows,
            "slots": workload.rollout.slots,
        },
        "length": workload.length,
        "needs": {phase: needs(workload) for phase, needs in NEEDS.items()},
        "phases": phases,
        "step": step(workload, phases),
        "cache": largest_cache(topology, workload, phases["decode"]["peak"], made["decode"].cache),
        "fits": all(phase["fits"] for phase in phases.values()),
    }


def estimate(topology: Topology, phase: str, measured: dict, workload: Workload) -> dict | None:
    """What the compiler estimates a phase to take, beside the chip's limit; None where it made no estimate.

    Returns:
      limit: seconds at the limit of the chip for what the compiler estimates, which is all but custom kernels and
      waiting for collectives; xla: its estimate of that; share: their ratio; kernels: seconds of the custom kernels at
      the chip's peak; seconds: xla and kernels, or what collectives take if that is more.
    """
    if measured["cycles"] is None:
        return None
    chip, cost, kernels = topology.chip, estimates.COSTS[phase](workload), measured["kernels"]
    attention = estimates.ATTENTION[phase](workload) if kernels else estimates.Cost(0, 0, 0)
    flops = sum(kernel["flops"] for kernel in kernels.values()) or attention.flops
    within = cost._replace(flops=cost.flops - attention.flops, bytes=cost.bytes - attention.bytes, sent=0)
    limit, xla = max(within.seconds(topology).values()), measured["cycles"] / chip.clock
    at_peak = max(attention._replace(flops=flops).seconds(topology).values())
    sending = cost._replace(sent=measured["sent"]).seconds(topology)["interconnect"]
    seconds = max(xla + at_peak, sending)
    return {"limit": limit, "xla": xla, "share": limit / xla, "kernels": at_peak, "seconds": seconds}


def step(workload: Workload, phases: dict) -> dict:
    """How often each phase runs in an RL step, and the seconds that it takes: at least, and by the estimate."""
    times = estimates.times(workload)
    seconds = {phase: times[phase] * phases[phase]["roofline_seconds"] for phase in phases}
    estimated = {}
    if all(phase["estimate"] for phase in phases.values()):
        estimated = {phase: times[phase] * phases[phase]["estimate"]["seconds"] for phase in phases}
        estimated["sum"] = sum(estimated.values())
    return {
        "response_length": decoding.mean(workload.lengths),
        "prompt_length": workload.prompt_length,
        "times": times,
        "seconds": seconds | {"sum": sum(seconds.values())},
        "estimated": estimated,
        "generated": workload.generated_rows,
        "learned": workload.step_rows,
    }


def memory(topology: Topology, phase: str, program: Program, workload: Workload) -> dict:
    """Memory and collectives of one phase, and whether it fits.

    Returns:
      arguments, output (without what is written over arguments), temporaries (held at once in addition), code, beside
      and peak: bytes of a device, None where the compiler gave no number; collectives: kind -> {count, sent}; sent:
      bytes to other devices; fits; and `refused`, the compiler's words, if it said no.
    """
    measured = compiled(program) if topology.compiled else modelled(program, phase, workload)
    return measured | {"fits": "refused" not in measured and measured["peak"] <= topology.chip.memory}


def compiled(program: Program) -> dict:
    """Compiles a program for the devices of its arguments."""
    try:
        executable = program.function.lower(*program.arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refused(str(error), program)
    analysis = executable.memory_analysis()
    work = hlo.work(executable.as_text(), program.turns, program.apart, program.outside)
    arguments = analysis.argument_size_in_bytes
    output = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    sizes = {
        "arguments": arguments,
        # libtpu's temp_size counts buffers that share memory twice, and it accepts programs by their peak.
        "temporaries": max(analysis.peak_memory_in_bytes - arguments - output, 0),
        "output": output,
        "code": analysis.generated_code_size_in_bytes,
        # The compiler drops arguments that the program never reads, but they stay in memory.
        "beside": program.beside + max(program.argument_bytes() - arguments, 0),
    }
    return sizes | {
        "peak": sum(sizes.values()),
        "collectives": {kind: traffic._asdict() for kind, traffic in work.collectives.items()},
        "sent": work.sent(),
        "cycles": work.cycles,
        "kernels": {name: kernel._asdict() for name, kernel in work.kernels.items()},
    }


def _refused(message: str, program: Program) -> dict:
    """What the compiler's message tells of a program that is too large: the largest size that it names is the need."""
    units = {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
    sizes = [float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([KMGT])\b", message)]
    arguments = program.argument_bytes()
    peak = max(max(sizes, default=math.inf), arguments) + program.beside
    unknown = dict.fromkeys(("temporaries", "output", "code", "sent", "cycles"))
    refused = " ".join(message.split())[:200]
    sizes = dict(arguments=arguments, beside=program.beside, peak=peak)
    return unknown | sizes | dict(collectives={}, kernels={}, refused=refused)


def modelled(program: Program, phase: str, workload: Workload) -> dict:
    """The same numbers from shapes alone."""
    arguments, temporaries = program.argument_bytes(), NEEDS[phase](workload)["sum"]
    return {
        "arguments": arguments, "temporaries": temporaries, "output": 0, "code": 0, "beside": program.beside,
        "peak": arguments + temporaries + program.beside, "collectives": {}, "kernels": {},
        "cycles": None, "sent": estimates.COSTS[phase](workload).sent,
    }  # fmt: skip
