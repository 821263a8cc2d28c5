"""Jobs of several processes: the launcher, what processes tell each other, a training run, and what is refused."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import processes
import pytest

from configs import quickstart
from rpg_jax import parallel
from rpg_jax.parallel import multihost
from rpg_jax.run import states
from rpg_jax.storage import workdir

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = "--config=configs/quickstart.py:smoke"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def members(*commands, devices=2):
    """Starts the processes of a job as processes.fork does, each with a command of its own."""
    job = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": str(len(commands))}
    job |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return [processes.fork(*command, **job, JAX_PROCESS_ID=str(index)) for index, command in enumerate(commands)]


# The launcher, with processes that are shell scripts.


def launched(folder, text, *arguments):
    """Starts the launcher of a clone in `folder` whose python runs the given shell text as every process."""
    shutil.copytree(ROOT / "launch", folder / "launch")
    (folder / "launch" / "setup.sh").write_text(":\n")
    processes.fake(folder / ".venv/bin/python", f'[[ "$1" != -c ]] || exec "{sys.executable}" "$@"\n{text}')
    command = ["bash", folder / "launch" / "multihost_cpu.sh", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(process, timeout=60):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


ONE = "[[ $JAX_PROCESS_ID == 1 ]] || exec sleep 600\n"


def test_every_process_is_given_its_identity_and_the_flags(tmp_path):
    identity = "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES: $JAX_NUM_CPU_DEVICES at $JAX_COORDINATOR_ADDRESS: $*"
    words = "1", "--devices=4", "--", "--a", "b c"
    status, _, err = outcome(launched(tmp_path, f'echo "{identity}" >&2; exit 1', *words))
    assert status == 1
    assert err.startswith("0 of 1: 4 at localhost:") and err.splitlines()[0].endswith(": -m rpg_jax.train --a b c")


@pytest.mark.parametrize(("text", "status", "out", "err"), [
    ("echo $JAX_PROCESS_ID", 0, "0\n", ""), ("echo 'error: no' >&2; exit 2", 2, "", "error: no\n"),
    (f"{ONE}echo noise >&2; echo 'error: a' >&2; exit 2", 2, "", "error: a\n"),
    (f"{ONE}echo last words >&2; exit 7", 1, "",
     "last words\nerror: process 1 of 3 was lost: it ended with status 7, and the others were ended.*\n"),
])  # fmt: skip
def test_the_first_process_is_heard_a_mistake_is_one_line_and_a_lost_process_is_named(tmp_path, text, status, out, err):
    """The others end with it; in `test_two_processes_follow_one` one is killed."""
    found = outcome(launched(tmp_path, text, "3", "--"))
    assert found[:2] == (status, out) and re.fullmatch(err, found[2]), found


def test_sigterm_is_passed_on_and_75_comes_back(tmp_path):
    mark = tmp_path / "started"
    text = f"trap 'exit 75' TERM; touch {mark}-$JAX_PROCESS_ID; while :; do sleep 0.1; done"
    job = launched(tmp_path, text, "2", "--")
    while not all((tmp_path / f"started-{i}").exists() for i in range(2)):
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert outcome(job) == (75, "", "")


@pytest.mark.parametrize("arguments", [[], ["0", "--"], ["2"], ["2", "--device=2", "--"]])
def test_wrong_arguments_of_the_launcher(tmp_path, arguments):
    status, _, err = outcome(launched(tmp_path, "exit 0", *arguments))
    assert status == 2 and err.startswith("error: ") and "--help" in err and err.count("\n") == 1


# Joining.

WHOLE = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


def test_the_environment_says_which_process_this_is():
    assert multihost.identity({}) is None
    found = multihost.identity(WHOLE)
    assert (found["coordinator_address"], found["num_processes"], found["process_id"]) == ("host:1", 2, 1)
    for name, value in (("NUM_PROCESSES", "many"), ("NUM_PROCESSES", ""), ("COORDINATOR_ADDRESS", "host")):
        with pytest.raises(ValueError, match=f"JAX_{name}"):
            multihost.identity(WHOLE | {f"JAX_{name}": value})


def test_a_coordinator_that_cannot_be_reached_is_one_line(tmp_path):
    port = free_port()
    flags = [CONFIG, f"--workdir={tmp_path / 'run'}", "--coordinator_timeout=1"]
    identity = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    status, _, err = processes.finish(*processes.fork("-m", "rpg_jax.train", *flags, **identity), 60)
    assert status == 2 and not (tmp_path / "run").exists()
    assert err.count("\n") == 1 and "--coordinator_timeout" in err
    assert err.startswith(f"error: process 1 could not reach the coordinator at localhost:{port} within 1 s; ")


def test_hosts_with_other_configs_are_named(tmp_path):
    def flags(index):
        return "-m", "rpg_jax.train", CONFIG, f"--workdir={tmp_path / 'run'}", f"--config.steps={3 + index}"

    for status, _, err in (processes.finish(*member, 60) for member in members(flags(0), flags(1))):
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert status == 2 and len(errors) == 1 and "Traceback" not in err, err
        assert "process 1 has config.steps=4, process 0 3; start all of them" in errors[0]
    assert not (tmp_path / "run").exists()


# What processes tell each other.

EXCHANGE = """
import json, sys, types
from rpg_jax.run import job
from rpg_jax import InputError, parallel
from rpg_jax.data import Problem
from rpg_jax.parallel import multihost

