"""A plan as text."""

from collections.abc import Iterable, Sequence

import pandas as pd

from rpg_jax.lab.planning.chips import GIB

MEMORY = ("arguments", "temporaries", "output", "code", "beside", "peak")
UNITS_OF_WORK = dict(prefill="generation batch", decode="token of every slot", experience="RL step", update="update")


def text(plan: dict) -> str:
    """One topology: memory, work and collectives of each phase, the time of an RL step, and whether it fits."""
    phases, is_compiled = plan["phases"], plan["compiled"]
    axes = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    lines = [
        f"{plan['topology']}: {plan['devices']} devices as {axes}; {plan['parameters'] / 1e9:.3g}B parameters, rows of "
        f"{plan['length']} tokens, {', '.join(f'{name} {count}' for name, count in plan['rows'].items())} rows",
        f"figures of the chip: {plan['source']}",
    ]
    if plan["size"]:
        lines.append(f"the checkpoint is not here: planned as model size {plan['size']}")
    how = "compiled" if is_compiled else "modelled from shapes, nothing is compiled"
    lines += ["", f"memory of a device in GiB, {how}; usable are {gib(plan['memory'])}"]
    lines.append(
        table(
            {name: [*(gib(phase[key]) for key in MEMORY), yes(phase["fits"])] for name, phase in phases.items()},
            [*MEMORY, "fits"],
        )
    )
    lines.append("beside: arrays of the run that the program does not take, such as the optimizer's while sampling")
    if not is_compiled:
        lines.append("of a GPU's memory JAX takes three quarters unless XLA_PYTHON_CLIENT_MEM_FRACTION says more")
    lines += [f"{name}: {phase['refused']}" for name, phase in phases.items() if "refused" in phase]
    lines += ["", *update_lines(plan), ""]
    sent = "compiled where a program was" if is_compiled else "modelled"
    lines.append(f"work of a device; FLOPs, HBM bytes and times are modelled, bytes sent to other devices {sent}")
    work = {
        name: [
            *(f"{x:.4g}" for x in (phase["flops"] / 1e12, phase["bytes"] / 1e9, phase["sent"] / 1e9)),
            *(f"{x:.4g}" for x in (*phase["limits"].values(), phase["roofline_seconds"])),
            UNITS_OF_WORK[name],
        ]
        for name, phase in phases.items()
    }
    columns = ["TFLOP", "HBM GB", "sent GB", "compute s", "memory s", "interconnect s", "at least s", "per"]
    lines.append(table(work, columns))
    collectives = {
        f"{name} {kind}": [f"{traffic['count']:.0f}", f"{traffic['sent'] / 1e9:.4g}"]
        for name, phase in phases.items()
        for kind, traffic in phase["collectives"].items()
    }
    if collectives:
        lines += ["", "collectives", table(collectives, ["times", "GB sent"])]
    return "\n".join([*lines, "", *step_lines(plan), *search_lines(plan), verdict(plan)])


def update_lines(plan: dict) -> list[str]:
    """The temporaries that the update must hold, and how many more the compiled program holds."""
    sizes, measured = plan["needs"]["update"], plan["phases"]["update"]["temporaries"]
    lines = ["temporaries of the update that must be held at once, from shapes"]
    lines.append(table({name: [gib(size)] for name, size in sizes.items()}, ["GiB"]))
    if plan["compiled"] and measured is not None:
        lines.append(f"the compiled update takes {gib(measured)}: {measured / sizes['sum']:.2f} x the sum")
    return lines


def step_lines(plan: dict) -> list[str]:
    step = plan["step"]
    phases = [f"{name} {times:.6g} x = {step['seconds'][name]:.4g}" for name, times in step["times"].items()]
    return [
        f"an RL step at {step['response_length']:.0f} tokens a response takes at least {step['seconds']['sum']:.4g} s, "
        f"modelled: {', '.join(phases)}",
        f"({step['generated']} responses generated at once, {step['learned']} learned from; rewards, more generation "
        f"batches and the tail of the longest responses come on top)",
    ]


def search_lines(plan: dict) -> list[str]:
    """The largest values that fit, if they were searched for."""
    lines = []
    for key, result in plan.get("largest", {}).items():
        value = "nothing fits" if result["value"] is None else f"{result['value']:g} (peak {gib(result['peak'])} GiB)"
        lines.append(f"largest {key} that fits, all else as configured: {value}; {result['how']}")
    return lines


def verdict(plan: dict) -> str:
    """Whether the run fits; if not, which phases do not and what to lower."""
    if plan["fits"]:
        return f"{plan['topology']}: it fits"
    too_large = [name for name, phase in plan["phases"].items() if not phase["fits"]]
    sampler = "rollout.slots or rollout.oversample"
    mend = dict(prefill=sampler, decode=sampler, experience="learner.microbatch_rows or learner.logprob_chunk")
    mend["update"] = "learner.microbatch_rows, or set model.remat=full"
    return (
        f"{plan['topology']}: it does NOT fit: {', '.join(too_large)}; for {too_large[0]} lower {mend[too_large[0]]}, "
        f"or take more devices"
    )


def comparison(plans: Sequence[dict]) -> str:
    """Several topologies in one table: peak memory in GiB and times in seconds."""
    lines = ["peak memory of a device in GiB, and the least seconds of an RL step"]
    columns = ["topology", "devices", "usable", *plans[0]["phases"], "fits", "step s", "how"]
    rows = [
        [
            plan["topology"],
            str(plan["devices"]),
            gib(plan["memory"]),
            *(gib(phase["peak"]) for phase in plan["phases"].values()),
            yes(plan["fits"]),
            f"{plan['step']['seconds']['sum']:.4g}",
            "compiled" if plan["compiled"] else "modelled",
        ]
        for plan in plans
    ]
    return "\n".join([*lines, pd.DataFrame(rows, columns=columns).to_string(index=False)])


def table(rows: dict[str, Iterable[str]], columns: Sequence[str]) -> str:
    """Lines of cells, one for each name."""
    spaced = [f" {column}" for column in columns]  # two spaces between columns, since their titles have spaces
    return pd.DataFrame.from_dict(rows, orient="index", columns=spaced).to_string()


def gib(size: float | None) -> str:
    return "?" if size is None else f"{size / GIB:.4g}"


def yes(fits: bool) -> str:
    return "yes" if fits else "NO"
