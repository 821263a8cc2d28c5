"""Evaluates a trained run or a checkpoint: mean@k, unbiased pass@k and maj@k with 95 % intervals over problems.

    python -m rpg_jax.evaluate --workdir=runs/quickstart [--k=32] [--which=best|last|STEP]
    python -m rpg_jax.evaluate --workdir=runs/quickstart --watch [--checkpoint_dir=gs://BUCKET/FOLDER]
    python -m rpg_jax.evaluate --checkpoint=checkpoints/Qwen3-4B --data=data/aime24,data/aime25,amc23.parquet --k=32

--data takes folders that `rpg_jax.prepare` wrote, or files that it reads; a run without it is evaluated on its own
held-out problems. Every response is written to OUT/responses.jsonl as it comes, the figures to OUT/evaluation.json.
The same command goes on where it was stopped, with the same responses as if it had not been.

--watch evaluates each checkpoint of a run as it appears, from the machine that trains or from another, and appends a
row to OUT/history.jsonl; it ends when the run does. SIGTERM ends it with status 75.
"""

import json
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from absl import flags
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from rpg_jax import data, parallel
from rpg_jax.models import Model
from rpg_jax.rewards import Scorer
from rpg_jax.run import build, cli, states
from rpg_jax.storage import workdir
from rpg_jax.storage.checkpoints import DamagedCheckpoint, saved_steps
from rpg_jax.storage.logs import Progress, jsonable, read_jsonl, write_json_atomic, write_text_atomic
from rpg_jax.storage.responses import ResponseLog
from rpg_jax.training import evaluation
from rpg_jax.training.experience import make_sampling_params
from rpg_jax.training.phases import phase

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run to evaluate.")
_CHECKPOINT_DIR = flags.DEFINE_string("checkpoint_dir", None, "Where a run's checkpoints are; the workdir knows.")
_WHICH = flags.DEFINE_string("which", None, "Which of a run's checkpoints: best by held-out accuracy, last, a step.")
_WATCH = flags.DEFINE_bool("watch", False, "Evaluate each checkpoint of a run as it appears.")
_WATCH_TIMEOUT = flags.DEFINE_float("watch_timeout", None, "Seconds without a new one that end --watch; 3600 if unset.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder of weights to evaluate: Hugging Face's, or of convert.")
_DATA = flags.DEFINE_list("data", None, "Problem sets, comma separated; the run's held-out problems if unset.")
_OUT = flags.DEFINE_string("out", None, "Folder to write; if unset, under WORKDIR/evaluation or runs/evaluation.")
_K = flags.DEFINE_integer("k", None, "Responses a problem; the run's evaluation.k, or 32.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Sampling temperature, 0 is greedy; the run's, or 1.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample among the most probable tokens only; 0 is off.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample among the fewest tokens of this probability; 1 is off.")
_MAX_PROMPT = flags.DEFINE_integer("max_prompt", None, "Most tokens of a prompt; the run's, or 1024.", lower_bound=1)
_MAX_NEW = flags.DEFINE_integer("max_new", None, "Most tokens of a response; the run's, or 3072.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", None, "Responses decoded at once; the run's, or 64.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", None, "Problems between two writes; the run's batch, or 16.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", None, "Of the noise; the run's, or 0.", lower_bound=0)
_REWARD = flags.DEFINE_string("reward", None, "dapo, boxed, math_verify or FILE.py:NAME; the run's, or dapo.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Folder of a --checkpoint's tokenizer; its own if unset.")
_TEMPLATE = flags.DEFINE_string("template", None, "Instead of the checkpoint's chat template: plain, or a Jinja file.")
_OPTIONS = flags.DEFINE_string("template_options", "{}", 'Of the chat template, JSON: {"enable_thinking": false}.')
_OVERLONG = flags.DEFINE_enum("overlong", "refuse", ["refuse", "drop"], "What to do with prompts over --max_prompt.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of a --checkpoint's weights and computation.")
_TENSOR = flags.DEFINE_integer(
    "tensor", 1, "Devices that share one copy of a --checkpoint's weights; copies answer other problems.", lower_bound=1
)

POLL_SECONDS = 2.0  # between two looks for a new checkpoint


class Subject(NamedTuple):
    """What is evaluated, and on what."""

    model: Model
    mesh: Mesh
    tokenizer: object
    problems: list
    scorer: Scorer
    settings: dict  # of sampling
    find: Callable  # (which) -> (where the weights come from, () -> params to sample from)

    def conditions(self) -> dict:
        """What responses depend on beside the weights."""
        sampling = {name: value for name, value in self.settings.items() if name not in ("slots", "rows")}
        return {"data": _DATA.value, "reward": _REWARD.value, **sampling}


