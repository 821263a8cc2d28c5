"""Times two implementations against each other: a worker process each, taking turns within one run.

Machines drift, so only figures from the same minutes compare. A worker builds one step of one case, runs it once (the
first step, compilation included) and then once per line it reads; it may live in another virtual environment.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time

# Sizes of the two models, as in rpg_jax.models.SIZES; written out because a peer's environment has no rpg_jax.
SHAPES = {
    "m1": dict(vocab=512, hidden=128, mlp=384, layers=4, heads=4, kv_heads=2, head_dim=32),
    "m2": dict(vocab=151936, hidden=256, mlp=768, layers=4, heads=8, kv_heads=4, head_dim=32),
}
# What a step does: rows sequences of prompt + new tokens; rl_step has rows / samples prompts.
TASKS = {
    "generation": dict(rows=32, prompt=32, new=128),
    "update": dict(rows=32, prompt=32, new=128),
    "rl_step": dict(rows=128, prompt=32, new=64, samples=8),
}


def main(script, package, theirs):
    """Entry point of a benchmark script.

    Args:
      script: its path; package: the peer's import name.
      theirs: {task: build}, `build(shape, task) -> step`, and `step()` does the work and returns after it is done.
    """
    cases = [f"{task}:{size}" for task in theirs for size in SHAPES if task != "rl_step" or size == "m1"]
    parser = argparse.ArgumentParser(description=f"Times rpg_jax beside {package}, interleaved, on this machine.")
    parser.add_argument("--cases", default=",".join(cases), help="comma-separated task:size (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each side (default: %(default)s)")
    parser.add_argument("--peer_python", default=sys.executable, help=f"the Python that has {package}")
    parser.add_argument("--json", metavar="FILE", help="write every timing there as well")
    parser.add_argument("--worker", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [case for case in args.cases.split(",") if case not in cases]
    if unknown or args.rounds < 1:
        parser.error(f"unknown case {unknown[0]!r}; known: {', '.join(cases)}" if unknown else "--rounds: at least 1")
    if args.worker:
        return work(args.worker, package, theirs, args.cases)
    results = []
    for case in args.cases.split(","):
        results.append(race(script, package, case, args))
        print(row(results[-1]), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


def work(side, package, theirs, case):
    """The worker: protocol on the real stdout, whatever the libraries print on stderr."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if side == "ours":
        import ours

        theirs = ours.BUILDERS
    elif importlib.util.find_spec(package) is None:
        replies.write(json.dumps({"missing": package}) + "\n")
        return
    name, size = case.split(":")
    started = time.perf_counter()
    step = theirs[name](SHAPES[size], TASKS[name])
    built = time.perf_counter()
    step()
    replies.write(json.dumps({"build": built - started, "first": time.perf_counter() - built}) + "\n")
    for _ in sys.stdin:
        started = time.perf_counter()
        step()
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        replies.write(json.dumps({"seconds": seconds, "peak_rss": peak}) + "\n")
    os._exit(0)  # whatever threads a library still has waiting


def race(script, package, case, args):
    """Runs one case; returns its timings by side. Exits with status 2 and one line if the peer is not installed."""
    log = None if os.environ.get("BENCHMARK_VERBOSE") else subprocess.DEVNULL
    pythons = {"theirs": args.peer_python, "ours": sys.executable}
    result = {"case": case, "peer": package}
    with contextlib.ExitStack() as stack:
        workers = {}
        for side, python in pythons.items():
            command = [python, script, "--worker", side, "--cases", case]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
            stack.callback(worker.wait)
            stack.callback(worker.stdin.close)
            reply = receive(worker, side, case)
            if "missing" in reply:
                requirements = os.path.join(os.path.dirname(os.path.relpath(script)), "requirements.txt")
                print(
                    f"{package} is not installed in {python}: install {requirements} into a virtual environment and "
                    "pass its Python as --peer_python",
                    file=sys.stderr,
                )
                sys.exit(2)
            workers[side] = worker
            result[side] = {**reply, "seconds": []}
        for _ in range(args.rounds):
            for side, worker in workers.items():
                print("step", file=worker.stdin, flush=True)
                reply = receive(worker, side, case)
                result[side]["seconds"].append(reply["seconds"])
                result[side]["peak_rss"] = reply["peak_rss"]
    return result


def receive(worker, side, case):
    line = worker.stdout.readline()
    if not line:
        print(f"{side} failed on {case}; BENCHMARK_VERBOSE=1 shows what it printed", file=sys.stderr)
        sys.exit(1)
    return json.loads(line)


def row(result):
    """One case as lines of a table: median [fastest, slowest] seconds, tokens/s, first step, peak memory, ratio."""
    task = TASKS[result["case"].split(":")[0]]
    columns = task["new"] if result["case"].startswith("generation") else task["prompt"] + task["new"]
    medians = {side: statistics.median(result[side]["seconds"]) for side in ("ours", "theirs")}
    lines = [f"{result['case']}: ours is {medians['theirs'] / medians['ours']:.2f} x as fast as {result['peer']}"]
    for side, name in (("ours", "rpg_jax"), ("theirs", result["peer"])):
        timing = result[side]
        lines.append(
            f"  {name:12s} {medians[side]:8.3f} s [{min(timing['seconds']):.3f}, {max(timing['seconds']):.3f}]"
            f" {task['rows'] * columns / medians[side]:10,.0f} tokens/s   first step {timing['first']:6.2f} s"
            f"   peak {timing['peak_rss'] / 1e9:5.2f} GB"
        )
    return "\n".join(lines)
