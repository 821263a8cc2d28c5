"""Evaluates a trained run on its held-out problems: mean@k and unbiased pass@k with 95 % intervals over problems.

    python -m rpg_jax.evaluate --workdir=runs/quickstart [--k=32] [--which=best|last|STEP]

Writes `evaluation.json` and every response, `responses.jsonl`, into the workdir.
"""

import json
import pathlib

from absl import flags
from rich.console import Console
from rich.table import Table

from rpg_jax import build, cli, workdir
from rpg_jax.training.experience import make_sampling_params
from rpg_jax.training.logs import Progress, write_json_atomic

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run to evaluate.")
_K = flags.DEFINE_integer("k", None, "Responses a problem; the config's evaluation.k if unset.", lower_bound=1)
_WHICH = flags.DEFINE_string("which", "best", "Which checkpoint: best (by held-out accuracy), last, or a step.")
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Sampling temperature, 0 is greedy; the config's if unset.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample among the most probable tokens only; 0 is off.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample among the fewest tokens of this probability; 1 is off.")


def main(_):
    with cli.door():
        if _WORKDIR.value is None:
            raise ValueError("--workdir=FOLDER is needed; see --help")
        path = pathlib.Path(_WORKDIR.value)
        config = workdir.read_config(path)
        run = build.build_run(config)
        sampling = dict(top_k=_TOP_K.value, top_p=_TOP_P.value)
        if _TEMPERATURE.value is not None:
            sampling["temperature"] = _TEMPERATURE.value
        evaluate = build.build_evaluate(config, run, _K.value, **sampling)
        step, state = build.restore_state(path, run, _WHICH.value)
    params = make_sampling_params(run.model, run.optimizer, run.mesh, state)(state)
    with run.scorer, Progress("evaluation", 0, len(run.data.problems("heldout"))) as progress:
        evaluation = evaluate(params, on_batch=progress)
    found = evaluation.metrics()
    write_json_atomic(path / "evaluation.json", {"step": step, "k": evaluation.correct.shape[1], **sampling, **found})
    write_responses(path / "responses.jsonl", evaluation)
    print_table(f"{path}, checkpoint {step}", found, evaluation)


def write_responses(file, evaluation):
    """One JSON object a response."""
    with open(file, "w") as out:
        for problem, texts, correct in zip(evaluation.problems, evaluation.texts, evaluation.correct, strict=True):
            for sample, (text, right) in enumerate(zip(texts, correct, strict=True)):
                row = dict(problem=problem.id, task=problem.task, sample=sample, prompt=problem.prompt, response=text)
                out.write(json.dumps({**row, "answer": problem.answer, "correct": float(right)}) + "\n")


def print_table(title, found, evaluation):
    """Tasks as rows, mean@k and pass@k as columns, 95 % intervals beside them."""
    table, k = Table(title=title), evaluation.correct.shape[1]
    for column in ("task", "problems", f"mean@{k}", "95 %", f"pass@{k}", "95 %"):
        table.add_column(column, justify="left" if column == "task" else "right")
    counts = {task: sum(p.task == task for p in evaluation.problems) for task in {p.task for p in evaluation.problems}}
    for task in sorted(counts) + ["all"]:
        cells = []
        for name in (f"{task}/mean@{k}", f"{task}/pass@{k}"):
            cells += [f"{found[name]:.3f}", f"{found[name + '_low']:.3f} – {found[name + '_high']:.3f}"]
        table.add_row(task, str(counts.get(task, len(evaluation.problems))), *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    cli.run(main)
