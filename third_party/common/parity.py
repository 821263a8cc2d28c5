"""Runs a peer on the same arrays in its own Python and compares what comes back."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile

import numpy as np


def main(script, package, ours, theirs, tolerance):
    """Entry point of a parity script.

    Args:
      ours, theirs: {case: (arrays, compute)} and {case: compute}; `compute(arrays) -> dict of arrays`, same keys.
      tolerance: largest relative difference that passes; else the exit status is 1.
    """
    parser = argparse.ArgumentParser(description=f"Holds rpg_jax against {package} on the same arrays.")
    parser.add_argument("--peer_python", default=sys.executable, help=f"the Python that has {package}")
    parser.add_argument("--json", metavar="FILE", help="write the differences there as well")
    parser.add_argument("--worker", nargs=3, metavar=("CASE", "IN", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        if importlib.util.find_spec(package) is None:
            sys.exit(2)
        case, given, out = args.worker
        with np.load(given) as arrays:
            np.savez(out, **theirs[case](dict(arrays)))
        return
    worst = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, (arrays, compute) in ours().items():
            given, out = os.path.join(folder, "in.npz"), os.path.join(folder, "out.npz")
            np.savez(given, **arrays)
            command = [args.peer_python, script, "--worker", case, given, out]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode == 2:
                requirements = os.path.join(os.path.dirname(os.path.relpath(script)), "requirements.txt")
                print(
                    f"{package} is not installed in {args.peer_python}: install {requirements} into a virtual "
                    "environment and pass its Python as --peer_python",
                    file=sys.stderr,
                )
                sys.exit(2)
            if done.returncode:
                print(f"{package} failed on {case}:\n{done.stderr[-2000:]}", file=sys.stderr)
                sys.exit(1)
            mine = compute(arrays)
            with np.load(out) as peer:
                for key in mine:
                    size = max(np.abs(peer[key]).max(), 1e-30)
                    gap = float(np.abs(np.asarray(mine[key], np.float64) - peer[key]).max() / size)
                    worst[f"{case} {key}"] = gap
                    verdict = "same" if gap <= tolerance else "DIFFERENT"
                    print(f"{case:24s} {key:12s} largest relative difference {gap:8.1e}  {verdict}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(worst, file, indent=1)
    sys.exit(int(any(not gap <= tolerance for gap in worst.values())))
