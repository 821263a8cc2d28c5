"""An RL step on meshes of 8 simulated devices against the same on one device; mesh_equivalence.py measures."""

import ast
import json

import processes
import pytest

MESHES = DATA_AND_FSDP, WITH_TENSOR = "(2, 4, 1)", "(2, 2, 2)"


@pytest.fixture(scope="module")
def measured():
    done = processes.execute("-m", "mesh_equivalence", timeout=900, JAX_NUM_CPU_DEVICES="8")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "donated buffers were not usable" not in done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_drawn_scored_and_learned_is_that_of_one_device(measured, mesh):
    """All tokens over data and fsdp, where a shard computes what one device computes for its rows."""
    found, (_, fsdp, tensor) = measured["meshes"][mesh], ast.literal_eval(mesh)
    assert max(found["loss"], found["gradient"], found["params"]) < 5e-5  # of the largest number of a leaf
    assert found["logp"] < 2e-5  # nats
    assert found["sampler_gap"] < 2e-5  # the sampler's log-probs against the trainer's
    assert measured["response_tokens"] > 100 and found["other_tokens"] <= (0 if mesh == DATA_AND_FSDP else 2)
    # Earlier policies are divided over devices, in the hosts' memory; norms are whole on each.
    assert found["recalled"] == 0 and 1 / (fsdp * tensor) <= found["remembered"] < 1.3 / (fsdp * tensor)
    # The update gathers the vocabulary once, and else a matrix of a layer at a time.
    largest, second = found["gathered"]
    assert largest == 264 * 32 / tensor and second <= 32 * 64 / tensor


def test_carried_over_responses_are_those_of_one_device(measured):
    """Which of them are complete first depends on the mesh, but not what they are, as parameters do not change here."""
    single, mesh = measured["carried_over"]
    both = single.keys() & mesh.keys()
    assert len(single) == len(mesh) == 3 * 16 and len(both) > 24
    assert all(single[name][0] == mesh[name][0] for name in both)
    mixed = [len(set(version)) > 1 for found in (single, mesh) for _, version in found.values()]
    assert any(mixed[:48]) and any(mixed[48:])


def test_one_compilation_serves_any_number_of_microbatches_and_donates_the_state(measured):
    found = [measured["meshes"][mesh] for mesh in MESHES]
    assert found[0]["loss_of_half"] < 1e-4 and min(one["donated"] for one in found) > 0.99


def test_a_mesh_packs_and_no_collective_moves_a_batch(measured):
    """What it learns is what one device does from whole rows. Each microbatch's rows are put together alone."""
    assert measured["meshes"][WITH_TENSOR]["microbatches"] < measured["meshes"][DATA_AND_FSDP]["microbatches"] == 4
    assert 8 * 32 <= measured["largest_collective"] < 64 * 32 / 4


def test_initialization_is_sharded_and_draws_what_one_device_draws(measured):
    whole, held = measured["initialization"]
    assert measured["initial"] == 0
    assert held < 0.5 * whole  # its eighth, and what drawing its part of one matrix takes


def test_the_vocabulary_matrix_is_gathered_once_before_the_chunks(measured):
    assert measured["fsdp"] == {"gathered": [[264, 32]], "in_loops": []}
    # A tensor axis splits the vocabulary: its parts are never put together, and what they add up are numbers a token.
    assert measured["tensor"] == {"gathered": [[66, 32]], "in_loops": ["all-reduce"]}