def main(_):
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with cli.in_words():
        with cli.door():
            check_flags()
            place = workdir.checkpoint_dir(_WORKDIR.value, _CHECKPOINT_DIR.value) if _WORKDIR.value else None
            subject = of_run(place) if place else of_checkpoint(_CHECKPOINT.value)
        with subject.scorer:
            if _WATCH.value:
                done = watch(subject, place, stop.is_set)
            else:
                done = examine(subject, _WHICH.value or "best", stop.is_set) is not None
    return 0 if done else cli.PREEMPTED


def check_flags():
    """Raises ValueError for flags that make no sense together."""
    if (_WORKDIR.value is None) == (_CHECKPOINT.value is None):
        raise ValueError("give one of --workdir=FOLDER and --checkpoint=FOLDER; see --help")
    if _CHECKPOINT.value and not _DATA.value:
        raise ValueError("--checkpoint needs --data=SET,...: folders of rpg_jax.prepare, .parquet or .jsonl files")
    if _TENSOR.value > 1 and not _CHECKPOINT.value:
        raise ValueError("--tensor is for a --checkpoint: a run is evaluated on the mesh of its config")
    for flag in (_WHICH, _CHECKPOINT_DIR, _WATCH):
        if flag.value and not _WORKDIR.value:
            raise ValueError(f"--{flag.name} is for the checkpoints of a run: give its --workdir, not --checkpoint")
    if _WATCH.value and _WHICH.value:
        raise ValueError(f"--watch evaluates every checkpoint, --which={_WHICH.value} one: give one of them")
    if _WATCH_TIMEOUT.value is not None and not _WATCH.value:
        raise ValueError("--watch_timeout is for --watch")


def base() -> pathlib.Path:
    """Where the folders of evaluations go."""
    return pathlib.Path(_OUT.value or pathlib.Path(_WORKDIR.value or "runs") / "evaluation")


def examine(subject: Subject, which: str | None, should_stop) -> dict | None:
    """Evaluates a checkpoint, prints its table and writes its files; None when it was told to stop before the end."""
    source, load = subject.find(which)
    k = subject.settings["k"]
    name = "-".join(str(value) for value in source.values())
    out = base() if _OUT.value and not _WATCH.value else base() / f"{pathlib.Path(name).name}-k{k}"
    with cli.door():
        log = ResponseLog(out, {**source, **subject.conditions()}, subject.problems)
    if not answer(subject, load, log, should_stop):
        return None
    found = evaluation.metrics(log.answered())
    write_json_atomic(out / "evaluation.json", {**source, **subject.settings, **found})
    print_table(f"{_WORKDIR.value}, {name}" if _WORKDIR.value else name, found, subject.problems, k)
    print(f"responses and figures: {out}/responses.jsonl, {out}/evaluation.json")
    return found


def watch(subject: Subject, place, should_stop) -> bool:
    """Evaluates each checkpoint as it appears, until the run is finished or none came for `--watch_timeout` seconds.

    Returns False when it was told to stop before. Started again, it leaves out the steps that `history.jsonl` has.
    """
    file, same = base() / "history.jsonl", jsonable(subject.conditions())
    rows, _ = read_jsonl(file)
    done = {row["step"] for row in rows if same == {name: row.get(name) for name in same}}
    damaged, last, timeout = set(), time.monotonic(), 3600.0 if _WATCH_TIMEOUT.value is None else _WATCH_TIMEOUT.value
    while not should_stop():
        finished = (place / "summary.json").exists()  # before the look that finds its last checkpoint
        for step in sorted(set(saved_steps(place / "checkpoints")) - done):
            try:
                found = examine(subject, str(step), should_stop)
            except ValueError as error:
                there = step in saved_steps(place / "checkpoints")  # or deleted while it was read
                if there and not isinstance(error, DamagedCheckpoint):
                    raise
                if there and step not in damaged:  # or copied here, and not yet whole
                    print(f"warning: {error}; will look again", file=sys.stderr, flush=True)
                damaged.add(step)
                continue
            if found is None:
                return False
            rows.append(jsonable({"step": step, **same, **found}))
            write_text_atomic(file, "".join(json.dumps(row) + "\n" for row in rows))
            done.add(step)
            last = time.monotonic()
        waited = time.monotonic() - last
        if finished or waited > timeout:
            why = "the run is finished" if finished else f"no new one for {waited:.0f} s"
            print(f"{len(done)} checkpoints in {file}: {why}")
            return True
        time.sleep(POLL_SECONDS)
    return False


