"""Times that a machine took, to hold plans against: those of a benchmark, or those that others measured on TPUs.

`--measured=FILE` reads what third_party/transformers/gpu_benchmark.py writes: a list, an object for each model size. Of
its keys these count: size, a name of `models.SIZES`; device, JAX's name of the GPU; decode, a list of {rows, length,
seconds}: responses drawn at once, their tokens by then with the prompt, on average, and the time of a step; update, a
list of {rows, length, packed, seconds}: sequences, the tokens of each, and whether rows hold several. All weights are
trained, in bfloat16 with remat="dots". What that takes at least is `floor.costs`, as for a plan.

`--calibrate` plans a batch that took 69.3 s to generate and 70.5 s in all, in vLLM on TPUs with its own model:
`SOURCE`, BVF-101. It says neither how long its prompts are nor how many responses ran at a time; 256 is vLLM's default.
The spread of lengths is not published either, only their mean and the most: a logarithmic normal distribution that has
both.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from rpg_jax import InputError
from rpg_jax.lab.planning import chips, decoding, floor, measure
from rpg_jax.lab.planning.workload import PHASES, Workload
from rpg_jax.models import SIZES, Model

SOURCE = "https://github.com/marin-community/marin/blob/main/.agents/logbook/benchmark_vllm_fork_claude.md"
TOPOLOGY = "v6e:2x2"
CONFIG = pathlib.Path(__file__).parents[3] / "configs/measured.py"
LENGTHS = "lognormal:368.5,0.6"  # of which no more than 1,024 tokens: 362 on average
FLAGS = (f"--config={CONFIG}", f"--lengths={LENGTHS}", "--prompt_length=128")
SECONDS = 70.5  # a batch of 64 prompts x 16 responses


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
    """The measurements of a --measured file: {phase: decode or update, size, device, rows, length, packed, seconds}.

    Raises InputError for a file of something else, and for a device or a size that is not known.
    """
    found = []
    try:
        for one in json.loads(pathlib.Path(file).read_text()):
            SIZES[one["size"]], chip_of(one["device"])
            for phase in ("decode", "update"):
                for row in one[phase]:
                    numbers = {name: float(row[name]) for name in ("rows", "length", "seconds")}
                    if not all(0 < number < math.inf for number in numbers.values()):
                        raise ValueError(f"{phase} {numbers}")
                    facts = dict(phase=phase, packed=bool(row.get("packed")), size=one["size"], device=one["device"])
                    found.append(facts | numbers)
        if {row["phase"] for row in found} == {"decode", "update"}:
            return found
        error = "it has not both of decode and update"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    raise InputError(
        f"--measured={file}: expected the --json of third_party/transformers/gpu_benchmark.py, made on one of "
        f"{', '.join(name for name, chip in chips.CHIPS.items() if chip.target)}; {error}"
    )


def chip_of(device: str) -> chips.Chip:
    """The GPU that JAX calls so, as `NVIDIA H100 80GB HBM3`."""
    return chips.CHIPS[next((name for name in chips.CHIPS if f" {name}" in device.lower()), device)]


def least(row: dict, w: Workload) -> float:
    """The seconds that a measurement's work takes at least, by a workload of which only what it leaves open counts."""
    rows, length = round(row["rows"]), row["length"]
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
    topology = chips.Topology("", chip_of(row["device"]), 1)
    return max(floor.costs(w)[row["phase"]].seconds(topology).values())


def applied(rows: Sequence[dict], sides: Mapping[str, Workload], seconds: Mapping[str, float], split: bool) -> dict:
    """What a plan's step takes if decoding takes as many times the least as it did in the nearest of the measurements,
    and every other phase as many times as the update did.

    Args:
      rows: as `read` gives them; sides: of the plan's `Sketch`; seconds: of its step, at least; split: whether some
      devices only sample.

    Returns decode and update, the measurements with `times`, and seconds (`measure.with_sum`).
    """
    sampling, learning = sides["decode"], sides["update"]
    slots = sampling.rollout.slots / sampling.row_shards

    def distance(row):
        packs = row["packed"] != bool(learning.loop.packed_columns)
        return abs(math.log(row["rows"] / slots)) if row["phase"] == "decode" else packs

    nearest = {row["phase"]: row for row in sorted(rows, key=distance, reverse=True)}
    found = {phase: row | {"times": row["seconds"] / least(row, learning)} for phase, row in nearest.items()}
    of = dict.fromkeys(PHASES, "update") | {"decode": "decode"}
    expected = {phase: seconds[phase] * found[of[phase]]["times"] for phase in PHASES}
    return found | {"seconds": measure.with_sum(expected, split)}
