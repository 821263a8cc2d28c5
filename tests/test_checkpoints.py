"""Checkpoints against damage: flipped bits, cut and missing files, kills, full disks. What returns is bit for bit."""

import dataclasses
import errno
import pathlib
import resource
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from faults.bench import Ended, explained
from hypothesis import given, settings
from hypothesis import strategies as st
from test_multihost import members

from rpg_jax.storage.checkpoints import Checkpoints, DamagedCheckpoint, checksum
from rpg_jax.types import TrainState

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint8", "bool")


def make_state(seed):
    """A TrainState with the kinds of leaves that occur, and some that may: odd floats."""
    normal = jax.random.normal(jax.random.key(seed), (67, 33))
    odd = jnp.array([0x80000000, 0x7FC00001, 0xFFC12345, 0x7F800000, 1], jnp.uint32)  # -0, two NaNs, inf, a subnormal
    params = {"layer": {"kernel": normal, "bias": normal[0].astype(jnp.bfloat16)}, "odd": odd.view(jnp.float32)}
    opt_state = (jnp.int32(seed), {"flags": normal[0] > 0})
    return TrainState(jnp.int32(seed), params, opt_state, jnp.arange(2), jnp.float32(0.5))


LIKE = jax.eval_shape(lambda: make_state(0))


def bits(tree):
    """Structure, and every leaf's dtype, shape and bytes."""
    leaves = jax.tree.leaves(tree)
    return jax.tree.structure(tree), [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in leaves]


