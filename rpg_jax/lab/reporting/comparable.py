"""What may not differ between variants that are held against each other, on flat settings {"section.key": value}."""

import math

# What a variant learns from, starts from and is measured by. A section stands for all of its keys.
SAME = (
    "data", "model.size", "model.checkpoint", "warm_start", "evaluation", "reward.function", "rollout.max_prompt",
    "rollout.max_new", "steps",
)  # fmt: skip
RESPONSES = ("rollout.prompts", "rollout.samples")  # a step's budget is their product
# What else a warm start depends on, beside its own section and what is under SAME.
WARM_START = ("model", "optimizer.name", "optimizer.beta2", "optimizer.clip_norm", "learner.logprob_chunk")


def under(key: str, sections) -> bool:
    """Whether a key is one of `sections`, or in one of them."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def warm_start_settings(settings: dict) -> dict:
    """The settings on which a warm start depends, its seed among them; empty where there is none."""
    sections = ("data", "warm_start", "rollout.max_prompt", "rollout.max_new", "seed", *WARM_START)
    return {key: settings[key] for key in sorted(settings) if settings.get("warm_start.steps") and under(key, sections)}


def incomparable(variants: dict) -> list[str]:
    """What differs between variants that are not to be compared, a line a key: "evaluation.k: 8 (a, b), 16 (c)".

    Args:
      variants: name -> flat settings.
    """
    every = dict.fromkeys(key for settings in variants.values() for key in settings)
    keys = [key for key in every if under(key, SAME)]
    if any(settings.get("warm_start.steps") for settings in variants.values()):
        keys += [key for key in every if under(key, WARM_START) and key not in keys]
    lines = [_differing(key, {name: settings.get(key) for name, settings in variants.items()}) for key in keys]
    budgets = {name: math.prod(settings.get(key) or 0 for key in RESPONSES) for name, settings in variants.items()}
    lines.append(_differing(" x ".join(RESPONSES), budgets))
    return [line for line in lines if line]


def differences(variants: dict) -> dict:
    """{key: {name: value}} of each key whose value is not the same in all, in the order in which keys appear."""
    every = dict.fromkeys(key for settings in variants.values() for key in settings)
    found = {key: {name: settings.get(key) for name, settings in variants.items()} for key in every}
    return {key: values for key, values in found.items() if len(_names_by_value(values)) > 1}


def _differing(key, values) -> str:
    names = _names_by_value(values)
    told = ", ".join(f"{value} ({', '.join(who)})" for value, who in names.items())
    return f"{key}: {told}" if len(names) > 1 else ""


def _names_by_value(values) -> dict:
    found = {}
    for name, value in values.items():
        found.setdefault(repr(value), []).append(name)
    return found
