"""Runs a sweep's variants and seeds in one process, on the task of `verify --oracle`, and keeps them in one file.

    python docs/study/trials.py configs/sweeps/equivalence.py --out=docs/study/equivalence.parquet
    python docs/study/trials.py configs/sweeps/betas.py --out=docs/study/betas.parquet
    python -m rpg_jax.report docs/study/equivalence.parquet --margin=0.01

A run takes a few seconds. The same command goes on after a kill, and leaves out what the file has.
"""

import argparse
import pathlib
import runpy
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from rpg_jax.lab.oracle import policies, trials
from rpg_jax.lab.reporting import kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=trials.Budget.steps)
    parser.add_argument("--seeds", type=int, help="only the first so many")
    parser.add_argument("--parallel", type=int, default=2, help="runs at once")
    options = parser.parse_args()
    sweep, budget = runpy.run_path(str(options.sweep)), trials.Budget(steps=options.steps)
    runs = kept.read(options.out) if options.out.exists() else []
    done = {(run.path.parent.name, run.seed) for run in runs}
    model, started = policies.transformer(), time.monotonic()
    begun = policies.warm_start(model, 0, **policies.DEMONSTRATIONS)
    base_rate = runpy.run_path(sweep["CONFIG"])["get_config"]().optimizer.learning_rate
    steps = {name: trials.variant(model, settings, budget, base_rate) for name, settings in sweep["VARIANTS"].items()}
    lock = threading.Lock()

    def run(seed, name):
        rows, seconds = trials.trial(model, begun, *steps[name], budget, seed)
        with lock:
            runs.append(trials.as_run(name, options.sweep.stem, sweep["VARIANTS"][name], seed, budget, rows, seconds))
            kept.keep(runs, options.out)
            print(f"{time.monotonic() - started:.0f} s: {name}, seed {seed}; {len(runs)} runs", flush=True)

    left = [(seed, name) for seed in sweep["SEEDS"][: options.seeds] for name in steps if (name, seed) not in done]
    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(run, *zip(*left, strict=True)))


if __name__ == "__main__":
    main()
