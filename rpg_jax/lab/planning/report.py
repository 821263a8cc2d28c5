"""A plan as text."""

import math
from collections.abc import Sequence

import pandas as pd

from rpg_jax.lab.planning.chips import GIB
from rpg_jax.run.target import width

MEMORY = ["arguments", "temporaries", "output", "code", "beside", "peak"]
UNITS_OF_WORK = dict(prefill="generation batch", decode="token of every slot", experience="RL step", update="update")
FITS = {True: "yes", False: "NO"}
SAMPLER_KEYS = "rollout.slots or rollout.oversample"
LOWER = {  # what to lower when a phase does not fit
    "prefill": SAMPLER_KEYS,
    "decode": SAMPLER_KEYS,
    "experience": "learner.scoring_rows or learner.logprob_chunk",
    "update": "learner.microbatch_rows, or set model.remat=full",
}


def text(plan: dict) -> str:
    """One topology: memory, work and collectives of each phase, the time of an RL step, and whether it fits."""
    phases, step = pd.DataFrame.from_dict(plan["phases"], orient="index"), plan["step"]
    launches = plan["phases"]["decode"].get("launches")  # of GPUs
    axes = described(plan["mesh"])
    if plan["sampler"]:
        axes += f" that learn, {described(plan['sampler'])} that sample"
    size = f"{plan['parameters'] / 1e9:.3g}B parameters"
    if plan["active"] < plan["parameters"]:
        size += f", of which a token meets {plan['active'] / 1e9:.3g}B"
    if plan["trained"] < plan["parameters"]:
        size += f" and {plan['trained'] / 1e6:.3g}M of adapters"
    lines = [
        f"{plan['topology']}: {plan['devices']} devices as {axes}; {size}, rows of "
        f"{plan['length']} tokens, {', '.join(f'{name} {count}' for name, count in plan['rows'].items())} rows",
        f"figures of the chip: {plan['source']}",
    ]
    if plan["size"]:
        lines.append(f"the checkpoint is not here: planned as model size {plan['size']}")
    lines += ["", f"memory of a device in GiB, compiled; usable are {plan['memory'] / GIB:.4g}"]
    lines.append(table((phases[MEMORY].astype(float) / GIB).assign(fits=phases["fits"].map(FITS))))
    lines.append("beside: arrays of the run that the program does not take, such as the optimizer's while sampling")
    if launches:
        lines += [
            "of a GPU's memory commands take 95 %, or XLA_CLIENT_MEM_FRACTION of it; no GPU has run with 95 %",
            "without a GPU nothing is autotuned: sizes of tiles, and the kernels of products, are XLA's defaults",
        ]
    lines += [f"{name}: {phase['refused']}" for name, phase in plan["phases"].items() if "refused" in phase]
    lines += ["", *times(phases)]
    if launches:
        lines += [
            "",
            f"a turn of the loop that decodes launches {launches['kernels']} kernels, {launches['outside']} of them "
            f"outside of {launches['command_buffers']} command buffers; the host waits for the GPU at "
            f"{launches['conditionals']} conditionals, {launches['loops']} loops within and the loop's own condition",
        ]
    products = [f"{name} {times:.6g} x = {step['seconds'][name]:.4g}" for name, times in step["times"].items()]
    lines += [
        "",
        f"an RL step at {step['prompt_length']:.0f} + {step['response_length']:.0f} tokens a response takes at least "
        f"{step['seconds']['sum']:.4g} s, modelled: {', '.join(products)}",
        f"({step['generated']} responses generated at once, {step['learned']} learned from; rewards and more batches "
        f"come on top)",
    ]
    if step["estimated"]:
        parts = ", ".join(f"{name} {step['estimated'][name]:.4g}" for name in step["times"])
        lines.append(f"by the compiler's estimate it takes {step['estimated']['sum']:.4g} s: {parts}")
    if plan["measured"]:
        lines += measured(plan)
    if plan["sampler"]:
        lines += ["", *sides(plan)]
    cache = plan["cache"]
    lines.append(
        f"the largest KV cache is rollout.cache_pages={cache['pages']} for rollout.slots={cache['slots']}: decoding "
        f"then takes at least {cache['seconds']:.4g} s, and responses stay the same"
    )
    return "\n".join([*lines, verdict(plan)])


def measured(plan: dict) -> list[str]:
    """What a step takes if every phase takes as many times the least as a machine's decoding and update did."""
    seconds, (decode, update) = plan["measured"]["seconds"], (plan["measured"][of] for of in ("decode", "update"))
    packed = ", packed" if update["packed"] else ""
    parts = ", ".join(f"{name} {seconds[name]:.4g}" for name in plan["step"]["times"])
    return [
        f"measured on {decode['device']}: decoding {decode['times']:.3g} times the least ({decode['size']}, "
        f"{decode['rows']:.0f} rows of {decode['length']:.0f} tokens), an update {update['times']:.3g} times "
        f"({update['rows']:.0f} rows of {update['length']:.0f}{packed})",
        f"with decoding as far from the least, and all else as an update, it takes {seconds['sum']:.4g} s: {parts}",
    ]


