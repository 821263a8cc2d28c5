"""A long run of a tiny model under a verifier that keeps dying: what it holds must not grow.

    python tests/soak.py [--steps=2000] [--out=runs/soak]

Over the second half of the steps a line is fitted to the process's memory, open files, threads and child processes. The
exit status is 1 if memory grows by 1 % or more, or if any of the others grows by a whole one.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import time

import numpy as np
import psutil

ROOT = pathlib.Path(__file__).parent.parent
REWARD = '''
import os, zlib

def reward(prompt, response):
    """Ends its process at one response in thirty."""
    number = zlib.crc32((prompt + response).encode())
    return os._exit(3) if number % 30 == 0 else number % 7 / 6
'''
SETTINGS = (
    "model.size=micro warm_start.steps=0 data.train_size=100 data.heldout_size=2 rollout.prompts=2 "
    "rollout.samples=4 rollout.max_new=12 rollout.slots=8 rollout.overlong_buffer=0 learner.minibatch_prompts=1 "
    "learner.microbatch_rows=4 optimizer.learning_rate=1e-5 evaluation.every=500 evaluation.k=1 "
    "checkpoint.every=50 reward.workers=1 reward.max_failures=1.0"
).split()
HELD = "MiB of memory", "open files", "threads", "child processes"


def held(process: psutil.Process) -> list[float]:
    """What a process has of `HELD`, without its children's own."""
    return [process.memory_info().rss / 2**20, process.num_fds(), process.num_threads(), len(process.children())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/soak"))
    options = parser.parse_args()
    out, log, seen = options.out.absolute(), options.out.absolute() / "run" / "metrics.jsonl", []
    out.mkdir(parents=True)
    (out / "reward.py").write_text(REWARD)
    settings = [*SETTINGS, f"steps={options.steps}", f"reward.function={out}/reward.py:reward"]
    command = [sys.executable, "-m", "rpg_jax.train", f"--config={ROOT}/configs/quickstart.py:smoke"]
    command += [f"--workdir={out}/run", *(f"--config.{x}" for x in [*settings, f"data.directory={out}/data"])]
    with psutil.Popen(command, cwd=ROOT, stderr=(out / "stderr.txt").open("a")) as training:
        while training.poll() is None:
            time.sleep(0.5)
            with contextlib.suppress(OSError, psutil.Error):  # there is no log yet, or it has ended meanwhile
                seen.append([log.read_bytes().count(b"\n"), *held(training)])
    rows, logged = np.array(seen), [json.loads(line) for line in log.read_text().splitlines()]
    print("The verifier died", sum(row.get("train/reward_failures", 0) for row in logged), "times")
    late, faults = rows[rows[:, 0] >= options.steps // 2], training.returncode != 0
    for name, column in zip(HELD, late.T[1:], strict=True):
        slope, offset = np.polyfit(late[:, 0], column, 1)
        level, rise = offset + slope * late[0, 0], slope * np.ptp(late[:, 0])
        print(f"{name}: {level:.1f} at row {late[0, 0]:.0f}, {rise:+.2f} until the end ({100 * rise / level:+.2f} %)")
        faults |= rise >= (0.01 * level if name == HELD[0] else 1)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
