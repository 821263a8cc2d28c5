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
import sys
import time
from collections import Counter
from functools import partial

from environment import environment

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # rpg_jax
os.environ.update(dict(JAX_PLATFORMS="cpu") | environment() | dict(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0"))

import numpy as np  # noqa: E402
from faults import rewards, signals  # noqa: E402
from faults.bench import LOST, OUTCOMES, Bench, Trial  # noqa: E402

# The faults, each with the share of the time that it may take.
FAULTS = (
    (32, partial(signals.interrupted, which="SIGKILL")), (8, partial(signals.interrupted, which="SIGTERM")),
    (6, rewards.misbehaving), (2, rewards.worker_lost),
)  # fmt: skip


def table(trials: list[Trial]) -> str:
    """A row a kind, in Markdown, and their sum."""
    lines = ["fault | tried | " + " | ".join(OUTCOMES), " | ".join(["---"] + ["---:"] * (1 + len(OUTCOMES)))]
    for kind in [*sorted({trial.kind for trial in trials}), "all"]:
        outcomes = Counter(trial.outcome for trial in trials if kind in (trial.kind, "all"))
        lines.append(" | ".join(map(str, (kind, outcomes.total(), *(outcomes[name] for name in OUTCOMES)))))
    return "".join(f"| {line} |\n" for line in lines)


def campaign(folder: pathlib.Path, minutes: float, seed: int) -> list[Trial]:
    """Tries the fault that is furthest behind its share of the time, again and again."""
    folder.mkdir(parents=True)
    bench, rng, begin, trials = Bench(folder), np.random.default_rng(seed), time.monotonic(), []
    faults = rng.permutation(np.array(FAULTS, object))
    spent = [0.0] * len(FAULTS)
    try:
        while time.monotonic() - begin < 60 * minutes:
            which = min(range(len(faults)), key=lambda one: spent[one] / faults[one][0])
            start, new = time.monotonic(), faults[which][1](bench, rng)
            spent[which] += time.monotonic() - start
            trials += new
            with (folder / "trials.jsonl").open("a") as log:
                log.writelines(json.dumps(trial._asdict()) + "\n" for trial in new)
            lost = [trial for trial in trials if trial.outcome == LOST]
            print(f"{len(trials)} faults, {len(lost)} lost", *new[-1:], file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return trials


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="until the last fault begins")
    parser.add_argument("--seed", type=int, default=0, help="which files, moments and bits the faults choose")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the campaign, which is made")
    options = parser.parse_args()
    trials = campaign(options.out.absolute(), options.minutes, options.seed)
    print(table(trials))
    lost = [trial for trial in trials if trial.outcome == LOST]
    print(*lost, sep="\n")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
