"""What a config's keys may hold: one table, which `build_settings` checks before anything else is built.

The numbers of `objective` are checked by the registry of objectives, and those of `data.tasks` by each task. What
depends on more than one key, such as rows that must divide a batch, is checked where the settings are built.
"""

import contextlib
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError

from rpg_jax import InputError


class Bound(NamedTuple):
    """The values that a key may hold, in words, as a type, and as a predicate, which is false for NaN."""

    text: str
    holds: Callable[[Any], bool]
    kind: type | tuple[type, ...] = numbers.Real


# The device computes in float32: a smaller number is 0 there, a larger one infinite.
SMALLEST_FLOAT, LARGEST_FLOAT = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
LARGEST = 2**31 - 1  # counters on the device are int32
WHOLE = numbers.Integral
COUNT = Bound("at least 1 and whole", lambda x: 1 <= x <= LARGEST, WHOLE)
COUNT_OR_ZERO = Bound("at least 0 and whole", lambda x: 0 <= x <= LARGEST, WHOLE)
PROCESSES = Bound("in 1..1024 and whole", lambda x: 1 <= x <= 1024, WHOLE)
AXIS = Bound("at least 1 and whole, or -1 for all devices that are left", lambda x: x == -1 or 1 <= x <= LARGEST, WHOLE)
SEED = Bound("in 0..2**32 - 1 and whole", lambda x: 0 <= x < 2**32, WHOLE)
POSITIVE = Bound("above 0 and finite in float32", lambda x: SMALLEST_FLOAT <= x <= LARGEST_FLOAT)
SECONDS = Bound("above 0 and at most 1e6", lambda x: 0 < x <= 1e6)  # the system's timers end at some 1e9
NOT_NEGATIVE = Bound("at least 0 and finite in float32", lambda x: 0 <= x <= LARGEST_FLOAT)
ONE_OR_MORE = Bound("at least 1 and at most 1e6", lambda x: 1 <= x <= 1e6)
DECAY = Bound("at least 0 and below 1", lambda x: 0 <= x < 1)
SHARE = Bound("in 0..1", lambda x: 0 <= x <= 1)
SWITCH = Bound("True or False", lambda _: True, bool)
TEXT = Bound("text without null characters", lambda text: "\0" not in text, str)
SETS = Bound("text, or a list of texts", lambda x: all(isinstance(item, str) for item in x), (str, Sequence))
SECTION = Bound("a section with keys of its own", lambda _: True, ConfigDict)

KEYS = {
    COUNT: """
        steps data.train_size data.heldout_size data.vocab_size mesh.slices
        warm_start.batch warm_start.microbatch_rows warm_start.save_every
        rollout.prompts rollout.samples rollout.max_prompt rollout.max_new rollout.slots rollout.page_size
        rollout.cache_pages rollout.max_batches reward.memory_mb reference.every
        learner.epochs learner.minibatch_prompts learner.microbatch_rows learner.scoring_rows learner.logprob_chunk
        learner.packed_lengths evaluation.every evaluation.k
        checkpoint.every checkpoint.keep_last checkpoint.most_skipped
    """,
    COUNT_OR_ZERO: """
        model.lora.rank warm_start.steps warm_start.warmup_steps optimizer.warmup_steps
        rollout.delay rollout.max_age rollout.overlong_buffer
    """,
    PROCESSES: "reward.workers",
    AXIS: "mesh.data mesh.fsdp mesh.tensor",
    SEED: "seed data.seed",
    POSITIVE: """
        model.lora.alpha warm_start.temperature rollout.temperature objective.denominator optimizer.epsilon
        optimizer.clip_norm reference.kl_target
    """,
    SECONDS: "reward.timeout_seconds",
    NOT_NEGATIVE: """
        warm_start.learning_rate optimizer.learning_rate optimizer.weight_decay
        rollout.overlong_factor evaluation.temperature
    """,
    ONE_OR_MORE: "rollout.oversample",
    DECAY: "optimizer.beta1 optimizer.beta2 reference.decay",
    SHARE: "reward.max_failures",
    SWITCH: """
        model.scan rollout.dynamic_sampling rollout.carry_over reward.partial_credit reward.network
        learner.pack optimizer.offload log.tensorboard
    """,
    TEXT: """
        model.size model.checkpoint model.dtype model.remat model.attention model.lora.targets
        data.directory data.train data.wording data.tokenizer data.overlong data.template
        rollout.cache_dtype rollout.weights_dtype behavior.source reward.scale reward.function reward.extraction
        objective.name objective.clip objective.divergence objective.estimator objective.kl objective.advantage
        objective.level objective.reduction reference.mode optimizer.name optimizer.decay evaluation.function
        log.wandb
    """,
    SETS: "data.heldout reward.functions",
    SECTION: "data.tasks data.template_options reward.weights",
}
BOUNDS: dict[str, Bound] = {key: bound for bound, keys in KEYS.items() for key in keys.split()}
MAY_BE_UNSET = set(
    """
    model.size model.checkpoint data.train data.tokenizer data.template rollout.cache_pages rollout.cache_dtype
    rollout.weights_dtype rollout.max_age reward.function reward.functions evaluation.function objective.denominator
    objective.clip objective.divergence objective.estimator objective.kl objective.advantage objective.level
    objective.reduction reference.every reference.kl_target reference.decay learner.scoring_rows optimizer.decay
    log.wandb
    """.split()
)


def check(config: ConfigDict) -> None:
    """Raises ValueError, which names the key, for a value of another type, out of its bounds, or unset though needed.

    A key that is not there is not looked at: the runs of earlier versions lack some, and have defaults elsewhere.
    """
    for key, bound in BOUNDS.items():
        section, _, name = key.rpartition(".")
        place = _section(config, section.split(".") if section else [])
        if name not in place:
            continue
        value = None
        with contextlib.suppress(RequiredValueError):
            value = place[name]
        if value in (None, "") and key in MAY_BE_UNSET:
            continue
        is_of_kind = isinstance(value, bound.kind) and isinstance(value, bool) == (bound is SWITCH)
        if value == "" or not is_of_kind or not bound.holds(value):
            shown = "unset" if value in (None, "") else f"{value!r:.60}"
            raise InputError(f"{key} is {shown}; it must be {bound.text}")


def _section(config: ConfigDict, names: list[str]) -> ConfigDict:
    """A section of a config, empty if it is not there; ValueError if it is no section."""
    for count, name in enumerate(names, 1):
        config = config.get(name, ConfigDict())
        if not isinstance(config, ConfigDict):
            raise InputError(f"{'.'.join(names[:count])} is {config!r:.60}; it must be {SECTION.text}")
    return config