def restored(folder, **settings):
    """(step, bits, extra) of what a fresh process would go on from."""
    with Checkpoints(folder, **settings) as checkpoints:
        step, state, extra = checkpoints.restore(LIKE)
        return step, bits(state), extra


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with steps 1 and 2, the first the better one."""
    folder = tmp_path_factory.mktemp("saved")
    with Checkpoints(folder) as checkpoints:
        for step, metric in ((1, 0.9), (2, 0.5)):
            checkpoints.save(step, make_state(step), {"cursor": step}, metric=metric)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of `saved`, to be damaged."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


# The checksum


def reference_checksum(array):
    """The same function in plain integers, word by word."""

    def mix(word):
        word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
        word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
        return word ^ word >> 16

    size = min(array.dtype.itemsize, 4)
    words = np.frombuffer(array.tobytes(), f"<u{size}")
    return sum(mix(int(word) ^ mix(index)) for index, word in enumerate(words)) % 2**32


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_checksum_is_the_plain_one(dtype, shape, seed):
    data = np.random.default_rng(seed).bytes(int(np.prod(shape)) * jnp.dtype(dtype).itemsize)
    array = np.frombuffer(data, np.uint8) % 2 == 1 if dtype == "bool" else np.frombuffer(data, jnp.dtype(dtype))
    array = array.reshape(shape)
    assert int(checksum(array)) == reference_checksum(array)


# Round trips


def test_extra_comes_back(tmp_path):
    extra = {"cursor": 12, "floats": [0.1, 1e300, 5e-324], "none": None, "text": "é\n", "nested": {"a": [True]}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1), extra)
        assert checkpoints.restore(LIKE)[2] == extra
        with pytest.raises(TypeError, match="JSON"):
            checkpoints.save(2, make_state(2), {"cursor": object()})
    assert restored(tmp_path)[0] == 1


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    bump = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = {str(i): jnp.full((512, 512), i, jnp.float32) for i in range(8)}
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(3):
            checkpoints.save(step, state, {})
            for _ in range(5):
                state = bump(state)
        _, found, _ = checkpoints.restore(state)
    assert all((np.asarray(found[str(i)]) == i + 10).all() for i in range(8))


# Which ones are kept


def steps_in(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def test_last_and_best_are_kept_over_restarts(tmp_path):
    metrics, kept = [None, 0.1, 0.8, 0.3, None, float("nan"), 0.8, 0.2, 0.1], []
    for step, metric in enumerate(metrics):
        with Checkpoints(tmp_path, keep_last=2) as checkpoints:
            checkpoints.restore({"x": jnp.int32(0)})
            assert checkpoints.latest_step() == (step - 1 if step else None)
            checkpoints.save(step, {"x": jnp.int32(step)}, {}, metric=metric)
            best = checkpoints.best_step()
        kept.append((steps_in(tmp_path), best))
    assert kept == [
        ([0], None), ([0, 1], 1), ([1, 2], 2), ([2, 3], 2), ([2, 3, 4], 2), ([2, 4, 5], 2), ([5, 6], 6), ([6, 7], 6),
        ([6, 7, 8], 6),
    ]  # fmt: skip
    with Checkpoints(tmp_path) as checkpoints:  # the record of a step that is there is replaced
        checkpoints.restore({"x": jnp.int32(0)})
        checkpoints.save(8, {"x": jnp.int32(8)}, {"again": 1}, metric=0.9)
    with Checkpoints(tmp_path) as checkpoints:
        assert (checkpoints.best_step(), checkpoints.restore({"x": jnp.int32(0)})[2]) == (8, {"again": 1})


# Damage


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :]


DAMAGE = {
    "flipped bit": flipped, "zeros": lambda data: bytes(len(data)), "truncated": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"", "missing": None,
}  # fmt: skip


def damage(path, kind):
    data = path.read_bytes()
    path.unlink()
    if DAMAGE[kind]:
        path.write_bytes(DAMAGE[kind](data))


@pytest.mark.parametrize("kind", DAMAGE)
def test_any_damaged_file_is_noticed_or_harmless(saved, tmp_path, kind, capfd):
    """Over every file of the newest checkpoint: the newest bit for bit, or the one before and a line that says so."""
    outcomes, said = {}, []
    files = sorted(path.relative_to(saved) for path in (saved / "2").rglob("*") if path.is_file())
    for number, file in enumerate(files):
        folder = shutil.copytree(saved, tmp_path / str(number))
        damage(folder / file, kind)
        step, found, extra = restored(folder)
        assert (found, extra) == (bits(make_state(step)), {"cursor": step})
        warnings = [line for line in capfd.readouterr().err.splitlines() if line]
        assert len(warnings) == (step == 1) and all("checkpoint 2 in" in line for line in warnings), warnings
        outcomes[str(file)] = step
        said += warnings
    assert outcomes["2/record/metadata"] == 1
    assert kind != "flipped bit" or any("the checksum of leaf" in line for line in said), "Orbax alone returns them"
    largest = max(files, key=lambda file: (saved / file).stat().st_size)
    assert outcomes[str(largest)] == 1 or kind != "missing", outcomes
    assert 1 in outcomes.values() and 2 in outcomes.values(), outcomes


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_goes_on_from_a_step_that_was_asked_for_or_over_a_damaged_one(folder, damaged):
    """And abandons the later ones."""
    if damaged:
        damage(folder / "2" / "record" / "metadata", "truncated")
    with Checkpoints(folder) as checkpoints:
        step, state, extra = checkpoints.restore(LIKE, None if damaged else checkpoints.best_step())
        assert (step, bits(state), extra) == (1, bits(make_state(1)), {"cursor": 1})
        assert checkpoints.latest_step() == 1 and steps_in(folder) == [1, 2]  # reading deletes nothing
        checkpoints.save(2, make_state(5), {"cursor": 5}, metric=0.1)
        checkpoints.save(3, make_state(6), {"cursor": 6}, metric=0.2)
    assert steps_in(folder) == [1, 2, 3]
    assert restored(folder) == (3, bits(make_state(6)), {"cursor": 6})


def test_a_damaged_record_is_reported_where_the_best_is_asked_for(folder, capfd):
    with Checkpoints(folder) as checkpoints:
        best = checkpoints.best_step()
    assert capfd.readouterr().err == ""
    (folder / str(best) / "record" / "metadata").write_text("{}")
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.best_step() != best
    assert f"warning: checkpoint {best} in {folder} is damaged: its record" in capfd.readouterr().err


def test_an_end_of_orbax_time_limits_is_one_line(folder, monkeypatch):
    def late(*_, **__):
        raise TimeoutError("Thread did not complete within 600 seconds.")

    message = "was not written within Orbax's time limit .*; start again to go on"
    with pytest.raises(ValueError, match=message), Checkpoints(folder) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "wait_until_finished", late)
        checkpoints.restore(LIKE)


def test_when_all_are_damaged_nothing_is_lost_and_it_says_so(folder):
    for step in (1, 2):
        damage(folder / str(step) / "record" / "metadata", "missing")
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(DamagedCheckpoint, match="each of the 2 checkpoints .* is damaged .*move the folder away"):
            checkpoints.restore(LIKE)
        with pytest.raises(DamagedCheckpoint, match="checkpoint 2 in .* is damaged"):
            checkpoints.restore(LIKE, 2)
    assert steps_in(folder) == [1, 2]


@pytest.mark.parametrize(("change", "message"), [
    (lambda p: p | {"odd": jnp.zeros(6)}, r"leaf params/odd is float32\[5\], float32\[6\] is wanted"),
    (lambda p: p | {"odd": jnp.zeros(5, jnp.int32)}, r"leaf params/odd is float32\[5\], int32\[5\] is wanted"),
    (lambda p: p | {"new": jnp.zeros(2)}, r"leaf params/new is absent, float32\[2\] is wanted"),
    (lambda p: {"odd": p["odd"]}, r"leaf params/layer/bias is bfloat16\[33\], absent is wanted"),
])  # fmt: skip
def test_another_structure_is_the_users_mistake(saved, change, message):
    state = make_state(2)
    like = dataclasses.replace(state, params=change(state.params))
    with Checkpoints(saved) as checkpoints, pytest.raises(ValueError, match=message) as caught:
        checkpoints.restore(like)
    assert not isinstance(caught.value, DamagedCheckpoint)


# Kills, disks, devices

KILLED = """
import sys, jax.numpy as jnp
from rpg_jax.parallel import make_mesh
from rpg_jax.storage.checkpoints import Checkpoints
state = lambda step: {str(i): jnp.full((256, 1024), step * 16 + i, jnp.float32) for i in range(16)}
with Checkpoints(sys.argv[1], keep_last=2) as checkpoints:
    start, found, extra = checkpoints.restore(state(0)) or (0, state(0), {"cursor": 0})
    assert extra == {"cursor": start} and all((found[name] == x).all() for name, x in state(start).items())
    print("from", start, flush=True)
    for step in range(start + 1, start + 1000):
        checkpoints.save(step, state(step), {"cursor": step})
        print("saving", step, flush=True)
