"""Times two implementations against each other: a worker process each, taking turns within one run.

Machines drift, so only figures from the same minutes compare. A worker builds one step of one case, runs it once (the
first step, compilation included) and then once per line it reads; it may live in another virtual environment. Between
its turns a worker is stopped (SIGSTOP), because the thread pools of XLA and torch spin for a while after their work is
done and would take the cores from the other side.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import time

import numpy as np

# Sizes of the models, as in rpg_jax.models.SIZES; written out because a peer's environment has no rpg_jax. m1, m2 are
# Qwen3; smollm2 is the Llama shape of SmolLM2-135M, which docs/running.md trains, and coder that of Qwen2.5-Coder-0.5B
# with a head of its own, as its GGUF file has, and without its biases.
SHAPES = {
    "m1": dict(vocab=512, hidden=128, mlp=384, layers=4, heads=4, kv_heads=2, head_dim=32),
    "m2": dict(vocab=151936, hidden=256, mlp=768, layers=4, heads=8, kv_heads=4, head_dim=32),
    "smollm2": dict(vocab=49152, hidden=576, mlp=1536, layers=30, heads=9, kv_heads=3, head_dim=64, qk_norm=False),
    "coder": dict(
        vocab=151936, hidden=896, mlp=4864, layers=24, heads=14, kv_heads=2, head_dim=64, qk_norm=False, tied=False
    ),
}
# What a step does: rows sequences of prompt + new tokens; rl_step has rows / samples prompts. long_tails generates
# `responses` responses of at most `new` tokens, `mean` on average, with at most `rows` at once.
TASKS = {
    "generation": dict(rows=32, prompt=32, new=128),
    "long_tails": dict(rows=32, prompt=32, new=2048, responses=512, mean=100),
    "update": dict(rows=32, prompt=32, new=128),
    "rl_step": dict(rows=128, prompt=32, new=64, samples=8),
    # What configs/real_model.py does: 16 prompts x 8 responses a step, 8 x 8 an update. trl's losses are of peer_rows
    # rows at a time, and accumulate: of 128 at once they took more than 22 GB.
    "generation:smollm2": dict(rows=128, prompt=64, new=24),
    "generation:coder": dict(rows=128, prompt=128, new=64, samples=8),  # 16 prompts, of which transformers reads 128
    "update:smollm2": dict(rows=64, prompt=64, new=24, peer_rows=8),
    "rl_step:smollm2": dict(rows=128, prompt=64, new=24, samples=8, peer_rows=8),
}


def response_lengths(task):
    """int64[responses]: the tokens that each response of a task must have; log-normal where the task has a mean.

    RandomState's stream never changes, so that both environments draw the same lengths whatever their version of numpy.
    """
    if "mean" not in task:
        return np.full(task["rows"], task["new"])
    sigma = 1.0
    lengths = np.random.RandomState(0).lognormal(np.log(task["mean"]) - sigma**2 / 2, sigma, task["responses"])
    return np.clip(np.rint(lengths), 1, task["new"]).astype(np.int64)


def task_of(case):
    """What a step of a case does: TASKS has a row for the case itself, or for its task at all sizes."""
    return TASKS.get(case) or TASKS[case.split(":")[0]]


def tokens_per_step(case):
    """Tokens that a step is credited with: of generation the response tokens asked for, else whole sequences."""
    task = task_of(case)
    if case.split(":")[0] in ("generation", "long_tails"):
        return int(response_lengths(task).sum())
    return task["rows"] * (task["prompt"] + task["new"])


def processor():
    """Name and cores of this machine's processor; family and model too, as clouds call several generations alike."""
    fields = {}
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in file)}
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return f"{name}, {os.cpu_count()} cores"


