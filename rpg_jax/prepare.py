"""Makes a dataset for training or evaluation of parquet, JSON lines or TFDS: checked, repeated problems folded to one.

    python -m rpg_jax.prepare --source=dapo-math-17k.parquet --target=data/dapo --tokenizer=Qwen3-4B --max_prompt=1024
    python -m rpg_jax.prepare --source=train.jsonl,more.jsonl --target=data/mine --name=mine --answer_field=final.value
    python -m rpg_jax.prepare --source=tfds:gsm8k/main:test --target=data/gsm8k --answer_field=short_answer

A row holds chat messages in `prompt` and the answer in `reward_model.ground_truth`, as in the files of the paper's
scripts, or a problem as text, which the template makes a user message of. Errors count rows from 0, lines from 1. The
target is what `data.train` and `data.heldout` of a config name: a TFDS dataset in ArrayRecord, and `summary.json`.
"""

import json
import pathlib
import time

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from rpg_jax import data
from rpg_jax.data import datasets, problems
from rpg_jax.data.folding import fold
from rpg_jax.data.sources import FIELDS, open_source
from rpg_jax.data.templates import TEMPLATES
from rpg_jax.run import cli
from rpg_jax.storage.logs import Progress

_SOURCE = flags.DEFINE_list("source", None, "FILE.parquet, FILE.jsonl, tfds:NAME[/CONFIG][:SPLIT]; comma separated.")
_TARGET = flags.DEFINE_string("target", None, "Folder to make; it must not exist, or be empty.")
_NAME = flags.DEFINE_string(
    "name", None, "Name of the set, under which scores are reported; each source's own if unset."
)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Folder of the model's tokenizer, to measure prompts with.")
_CHAT_TEMPLATE = flags.DEFINE_string("chat_template", None, '"plain" or a Jinja file, instead of the tokenizer\'s own.')
_MAX_PROMPT = flags.DEFINE_integer("max_prompt", None, "Most tokens of a prompt; unlimited if unset.", lower_bound=1)
_OVERLONG = flags.DEFINE_enum("overlong", None, ["drop", "refuse"], "What to do with longer prompts; drop if unset.")
_TEMPLATE = flags.DEFINE_enum("template", "paper", list(TEMPLATES), "What makes a user message of a problem's text.")
_CONFLICTS = flags.DEFINE_enum(
    "conflicts", "refuse", ["refuse", "drop"], "What to do with a problem that comes with different answers."
)
_PROBLEM = flags.DEFINE_string(
    "problem_field", None, f"Column of messages or text; unset: {', '.join(FIELDS['problem'])}."
)
_ANSWER = flags.DEFINE_string("answer_field", None, f"Column of the answer; unset: {', '.join(FIELDS['answer'])}.")
_SOLUTION = flags.DEFINE_string(
    "solution_field", None, f"Column of worked solutions, for a warm start; unset: {', '.join(FIELDS['solution'])}."
)
_LIMIT = flags.DEFINE_integer("limit", None, "Most problems to write, the first ones.", lower_bound=1)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TFDS datasets lie; TFDS's own default if unset.")

_FLAGS = (
    _SOURCE,
    _NAME,
    _TOKENIZER,
    _MAX_PROMPT,
    _TEMPLATE,
    _PROBLEM,
    _ANSWER,
    _SOLUTION,
    _LIMIT,
    _DATA_DIR,
)  # recorded


def main(_):
    start = time.monotonic()
    with cli.door():
        target = check_flags()
        tokenizer = data.load_tokenizer(_TOKENIZER.value, _CHAT_TEMPLATE.value) if _TOKENIZER.value else None
        folded = read_sources()
        where = folded.origins.__getitem__
        kept, tokens = np.arange(len(folded.problems)), {}
        if tokenizer is not None:
            lengths = datasets.prompt_lengths(folded.problems, tokenizer, {}, where)
            if _MAX_PROMPT.value is not None:
                kept = datasets.within(lengths, _MAX_PROMPT.value, _OVERLONG.value or "drop", where)
            tokens = {"longest prompt, tokens": int(lengths[kept[: _LIMIT.value]].max())}
        written = [folded.problems[i] for i in kept[: _LIMIT.value]]
        counts = {
            "rows read": folded.read,
            "repeats folded": folded.repeats(),
            "contradictory answers": folded.contradicted,
            "prompt too long": len(folded.problems) - len(kept),
            "over the limit": len(kept) - len(written),
            "problems written": len(written),
            **tokens,
        }
        settings = {flag.name: flag.value for flag in _FLAGS if flag.value is not None}
        summary = json.dumps({**settings, **counts}, indent=1) + "\n"
        problems.publish({"train": written}, {"summary.json": summary.encode()}, target)
    print_table(str(target), {**counts, "seconds": f"{time.monotonic() - start:.1f}"})


def check_flags() -> pathlib.Path:
    """The target; raises ValueError for flags that make no sense together."""
    if not _SOURCE.value or not _TARGET.value:
        raise ValueError("--source=FILE and --target=FOLDER are needed; see --help")
    if _MAX_PROMPT.value is not None and _TOKENIZER.value is None:
        raise ValueError("--max_prompt counts tokens: give the model's --tokenizer=FOLDER")
    if _CHAT_TEMPLATE.value is not None and _TOKENIZER.value is None:
        raise ValueError("--chat_template is for measuring prompts: give the model's --tokenizer=FOLDER too")
    if _OVERLONG.value is not None and _MAX_PROMPT.value is None:
        raise ValueError(f"--overlong={_OVERLONG.value} needs a limit: give --max_prompt")
    if _DATA_DIR.value is not None and not any(title.startswith("tfds:") for title in _SOURCE.value):
        raise ValueError("--data_dir is where tfds: sources lie, and --source names none")
    for flag in (_NAME, _PROBLEM, _ANSWER):
        if flag.value is not None and not flag.value.strip():
            raise ValueError(f"--{flag.name} is empty; leave it out for the default")
    target = pathlib.Path(_TARGET.value)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is no empty folder; remove it or name another --target")
    return target


def read_sources():
    """The distinct problems of all sources, with progress on stderr."""
    chosen = {"problem": _PROBLEM.value, "answer": _ANSWER.value, "solution": _SOLUTION.value}
    fields = {kind: FIELDS[kind] if path is None else (path,) * bool(path) for kind, path in chosen.items()}
    sources = [open_source(title, fields, _DATA_DIR.value) for title in _SOURCE.value]
    with Progress("rows", 0, sum(source.total for source in sources), process_index=0) as progress:
        return fold(sources, TEMPLATES[_TEMPLATE.value], _NAME.value, _CONFLICTS.value, progress)


def print_table(title, counts):
    table = Table(title=title, show_header=False)
    for name, value in counts.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else value)
    Console(width=100).print(table)


if __name__ == "__main__":
    cli.run(main)