"""


def test_killed_in_the_middle_of_saves(tmp_path):
    """kill -9 at some moment of a save, again and again: a saved step always remains, whole, and never an older one."""
    newest = leftovers = 0
    for pause in (0.0, 0.04, 0.1):
        process, (output, errors) = processes.fork("-c", KILLED, tmp_path)
        # Once the third save has begun, the first is on disk.
        while (text := pathlib.Path(output.name).read_text()).count("\n") < 4:
            assert process.is_alive(), pathlib.Path(errors.name).read_text()
            time.sleep(0.002)
        start = int(text.split()[1])
        assert start >= newest
        time.sleep(pause)
        process.kill()
        process.join()
        newest = start + 1
        leftovers += len(list(tmp_path.glob("*tmp*")))
    assert leftovers  # else no kill hit a save
    with Checkpoints(tmp_path) as checkpoints:
        like = {str(i): jax.ShapeDtypeStruct((256, 1024), jnp.float32) for i in range(16)}
        step, _, extra = checkpoints.restore(like)
        assert step >= newest and extra == {"cursor": step}
        checkpoints.save(step + 1, {str(i): jnp.ones(3) for i in range(2)}, {}, wait=True)
    assert not list(tmp_path.glob("*tmp*"))  # what killed saves left does not fill the disk


# Orbax closes its event loop at the first write that fails; TensorStore's threads still report on others to it.
@pytest.mark.filterwarnings("ignore:(?s).*Event loop is closed:pytest.PytestUnraisableExceptionWarning")
def test_files_may_not_grow(folder):
    """As on a full disk: saving raises the OSError at the latest on leaving; what was saved before is as it was."""
    before, rng = set(threading.enumerate()), np.random.default_rng(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError) as caught, Checkpoints(folder, keep_last=1) as checkpoints:
            checkpoints.restore(LIKE)
            for step in (3, 4):
                # Many leaves: when the first one fails, others are still being written.
                checkpoints.save(step, {str(i): jnp.asarray(rng.normal(size=(250, 100))) for i in range(60)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(folder)
    for thread in set(threading.enumerate()) - before:  # a thread that stays would keep the process from ending
        thread.join(10)
        assert thread.daemon or not thread.is_alive(), thread
    assert restored(folder)[:2] == (2, bits(make_state(2)))


TWO_PROCESSES = """
import pathlib, sys, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from rpg_jax.parallel import make_mesh, multihost
from rpg_jax.storage.checkpoints import Checkpoints
folder = pathlib.Path(sys.argv[1])
multihost.initialize(False, 60)
one, other = make_mesh(2, 2), make_mesh(4, 1)
split = NamedSharding(one, P("fsdp", "data"))
def values(seed):
    return np.random.default_rng(seed).normal(size=(64, 32)).astype(np.float32)
