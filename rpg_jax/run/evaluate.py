"""What `python -m rpg_jax.evaluate` does: k responses to each problem, their scores, a table and files of both."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.table import Table

from rpg_jax import InputError, data, parallel
from rpg_jax.data.sources import listed
from rpg_jax.models import Model
from rpg_jax.rewards import Scorer
from rpg_jax.run import build, cli, models, states
from rpg_jax.run.target import print_table, writable
from rpg_jax.sampling import Decoding
from rpg_jax.storage import workdir
from rpg_jax.storage.checkpoints import checksums
from rpg_jax.storage.logs import Progress, write_json_atomic
from rpg_jax.storage.responses import ResponseLog
from rpg_jax.storage.settings import CODE, as_json, digest
from rpg_jax.training import evaluation
from rpg_jax.training.phases import phase
from rpg_jax.training.policies import make_policies
from rpg_jax.training.update import check_finite
from rpg_jax.types import Params

ASKED = ("data", "reward", "extraction", "wording", "template", "template_options", "tokenizer", "dtype", "overlong")


class Subject(NamedTuple):
    """A model, the problems that it answers, and how."""

    model: Model
    mesh: Mesh
    tokenizer: data.Tokenizer
    problems: list[data.Problem]
    scorer: Scorer
    settings: dict  # k, seed, rows and those of sampling
    files: dict | None  # digests of the user's own files that its config names
    find: Callable[[], tuple[dict, str, Callable[[], Params]]]  # (its name, a digest of its weights, how to load them)


def main(options) -> int:
    """Evaluates as the flags of `rpg_jax.evaluate` say; returns the exit status."""
    stop = cli.stop_event()
    options.data = listed(options.data or "") or None
    place = workdir.checkpoint_dir(options.workdir, options.checkpoint_dir) if options.workdir else None
    subject = of_run(options, place) if place else of_checkpoint(options)
    subject.scorer.try_out(subject.problems[0], rewards=False)
    with subject.scorer:
        return 0 if evaluate(options, subject, stop.is_set) else cli.PREEMPTED


def of_run(options, place: epath.Path) -> Subject:
    """The run whose checkpoints are in a folder, on its own held-out problems or on `--data`."""
    config, run = states.read_run(place, options.data, options.reward, options.extraction, options.network)
    prompts, k = run.rollout.fresh_prompts, options.k or config.evaluation.k
    settings = sampling_settings(
        options, k=k, temperature=config.evaluation.temperature, max_prompt=run.rollout.max_prompt,
        max_new=run.rollout.max_new, slots=run.rollout.slots, seed=config.seed,
        rows=max(prompts, evaluation.problems_of(run.mesh, prompts * run.rollout.samples, k)),
    )  # fmt: skip
    settings["page_size"] = run.rollout.page_size
    sets = run.data
    if options.data:
        if "tasks" in config.data:
            raise InputError(f"--data={options.data[0]}: a run of generated tasks knows no other text; leave it out")
        sets = read_sets(options, run.data.tokenizer, settings["max_prompt"], config.data.wording)

    def find():
        with phase("state"):
            step, found = states.restore_state(place, run, options.which or "best", states.load_frozen(config, run))
        sums = checksums(parallel.named_leaves((found.state, found.checksums)))
        policies = make_policies(run.model, run.optimizer, run.mesh, found.state)
        load = partial(policies.sampling_params, policies.current(found.state), found.frozen)
        return dict(checkpoint="step", step=step), digest(sums), load

    problems, files = list(sets.problems("heldout")), as_json(config).get(CODE)
    return Subject(run.model, run.mesh, run.data.tokenizer, problems, run.scorer, settings, files, find)


def of_checkpoint(options) -> Subject:
    """Weights in a folder, on `--data`."""
    folder = options.checkpoint
    defaults = dict(k=32, temperature=1.0, max_prompt=1024, max_new=3072, slots=64, rows=16, seed=0)
    settings = sampling_settings(options, **defaults)
    tokenizer = data.load_tokenizer(options.tokenizer or folder, options.template)
    section = dict(size=None, checkpoint=folder, dtype=options.dtype, scan=False, remat="none", attention="auto")
    section |= dict(lora=dict(rank=0), router_balance=0.0)
    mesh = parallel.make_mesh(tensor=options.tensor)
    longest = settings["max_prompt"] + settings["max_new"]
    config = ConfigDict(dict(model=section, reward=dict(function=options.reward)))
    model = models.build_model(config, tokenizer, longest, mesh)

    def find():
        stats = [(file.name, file.stat()) for file in sorted(pathlib.Path(folder).glob("*"))]
        stamps = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        return dict(checkpoint=folder), digest(stamps), partial(states.checkpoint_params, folder, model, mesh)

    sets = read_sets(options, tokenizer, settings["max_prompt"])
    scoring = dict(extraction=options.extraction or "stated", network=options.network, tasks=sets.tasks)
    scorer = Scorer(options.reward, generated=False, **scoring)
    problems, files = list(sets.problems("heldout")), as_json(config).get(CODE)
    return Subject(model, mesh, tokenizer, problems, scorer, settings, files, find)


def sampling_settings(options, **defaults) -> dict:
    """The settings of `make_evaluate` and the seed: flags in place of the defaults where they are set."""
    flags = {name: value for name in defaults if (value := getattr(options, name)) is not None}
    return {**defaults, **flags, "top_k": options.top_k, "top_p": options.top_p}


def read_sets(options, tokenizer: data.Tokenizer, max_prompt: int, wording="paper") -> data.Sets:
    """The sets of `--data`, rendered with the tokenizer's chat template.

    `--wording` stands in place of `wording`.
    """
    try:
        variables = json.loads(options.template_options)
    except json.JSONDecodeError as error:
        raise InputError(f"--template_options={options.template_options} is not JSON: {error}") from None
    if not isinstance(variables, dict):
        raise InputError(f"--template_options={options.template_options} is no JSON object of variables")
    rendering = dict(tokenizer=tokenizer, overlong=options.overlong, template_options=variables)
    return data.load(None, tuple(options.data), max_prompt=max_prompt, wording=options.wording or wording, **rendering)


def conditions(options, subject: Subject) -> dict:
    """What responses and scores depend on beside weights; slots, rows and pages change rounding only."""
    sampling = {name: value for name, value in subject.settings.items() if name not in ("slots", "rows", "page_size")}
    asked = {name: getattr(options, name) for name in ASKED}
    problems = digest([dataclasses.astuple(problem) for problem in subject.problems])
    return {**asked, **sampling, "files": subject.files, "problems": problems}


def evaluate(options, subject: Subject, should_stop: Callable[[], bool]) -> bool:
    """Evaluates a checkpoint, prints its table and writes its files. Returns False when told to stop."""
    source, weights, load = subject.find()
    k = subject.settings["k"]
    name = "-".join(str(value) for value in source.values())
    evaluations = pathlib.Path(options.workdir or "runs") / "evaluation"
    out = writable("out", options.out or evaluations / f"{pathlib.Path(name).name}-k{k}")
    log = ResponseLog(out, {**source, "weights": weights, **conditions(options, subject)}, subject.problems)
    if not answer(subject, name, load, log, should_stop):
        return False
    scores = evaluation.metrics(log.answered(), subject.scorer.vote)
    write_json_atomic(out / "evaluation.json", {**source, **subject.settings, **scores})
    print_scores(f"{options.workdir}, {name}" if options.workdir else name, scores, subject.problems, k)
    print(f"responses and figures: {out}/responses.jsonl, {out}/evaluation.json")
    return True


def answer(
    subject: Subject, name: str, load: Callable[[], Params], log: ResponseLog, should_stop: Callable[[], bool]
) -> bool:
    """Answers the problems that have no responses yet, by weights with this name. Returns False when it was told to
    stop before the end; raises ValueError for weights that are not finite."""
    missing = log.missing()
    if not missing:
        return True
    settings = dict(subject.settings)
    key = build.noise_key(settings.pop("seed"), build.EVALUATION)
    parts = subject.model, subject.tokenizer, subject.scorer, subject.mesh
    shards = parallel.row_shards(subject.mesh)
    settings |= {name: -(-settings[name] // shards) * shards for name in ("rows", "slots")}
    decoding = Decoding(**{name: settings.pop(name) for name in ("slots", "page_size") if name in settings})
    responses = evaluation.make_evaluate(*parts, key=key, decoding=decoding, **settings)
    k, numbers = subject.settings["k"], {}
    total, begun = k * len(subject.problems), k * (len(subject.problems) - len(missing))
    with phase("evaluation"), Progress("responses", begun, total) as progress:
        params = load()
        check_finite(params, name, "a policy that cannot be sampled has no score; name another checkpoint")
        left = [subject.problems[place] for place in missing]
        answers = responses(params, left, should_stop, missing, lambda complete: progress(begun + complete, **numbers))
        means = [answered.correct.mean() for answered in log.answered()]
        for answered in answers:
            log.write(answered)
            for failure in answered.failures:
                print(f"warning: {failure}", file=sys.stderr)
            means.append(answered.correct.mean())
            numbers["accuracy"] = np.mean(means)
    return not log.missing()


def print_scores(title: str, scores: dict[str, float], problems: list[data.Problem], k: int) -> None:
    """Sets as columns and mean@k, pass@k, maj@k as rows, as in the paper's tables, with 95 % intervals below."""
    tasks = [problem.task for problem in problems]
    counts = {task: tasks.count(task) for task in dict.fromkeys(tasks)}
    if len(counts) > 1:
        counts[evaluation.ALL] = len(tasks)
    table = Table(title=f"{title}, {k} responses a problem")
    table.add_column("")
    for task, count in counts.items():
        table.add_column(f"{task} ({count})", justify="right")
    for name in (f"mean@{k}", f"pass@{k}", f"maj@{k}"):
        keys = [f"{task}/{name}" for task in counts]
        intervals = [f"{scores[f'{key}_low']:.3f} – {scores[f'{key}_high']:.3f}" for key in keys]
        table.add_row(name, *(f"{scores[key]:.4f}\n{line}" for key, line in zip(keys, intervals, strict=True)))
    for name, label in (("response_length", "response tokens"), ("finished", "finished")):
        table.add_row(label, *(f"{scores[f'{task}/{name}']:.4g}" for task in counts))
    print_table(table)
