"""The largest microbatch, slots and generation batch that fit: predicted from shapes, then compiled where possible."""

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence

from ml_collections import ConfigDict

from rpg_jax.lab.planning import floor, measure
from rpg_jax.lab.planning.chips import Topology
from rpg_jax.lab.planning.programs import programs
from rpg_jax.lab.planning.sketch import Sketch
from rpg_jax.lab.planning.workload import Workload

# Config key -> phases whose memory depends on it.
KEYS = {
    "learner.microbatch_rows": ("experience", "update"),  # the log-prob pass has as many unless scoring_rows is set
    "learner.scoring_rows": ("experience",),
    "rollout.slots": ("prefill", "decode"),
    "rollout.oversample": ("prefill", "decode"),
}


def candidates(sides: Mapping[str, Workload]) -> dict[str, list]:
    """Config key -> the values to try, ascending, that divide over the mesh of their phases (`Sketch.sides`);
    oversample only if it has an effect."""
    workload, sampling = sides["update"], sides["decode"].row_shards
    shards, prompts, fresh = workload.row_shards, workload.loop.prompts, workload.rollout.fresh_prompts
    slots = sorted(sampling * base * 2**power for base in (1, 3) for power in range(31))
    rows = range(shards, workload.minibatch_rows + 1, shards)
    values = {
        "learner.microbatch_rows": [count for count in rows if workload.minibatch_rows % count == 0],
        "learner.scoring_rows": [shards * 2**n for n in range(31) if workload.step_rows % (shards * 2**n) == 0],
        "rollout.slots": [count for count in slots if count <= workload.generated_rows],
    }
    if fresh > prompts:
        quarters = [count for count in range(4, 33) if count * prompts % (4 * sampling) == 0]
        values["rollout.oversample"] = [count / 4 for count in quarters]
    return values


def largest(config: ConfigDict, topology: Topology, sketch: Callable[[ConfigDict], Sketch], plan: dict) -> dict:
    """Config key -> {value, peak, how}: the largest value that fits while every other key stays as configured.

    Memory is predicted from shapes, plus what the configured value took beyond its own prediction. For TPUs the value
    is then compiled, and lower ones are tried until one fits.

    Args:
      sketch: makes the shapes of a config; plan: `measure.measure` of the config as it stands.
    """
    sides, excess = sketch(config).sides, {}
    for phase, found in plan["phases"].items():  # the compiler gives no number for a program that it refuses
        known = found["temporaries"] is not None
        excess[phase] = (
            found["temporaries"] + found["output"] + found["code"] - _temporaries(sides, phase) if known else 0.0
        )
    values = candidates(sides)
    return {key: _largest(config, topology, sketch, key, values[key], excess) for key in values}


def _temporaries(sides: Mapping[str, Workload], phase: str) -> float:
    return floor.temporaries(sides[phase])[phase]


def _largest(config, topology, sketch, key: str, values: Sequence, excess: dict[str, float]) -> dict:
    @functools.cache
    def at(value):
        changed = config.copy_and_resolve_references()
        with changed.unlocked():
            changed.update_from_flattened_dict({key: value})
        sketched = sketch(changed)
        return programs(sketched), sketched.sides

    def predicted(value) -> float:
        made, sides = at(value)
        held = {one: made[one].argument_bytes() + made[one].beside for one in KEYS[key]}
        return max(held[one] + _temporaries(sides, one) + excess[one] for one in KEYS[key])

    how = "compiled" if topology.compiled else "modelled"
    for value in reversed(values[: bisect.bisect_right(values, topology.chip.memory, key=predicted)]):
        if not topology.compiled:
            return {"value": value, "peak": predicted(value), "how": how}
        made, sides = at(value)
        memories = [measure.memory(topology, phase, made[phase], sides[phase]) for phase in KEYS[key]]
        if all(memory["fits"] for memory in memories):
            return {"value": value, "peak": max(memory["peak"] for memory in memories), "how": how}
    return {"value": None, "peak": None, "how": how}
