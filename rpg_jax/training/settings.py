"""The settings of an RL step: how responses are made, and how a step learns from them.

What a key may hold by itself is checked before (configs/base.py); here is what depends on several.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from rpg_jax import InputError
from rpg_jax.models import ModelConfig, routes
from rpg_jax.sampling import Decoding
from rpg_jax.training import packing


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """How responses are made; lengths in tokens."""

    prompts: int  # groups a step
    samples: int  # responses a group
    max_prompt: int
    max_new: int
    slots: int
    temperature: float
    dynamic_sampling: bool  # drop groups whose rewards are all equal, before the overlong punishment
    oversample: float  # prompts generated at a time, or under way with carry_over, as a multiple of `prompts`
    max_batches: int  # generation batches a step at most
    overlong_buffer: int  # soft punishment over the last so many tokens
    overlong_factor: float
    page_size: int = Decoding.page_size  # of the KV cache
    cache_pages: int | None = None  # of the KV cache; None is what the slots, in conversations the rows, need at most
    cache_dtype: str | None = None  # of the KV cache; None is the model's
    weights_dtype: str | None = None  # of the sampler's matrices; None is the model's
    carry_over: bool = False  # unfinished responses go on in the next step
    max_age: int | None = None  # optimizer updates, of a trained token at most; None is no limit
    routes: str = "recompute"  # a token's experts in training: what each pass prefers, or record, the sampler's
    environment_failures: str = "train"  # on what an environment failed with: its return is 0, or mask, left out

    def __post_init__(self):
        if self.samples < 2 and self.dynamic_sampling:
            raise InputError(
                "rollout.dynamic_sampling needs rollout.samples of at least 2: one response is always uniform"
            )
        if self.overlong_buffer >= self.max_new:
            raise InputError(
                f"rollout.overlong_buffer ({self.overlong_buffer}) must be under rollout.max_new ({self.max_new})"
            )

    @property
    def decoding(self) -> Decoding:
        """How much `generate` decodes at a time, and how it keeps keys and values."""
        return Decoding(self.slots, self.page_size, self.cache_pages, self.cache_dtype)

    @property
    def fresh_prompts(self) -> int:
        """Prompts of one generation batch."""
        return math.ceil(self.prompts * self.oversample) if self.dynamic_sampling or self.carry_over else self.prompts

    def recorded(self, config: ModelConfig) -> int:
        """Numbers of a token's routes, where they are recorded, else 0. Raises InputError as `routes.width` does."""
        return routes.width(config) if self.routes == "record" else 0

    def usable(self, unpunished: np.ndarray) -> np.ndarray:
        """Which groups [P] have a signal: those whose rewards [P, G], before the overlong punishment, differ."""
        return (unpunished != unpunished[:, :1]).any(1) | (not self.dynamic_sampling)


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """How a step learns from its groups, and when to evaluate and save. Counts are RL steps unless named otherwise."""

    steps: int
    seed: int
    prompts: int  # groups a step
    samples: int  # responses a group
    minibatch_prompts: int
    microbatch_rows: int  # of a forward and backward pass
    scoring_rows: int  # of a forward pass for log-probs alone
    epochs: int
    packed_columns: int | None  # of a row of several sequences, in updates and log-prob passes; None: one a row
    evaluate_every: int
    save_every: int
    most_skipped: int  # non-finite updates in a row that end the run
    packed_sequences: int | None = None  # of a packed row at most; None: as many as it has room for
    delay: int = 0  # optimizer updates, how old the policy is that responses are drawn from
    look_every: int | None = None  # steps between those whose tokens are kept, beside evaluations; 0: none are

    def __post_init__(self):
        rows = self.minibatch_prompts * self.samples
        if self.prompts % self.minibatch_prompts:
            raise InputError(
                f"learner.minibatch_prompts ({self.minibatch_prompts}) does not divide rollout.prompts ({self.prompts})"
            )
        if rows % self.microbatch_rows:
            raise InputError(
                f"learner.microbatch_rows ({self.microbatch_rows}) does not divide the {rows} rows of a minibatch "
                f"(learner.minibatch_prompts {self.minibatch_prompts} x rollout.samples {self.samples})"
            )
        if self.prompts * self.samples % self.scoring_rows:
            raise InputError(
                f"learner.scoring_rows ({self.scoring_rows}) does not divide the {self.prompts * self.samples} rows of "
                f"a rollout (rollout.prompts {self.prompts} x rollout.samples {self.samples})"
            )

    @property
    def updates(self) -> int:
        """Optimizer updates of an RL step."""
        return self.epochs * (self.prompts // self.minibatch_prompts)

    @property
    def policies_kept(self) -> int:
        """Policies of earlier updates that are kept for coming rollouts (`training.policies`)."""
        return self.delay // self.updates + 1 if self.delay else 0

    def is_kept(self, update: int) -> bool:
        """Whether the policy after this update of an RL step (1 is the first) is one that a coming rollout needs."""
        return self.delay > 0 and (update + self.delay) % self.updates == 0

    def is_evaluated(self, done: int) -> bool:
        """Whether the policy is evaluated after so many steps."""
        return done % self.evaluate_every == 0 or done == self.steps

    def minibatches(self, step: int) -> Iterator[np.ndarray]:
        """Row indices of each minibatch of each epoch; whole groups, shuffled anew every epoch."""
        for epoch in range(self.epochs):
            groups = np.random.default_rng([self.seed, step, epoch]).permutation(self.prompts)
            for chosen in groups.reshape(-1, self.minibatch_prompts):
                yield (chosen[:, None] * self.samples + np.arange(self.samples)).reshape(-1)

    def plan(self, lengths: np.ndarray, rows: int) -> packing.Plan:
        """`packing.plan` of sequences with these lengths, in microbatches of so many rows."""
        return packing.plan(lengths, rows, self.packed_columns, self.packed_sequences)


def steps_to_wait(max_age: int | None, updates: int, delay: int) -> int | None:
    """How many steps after the one that drew it a token may be trained; None for any number.

    Step s trains tokens that were drawn in step s - k at ages up to (k + 1) * updates - 1 + delay.
    """
    return None if max_age is None else (max_age + 1 - delay) // updates - 1


def check_carry_over(settings: RolloutSettings, source: str, updates: int, delay: int) -> None:
    """Raises ValueError for settings with which nothing can be carried over, or not without a bias."""
    if not settings.carry_over:
        if settings.max_age is not None:
            raise InputError(
                f"rollout.max_age is {settings.max_age} and rollout.carry_over is off: no response is carried over, so "
                f"there is no age to bound; unset rollout.max_age, or set rollout.carry_over=True"
            )
        return
    if source == "trainer":
        raise InputError(
            "rollout.carry_over and behavior.source=trainer: several policies draw one response, and the trainer "
            "computes the log-probs of the newest alone, which is biased; set behavior.source=sampler or proximal"
        )
    total, prompts = settings.fresh_prompts, settings.prompts
    if total == prompts:
        raise InputError(
            f"rollout.carry_over with rollout.oversample={settings.oversample} leaves nothing to carry over: a step "
            f"trains {prompts} groups, and so many are under way; set rollout.oversample above 1, such as 2.0"
        )
    least = -(-total // prompts) * updates - 1 + delay
    if settings.max_age is not None and settings.max_age < least:
        raise InputError(
            f"rollout.max_age is {settings.max_age} optimizer updates; with {total} groups under way, {prompts} "
            f"of them trained in a step of {updates} updates, and rollout.delay={delay}, it must be at least {least}"
        )
