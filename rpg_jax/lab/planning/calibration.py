"""Times that a machine took, to hold plans against: those of a benchmark, or those that others measured on TPUs.

`--measured=FILE` reads what third_party/transformers/gpu_benchmark.py writes, whose docstring has the format. What its
works take at least is `floor.costs`, as for a plan: all weights trained, in bfloat16 with remat="dots".

`--calibrate` plans a batch that took 69.3 s to generate and 70.5 s in all, in vLLM on TPUs with its own model
(`SOURCE`, BVF-101). What it does not publish is assumed: prompts, 256 responses at a time, vLLM's default, and a
logarithmic normal distribution of lengths with the mean and the most that it states.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from rpg_jax import InputError
from rpg_jax.lab.planning import chips, decoding, floor
from rpg_jax.lab.planning.workload import PHASES, Workload
from rpg_jax.models import SIZES, Model

SOURCE = "https://github.com/marin-community/marin/blob/main/.agents/logbook/benchmark_vllm_fork_claude.md"
TOPOLOGY = "v6e:2x2"
CONFIG = pathlib.Path(__file__).parents[3] / "configs/measured.py"
LENGTHS = "lognormal:368.5,0.6"  # of which no more than 1,024 tokens: 362 on average
FLAGS = (f"--config={CONFIG}", f"--lengths={LENGTHS}", "--prompt_length=128")
SECONDS = 70.5  # a batch of 64 prompts x 16 responses
DEVICES = {chip.target.split('"')[-2]: chip for chip in chips.CHIPS.values() if chip.target}  # by JAX's name of them


def text(plan: dict) -> str:
    """How far a plan of the measured shape is from the measured time."""
    seconds, estimated = (plan["step"][kind] for kind in ("seconds", "estimated"))
    at_least, expected = (kind["prefill"] + kind["decode"] for kind in (seconds, estimated))
    return (
        f"a rollout that others measured, Llama-3.1-8B on {TOPOLOGY}: {SECONDS} s with vLLM; ours takes at least "
        f"{at_least:.3g} s\nand by the compiler's estimate {expected:.3g} s: {expected / SECONDS:.2f} of the measured "
        f"time ({SOURCE})"
    )


def read(file: str) -> list[dict]:
    """The works of a --measured file: {phase: decode or update, device, size, rows, length: mean tokens of a row with
    its prompt, packed, seconds: of a step or an update}. InputError for another file, device or size of a model."""
    try:
        text = json.loads(pathlib.Path(file).read_text())
        found, missing = [], {"decode", "update"}
        SIZES[text["size"]], DEVICES[text["device"]]
        for name, work in text["works"].items():
            phase, _, kind = name.partition(":")
            lengths = work["lengths"] if phase == "update" else [work["prompt"] + (work["few"] + work["new"]) / 2]
            numbers = dict(rows=work["rows"], length=sum(lengths) / len(lengths), seconds=work["seconds"]["median"])
            if not all(0 < number < math.inf for number in numbers.values()):
                raise InputError(f"{name} has {numbers}")
            found.append(numbers | dict(phase=phase, packed=kind == "packed", size=text["size"], device=text["device"]))
            missing -= {phase}
        if not missing:
            return found
        error = f"works without {', '.join(missing)}"
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    known = ", ".join(DEVICES)
    raise InputError(f"--measured={file}: expected what gpu_benchmark.py --json writes on one of {known}; {error}")


def least(row: dict, w: Workload) -> float:
    """The seconds that a measured work takes at least; of `w` counts only what the work leaves open."""
    rows, length = row["rows"], row["length"]
    sizes = dict(max_prompt=length - 1, max_new=1, overlong_buffer=0, slots=rows, cache_dtype=None, weights_dtype=None)
    learning = dict(prompts=rows, samples=1, minibatch_prompts=rows, microbatch_rows=rows, scoring_rows=rows)
    w = dataclasses.replace(
        w,
        model=Model(SIZES[row["size"]], dtype=jnp.bfloat16, remat="dots"),
        mesh=dict(data=1, fsdp=1, tensor=1),
        rollout=dataclasses.replace(w.rollout, **sizes),
        loop=dataclasses.replace(w.loop, packed_columns=None, **learning),
        lengths=decoding.parse("fixed:1", 1),
        prompt_length=length - 1,
        moments=2,
    )
    topology = chips.Topology("", DEVICES[row["device"]], 1)
    return max(floor.costs(w)[row["phase"]].seconds(topology).values())


def applied(rows: Sequence[dict], sides: Mapping[str, Workload], least_seconds: Mapping[str, float]) -> dict:
    """A step whose decoding takes as many times the least as it did in the measured work with the nearest number of
    rows, and whose other phases take as many times as the update did, packed or not as the plan's.

    Of works as `read` gives them, a `Sketch`'s sides and the least seconds of each phase in an RL step: decode and
    update, those works with `times`, and the seconds of each phase.
    """
    sampling, learning = sides["decode"], sides["update"]
    slots = sampling.rollout.slots / sampling.row_shards

    def distance(row):
        packs = row["packed"] != bool(learning.loop.packed_columns)
        return abs(math.log(row["rows"] / slots)) if row["phase"] == "decode" else packs

    nearest = {row["phase"]: row for row in sorted(rows, key=distance, reverse=True)}
    found = {phase: row | {"times": row["seconds"] / least(row, learning)} for phase, row in nearest.items()}
    times = dict.fromkeys(PHASES, found["update"]["times"]) | {"decode": found["decode"]["times"]}
    return found | {"seconds": {phase: times[phase] * least_seconds[phase] for phase in PHASES}}
