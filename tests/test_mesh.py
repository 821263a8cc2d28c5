"""An RL step on meshes of 8 simulated devices against the same on one device; mesh_equivalence.py measures."""

import json

import processes
import pytest


@pytest.fixture(scope="module")
def measured():
    done = processes.execute("-m", "mesh_equivalence", timeout=900, JAX_NUM_CPU_DEVICES="8")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "donated buffers were not usable" not in done.stderr
    return json.loads(done.stdout)


def test_what_is_drawn_scored_and_learned_is_that_of_one_device(measured):
    assert max(measured[name] for name in ("loss", "gradient", "params")) < 5e-5  # of the largest number of a leaf
    assert measured["logp"] < 2e-5  # nats
    assert measured["sampler_gap"] < 2e-5  # the sampler's log-probs against the trainer's
    # All responses over data and fsdp, but for rounding: a shard computes what one device computes for its rows.
    assert measured["response_tokens"] > 100 and measured["other_tokens"] <= 2
    # Earlier policies are divided over fsdp and tensor, in the hosts' memory; norms are whole on each device.
    assert measured["recalled"] == 0 and 1 / 4 <= measured["remembered"] < 1.3 / 4
    # The update gathers the vocabulary once, and else a matrix of a layer at a time.
    largest, second = measured["gathered"]
    assert largest == 264 * 32 / 2 and second <= 32 * 64 / 2


def test_carried_over_responses_are_those_of_one_device(measured):
    """Which of them are complete first depends on the mesh, but not what they are, as parameters do not change here."""
    single, mesh = measured["carried_over"]
    both = single.keys() & mesh.keys()
    assert len(single) == len(mesh) == 3 * 16 and len(both) > 24
    assert all(single[name][0] == mesh[name][0] for name in both)
    mixed = [len(set(version)) > 1 for found in (single, mesh) for _, version in found.values()]
    assert any(mixed[:48]) and any(mixed[48:])


def test_a_mesh_packs_donates_the_state_and_no_collective_moves_a_batch(measured):
    """What it learns is what one device does from whole rows. Each microbatch's rows are put together alone."""
    whole, packed = measured["microbatches"]
    assert packed < whole == 4 and measured["donated"] > 0.99
    assert 8 * 32 <= measured["largest_collective"] < 64 * 32 / 4


def test_initialization_is_sharded_and_draws_what_one_device_draws(measured):
    whole, held = measured["initialization"]
    assert measured["initial"] == 0
    assert held < 0.5 * whole  # its eighth, and what drawing its part of one matrix takes


def test_the_vocabulary_matrix_is_gathered_once_before_the_chunks(measured):
    assert measured["fsdp"] == {"gathered": [[264, 32]], "in_loops": []}
    # A tensor axis splits the vocabulary: its parts are never put together, and what they add up are numbers a token.
    assert measured["tensor"] == {"gathered": [[66, 32]], "in_loops": ["all-reduce"]}
