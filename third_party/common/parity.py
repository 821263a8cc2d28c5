"""Runs a peer on the same arrays in its own Python and compares what comes back."""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np


def main(script, package, ours, theirs, tolerance, different=(), checkout=None):
    """Entry point of a parity script.

    Args:
      ours, theirs: {case: (arrays, compute)} and {case: compute}; `compute(arrays) -> dict of arrays`, same keys.
      tolerance: largest relative difference that passes; else the exit status is 1.
      different: cases that are known to differ, and must; docs/paper.md says why.
      checkout: (name, file) of a repository whose checkout --repo names, and a file that it must have; the workers find
        the folder in the environment as PEER_REPO.
    """
    parser = argparse.ArgumentParser(description=f"Holds rpg_jax against {package} on the same arrays.")
    parser.add_argument("--peer_python", default=sys.executable, help=f"the Python that has {package}")
    parser.add_argument("--json", metavar="FILE", help="write the differences there as well")
    parser.add_argument("--worker", nargs=3, metavar=("CASE", "IN", "OUT"), help=argparse.SUPPRESS)
    if checkout:
        parser.add_argument("--repo", metavar="FOLDER", help=f"a checkout of {checkout[0]}")
    args = parser.parse_args()
    if args.worker:
        case, given, out = args.worker
        with np.load(given) as arrays:
            np.savez(out, **theirs[case](dict(arrays)))
        return
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    if subprocess.run([args.peer_python, "-c", find], stderr=subprocess.DEVNULL).returncode:
        requirements = os.path.join(os.path.dirname(os.path.relpath(script)), "requirements.txt")
        leave(
            f"{package} is not installed in {args.peer_python}: install {requirements} into a virtual environment and "
            "pass its Python as --peer_python"
        )
    if checkout:
        if not os.path.isfile(os.path.join(args.repo or "", checkout[1])):
            leave(
                f"--repo={args.repo or ''}: there is no {checkout[1]}; name the folder of a checkout of {checkout[0]}"
            )
        os.environ["PEER_REPO"] = os.path.abspath(args.repo)
    worst, passed = {}, True
    with tempfile.TemporaryDirectory() as folder:
        for case, (arrays, compute) in ours().items():
            given, out = os.path.join(folder, "in.npz"), os.path.join(folder, "out.npz")
            np.savez(given, **arrays)
            command = [args.peer_python, script, "--worker", case, given, out]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
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
                    if case in different:
                        verdict = "differs, as known" if verdict == "DIFFERENT" else "SAME, and should differ"
                    passed &= verdict in ("same", "differs, as known")
                    print(f"{case:32s} {key:12s} largest relative difference {gap:8.1e}  {verdict}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(worst, file, indent=1)
    sys.exit(int(not passed))


def leave(line):
    """Ends the script: a mistake in the call."""
    print(line, file=sys.stderr)
    sys.exit(2)
