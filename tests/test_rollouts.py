"""Rollouts on a mesh of their own: which policy draws what, what is refused, and whole runs that are the same bits."""

import dataclasses
import json
import random
import threading
import time
import types

import jax
import numpy as np
import processes
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_parallel import Chip
from test_rollout import loop_settings

from configs import quickstart
from rpg_jax import InputError, parallel
from rpg_jax.run import build
from rpg_jax.training.collect import Preempted
from rpg_jax.training.rollouts import Rollouts, check_overlap
from rpg_jax.types import Checkpoint, Policy


def chips(hosts, each):
    """Devices that are not there, by process."""
    return [Chip(host * each + chip, 0, host) for host in range(hosts) for chip in range(each)]


@given(hosts=st.integers(1, 4), each=st.integers(2, 8), sampler=st.integers(1, 7))
def test_the_last_devices_of_every_process_sample(hosts, each, sampler):
    devices = chips(hosts, each)
    if sampler >= each:
        with pytest.raises(InputError, match=f"mesh.sampler={sampler} leaves no device to learn with: .* has {each} "):
            parallel.make_meshes(sampler=sampler, devices=devices)
        return
    learner, sampling = parallel.make_meshes(sampler=sampler, data=1, fsdp=-1, devices=devices)
    assert dict(learner.shape) == dict(data=1, fsdp=hosts * (each - sampler), tensor=1, expert=1)
    assert dict(sampling.shape) == dict(data=hosts * sampler, fsdp=1, tensor=1, expert=1)
    for mesh, samples in ((learner, False), (sampling, True)):
        assert mesh.devices.ravel().tolist() == [d for d in devices if (d.id % each >= each - sampler) == samples]


def test_meshes_that_cannot_be():
    with pytest.raises(InputError, match="mesh.sampler=1, the devices that sample: mesh data=-1.*tensor=2 needs 2"):
        parallel.make_meshes(sampler=1, tensor=2, devices=chips(1, 3))
    with pytest.raises(InputError, match="the devices that learn: mesh data=-1.*tensor=2 needs 2"):
        parallel.make_meshes(sampler=1, tensor=2, devices=chips(1, 2))
    one, same = parallel.make_meshes(devices=jax.devices()[:1])
    assert one is same


def test_what_cannot_overlap_is_refused():
    config = quickstart.get_config("smoke")
    config.mesh.sampler = 1
    with pytest.raises(InputError, match=r"mesh.sampler=1 .* the 2 updates .*set rollout.delay=2 or more \(it is 0\)"):
        build.build_settings(config)
    check_overlap(1, False, 0, 2)
    check_overlap(0, True, 0, 2)


# The schedule, with policies and groups that are numbers.

MESHES = [types.SimpleNamespace(devices=np.array(jax.devices()), local_devices=jax.devices()) for _ in range(2)]
POLICIES = types.SimpleNamespace(sampling_params=lambda policy, frozen: None)


@dataclasses.dataclass(frozen=True)
class Groups:
    sequences: tuple  # what they were drawn by and from
    pending: int
    seconds: dict


class Failed(Exception):
    pass


def played(settings, *, overlap, meshes=MESHES, stop=None, fails=None, seed=0):
    """(What each step learned from, those that were begun while the step before learned, names of threads)."""
    updates, rng = settings.updates, random.Random(seed)
    threads, learned, early, over = set(), [], [], 0

    def make_collect(should_stop):
        def collect(params, version, pending, step):
            threads.add(threading.current_thread().name)
            early.extend([step] * (over < step))
            time.sleep(rng.random() / 1000)
            if should_stop():
                raise Preempted
            if step == fails:
                raise Failed(step)
            return Groups((version, step, pending), 2 * pending + step, {})

        return collect

    past, pending = (Policy(None, None, 0),) * settings.policies_kept, 1
    options = dict(steps=settings.steps, overlap=overlap, should_stop=lambda flag=False: flag)
    with Rollouts(make_collect, POLICIES, *meshes, **options) as rollouts:
        for step in range(settings.steps):
            try:
                groups = rollouts.of_step(Checkpoint(None, past=past, pending=pending), step)
            except Failed:
                rollouts.settle()  # as before the checkpoint of a run that was told to stop
                raise
            pending = groups.pending
            learned.append(groups.sequences)
            time.sleep(rng.random() / 1000)
            for number in range(1, updates + 1):
                if settings.is_kept(number):
                    past = *past[1:], Policy(None, None, step * updates + number)
            if rng.random() < 0.3:
                rollouts.settle()
                assert rollouts.call(lambda: "evaluated") == "evaluated"
            over = step + 1
            if step == stop:
                break
    return learned, early, threads


