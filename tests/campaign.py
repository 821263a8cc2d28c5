"""Tries to break small trainings for some minutes, and tells what became of each fault.

    python tests/campaign.py --minutes=60 --seed=0 --out=runs/faults

Trainings are killed in every phase, and their reward functions hang, lie and fork. After each fault the training must
end with the bits of one that nothing disturbed, or one line must say what was lost and how to go on. OUT holds
trials.jsonl, and under runs/ the folders of what was lost. The exit status is 1 if anything was. docs/reliability.md
has what is promised, and what was found; damaged files and full disks are those of tests/test_checkpoints.py.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import time
from collections import Counter

from environment import environment

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # rpg_jax
os.environ.update(dict(JAX_PLATFORMS="cpu") | environment() | dict(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0"))

import numpy as np  # noqa: E402
from faults import kinds  # noqa: E402
from faults.bench import LOST  # noqa: E402

# The faults, each with the share of the time that it may take.
FAULTS = (
    (32, lambda *of: kinds.interrupted(*of, signal.SIGKILL)), (8, lambda *of: kinds.interrupted(*of, signal.SIGTERM)),
    (8, kinds.misbehaving),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="until the last fault begins")
    parser.add_argument("--seed", type=int, default=0, help="which files, moments and bits the faults choose")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the campaign, which is made")
    options = parser.parse_args()
    folder, rng = options.out.absolute(), np.random.default_rng(options.seed)
    folder.mkdir(parents=True)
    spent, trials, lost, begin = [0.0] * len(FAULTS), [], [], time.monotonic()
    order = rng.permutation(len(FAULTS)).tolist()
    while time.monotonic() - begin < 60 * options.minutes:  # the fault that is furthest behind its share of the time
        which = min(order, key=lambda one: spent[one] / FAULTS[one][0])
        start, new = time.monotonic(), FAULTS[which][1](folder, rng)
        spent[which] += time.monotonic() - start
        trials += new
        with (folder / "trials.jsonl").open("a") as log:
            log.writelines(json.dumps(trial._asdict()) + "\n" for trial in new)
        lost = [trial for trial in trials if trial.outcome == LOST]
        print(f"{len(trials)} faults, {len(lost)} lost", *new[-1:], file=sys.stderr, flush=True)
    for (kind, outcome), count in sorted(Counter((trial.kind, trial.outcome) for trial in trials).items()):
        print(f"{kind}: {count} times {outcome}")
    print(*lost, sep="\n")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
