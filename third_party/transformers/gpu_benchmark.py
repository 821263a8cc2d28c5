"""Decoding and updates on an accelerator: rpg_jax beside torch and `transformers`; random Qwen3 weights, bfloat16.

    python third_party/transformers/gpu_benchmark.py --peer_python=VENV/bin/python [--works=decode:256] [--json=FILE]
    python third_party/transformers/gpu_benchmark.py --alone --trace    # ours alone, and its kernels by time
    python third_party/transformers/gpu_benchmark.py --peer_python=VENV/bin/python --smoke    # tiny, on any machine

Each work has a process of each side, gpu_ours.py and gpu_theirs.py; they take turns, so that both have the device for
themselves and figures are of the same minutes. The peer has two variants: `eager`, and `compiled`, which is
torch.compile, for decoding over a static cache. A variant that fails, or takes longer than --limit seconds for one
reply, is left out with a line; one whose rounds have taken --seconds has no more. Lines are printed as they come.

Works: `decode:N`, a step of N rows, the time of many new tokens less that of few, so that prefill is not in it;
`update:plain`, whole rows of one length; `update:packed`, sequences of various lengths end to end in rows as long,
ours alone. Shares are of what this device reached a minute before: of the bandwidth of a copy, by the bytes that a step
must read (weights, and keys and values of the tokens there are); of a large product, by the operations of the model (no
recomputation).

--json=FILE, which is written anew after each work; `python -m rpg_jax.plan --measured=FILE` reads it:
    {"device": "NVIDIA H100 80GB HBM3", "versions": {"jax": ...}, "time": "2026-11-27T21:00:00+00:00",
     "size": "qwen3-0.6b", "shape": {"vocab": ..., "layers": ..., ...}, "dtype": "bfloat16", "remat": "dots",
     "limits": {"bandwidth": bytes/s, "matrix": operations/s},
     "works": {"decode:64": WORK, "decode:256": WORK, "update:plain": WORK, "update:packed": WORK},
     "peer": {"versions": {...}, "eager": {work: WORK}, "compiled": {work: WORK}}}
    WORK = {"seconds": {"median": s, "min": s, "max": s}, "rounds": n, "first": s,     of a decode step, or an update;
                                                                  first: of the first call, compilation included
            "tokens": n, "tokens_per_second": n / s,     response tokens of a step, or all tokens of the sequences
            "least": s, "share": least / median,         by the limits above
            "peak": bytes or null,                       of the process's memory on the device
            decode: "rows": N, "prompt": tokens, "few": tokens, "new": tokens,
            update: "rows": sequences, "lengths": [tokens of each], "prompt": tokens of each that are not trained,
                    "columns": of a row of the model, "microbatch_rows": rows of the model at a time,
            with --trace, ours: "kernels": {"busy": s, "span": s, "launches": n, "top": [[name, s, launches]]}}
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import select
import statistics
import subprocess
import sys
import time
import traceback

# Published shapes, written out because the peer's environment has no rpg_jax.
QWEN3 = dict(vocab=151936, layers=28, heads=16, kv_heads=8, head_dim=128)
SHAPES = {
    "qwen3-0.6b": dict(QWEN3, hidden=1024, mlp=3072),
    "qwen3-1.7b": dict(QWEN3, hidden=2048, mlp=6144),
    "smoke": dict(vocab=512, layers=2, heads=4, kv_heads=2, head_dim=32, hidden=64, mlp=128),
}
UPDATE = dict(prompt=128, columns=1024, microbatch_rows=8)
WORKS = {
    "decode:64": dict(rows=64, prompt=128, few=32, new=160),
    "decode:256": dict(rows=256, prompt=128, few=32, new=160),
    "update:plain": UPDATE | dict(lengths=[1024] * 32),
    # From 160 to 512 tokens, evenly spread: 96 sequences, which a plan puts into some 32 rows.
    "update:packed": UPDATE | dict(lengths=[160 + 352 * ((37 * n) % 96) // 95 for n in range(96)]),
}
LIMITS = dict(copy=2**29, side=8192, calls=10)
SMOKE = {
    "decode:64": dict(rows=4, prompt=8, few=2, new=18),
    "decode:256": dict(rows=8, prompt=8, few=2, new=18),
    "update:plain": dict(prompt=8, columns=32, microbatch_rows=2, lengths=[32] * 4),
    "update:packed": dict(prompt=8, columns=32, microbatch_rows=2, lengths=[9, 16, 12, 20, 10, 16]),
    "limits": dict(copy=2**20, side=256, calls=2),
    "versions": {},
}
SIDES = {"ours": ("ours",), "theirs": ("eager", "compiled")}
SCRIPTS = {side: pathlib.Path(__file__).with_name(f"gpu_{side}.py") for side in SIDES}


def task_of(work, smoke) -> dict:
    """What a work does: sizes by name."""
    task = (SMOKE if smoke else WORKS | {"limits": LIMITS, "versions": {}})[work]
    return task | dict(rows=len(task["lengths"])) if "lengths" in task else task


def parameters(shape) -> dict:
    """Numbers in the layers' matrices and in the vocabulary's, which is tied."""
    query, key = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    layer = shape["hidden"] * (2 * query + 2 * key + 3 * shape["mlp"])
    return dict(layers=shape["layers"] * layer, vocabulary=shape["vocab"] * shape["hidden"])


def decode_bytes(shape, task) -> float:
    """Bytes of bfloat16 that a decode step must read, averaged over the steps between `few` and `new` tokens."""
    present = task["prompt"] + (task["few"] + task["new"]) / 2
    cached = 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * present * task["rows"]
    return 2 * (sum(parameters(shape).values()) + cached)


def update_operations(shape, task) -> float:
    """Operations of an update: thrice the forward pass, attention over earlier tokens only, no recomputation."""
    tokens, trained = sum(task["lengths"]), sum(length - task["prompt"] for length in task["lengths"])
    sizes, width = parameters(shape), shape["heads"] * shape["head_dim"]
    attention = 2 * width * shape["layers"] * sum(length**2 for length in task["lengths"])
    return 3 * (2 * sizes["layers"] * tokens + 2 * sizes["vocabulary"] * trained + attention)


def decode_seconds(decode, task) -> float:
    """Seconds of a step; `decode(new)` returns when so many tokens of each row are there."""
    seconds = []
    for new in (task["new"], task["few"]):  # the many first: a static cache is made for them
        begin = time.perf_counter()
        decode(new)
        seconds.append(time.perf_counter() - begin)
    return (seconds[0] - seconds[1]) / (task["new"] - task["few"])


def seconds_of(run) -> float:
    """`run()` returns when the work is done."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def said(error) -> str:
    """An exception in a line, or where it has no message, what raised it."""
    message = str(error).strip() or traceback.extract_tb(error.__traceback__)[-1].line
    return f"{type(error).__name__}: {message}".split("\n")[0][:300]


