"""What a step says of itself: its row of metrics.jsonl, and a line for each skipped update."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np

from rpg_jax.objectives import metrics as metric
from rpg_jax.training.collect import Collected
from rpg_jax.training.packing import Plan
from rpg_jax.training.phases import Clock, phase
from rpg_jax.training.settings import LoopSettings
from rpg_jax.training.skipped import split_finiteness
from rpg_jax.types import TrainState


class Record:
    """Collects, phase by phase, what a step's row is made of."""

    def __init__(self, settings: LoopSettings, groups: Collected):
        self.settings, self.groups, self.clock = settings, groups, Clock(**groups.seconds)
        self.before: metric.Metrics = {}  # of the experience
        self.during: metric.Metrics = {}  # of all updates
        self.microbatches, self.skipped = 0, list[str]()
        self.look: list[dict] = []  # rows of look.parquet
        self._under_way: tuple[int, metric.Metrics] | None = None  # an update's number and what it measures

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A `phase` whose seconds are logged."""
        with phase(name):
            yield
            self._read()
        self.clock.lap(name)

    def add_update(self, number: int, plan: Plan, metrics: metric.Metrics) -> None:
        """Waits for the update before, while this one runs: XLA's CPU client hangs when many programs are under way."""
        self.microbatches += int(plan.count)
        self._read()
        self._under_way = number, metrics

    def _read(self) -> None:
        if self._under_way is None:
            return
        (number, measured), self._under_way = self._under_way, None
        metrics, reason = split_finiteness(jax.device_get(measured))
        self.skipped += [f"update {number} of {self.settings.updates} was skipped: {reason}"] * bool(reason)
        self.during = metric.merge(self.during, metrics) if self.during else metrics

    def row(self, state: TrainState) -> dict[str, float]:
        """The row, once all updates have been taken."""
        groups, settings, seconds = self.groups, self.settings, self.clock.seconds
        measured = metric.values(jax.device_get(self.during | self.before))  # ours win over a user's of their name
        row = {f"train/{name}": float(value) for name, value in measured.items()}
        row |= {f"train/{name}": value for name, value in groups.metrics.items()}
        row |= {f"time/{name}": value for name, value in seconds.items()}
        row["throughput/rollout_tokens_per_second"] = groups.tokens / seconds["rollout"]
        row["throughput/update_tokens_per_second"] = settings.epochs * groups.trained / seconds["update"]
        columns = settings.packed_columns or groups.sequences.tokens.shape[1]
        computed = self.microbatches * settings.microbatch_rows * columns
        row["train/padding_waste"] = 1.0 - settings.epochs * int(np.sum(groups.lengths)) / computed
        row["train/updates"], row["train/skipped_updates"] = int(state.step), int(state.skipped[0])
        return row
