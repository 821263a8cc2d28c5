"""The largest microbatch, slots and generation batch that fit: modelled from what was compiled, then compiled."""

import bisect
import functools

from rpg_jax.lab.planning import report
from rpg_jax.lab.planning.programs import programs

# Config key -> phases whose memory it changes.
KEYS = {
    "learner.microbatch_rows": ("experience", "update"),
    "rollout.slots": ("prefill", "decode"),
    "rollout.oversample": ("prefill", "decode"),
}


def candidates(recipe) -> dict[str, list]:
    """Config key -> values, rising, that rows of this mesh allow; oversample only where it matters."""
    shards, responses = recipe.row_shards, recipe.fresh_prompts * recipe.samples
    slots = sorted(shards * base * 2**power for base in (1, 3) for power in range(31))
    rows = range(shards, recipe.minibatch_rows + 1, shards)
    found = {
        "learner.microbatch_rows": [n for n in rows if recipe.minibatch_rows % n == 0],
        "rollout.slots": [n for n in slots if n <= responses],
    }
    quarters = [n for n in range(4, 33) if n * recipe.prompts % (4 * shards) == 0]
    return found | ({"rollout.oversample": [n / 4 for n in quarters]} if recipe.fresh_prompts > recipe.prompts else {})


def largest(config, topology, sketch, plan) -> dict:
    """Config key -> {value, peak, how}: the largest value that fits with every other key as configured.

    Memory is predicted from shapes, corrected by what the configured value was measured to take beyond its prediction;
    for TPUs the value found is compiled, and the next lower one tried until one fits.

    Args:
      sketch: config -> (Run, Parts, abstract state, Recipe); plan: of the config as it stands.
    """
    recipe = sketch(config)[-1]
    return {
        key: _largest(config, topology, sketch, key, values, {phase: _excess(plan, phase) for phase in KEYS[key]})
        for key, values in candidates(recipe).items()
    }


def _excess(plan, phase) -> float:
    """Measured beyond predicted bytes, at the configured value; 0 where the compiler gave no number."""
    measured = plan["phases"][phase]
    if measured["temporaries"] is None:
        return 0.0
    return measured["temporaries"] + measured["output"] + measured["code"] - plan["needs"][phase]["sum"]


def _with(config, key, value):
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.update_from_flattened_dict({key: value})
    return config


def _largest(config, topology, sketch, key, values, excess):
    @functools.cache
    def at(value):
        run, parts, state, recipe = sketch(_with(config, key, value))
        return programs(run, parts, state), recipe

    def predicted(value) -> float:
        made, recipe = at(value)
        needs = report.needs(recipe)
        return max(
            made[phase].argument_bytes() + made[phase].beside + needs[phase]["sum"] + more
            for phase, more in excess.items()
        )

    how = "compiled" if topology.compiled else "modelled"
    for value in reversed(values[: bisect.bisect_right(values, topology.chip.memory, key=predicted)]):
        if not topology.compiled:
            return {"value": value, "peak": predicted(value), "how": how}
        made, recipe = at(value)
        measured = [report.memory(topology, phase, made[phase], recipe) for phase in excess]
        if all(one["fits"] for one in measured):
            return {"value": value, "peak": max(one["peak"] for one in measured), "how": how}
    return {"value": None, "peak": None, "how": how}