@pytest.fixture
def rows_stay(monkeypatch):
    monkeypatch.setattr(parallel, "move_rows", lambda mesh, rows: rows)


@pytest.mark.usefixtures("rows_stay")
@pytest.mark.parametrize("epochs, delay", [(1, 2), (1, 5), (2, 9)])
def test_played_ahead_or_not_every_step_learns_from_the_same(epochs, delay):
    settings = loop_settings(prompts=4, minibatch_prompts=2, epochs=epochs, microbatch_rows=4, delay=delay, steps=12)
    expected, early, threads = played(settings, overlap=False, meshes=MESHES[:1] * 2)
    assert [version for version, *_ in expected] == [max(0, n * settings.updates - delay) for n in range(12)]
    assert not early and threads == {"MainThread"}
    for overlap in (False, True):
        for seed in range(3):
            learned, early, threads = played(settings, overlap=overlap, seed=seed)
            assert learned == expected and threads == {"sampler_0"}
            assert not early or overlap
    assert early, "nothing was drawn while another step learned"


@pytest.mark.usefixtures("rows_stay")
def test_played_to_an_end_that_comes_early():
    """A run that stops leaves nothing under way; what collecting raises is raised in the step that needs it."""
    settings = loop_settings(prompts=4, minibatch_prompts=2, epochs=1, microbatch_rows=4, delay=2, steps=12)
    before = threading.active_count()
    learned, *_ = played(settings, overlap=True, stop=5)
    assert len(learned) == 6 and threading.active_count() == before
    for meshes in (MESHES, MESHES[:1] * 2):
        with pytest.raises(Failed, match="7"):
            played(settings, overlap=True, meshes=meshes, fails=7)
        assert threading.active_count() == before


# Whole runs.


@pytest.fixture(scope="module")
def found():
    """With carry-over, dynamic sampling and a verifier that sleeps at random: in turn, and ahead with a stop."""
    done = processes.execute("tests/overlapped.py", JAX_NUM_CPU_DEVICES="2")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_whole_runs_are_the_same_bits(found):
    ahead, apart = found["ahead"], found["apart"]
    assert ahead["metrics"] == apart["metrics"] and len(ahead["metrics"]) == 5 and ahead["leaves"] == apart["leaves"]
    assert found["stops"] == 1, "nothing was cut short"
    assert all(row["train/policy_age_max"] >= 2 for row in ahead["metrics"][2:])
    assert {"time/sampler_waited", "time/learner_waited"} <= {*ahead["timings"]}


def test_each_side_holds_and_takes_what_plan_says(found):
    """A step is the longer side; on half of the devices neither is faster, and reading the weights takes the same."""
    assert found["bytes"] == pytest.approx({phase: found["planned"][phase] for phase in found["bytes"]}, rel=0.1)
    whole, half = (row["seconds"] for row in found["splits"])
    assert whole["sum"] == pytest.approx(whole["sampler"] + whole["learner"])
    assert half["sum"] == max(half["sampler"], half["learner"])
    assert whole["learner"] <= half["learner"] <= 2 * whole["learner"] and half["sampler"] >= whole["sampler"]
    assert half["sum"] < whole["sum"]