def of_run(place) -> Subject:
    """The run whose checkpoints are in a folder, on its own held-out problems or on `--data`."""
    config = states.to_read(workdir.read_config(place))
    if "tasks" not in config.data:  # the training set is not needed, and may not be on this machine
        config.data.update(train=None, heldout=_DATA.value or config.data.heldout)
    config.reward.function = _REWARD.value or config.reward.function or ("dapo" if _DATA.value else None)
    run = build.build_run(config)
    rollout = config.rollout
    settings = with_flags(
        k=config.evaluation.k,
        temperature=config.evaluation.temperature,
        max_prompt=rollout.max_prompt,
        max_new=rollout.max_new,
        slots=rollout.slots,
        rows=run.rollout.fresh_prompts,
        seed=config.seed,
    )
    sets = run.data if _DATA.value is None else read_sets(run.data.tokenizer, settings["max_prompt"])
    shapes = states.abstract(run, partial(states.build_state, run))
    policy = make_sampling_params(run.model, run.optimizer, run.mesh, shapes)

    def find(which):
        with phase("state"):
            step, state = states.restore_state(place, run, which)
        return dict(checkpoint="step", step=step), lambda: policy(state)

    problems = list(sets.problems("heldout"))
    return Subject(run.model, run.mesh, run.data.tokenizer, problems, run.scorer, settings, find)


def of_checkpoint(folder) -> Subject:
    """Weights from a folder, on `--data`."""
    settings = with_flags(k=32, temperature=1.0, max_prompt=1024, max_new=3072, slots=64, rows=16, seed=0)
    tokenizer = data.load_tokenizer(_TOKENIZER.value or folder, _TEMPLATE.value)
    settings_of_model = dict(checkpoint=folder, dtype=_DTYPE.value, scan=False, remat="none", attention="auto")
    section = ConfigDict(dict(model=dict(settings_of_model, size=None)))
    mesh = parallel.make_mesh(tensor=_TENSOR.value)
    model = build.build_model(section, tokenizer, settings["max_prompt"] + settings["max_new"], mesh)

    def find(_):
        return dict(checkpoint=str(folder)), lambda: states.checkpoint_params(folder, model, mesh)

    problems = list(read_sets(tokenizer, settings["max_prompt"]).problems("heldout"))
    return Subject(model, mesh, tokenizer, problems, Scorer(_REWARD.value or "dapo"), settings, find)


def with_flags(**defaults) -> dict:
    """Settings of sampling: flags where they are given."""
    named = dict(k=_K, temperature=_TEMPERATURE, seed=_SEED)
    named |= dict(max_prompt=_MAX_PROMPT, max_new=_MAX_NEW, slots=_SLOTS, rows=_ROWS)
    given = {name: flag.value for name, flag in named.items() if flag.value is not None}
    return {**defaults, **given, "top_k": _TOP_K.value, "top_p": _TOP_P.value}


def read_sets(tokenizer, max_prompt):
    """The sets of `--data`, rendered with the tokenizer's chat template."""
    try:
        options = json.loads(_OPTIONS.value)
    except json.JSONDecodeError as error:
        raise ValueError(f"--template_options={_OPTIONS.value} is not JSON: {error}") from None
    return data.load(
        None,
        tuple(_DATA.value),
        tokenizer=tokenizer,
        max_prompt=max_prompt,
        overlong=_OVERLONG.value,
        template_options=options,
    )


def answer(subject: Subject, load, log: ResponseLog, should_stop) -> bool:
    """Answers what is missing; returns False when it was told to stop before the end."""
    missing = log.missing()
    if not missing:
        return True
    key = build.noise_key(subject.settings["seed"], build.EVALUATION)
    settings = {name: value for name, value in subject.settings.items() if name != "seed"}
    evaluate = evaluation.make_evaluate(
        subject.model, subject.tokenizer, subject.scorer, subject.mesh, key=key, **settings
    )
    total, begun = len(subject.problems), len(subject.problems) - len(missing)
    with phase("evaluation"), Progress("evaluation", begun, total) as progress:
        for done, one in enumerate(evaluate(load(), missing, should_stop), start=begun + 1):
            log.write(one)
            for line in one.failures:
                print(f"warning: {line}; counted as wrong", file=sys.stderr)
            progress(done, accuracy=np.mean([one.correct.mean() for one in log.answered()]))
    return not log.missing()


def print_table(title, found, problems, k):
    """Sets as columns and mean@k, pass@k, maj@k as rows, as the paper prints them; 95 % intervals beneath."""
    tasks = list(dict.fromkeys(problem.task for problem in problems))
    columns = tasks + [evaluation.ALL] * (len(tasks) > 1)
    counts = {task: sum(problem.task == task for problem in problems) for task in tasks} | {"all": len(problems)}
    table = Table(title=f"{title}, {k} responses a problem")
    for column in ("", *(f"{task} ({counts[task]})" for task in columns)):
        table.add_column(column, justify="right" if column else "left")
    for name in (f"mean@{k}", f"pass@{k}", f"maj@{k}"):
        keys = [f"{task}/{name}" for task in columns]
        table.add_row(
            name, *(f"{found[key]:.4f}\n{found[key + '_low']:.3f} – {found[key + '_high']:.3f}" for key in keys)
        )
    for name, text in (("response_length", "response tokens"), ("finished", "finished")):
        table.add_row(text, *(f"{found[f'{task}/{name}']:.4g}" for task in columns))
    Console(width=max(100, 24 * len(columns))).print(table)


if __name__ == "__main__":
    cli.run(main)
