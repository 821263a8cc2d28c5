"""Which settings must agree before variants can be compared, on flat settings {"section.key": value}."""

import math

# What a variant learns from, starts from and is measured by. A section stands for all of its keys.
SAME = (
    "data", "model.size", "model.checkpoint", "warm_start", "evaluation", "reward.function", "reward.functions",
    "reward.weights", "rollout.max_prompt", "rollout.max_new", "steps",
)  # fmt: skip
RESPONSES = ("rollout.prompts", "rollout.samples")  # a step's budget is their product
# What a warm start depends on beside its own section and what is under SAME.
WARM_START = ("model", "optimizer.name", "optimizer.beta2", "optimizer.clip_norm", "learner.logprob_chunk")


def under(key: str, sections) -> bool:
    """Whether a key is one of `sections`, or in one of them."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def warm_start_settings(settings: dict) -> dict:
    """The settings on which a warm start depends, its seed among them; empty where there is none."""
    sections = ("data", "warm_start", "rollout.max_prompt", "rollout.max_new", "seed", *WARM_START)
    return {key: settings[key] for key in sorted(settings) if settings.get("warm_start.steps") and under(key, sections)}


def incomparable(variants: dict) -> list[str]:
    """What differs between variants and makes them incomparable, a line a key: "evaluation.k: 8 (a, b), 16 (c)".

    Args:
      variants: name -> flat settings.
    """
    sections = SAME
    if any(settings.get("warm_start.steps") for settings in variants.values()):
        sections += WARM_START
    unlike = {key: values for key, values in differences(variants).items() if under(key, sections)}
    budgets = {name: math.prod(settings.get(key) or 0 for key in RESPONSES) for name, settings in variants.items()}
    if len(set(budgets.values())) > 1:
        unlike[" x ".join(RESPONSES)] = budgets
    return [f"{key}: {_listed(values)}" for key, values in unlike.items()]


def differences(variants: dict) -> dict:
    """{key: {name: value}} of each key whose value is not the same in all variants, in the order of the settings."""
    keys = dict.fromkeys(key for settings in variants.values() for key in settings)
    table = {key: {name: settings.get(key) for name, settings in variants.items()} for key in keys}
    return {key: values for key, values in table.items() if len(set(map(repr, values.values()))) > 1}


def _listed(values: dict) -> str:
    """Each value with the names that have it: "8 (a, b), 16 (c)"."""
    names = {}
    for name, value in values.items():
        names.setdefault(repr(value), []).append(name)
    return ", ".join(f"{value} ({', '.join(who)})" for value, who in names.items())
