"""Scripts that train the runs of a sweep on a cluster: a SLURM array, or a TPU pod for each run."""

import pathlib
import re
import shlex
from collections.abc import Sequence

import jinja2

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True, trim_blocks=True, autoescape=False,  # the text is a shell script, not HTML
)  # fmt: skip


def script(
    kind: str,
    runs: Sequence[tuple[str, Sequence[str]]],
    *,
    sweep: str,
    path: pathlib.Path,
    out: pathlib.Path,
    prepare: Sequence[str] | None,
) -> str:
    """The text of a script: "slurm", an array job, or "tpu", a pod for each run.

    Args:
      runs: (name, flags of rpg_jax.train) of each; sweep: the file they are of; path: where the script will lie.
      out: the folder of the runs.
      prepare: the command that, with --prepare=NAME, gives a run its warm start; None if runs have none.
    """
    return TEMPLATES.get_template(f"{kind}.sh.jinja").render(
        count=len(runs),
        sweep=sweep,
        script=path,
        name=re.sub("[^a-z0-9]+", "-", f"rpg-{out.name}".lower()).strip("-")[:50],  # as pods may be named
        runs=[shlex.quote(shlex.join([name, *flags])) for name, flags in runs],
        out=shlex.quote(str(out)),
        prepare=shlex.join(prepare or ()),
    )