def described(mesh: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


def sides(plan: dict) -> list[str]:
    """What each side of a split takes, and what other splits would."""
    step, lines = plan["step"], []
    for how, seconds in (("at least", step["seconds"]), ("by the compiler's estimate", step["estimated"])):
        if seconds:
            parts = f"sampling takes {seconds['sampler']:.4g} s and learning {seconds['learner']:.4g} s"
            lines.append(f"{how}, {parts}: with rollout.overlap a step is the longer one")
    known = {row["sampler"]: row["seconds"] for row in plan["splits"] if "seconds" in row}
    frame = pd.DataFrame(known).T[["sampler", "learner", "sum"]]
    best = frame["sum"][frame.index > 0].idxmin()
    share = frame["sampler"][0] / frame["sum"][0] * len(plan["splits"])
    frame.columns = ["sampling s", "learning s", "step s"]
    lines += [
        "at least, by the devices of a process that only sample (mesh.sampler); 0: all do both in turn",
        table(frame),
    ]
    lines.append(
        f"both sides would be equal with {share:.2g} of the {len(plan['splits'])} devices of a process; of what can "
        f"be, mesh.sampler={best} has the shortest step"
    )
    refused: dict[str, list[str]] = {}
    for row in plan["splits"]:
        if "refused" in row:
            refused.setdefault(row["refused"].partition(";")[0], []).append(str(row["sampler"]))
    return lines + [f"mesh.sampler={', '.join(counts)} cannot be: {why}" for why, counts in refused.items()]


def times(phases: pd.DataFrame) -> list[str]:
    """Work and seconds of each phase: at the limits of the chip, and by the compiler's estimate; collectives."""
    work = {"TFLOP": phases["flops"] / 1e12, "HBM GB": phases["bytes"] / 1e9, "sent GB": phases["sent"] / 1e9}
    frame = pd.DataFrame(work).join(pd.DataFrame(list(phases["limits"]), phases.index).add_suffix(" s"))
    frame["at least s"] = phases["roofline_seconds"]
    lines = ["work of a device; FLOPs and HBM bytes are modelled, bytes sent compiled"]
    if phases["estimate"].notna().any():
        frame["estimate s"] = [made["seconds"] if made else None for made in phases["estimate"]]
        frame["kernels"] = [made["kernels"] if made else None for made in phases["estimate"]]
        lines.append(
            "estimate: of the TPU compiler, without waiting for collectives; kernels, of it: at their peak, for XLA "
            "estimates none"
        )
    lines.insert(1, table(frame.assign(per=pd.Series(UNITS_OF_WORK))))
    collectives = {
        f"{name} {kind}": {"times": f"{traffic['count']:.0f}", "GB sent": traffic["sent"] / 1e9}
        for name, found in phases["collectives"].items()
        for kind, traffic in found.items()
    }
    if collectives:
        lines += ["", "collectives", table(pd.DataFrame.from_dict(collectives, orient="index"))]
    return lines


def verdict(plan: dict) -> str:
    """Whether the run fits; if not, which phases do not and what to lower."""
    if plan["fits"]:
        return f"{plan['topology']}: it fits"
    large = [name for name, phase in plan["phases"].items() if not phase["fits"]]
    return (
        f"{plan['topology']}: it does NOT fit: {', '.join(large)}; for {large[0]} lower {LOWER[large[0]]}, or take "
        f"more devices"
    )


def comparison(plans: Sequence[dict]) -> str:
    """Several topologies in one table."""
    rows = [
        {
            "devices": plan["devices"],
            "usable": plan["memory"] / GIB,
            **{name: phase["peak"] / GIB for name, phase in plan["phases"].items()},
            "fits": FITS[plan["fits"]],
            "at least s": plan["step"]["seconds"]["sum"],
            "estimate s": plan["step"]["estimated"].get("sum", math.nan),
            "measured s": plan["measured"].get("seconds", {}).get("sum", math.nan),
        }
        for plan in plans
    ]
    frame = pd.DataFrame(rows, index=[plan["topology"] for plan in plans]).dropna(axis=1, how="all")
    title = "peak memory of a device in GiB, and the seconds of an RL step: at least, by the compiler's estimate, and "
    title += "as far from the least as what was measured"
    return f"{title}\n{table(frame)}"


def table(frame: pd.DataFrame) -> str:
    """A frame as lines, with two spaces between columns since their titles have spaces; "?" for unknown numbers."""
    return frame.rename(columns=" {}".format).to_string(float_format="{:.4g}".format, na_rep="?", line_width=width())