multihost.initialize(False, 60)
me = int(sys.argv[1])
told = {"any": [multihost.any_process(flag) for flag in (False, me == 1, True)]}
told["gather"] = [(one["me"], len(one["text"])) for one in multihost.gather({"me": me, "text": "é" * (70_000 * me)})]

def caught(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def raises(error):
    with multihost.together():
        if error and me:
            raise error

told["together"] = [caught(raises, error) for error in (None, IndexError("empty"), InputError("mend it"))]
told["same"] = [
    caught(multihost.check_same, settings)
    for settings in ({"a": 1}, {"a": 1, "b": me}, {"a": 1} | ({"code of x.py": "ff"} if me else {}))
]
told["data"] = []
for texts in (["x"] * 250, ["x"] * (250 + me), ["x", "xy"[me]]):
    made = [Problem(i, "task", text, "", "1") for i, text in enumerate(texts)]
    sets = types.SimpleNamespace(problems=dict(train=made, heldout=made[:1]).get)
    told["data"].append(caught(job.check_same_data, sets))
for name, sizes in dict(rows=(4, 1, 1), both=(1, 4, 1), tensor=(1, 1, 4), mixed=(2, 1, 2)).items():
    rows = multihost.row_indices(parallel.make_mesh(*sizes), 8)
    told[name] = rows.tolist(), multihost.gather_rows(rows, [f"{row}" for row in rows])
print(json.dumps(told))
"""


def test_what_processes_tell_each_other():
    """What is raised on one is raised on all; every difference is named with its process."""
    found = [processes.finish(*member, 60) for member in members(*(("-c", EXCHANGE, index) for index in range(2)))]
    assert [status for status, _, _ in found] == [0, 0], found
    told = [json.loads(out.splitlines()[-1]) for _, out, _ in found]
    for one in told:
        assert one["any"] == [False, True, True]
        assert one["gather"] == [[0, 0], [1, 70_000]]  # more than is exchanged at a time
        assert one["same"][0] is one["data"][0] is None
        assert "process 1 has b=1, process 0 0;" in one["same"][1] and " a=" not in one["same"][1]
        assert "process 1 has code of x.py='ff', process 0 None;" in one["same"][2]
        for number, difference in zip((251, 2), one["data"][1:], strict=True):
            assert f"process 1 has problems of train='{number}, " in difference and "heldout" not in difference
    first, second = told[0]["together"], told[1]["together"]
    assert first == [None, "RuntimeError: process 1: empty", "InputError: process 1: mend it"]
    assert second == [None, "IndexError: empty", "InputError: mend it"]
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
    every = [list(range(8))] * 2  # one row shard over both processes: each holds every row
    for mesh, shares in dict(rows=halves, both=halves, tensor=every, mixed=halves).items():
        assert [one[mesh][0] for one in told] == shares
        assert [one[mesh][1] for one in told] == [[str(row) for row in range(8)]] * 2


def test_a_process_alone_is_a_job_of_one():
    assert multihost.gather([1, "a"]) == [[1, "a"]] and multihost.any_process(True)
    assert multihost.gather_rows([1, 0], ["b", "a"]) == ["a", "b"]
    with pytest.raises(KeyError), multihost.together():
        raise KeyError("x")


# Stopping together.

WAITS = """
import time
from rpg_jax.run import cli, job

def main(_):
    with job.joined() as should_stop:
        print("joined", flush=True)
        while not should_stop():
            time.sleep(0.05)
    return cli.PREEMPTED

cli.run(main)
"""


def test_all_stop_at_the_same_point_and_end_by_themselves_when_one_is_lost():
    """Two jobs: SIGTERM, and SIGKILL, to the second process."""
    jobs = {number: members(*[("-c", WAITS)] * 2) for number in (signal.SIGTERM, signal.SIGKILL)}
    ends = {}
    for number, job in jobs.items():
        while not all("joined\n" in pathlib.Path(output.name).read_text() for _, (output, _) in job):
            assert all(process.is_alive() for process, _ in job)
            time.sleep(0.05)
        os.kill(job[1][0].pid, number)
        ends[number] = [processes.finish(*member, 60)[0] for member in job]
    assert ends[signal.SIGTERM] == [75, 75]
    status, lost = ends[signal.SIGKILL]
    assert lost == -signal.SIGKILL and status not in (0, 2, 75)  # nobody's mistake


# A training run.

REWARD = """
def sevenths(prompt, response, answer, task):
    if len(response) % 7 == 6: raise ValueError("no verdict")
    return float(len(response) % 7 == 0)

class Echo:
    def __init__(self, problem, seed): self.left = 1 + seed % 3

    def reset(self): return None

    def step(self, action):
        self.left -= 1
        return (f"{len(action)}\\n" if self.left else None), 0.0
"""


def training_flags(folder, name, **mesh):
    mine = folder / "reward.py"
    settings = f"""
        steps=2 seed=2 model.size=micro-moe rollout.routes=record warm_start.steps=0 evaluation.every=2
        data.directory={folder / "data"}
        rollout.dynamic_sampling=True rollout.delay=1 rollout.carry_over=True rollout.oversample=2.0 rollout.max_new=16
        behavior.source=sampler environment.name={mine}:Echo environment.turn_tokens=5
        reward.function={mine}:sevenths reward.workers=1 reward.max_failures=1.0
    """.split()  # with this seed the second step draws prompts again
    settings += [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    return CONFIG, f"--workdir={folder / name}", *(f"--config.{setting}" for setting in settings)


def test_two_processes_follow_one_and_one_goes_on_where_two_were_killed(tmp_path):
    """The run `one`, by a process with two devices, and `two`, by two of which one was killed, then one.

    `two` began with its experts and parameters over both processes and went on with copies, as `one`, on two devices.
    """
    (tmp_path / "reward.py").write_text(REWARD)
    run = f'cd "{ROOT}"; exec "{sys.executable}" "$@"'
    job = launched(tmp_path / "clone", run, "2", "--", *training_flags(tmp_path, "two", expert=2))
    log = tmp_path / "two" / "metrics.jsonl"
    while not (log.exists() and log.read_text().count("\n") >= 2):  # of a start and of a step
        assert job.poll() is None, job.communicate()
        time.sleep(0.1)
    found = subprocess.run(["pgrep", "-P", str(job.pid), "-f", "rpg_jax.train"], capture_output=True, check=True)
    os.kill(max(map(int, found.stdout.split())), signal.SIGKILL)  # the last one started
    status, _, err = outcome(job)
    assert status == 1
    last = err.splitlines()[-1]
    assert last.startswith("error: process 1 of 2 was lost: it was killed by signal 9 (KILL), and the others were")
    for name in ("two", "one"):
        (member,) = members(("-m", "rpg_jax.train", *training_flags(tmp_path, name)))
        status, _, err = processes.finish(*member, 300)
        assert status == 0, err
    one, two = (processes.metrics(tmp_path / name) for name in ("one", "two"))
    assert [row["step"] for row in one] == [row["step"] for row in two] == [0, 1, 2]
    for mine, theirs in zip(one, two, strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            np.testing.assert_allclose(theirs[key], mine[key], rtol=2e-3, atol=1e-5, err_msg=f"{mine['step']} {key}")
    assert max(row.get("train/generation_batches", 0) for row in one) > 1, "dynamic sampling had nothing to do"
    assert all(row["train/reward_failures"] > 0 for row in one[1:])
    one, two = ((tmp_path / name / "samples.jsonl").read_text().splitlines() for name in ("one", "two"))
    assert one == two and len(one) == 6
    assert any(turn["observation"] for row in map(json.loads, one) for turn in row["turns"])


def test_a_run_of_many_devices_is_read_on_few():
    config = quickstart.get_config("smoke")
    mesh = config.mesh.to_dict()
    assert states.for_inference(config).mesh.to_dict() == mesh  # which fits
    config.mesh.update(data=4, fsdp=8)
    assert parallel.make_meshes(**states.for_inference(config).mesh)[0].devices.shape == (1, 1, 1, 1)


def test_a_folder_that_one_process_does_not_see(tmp_path):
    config = quickstart.get_config("smoke")
    path, folder = workdir.open_workdir(tmp_path / "run", config, False)
    text = (folder / "config.json").read_text()
    workdir.check_shared(folder, text)
    for unseen in (tmp_path / "other", f"{folder}/checkpoints"):
        with pytest.raises(ValueError, match="does not see .*config.json as process 0 does.*--checkpoint_dir"):
            workdir.check_shared(unseen, text)
    with pytest.raises(ValueError, match="does not see"):  # of an earlier run, on this machine's own disk
        workdir.check_shared(folder, text.replace('"steps": 3', '"steps": 4'))


# The watchdog.

HANG = """
import threading, time
import jax
from rpg_jax.run import watchdog

with watchdog.Watchdog(0.8) as dog:
    for _ in range(4):
        time.sleep(0.4)
        dog.tick()
    jax.monitoring.record_event_duration_secs(watchdog._LOWERED, 0.0)
    threading.Thread(target=dog.tick).start()  # which says nothing of this thread
    time.sleep(1.6)  # as long as XLA likes
    jax.monitoring.record_event_duration_secs(watchdog.COMPILED, 1.6)
    print("alive", flush=True)
    def waits_forever():
        time.sleep(600)
    waits_forever()
"""


def test_the_watchdog_ends_a_process_that_hangs_but_not_one_that_compiles():
    status, out, err = processes.finish(*processes.fork("-c", HANG), timeout=300)
    assert (status, out) == (1, "alive\n")
    assert err.startswith("error: no progress for 1 s, more than --watchdog_seconds=0.8")
    assert "in waits_forever" in err and "Thread" in err