def serve(build):
    """A worker of one work: `build(work, shape, task) -> steps`, functions by name; a line of stdin names the next.

    The reply is a line of JSON on the real stdout, whatever libraries print: what the function returns, or why it
    failed.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    work, size, smoke = sys.argv[1:4]
    steps, failed = {}, None
    try:
        steps = build(work, SHAPES[size], task_of(work, smoke == "smoke"))  # at once: both sides' imports overlap
    except Exception as error:
        failed = error
    for line in sys.stdin:
        try:
            reply = dict(failed=said(failed)) if failed else steps[line.strip()]()
        except Exception as error:  # out of memory, a kernel that is not there: the other variants go on
            reply = dict(failed=said(error))
        replies.write(json.dumps(reply) + "\n")
    os._exit(0)  # whatever threads a library still has waiting


class Worker:
    """A process of one side for one work, which dies with the block."""

    def __init__(self, side, work, options):
        python = options.peer_python if side == "theirs" else sys.executable
        self.command = [python, SCRIPTS[side], work, options.size, "smoke" if options.smoke else "whole"]
        self.limit = options.limit
        self.start()

    def start(self):
        # Two processes share the device; what JAX would take in advance is the other's.
        environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false", TOKENIZERS_PARALLELISM="false")
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        log = None if os.environ.get("BENCHMARK_VERBOSE") else subprocess.DEVNULL
        self.process = subprocess.Popen(self.command, stderr=log, env=environment, **pipes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def ask(self, step) -> dict:
        """The reply to a step's name, or {"failed": why}; a process that took too long is ended."""
        with contextlib.suppress(BrokenPipeError):
            print(step, file=self.process.stdin, flush=True)
        failed = f"no answer in {self.limit:.0f} s"
        if select.select([self.process.stdout], [], [], self.limit)[0]:
            if line := self.process.stdout.readline():
                return json.loads(line)
            failed = "its process ended; BENCHMARK_VERBOSE=1 shows what it said"
        self.__exit__()
        return dict(failed=failed)


def race(work, options) -> dict:
    """{variant: its last reply, with "first" and "times" of its rounds}; one that fails gets a line and no more."""
    found = {}
    sides = ["ours"] if options.alone or work in ("limits", "update:packed") else ["ours", "theirs"]
    with contextlib.ExitStack() as stack:
        workers = {}
        for side in sides:
            workers |= dict.fromkeys(SIDES[side], stack.enter_context(Worker(side, work, options)))
        for number in range(options.rounds + 1):
            for variant, worker in workers.items():
                so_far = found.setdefault(variant, dict(times=[], spent=0.0))
                if "failed" in so_far or so_far["spent"] > options.seconds:
                    continue
                if worker.process.poll() is not None:  # the side's other variant has ended it
                    worker.start()
                    if number:
                        worker.ask(variant)  # the first call of a process is not timed
                begin = time.perf_counter()
                reply = worker.ask(variant)
                took = time.perf_counter() - begin
                if number == 0:
                    print(f"  {work:13} {variant:8} first call {took:6.1f} s", flush=True)
                    reply["first"] = took
                elif "failed" not in reply:
                    so_far["spent"] += took
                    so_far["times"].append(reply["seconds"])
                so_far |= reply
                if "failed" in reply:
                    print(f"  {work:13} {variant:8} is left out: {reply['failed']}", flush=True)
        if options.trace and work != "limits" and "failed" not in found["ours"]:
            found["ours"]["kernels"] = workers["ours"].ask("trace")
    return found