def main(script, package, theirs, sizes=tuple(SHAPES)):
    """Entry point of a benchmark script.

    Args:
      script: its path; package: the peer's import name.
      theirs: {task: build}, `build(shape, task) -> step`, and `step()` does the work and returns after it is done.
      sizes: those of SHAPES that the peer has the architecture of.
    """
    left_out = {"rl_step:m2", "long_tails:smollm2", "long_tails:coder", "update:coder", "rl_step:coder"}
    cases = [f"{task}:{size}" for task in theirs for size in sizes if f"{task}:{size}" not in left_out]
    # Without those that take many minutes.
    usual = ",".join(case for case in cases if case != "long_tails:m2" and not case.endswith((":smollm2", ":coder")))
    parser = argparse.ArgumentParser(description=f"Times rpg_jax beside {package}, interleaved, on this machine.")
    parser.add_argument("--cases", default=usual, help=f"comma-separated, of {', '.join(cases)} (default: %(default)s)")
    parser.add_argument("--responses", type=int, default=TASKS["long_tails"]["responses"],
                        help="responses of long_tails (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each side (default: %(default)s)")
    parser.add_argument("--peer_python", default=sys.executable, help=f"the Python that has {package}")
    parser.add_argument("--json", metavar="FILE", help="write every timing there as well")
    parser.add_argument("--worker", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [case for case in args.cases.split(",") if case not in cases]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; known: {', '.join(cases)}")
    for flag in ("rounds", "responses"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag}: at least 1")
    TASKS["long_tails"]["responses"] = args.responses
    if args.worker:
        return work(args.worker, package, theirs, args.cases)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else a stopped worker would outlive this process
    print(processor(), flush=True)
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
    step = theirs[name](SHAPES[size], task_of(case))
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
    result = {"case": case, "peer": package, "processor": processor(), "tokens": tokens_per_step(case)}
    with contextlib.ExitStack() as stack:
        workers = {}
        for side, python in pythons.items():
            command = [python, script, "--worker", side, "--cases", case, "--responses", str(args.responses)]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            reply = receive(worker, side, case)
            if "missing" in reply:
                requirements = os.path.join(os.path.dirname(os.path.relpath(script)), "requirements.txt")
                print(
                    f"{package} is not installed in {python}: install {requirements} into a virtual environment and "
                    "pass its Python as --peer_python",
                    file=sys.stderr,
                )
                sys.exit(2)
            worker.send_signal(signal.SIGSTOP)
            workers[side] = worker
            result[side] = {**reply, "seconds": []}
        for _ in range(args.rounds):
            for side, worker in workers.items():
                reply = turn(worker, side, case)
                result[side]["seconds"].append(reply["seconds"])
                result[side]["peak_rss"] = reply["peak_rss"]
    return result


def turn(worker, side, case):
    """Lets a stopped worker take one step and stops it again; returns its reply."""
    worker.send_signal(signal.SIGCONT)
    print("step", file=worker.stdin, flush=True)
    reply = receive(worker, side, case)
    worker.send_signal(signal.SIGSTOP)
    return reply


def receive(worker, side, case):
    line = worker.stdout.readline()
    if not line:
        print(f"{side} failed on {case}; BENCHMARK_VERBOSE=1 shows what it printed", file=sys.stderr)
        sys.exit(1)
    return json.loads(line)


def row(result):
    """One case as lines of a table: median [fastest, slowest] seconds, tokens/s, first step, peak memory, ratio."""
    medians = {side: statistics.median(result[side]["seconds"]) for side in ("ours", "theirs")}
    lines = [f"{result['case']}: ours is {medians['theirs'] / medians['ours']:.2f} x as fast as {result['peer']}"]
    for side, name in (("ours", "rpg_jax"), ("theirs", result["peer"])):
        timing = result[side]
        lines.append(
            f"  {name:12s} {medians[side]:8.3f} s [{min(timing['seconds']):.3f}, {max(timing['seconds']):.3f}]"
            f" {result['tokens'] / medians[side]:10,.0f} tokens/s   first step {timing['first']:6.2f} s"
            f"   peak {timing['peak_rss'] / 1e9:5.2f} GB"
        )
    return "\n".join(lines)
