"""What `python -m rpg_jax.sweep` does: what is left of a sweep is trained here, or written as a script."""

import pathlib
import re
import shlex
import signal
import sys
import threading
from collections.abc import Container, Sequence

import jinja2
import pandas as pd

from rpg_jax import InputError
from rpg_jax.lab.sweeping import variants, warm_starts
from rpg_jax.lab.sweeping.pool import Pool, Task, carries
from rpg_jax.lab.sweeping.variants import Run, Sweep
from rpg_jax.run import cli
from rpg_jax.run.target import width, writable
from rpg_jax.storage import workdir
from rpg_jax.storage.logs import read_json

SCRIPTS = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True, trim_blocks=True, autoescape=False,  # the text is a shell script, not HTML
)  # fmt: skip
ACCURACIES = {"accuracy_before": "before", "accuracy_after": "last", "best_accuracy": "best"}  # summary's key -> column
MINUTES = "minutes, with warm start"


def main(options) -> int:
    """Does what the flags of `rpg_jax.sweep` say; returns its exit status (`InputError` stands for status 2)."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if len(options.arguments) != 1:
        raise InputError("name one sweep, such as configs/sweeps/objectives.py; see --help")
    if options.slurm and options.tpu:
        raise InputError("--slurm and --tpu exclude each other; give one")
    seeds = [int(word) if word.strip().isdecimal() else word for word in options.seeds or ()]
    sweep = variants.read(options.arguments[0], seeds or None)
    out = writable("out", options.out or f"runs/{pathlib.Path(sweep.file).stem}")
    outdated = variants.check_begun(out, sweep.runs)
    to_prepare = {run.name: run for run in sweep.runs}.get(options.prepare)
    if options.prepare and not to_prepare:
        raise InputError(f"--prepare={options.prepare}: {sweep.file} has no such run; one is {sweep.runs[0].name}")
    left = [run for run in sweep.runs if not variants.is_done(out, run)]
    if options.slurm or options.tpu:
        write_script(options, out, sweep, left)
        return 0
    if to_prepare:
        return 0 if warm_starts.prepare(out, to_prepare, stop) else cli.PREEMPTED
    for text, names in outdated.items():
        print(f"warning: {text} since these were trained, which stay as they are: {', '.join(names)}", file=sys.stderr)
    at_once = min(options.parallel or carries(), max(len(left), 1))
    print(f"runs in {out}: {len(sweep.runs)}, done: {len(sweep.runs) - len(left)}, at once: {at_once}", flush=True)
    if options.dry_run:
        for run in left:
            print(shlex.join(train_command(out, run)))
        return 0
    failed = {}
    if left:
        if warm_starts.is_missing(out, left[0]):
            print(f"training the warm start of all runs in {warm_starts.shared_folder(out, left[0])}", flush=True)
            own_command = [sys.executable, "-m", "rpg_jax.sweep", *options.arguments, f"--out={out}"]
            own_command += [f"--prepare={left[0].name}", f"--seeds={left[0].seed}"]
            if status := warm_starts.train_in_process(own_command, stop):
                return stopped() if status == cli.PREEMPTED else status
        failed = Pool([task(out, run) for run in left], at_once, stop.is_set).run()
    print(table(out, sweep, failed))
    print(f"curves, intervals and what is significant: python -m rpg_jax.report {out}")
    if not all(run.name in failed or variants.is_done(out, run) for run in left):
        return stopped()
    return 1 if failed else 0


def stopped() -> int:
    print("stopped after saving; the same command goes on", file=sys.stderr)
    return cli.PREEMPTED


def train_command(out: pathlib.Path, run: Run) -> list[str]:
    return [sys.executable, "-m", "rpg_jax.train", *run.flags, f"--workdir={out / run.name}"]


def task(out: pathlib.Path, run: Run) -> Task:
    return Task(
        name=run.name,
        command=train_command(out, run),
        folder=out / run.name,
        prepare=lambda: warm_starts.place(out, run),
        is_done=lambda: variants.is_done(out, run),
    )


def write_script(options, out: pathlib.Path, sweep: Sweep, left: list[Run]) -> None:
    """Writes, or in a dry run prints, the script that trains the runs that are left on a cluster."""
    if not left:
        print(f"every run of {sweep.file} in {out} is done")
        return
    kind = "slurm" if options.slurm else "tpu"
    if kind == "tpu" and out.is_absolute():
        raise InputError(f"--out={out} with --tpu: name a folder relative to the repository, which pods have as well")
    own_command = [".venv/bin/python", "-m", "rpg_jax.sweep", options.arguments[0], f"--out={out}"]
    own_command += [f"--seeds={','.join(options.seeds)}"] if options.seeds else []
    runs = [(run.name, [*run.flags, f"--workdir={out / run.name}"]) for run in left]
    prepare = own_command if warm_starts.shared_folder(out, left[0]) else []
    text = cluster_script(kind, runs, sweep.file, out, prepare)
    if options.dry_run:
        print(text, end="")
    else:
        workdir.write(out, f"{kind}.sh", text)
        print(f"wrote {out / kind}.sh with {len(left)} runs; its first lines say how to start it")


def cluster_script(
    kind: str, runs: Sequence[tuple[str, Sequence[str]]], sweep: str, out: pathlib.Path, prepare: Sequence[str]
) -> str:
    """The text of a script in the folder `out`: "slurm", an array job, or "tpu", a pod for each run.

    `runs` are (name, flags of rpg_jax.train), and `prepare` is the command that, with --prepare=NAME, gives a run its
    warm start; empty if runs have none.
    """
    return SCRIPTS.get_template(f"{kind}.sh.jinja").render(
        count=len(runs), sweep=sweep, script=out / f"{kind}.sh", out=shlex.quote(str(out)), prepare=shlex.join(prepare),
        name=re.sub("[^a-z0-9]+", "-", f"rpg-{out.name}".lower()).strip("-")[:50],  # as pods may be named
        runs=[shlex.quote(shlex.join([name, *flags])) for name, flags in runs],
    )  # fmt: skip


def table(out: pathlib.Path, sweep: Sweep, failed: Container[str]) -> str:
    """Held-out accuracy of each variant over the seeds that are done; `failed` has the names of runs that failed."""
    summaries = [read_json(out / run.name / "summary.json") for run in sweep.runs]
    columns = ACCURACIES | {"wall_seconds": MINUTES}
    runs = pd.DataFrame([summary or {} for summary in summaries]).reindex(columns=list(columns)).rename(columns=columns)
    runs = runs.astype(float).assign(done=[summary is not None for summary in summaries])
    runs["failed"] = [run.name in failed for run in sweep.runs]
    runs[MINUTES] /= 60
    variants = runs.groupby([run.variant for run in sweep.runs], sort=False)
    counts = variants[["done", "failed"]].sum()
    counts["done"] = counts["done"].astype(str) + "/" + variants.size().astype(str)
    formats = dict.fromkeys(ACCURACIES.values(), "{:.1%}".format) | {MINUTES: "{:.1f}".format}
    lines = counts.join(variants[list(formats)].mean()).to_string(formatters=formats, na_rep="-", line_width=width())
    return f"{sweep.file}, held-out mean@k over the seeds that are done\n{lines}"
