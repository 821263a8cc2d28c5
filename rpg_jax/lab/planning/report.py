"""A plan as numbers, and the numbers as text."""

from concurrent.futures import ThreadPoolExecutor

from rpg_jax.lab.planning import estimates
from rpg_jax.lab.planning.chips import GIB
from rpg_jax.lab.planning.programs import PHASES, compiled, modelled, programs
from rpg_jax.models import parameter_count
from rpg_jax.sampling.ahead import PREFILL_ROWS


def needs(recipe) -> dict[str, dict]:
    """Phase -> what its temporaries must take."""
    return {
        "prefill": estimates.prefill_needs(recipe, PREFILL_ROWS),
        "decode": estimates.decode_needs(recipe),
        "experience": estimates.experience_needs(recipe),
        "update": estimates.update_needs(recipe),
    }


def memory(topology, phase, program, recipe) -> dict:
    """Compiled or modelled memory of one phase, with whether it fits."""
    cost = getattr(estimates, phase)(recipe)
    found = compiled(program) if topology.compiled else modelled(program, needs(recipe)[phase], cost.sent)
    return found | {"fits": "refused" not in found and found["peak"] <= topology.chip.memory}


def measure(topology, run, parts, state, recipe, response_length) -> dict:
    """The plan of one topology: sizes in bytes, times in seconds, everything of one device.

    Keys: topology, devices, mesh, memory (bytes that may be used), source, compiled, model, needs (of the update's
    temporaries), phases (memory and cost of each), step (an RL step), fits.
    """
    made, phases = programs(run, parts, state), {}
    with ThreadPoolExecutor() as pool:  # the compiler works on one core, outside of Python's lock
        measured = pool.map(lambda phase: memory(topology, phase, made[phase], recipe), made)
    for phase, found in zip(made, measured, strict=True):
        cost = getattr(estimates, phase)(recipe)
        sent = cost.sent if found["sent"] is None else found["sent"]
        cost = cost._replace(sent=sent)
        limits = cost.seconds(topology)
        phases[phase] = found | cost._asdict() | {"limits": limits, "roofline_seconds": max(limits.values())}
    return {
        "topology": topology.name,
        "compiled": topology.compiled,
        "devices": topology.devices,
        "mesh": recipe.mesh,
        "memory": topology.chip.memory,
        "source": topology.chip.source,
        "parameters": parameter_count(recipe.model),
        "remat": recipe.remat,
        "rows": {"microbatch": recipe.microbatch_rows, "minibatch": recipe.minibatch_rows, "slots": recipe.slots},
        "length": recipe.length,
        "needs": needs(recipe),
        "phases": phases,
        "step": step(recipe, phases, response_length),
        "fits": all(phase["fits"] for phase in phases.values()),
    }


def step(recipe, phases, response_length) -> dict:
    """How often each phase runs in an RL step, and the seconds of it."""
    times = estimates.times(recipe, response_length)
    seconds = {phase: times[phase] * phases[phase]["roofline_seconds"] for phase in PHASES}
    return {
        "response_length": response_length,
        "times": times,
        "seconds": seconds | {"sum": sum(seconds.values())},
        "generated": recipe.fresh_prompts * recipe.samples,
        "learned": recipe.prompts * recipe.samples,
    }


def gib(size) -> str:
    return "?" if size is None else f"{size / GIB:.4g}"


