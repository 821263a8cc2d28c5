"""A long run of a tiny model under a verifier that keeps dying: what it holds must not grow.

    python tests/soak.py [--steps=2000] [--out=runs/soak]

Over the second half of the steps a line is fitted to the process's memory, open files, threads and child processes. The
exit status is 1 if memory grows by 1 % or more, if any of the others grows by a whole one, or if a step takes 10 % more
CPU time in the last quarter than in the one before. tests/test_train.py kills runs, and reads their logs.
"""

import argparse
import atexit
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
REWARD = '''
import os, zlib

def reward(prompt, response, answer, task):
    """Ends its process at one response in thirty."""
    number = zlib.crc32((prompt + response).encode())
    if number % 30 == 0:
        os._exit(3)
    return number % 7 / 6
'''
SETTINGS = (
    "model.size=micro warm_start.steps=0 data.train_size=100 data.heldout_size=2 rollout.prompts=2 "
    "rollout.samples=4 rollout.max_new=12 rollout.slots=8 rollout.overlong_buffer=0 learner.minibatch_prompts=1 "
    "learner.microbatch_rows=4 optimizer.learning_rate=1e-5 evaluation.every=500 evaluation.k=1 "
    "checkpoint.every=50 reward.workers=1 reward.max_failures=1.0"
).split()


def start(out: pathlib.Path, steps: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "rpg_jax.train", f"--config={ROOT}/configs/quickstart.py:smoke"]
    command += [f"--workdir={out / 'run'}", *(f"--config.{setting}" for setting in SETTINGS)]
    command += [f"--config.steps={steps}", f"--config.reward.function={out / 'reward.py'}:reward"]
    command += [f"--config.data.directory={out / 'data'}"]
    training = subprocess.Popen(command, cwd=ROOT, stderr=(out / "stderr.txt").open("a"), stdout=subprocess.DEVNULL)
    atexit.register(training.kill)  # of a soak that is stopped
    return training


def steps_done(log: pathlib.Path) -> int:
    """The last step of a log that is being written."""
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
    return json.loads(whole.rpartition("\n")[2])["step"] if whole else -1


def held(pid: int) -> list[float]:
    """[CPU seconds, resident MiB, open files, threads, child processes] of a process, without its children's own."""
    folder, parents = pathlib.Path(f"/proc/{pid}"), []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents.append(int(stat.read_text().rpartition(")")[2].split()[1]))
    used = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    seconds = sum(map(int, used)) / os.sysconf("SC_CLK_TCK")
    resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return [seconds, resident, len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")), parents.count(pid)]


def watch(training: subprocess.Popen, log: pathlib.Path) -> list[list[float]]:
    """Rows [step, *held] twice a second, until the process has ended."""
    rows = []
    while training.poll() is None:
        time.sleep(0.5)
        with contextlib.suppress(OSError):  # it has ended meanwhile
            rows.append([steps_done(log), *held(training.pid)])
    return rows


def growth(steps: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """(The fitted line's value at the first step, how much it rises until the last)."""
    slope, offset = np.polyfit(steps, values, 1)
    return offset + slope * steps[0], slope * (steps[-1] - steps[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/soak"))
    options = parser.parse_args()
    out, steps, begin = options.out.absolute(), options.steps, time.monotonic()
    out.mkdir(parents=True)
    (out / "reward.py").write_text(REWARD)
    log = out / "run" / "metrics.jsonl"
    training = start(out, steps)
    rows = np.array(watch(training, log))
    faults = [f"training ended with status {status}"] if (status := training.wait()) else []
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    restarts = sum(row.get("train/reward_failures", 0) for row in logged)
    print(f"{steps} steps in {time.monotonic() - begin:.0f} s; the verifier died {restarts:.0f} times")
    late = rows[(rows[:, 0] >= steps // 2) & (rows[:, 0] < steps)]
    for name, column in zip(("MiB of memory", "open files", "threads", "child processes"), late.T[2:], strict=True):
        level, rise = growth(late[:, 0], column)
        print(f"{name}: {level:.1f} at step {late[0, 0]:.0f}, {rise:+.2f} until the end ({100 * rise / level:+.2f} %)")
        if rise >= (0.01 * level if name.startswith("MiB") else 1):
            faults.append(f"{name} grow")
    middle = np.median(late[:, 0])
    parts = [late[late[:, 0] <= middle], late[late[:, 0] >= middle]]
    third, fourth = (1000 * np.polyfit(part[:, 0], part[:, 1], 1)[0] for part in parts)
    print(f"CPU time of a step: {third:.1f} ms in the third quarter, {fourth:.1f} ms in the fourth")
    if fourth > 1.1 * third:
        faults.append("the time of a step grows")
    print(*(f"fault: {fault}" for fault in faults), sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