def state(seed):
    return {"x": jax.make_array_from_callback((64, 32), split, lambda index: values(seed)[index])}
def restored(checkpoints, sharding=split):
    like = jax.ShapeDtypeStruct((64, 32), np.float32, sharding=sharding)
    step, found, extra = checkpoints.restore({"x": like})
    assert found["x"].sharding == sharding
    for shard in found["x"].addressable_shards:
        assert (np.asarray(shard.data) == values(extra["values"])[shard.index]).all()
    return step, extra["values"]
def largest(parts):
    return max(parts, key=lambda path: path.stat().st_size)
with Checkpoints(folder, keep_last=9) as checkpoints:
    assert checkpoints.restore(state(0)) is None
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {"values": step}, metric=1 / step)
    assert checkpoints.best_step() == 1
if multihost.is_first():  # what process 1 wrote and alone reads is gone; of step 2, a bit is flipped
    largest((folder / "3" / "state" / "ocdbt.process_1").rglob("d/*")).write_bytes(b"")
    file = largest((folder / "2" / "state" / "ocdbt.process_0").rglob("d/*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
multihost.any_process(False)  # waits for the damage
with Checkpoints(folder) as checkpoints:
    assert restored(checkpoints) == (1, 1)
    checkpoints.save(2, state(7), {"values": 7}, wait=True)
    for mesh, spec in ((one, P("fsdp", "data")), (one, P(("data", "fsdp"))), (other, P(None, "data")), (other, P())):
        assert restored(checkpoints, NamedSharding(mesh, spec)) == (2, 7)
print("agreed", flush=True)
"""


def test_processes_agree_on_what_is_damaged_and_restore_on_other_meshes(tmp_path):
    both = members(*[("-c", TWO_PROCESSES, tmp_path)] * 2)
    (_, first, first_errors), (_, second, second_errors) = [processes.finish(*member, 60) for member in both]
    assert "agreed" in first and "agreed" in second, first_errors + second_errors
    assert [line.split(" in ")[0] for line in first_errors.splitlines() if "warning: checkpoint" in line] == [
        "warning: checkpoint 3", "warning: checkpoint 2"
    ]  # fmt: skip
    assert "warning: checkpoint" not in second_errors


# The verdicts of the campaign of faults.
REFUSED = "error: config.json is not JSON; restore it\n"
TRACEBACK = "Traceback (most recent call last):\n  ...\nValueError: x\n"


@pytest.mark.parametrize(("ended", "words"), [
    (Ended(0, ""), ""), (Ended(2, REFUSED), ""), (Ended(75, ""), "exit status 75"), (Ended(1, ""), "exit status 1"),
    (Ended(2, REFUSED + REFUSED), "2 lines that explain it"), (Ended(0, TRACEBACK), "a traceback: ValueError: x"),
    (Ended(0, "", [7]), "left 1 process"), (Ended(None, "RL 2/4\n"), "no end within the limit; its last line: RL 2/4"),
])  # fmt: skip
def test_verdicts(ended, words):
    assert words in explained(ended) and bool(words) == bool(explained(ended)) and not explained(Ended(75, ""), (75,))