def table(rows) -> list[str]:
    """Rows of cells as lines, the first column to the left and the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def text(plan) -> str:
    """One topology for people to read."""
    by_hand = "modelled from shapes, nothing is compiled"
    how = "compiled" if plan["compiled"] else by_hand
    axes = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    lines = [
        f"{plan['topology']}: {plan['devices']} devices as {axes}; {plan['parameters'] / 1e9:.3g}B parameters, rows of "
        f"{plan['length']} tokens, {', '.join(f'{name} {count}' for name, count in plan['rows'].items())} rows",
        f"figures of the chip: {plan['source']}",
    ]
    if plan["size"]:
        lines.append(f"the checkpoint is not here: planned as model size {plan['size']}")
    lines += ["", f"memory of a device in GiB, {how}; usable are {gib(plan['memory'])}"]
    columns = ("arguments", "temporaries", "output", "code", "beside", "peak")
    rows = [("", *columns, "fits")]
    for name, phase in plan["phases"].items():
        rows.append((name, *(gib(phase[column]) for column in columns), "yes" if phase["fits"] else "NO"))
    lines += table(rows)
    lines.append("beside: arrays of the run that the program does not take, such as the optimizer's while sampling")
    if not plan["compiled"]:
        lines.append("of a GPU's memory JAX takes three quarters unless XLA_PYTHON_CLIENT_MEM_FRACTION says more")
    lines += [f"{name}: {phase['refused']}" for name, phase in plan["phases"].items() if "refused" in phase]
    lines += ["", *needed(plan), ""]
    sent = "compiled where a program was" if plan["compiled"] else "modelled"
    lines.append(f"work of a device; FLOPs, HBM bytes and times are modelled, bytes sent to other devices {sent}")
    rows = [("", "TFLOP", "HBM GB", "sent GB", "compute s", "memory s", "interconnect s", "at least s", "per")]
    per = dict(prefill="generation batch", decode="token of every slot", experience="RL step", update="update")
    for name, phase in plan["phases"].items():
        work = (phase["flops"] / 1e12, phase["bytes"] / 1e9, phase["sent"] / 1e9)
        rows.append(
            (name, *(f"{x:.4g}" for x in (*work, *phase["limits"].values(), phase["roofline_seconds"])), per[name])
        )
    lines += table(rows)
    if plan["compiled"]:
        rows = [("collectives", "kind", "times", "GB sent")]
        for name, phase in plan["phases"].items():
            for kind, one in phase["collectives"].items():
                rows.append((name, kind, f"{one['count']:.0f}", f"{one['sent'] / 1e9:.4g}"))
        lines += ["", *table(rows)]
    return "\n".join([*lines, "", *step_lines(plan), *search_lines(plan), verdict(plan)])


def needed(plan) -> list[str]:
    """What temporaries of the update must take, beside what they take."""
    items, measured = plan["needs"]["update"], plan["phases"]["update"]["temporaries"]
    lines = ["temporaries of the update: what must be held at once, from shapes, in GiB"]
    lines += table([(f"  {name}", gib(size)) for name, size in items.items()])
    if plan["compiled"] and measured is not None:
        lines.append(f"the compiled update takes {gib(measured)}: {measured / items['sum']:.2f} x the sum")
    return lines


def step_lines(plan) -> list[str]:
    one = plan["step"]
    parts = [f"{name} {one['times'][name]:.6g} x = {one['seconds'][name]:.4g}" for name in PHASES]
    return [
        f"an RL step at {one['response_length']:.0f} tokens a response takes at least {one['seconds']['sum']:.4g} s, "
        f"modelled: {', '.join(parts)}",
        f"({one['generated']} responses generated at once, {one['learned']} learned from; rewards, more generation "
        f"batches and the tail of the longest responses come on top)",
    ]


def search_lines(plan) -> list[str]:
    """The largest values that fit, if they were asked for."""
    lines = []
    for key, found in plan.get("largest", {}).items():
        value = "nothing fits" if found["value"] is None else f"{found['value']:g} (peak {gib(found['peak'])} GiB)"
        lines.append(f"largest {key} that fits, all else as configured: {value}; {found['how']}")
    return lines


def verdict(plan) -> str:
    if plan["fits"]:
        return f"{plan['topology']}: it fits"
    over = {name: phase for name, phase in plan["phases"].items() if not phase["fits"]}
    sampler = "rollout.slots or rollout.oversample"
    mend = dict(prefill=sampler, decode=sampler, experience="learner.microbatch_rows or learner.logprob_chunk")
    mend["update"] = "learner.microbatch_rows, or set model.remat=full"
    first = next(iter(over))
    return (
        f"{plan['topology']}: it does NOT fit: {', '.join(over)}; for {first} lower {mend[first]}, or take more devices"
    )


def comparison(plans) -> str:
    """Several topologies in one table: peaks in GiB and times in seconds."""
    rows = [("", "devices", "usable", *(f"{phase}" for phase in PHASES), "fits", "step s", "how")]
    for plan in plans:
        peaks = (gib(plan["phases"][phase]["peak"]) for phase in PHASES)
        how = "compiled" if plan["compiled"] else "modelled"
        fits, seconds = "yes" if plan["fits"] else "NO", f"{plan['step']['seconds']['sum']:.4g}"
        rows.append((plan["topology"], str(plan["devices"]), gib(plan["memory"]), *peaks, fits, seconds, how))
    return "\n".join(["peak memory of a device in GiB, and the least seconds of an RL step", *table(rows)])
