"""What `python -m rpg_jax.prepare` does: reads sources, folds repeated problems, writes a dataset."""

import json
import sys
import time

from rpg_jax import InputError
from rpg_jax.data import problems
from rpg_jax.data.folding import Folded, fold
from rpg_jax.data.sources import FIELDS, listed, open_gym, open_source
from rpg_jax.data.templates import named
from rpg_jax.gym import PREFIX, families, line_about
from rpg_jax.run.target import new_folder, print_summary
from rpg_jax.storage.logs import Progress

# The flags that the dataset's summary.json records.
RECORDED = ("source", "name", "template", "problem_field", "answer_field", "solution_field", "limit", "split")


def main(options) -> None:
    """Makes the dataset that the flags of `rpg_jax.prepare` describe."""
    start = time.monotonic()
    if options.list_gym:
        for family, parameters in families().items():
            print(f"{family}({', '.join(f'{name}={default}' for name, default in parameters.items())})")
        return
    options.source = listed(options.source or "")
    check_flags(options)
    target = new_folder("target", options.target)
    folded = read_sources(options)
    written = folded.problems[: options.limit]
    if line := line_about(written):
        print(line, file=sys.stderr)
    counts = {
        "rows read": folded.read,
        "repeats folded": folded.read - len(folded.problems) - folded.contradicted,
        "contradictory answers": folded.contradicted,
        "over the limit": len(folded.problems) - len(written),
        "problems written": len(written),
    }
    settings = {name: value for name in RECORDED if (value := getattr(options, name)) is not None}
    summary = json.dumps({**settings, **counts}, indent=1) + "\n"
    problems.publish({"train": written}, {"summary.json": summary.encode()}, target)
    print_summary(str(target), {**counts, "seconds": f"{time.monotonic() - start:.1f}"})


def check_flags(options) -> None:
    """Raises ValueError for flags that make no sense together."""
    has_gym = any(title.startswith(PREFIX) for title in options.source)
    if options.split is not None and not has_gym:
        raise InputError(f"--split={options.split} is for gym: sources, and --source names none")
    if options.name is not None and has_gym:
        raise InputError(
            f"--name={options.name}: problems of reasoning-gym have the name of their family, which scores them"
        )


def read_sources(options) -> Folded:
    """The distinct problems of all sources, with progress on stderr."""
    fields = dict(FIELDS)
    for kind in fields:
        column = getattr(options, f"{kind}_field")
        if column is not None:
            fields[kind] = (column,) if column else ()  # an empty --solution_field= reads no solutions
    gym = [title for title in options.source if title.startswith(PREFIX)]
    sources = [open_source(title, fields) for title in options.source if title not in gym]
    sources += open_gym(gym, options.split or "train") if gym else []
    with Progress("rows", 0, sum(source.total for source in sources), process_index=0) as progress:
        return fold(sources, named(options.template, "--template"), options.name, options.conflicts, progress)
