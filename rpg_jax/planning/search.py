"""The largest microbatch, slots and generation batch that fit: modelled from what was compiled, then compiled."""

from rpg_jax.planning import report
from rpg_jax.planning.programs import programs

# Config key -> phases whose memory it changes.
KEYS = {
    "learner.microbatch_rows": ("experience", "update"),
    "rollout.slots": ("prefill", "decode"),
    "rollout.oversample": ("prefill", "decode"),
}


def candidates(recipe) -> dict[str, list]:
    """Config key -> values, rising, that rows of this mesh allow; oversample only where it matters."""
    shards, responses = recipe.row_shards, recipe.fresh_prompts * recipe.samples
    slots = (
        shards * base * 2**power
        for base in (2, 3)
        for power in range(-1, 31)
        if base * 2**power == int(base * 2**power)
    )
    found = {
        "learner.microbatch_rows": [
            n for n in range(shards, recipe.minibatch_rows + 1, shards) if recipe.minibatch_rows % n == 0
        ],
        "rollout.slots": sorted(int(n) for n in slots if n <= responses),
    }
    more = [quarter / 4 for quarter in range(4, 33) if quarter * recipe.prompts % (4 * shards) == 0]
    return found | ({"rollout.oversample": more} if recipe.fresh_prompts > recipe.prompts else {})


def largest(config, topology, sketch, plan) -> dict:
    """Config key -> {value, peak, how}: the largest value that fits with every other key as configured.

    Memory is predicted from shapes, corrected by what the configured value was measured to take beyond its prediction;
    for TPUs the value found is compiled, and the next lower one tried until one fits.

    Args:
      sketch: config -> (Run, Parts, abstract state, Recipe); plan: of the config as it stands.
    """
    _, _, _, recipe = sketch(config)
    found = {}
    for key, values in candidates(recipe).items():
        off = {phase: _excess(plan, phase) for phase in KEYS[key]}
        found[key] = _largest(config, topology, sketch, key, values, off)
    return found


def _excess(plan, phase) -> float:
    """Measured beyond predicted temporaries, at the configured value; 0 where the compiler gave no number."""
    measured = plan["phases"][phase]
    if measured["temporaries"] is None:
        return 0.0
    return measured["temporaries"] + measured["output"] + measured["code"] - plan["needs"][phase]["sum"]


def _with(config, key, value):
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.update_from_flattened_dict({key: value})
    return config


def _largest(config, topology, sketch, key, values, off):
    for value in reversed(values):
        run, parts, state, recipe = sketch(_with(config, key, value))
        made = programs(run, parts, state)
        sums = report.needs(recipe)
        peaks = {
            phase: made[phase].argument_bytes() + sums[phase]["sum"] + off[phase] + made[phase].beside for phase in off
        }
        if max(peaks.values()) > topology.chip.memory:
            continue
        if not topology.compiled:
            return {"value": value, "peak": max(peaks.values()), "how": "modelled"}
        measured = [report.memory(topology, phase, made[phase], recipe) for phase in off]
        if all(one["fits"] for one in measured):
            return {"value": value, "peak": max(one["peak"] for one in measured), "how": "compiled"}
    return {"value": None, "peak": None, "how": "compiled" if topology.compiled else "modelled"}
