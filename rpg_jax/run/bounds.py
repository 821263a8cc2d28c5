"""The numbers that a config's keys may hold: one table, which `build_settings` checks before anything else is built.

The values of `objective` are checked by the registry of objectives, and those of `data.tasks` by each task. What
depends on more than one key, such as rows that must divide a batch, is checked where the settings are built.
"""

import math
import numbers
from collections.abc import Callable
from typing import NamedTuple

from ml_collections import ConfigDict

from rpg_jax.storage.settings import flatten


class Bound(NamedTuple):
    """The values that a key may hold, in words and as a predicate, which is false for NaN."""

    text: str
    holds: Callable[[float], bool]
    whole: bool = False


LARGEST = 2**31 - 1  # counters on the device are int32
COUNT = Bound("at least 1 and whole", lambda x: 1 <= x <= LARGEST, whole=True)
COUNT_OR_ZERO = Bound("at least 0 and whole", lambda x: 0 <= x <= LARGEST, whole=True)
AXIS = Bound("at least 1 and whole, or -1 for all devices that are left", lambda x: x == -1 or x >= 1, whole=True)
SEED = Bound("in 0..2**32 - 1 and whole", lambda x: 0 <= x < 2**32, whole=True)
POSITIVE = Bound("above 0 and finite", lambda x: 0 < x < math.inf)
NOT_NEGATIVE = Bound("at least 0 and finite", lambda x: 0 <= x < math.inf)
ONE_OR_MORE = Bound("at least 1 and finite", lambda x: 1 <= x < math.inf)
DECAY = Bound("at least 0 and below 1", lambda x: 0 <= x < 1)
SHARE = Bound("in 0..1", lambda x: 0 <= x <= 1)

KEYS = {
    COUNT: """
        steps data.train_size data.heldout_size data.vocab_size mesh.slices
        warm_start.batch warm_start.microbatch_rows warm_start.save_every
        rollout.prompts rollout.samples rollout.max_prompt rollout.max_new rollout.slots rollout.page_size
        rollout.cache_pages rollout.max_batches reward.workers reward.memory_mb reference.every
        learner.epochs learner.minibatch_prompts learner.microbatch_rows learner.scoring_rows learner.logprob_chunk
        evaluation.every evaluation.k checkpoint.every checkpoint.keep_last checkpoint.most_skipped
    """,
    COUNT_OR_ZERO: """
        model.lora.rank warm_start.steps warm_start.warmup_steps optimizer.warmup_steps
        rollout.delay rollout.max_age rollout.overlong_buffer rollout.top_k
    """,
    AXIS: "mesh.data mesh.fsdp mesh.tensor",
    SEED: "seed data.seed",
    POSITIVE: """
        model.lora.alpha warm_start.temperature rollout.temperature reward.timeout_seconds objective.denominator
        optimizer.epsilon optimizer.clip_norm reference.kl_target
    """,
    NOT_NEGATIVE: """
        warm_start.learning_rate optimizer.learning_rate optimizer.weight_decay
        rollout.overlong_factor evaluation.temperature
    """,
    ONE_OR_MORE: "rollout.oversample",
    DECAY: "optimizer.beta1 optimizer.beta2 reference.decay",
    SHARE: "reward.max_failures rollout.top_p",
}
BOUNDS: dict[str, Bound] = {key: bound for bound, keys in KEYS.items() for key in keys.split()}


def check(config: ConfigDict) -> None:
    """Raises ValueError, which names the key, for a number that is out of its bounds; keys that are unset may be."""
    for key, value in flatten(config.to_dict()).items():
        bound = BOUNDS.get(key)
        if bound is None or value in (None, ""):
            continue
        kind = numbers.Integral if bound.whole else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind) or not bound.holds(value):
            raise ValueError(f"{key} is {value!r}; it must be {bound.text}")