def measured(work, shape, task, reply, limits) -> dict:
    """The entry of a work in the JSON file: what it was, and what it took."""
    decodes = work.startswith("decode")
    tokens = task["rows"] if decodes else sum(task["lengths"])
    if decodes:
        least = decode_bytes(shape, task) / limits["bandwidth"]
    else:
        least = update_operations(shape, task) / limits["matrix"]
    times = reply["times"]
    seconds = dict(median=statistics.median(times), min=min(times), max=max(times))
    found = dict(seconds=seconds, rounds=len(times), first=reply["first"], peak=reply["peak"], tokens=tokens)
    found |= dict(tokens_per_second=tokens / seconds["median"], least=least, share=least / seconds["median"])
    return task | found | {name: reply[name] for name in ("kernels",) if name in reply}


def line_of(work, variant, found) -> str:
    """An entry of the JSON file as a line of the table."""
    seconds = {name: f"{value * 1e3:.2f}" for name, value in found["seconds"].items()}
    limit = "bandwidth" if work.startswith("decode") else "product"
    peak = "" if found["peak"] is None else f"   peak {found['peak'] / 2**30:5.2f} GiB"
    return (
        f"  {work:13} {variant:8} {seconds['median']:>9} ms [{seconds['min']}, {seconds['max']}] of {found['rounds']}"
        f"   {found['tokens_per_second']:10,.0f} tokens/s   {found['share']:5.1%} of the {limit}{peak}"
    )


def kernels_table(kernels) -> str:
    """A trace as lines: how much of the time kernels ran, and those that took most of it."""
    if "failed" in kernels:
        return f"    no trace: {kernels['failed']}"
    busy, span = (f"{kernels[name] * 1e3:.1f} ms" for name in ("busy", "span"))
    lines = [f"    kernels of {busy} in {span}, {kernels['launches']} launches"]
    for name, seconds, count in kernels["top"]:
        lines.append(f"    {seconds * 1e3:9.2f} ms {count:7d} x {seconds / count * 1e6:8.1f} us  {name[:110]}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", help="the model's; qwen3-0.6b if not given")
    parser.add_argument("--works", default=",".join(WORKS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each variant (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of those together (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds, of a reply (default: %(default)s)")
    parser.add_argument("--peer_python", default=sys.executable, help="the Python that has transformers and torch")
    parser.add_argument("--alone", action="store_true", help="ours only")
    parser.add_argument("--trace", action="store_true", help="also say which of our kernels take the time")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that the benchmark runs")
    parser.add_argument("--json", metavar="FILE", help="write every timing there as well, after each work")
    options = parser.parse_args()
    options.size = options.size or ("smoke" if options.smoke else "qwen3-0.6b")
    works = options.works.split(",")
    for given, known, what in (([options.size], SHAPES, "size"), (works, WORKS, "work")):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}")
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    peer = {}
    if not options.alone:
        asked = Worker("theirs", "versions", options)
        with asked:
            peer = asked.ask("versions")
        if "failed" in peer:
            parser.exit(
                2,
                f"transformers is not installed in {options.peer_python}, or torch: install "
                "third_party/transformers/requirements.txt, with torch for this device, into a virtual environment and "
                "pass its Python as --peer_python; or measure ours with --alone\n",
            )
    shape = SHAPES[options.size]
    limits = race("limits", options)["ours"]
    if "failed" in limits:
        parser.exit(1, f"ours measured no device; does JAX find one? {limits['failed']}\n")
    result = dict(device=limits["device"], versions=limits["versions"], time=now(), size=options.size, shape=shape)
    result |= dict(dtype="bfloat16", remat="dots", limits={name: limits[name] for name in ("bandwidth", "matrix")})
    result |= dict(works={}, peer=peer)
    print(
        f"{options.size} on {result['device']}, jax {limits['versions']['jax']}: a copy moves "
        f"{limits['bandwidth'] / 1e9:,.0f} GB/s, a product of bfloat16 makes {limits['matrix'] / 1e12:,.1f} TFLOP/s",
        flush=True,
    )
    for work in works:
        task = task_of(work, options.smoke)
        for variant, reply in race(work, options).items():
            if "failed" in reply:
                continue
            found = measured(work, shape, task, reply, limits)
            print(line_of(work, variant, found), flush=True)
            if "kernels" in found:
                print(kernels_table(found["kernels"]), flush=True)
            (result["works"] if variant == "ours" else peer.setdefault(variant, {}))[work] = found
        if options.json:
            pathlib.Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    failed = [work for work in works if work not in result["works"]]
    if failed:
        parser.exit(1, f"ours failed at {', '.join(failed)}; BENCHMARK_VERBOSE=1 shows what it said\n")


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    main()
