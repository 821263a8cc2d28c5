"""Each step's rollout, in time: before the step, or on a mesh that samples while another one learns.

With `mesh.sampler` one thread collects and one learns. While step s learns, the responses of step s + 1 are drawn from
a policy that step s began with, which is what `rollout.delay` of a step's updates means. So the schedule says which
policy draws what, the clock does not, and `rollout.overlap=False`, where the threads take turns, gives the same bits.

Each thread runs programs on its own mesh only, because processes have to issue those of a device in the same order.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from rpg_jax import InputError, parallel
from rpg_jax.parallel import multihost
from rpg_jax.training.collect import Collect, Collected
from rpg_jax.training.phases import phase
from rpg_jax.training.policies import Policies, sampled
from rpg_jax.types import Checkpoint, Params, Pending


def check_overlap(sampler: int, overlap: bool, delay: int, updates: int) -> None:
    """Raises InputError where a step's responses cannot be drawn while the step before is learned."""
    if sampler and overlap and delay < updates:
        raise InputError(
            f"mesh.sampler={sampler} draws a step's responses while the {updates} updates of the step before are made, "
            f"from a policy before them: set rollout.delay={updates} or more (it is {delay}), or rollout.overlap=False"
        )


class Rollouts(contextlib.AbstractContextManager):
    """The rollouts of steps that follow each other, up to step `steps`; a context manager, which ends their thread.

    `make_collect(should_stop)` gives the `collect` of `collect.make_collect`. `should_stop(flag)` is also true once the
    flag is set on a process. With one mesh for all there is no thread.
    """

    def __init__(
        self, make_collect: Callable[[Callable[[], bool]], Collect], policies: Policies, learner: Mesh, sampler: Mesh,
        *, steps: int, overlap: bool, should_stop: Callable[..., bool],
    ):  # fmt: skip
        self._policies, self._learner, self._sampler = policies, learner, sampler
        self._split, self._steps = sampler is not learner, steps
        self._overlap, self._closing = overlap and self._split, threading.Event()
        self._collect = make_collect(lambda: should_stop(self._closing.is_set()))
        self._thread = ThreadPoolExecutor(1, "sampler", multihost.exchange_over, (sampler,)) if self._split else None
        self._begun: tuple[int, Future] | None = None  # a step, and its groups
        self._last: Future = Future()  # what the thread does, or did last
        self._last.set_result(None)
        self._idle = time.perf_counter()  # since when

    def of_step(self, checkpoint: Checkpoint, step: int) -> Collected:
        """The groups that a step learns from, on the mesh that learns; with `overlap` the next step's are begun.

        Raises what collecting them raised. With two meshes `seconds` has what each side waited for the other.
        """
        asked = time.perf_counter()
        if self._begun is None or self._begun[0] != step:
            self._begin(checkpoint, checkpoint.pending, step, ahead=0)
        assert self._begun is not None
        groups = self._begun[1].result()
        if self._split:
            groups.seconds["learner_waited"] = time.perf_counter() - asked
        if self._overlap and step + 1 < self._steps:
            self._begin(checkpoint, groups.pending, step + 1, ahead=1)
        return groups

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls a function on the thread that samples, after what is under way there."""
        return self._submit(function).result()

    def settle(self) -> None:
        """Waits until nothing is under way on the thread that samples."""
        self._last.exception()

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.shutdown()
        # What was stopped refers to the frames of the loop, and they to this: in a cycle, all arrays would stay alive.
        self._begun, self._last = None, Future()

    def _begin(self, checkpoint: Checkpoint, pending: Pending | None, step: int, ahead: int) -> None:
        params, version = sampled(self._policies, checkpoint, ahead)
        self._begun = step, self._submit(partial(self._collected, params, version, pending, step))

    def _collected(self, params: Params, version: int, pending: Pending | None, step: int) -> Collected:
        waited = time.perf_counter() - self._idle
        with phase("rollout"):
            groups = self._collect(params, version, pending, step)
        if not self._split:
            return groups
        groups.seconds["sampler_waited"] = waited
        return dataclasses.replace(groups, sequences=parallel.move_rows(self._learner, groups.sequences))

    def _submit(self, function: Callable[[], Any]) -> Future:
        if self._thread is None:
            done: Future = Future()
            done.set_result(function())
            return done
        self._last = self._thread.submit(self._on_thread, function)
        return self._last

    def _on_thread(self, function: Callable[[], Any]) -> Any:
        # Small arrays that the host makes would wait behind an update on the default device.
        with jax.default_device(self._sampler.local_devices[0]):
            try:
                return function()
            finally:
                self._idle = time.perf_counter()
