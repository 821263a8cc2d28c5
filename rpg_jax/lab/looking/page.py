"""What `python -m rpg_jax.look` does: the kept rows and their coefficients, as data in a page that draws itself."""

import base64
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from rpg_jax import InputError, data
from rpg_jax.data import Tokenizer
from rpg_jax.lab.looking import numbers
from rpg_jax.run.build import set_keys
from rpg_jax.storage import workdir
from rpg_jax.storage.logs import LOOK, jsonable, read_table, write_text_atomic
from rpg_jax.training.phases import say

MOST_TOKENS = 400_000  # of a page, about 60 bytes each for one objective; steps are left out evenly beyond
MOST_BYTES = 4  # of a character
NEEDED = {"step", "group", "sample", "tokens", "turns", "rewards", *numbers.INPUTS.values()}


def main(options) -> None:
    """Writes the page as the flags of `rpg_jax.look` say. Raises InputError where there is nothing to show."""
    jax.config.update("jax_platforms", "cpu")  # small, and in float64
    folder = pathlib.Path(options.workdir)
    config, out = workdir.read_config(folder), pathlib.Path(options.out or folder / "look.html")
    if out.suffix != ".html" or not out.parent.is_dir():
        raise InputError(f"--out={out}: expected a file in a folder that is there, which ends in .html")
    groups, notes = read_groups(folder / LOOK, options.step)
    with jax.enable_x64():
        shown = [numbers.shown(config, spec) for spec in options.objectives or [None]]
        arrays = numbers.arrays_of(groups)
        found = [numbers.of_groups(one.objective, arrays) for one in shown]
    try:
        tokenizer = tokenizer_of(config)
    except InputError as error:
        tokenizer, notes = None, [*notes, f"tokens are shown by their ids, because there is no tokenizer: {error}"]
    contents = dict(
        run=str(folder), notes=notes, objectives=[dict(title=one.title, notes=one.notes) for one in shown],
        groups=[group_of(rows, [[x[n] for x in pair] for pair in found], tokenizer) for n, rows in enumerate(groups)],
    )  # fmt: skip
    write_text_atomic(out, to_html(contents))
    print(f"{len(groups)} groups of {len({rows[0]['step'] for rows in groups})} steps: {out}")


def read_groups(file: pathlib.Path, step: int | None) -> tuple[list[list[dict]], list[str]]:
    """The rows of each kept group, in order of steps, and what the page says of those that it leaves out."""
    table = read_table(file)
    if table is None or not len(table):
        raise InputError(f"{file} holds no tokens: the run keeps them with evaluations, unless log.look_every is 0")
    if missing := NEEDED - set(table.column_names):
        raise InputError(f"{file} has no column {', '.join(sorted(missing))}: it is no log of tokens of this version")
    frame = table.to_pandas()
    steps = sorted(frame["step"].unique().tolist())
    if step is not None and step not in steps:
        raise InputError(f"--step={step}: tokens are kept of the steps {', '.join(map(str, steps))}; name one of them")
    kept, tokens = steps if step is None else [step], int(frame["tokens"].map(len).sum())
    if step is None and tokens > MOST_TOKENS:
        count = max(1, len(steps) * MOST_TOKENS // tokens)
        kept = [steps[round(n)] for n in np.linspace(len(steps) - 1, 0, count)]
    left = len(steps) - len(kept) if step is None else 0
    note = f"{left} of {len(steps)} kept steps are left out, to keep the page small; --step=STEP shows one of them"
    chosen = frame[frame["step"].isin(kept)].groupby(["step", "group"])
    return [rows.to_dict("records") for _, rows in chosen], [note] * bool(left)


def tokenizer_of(config: ConfigDict) -> Tokenizer:
    """The tokenizer of a run. Raises InputError where its folder is not here."""
    if "tasks" in config.data:
        return data.prepare(**set_keys(config.data), log=say).tokenizer
    return data.load_tokenizer(config.data.tokenizer or config.model.checkpoint or "", config.data.template)


def pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; "" for one that adds nothing, such as the end. A first byte of a character adds
    U+FFFD, and the last one the character."""
    if tokenizer is None:
        return [f"{id} " for id in ids]
    texts, context, begin = list[str](), 0, 0  # where the character before begins, and this one
    for end in range(1, len(ids) + 1):
        before, text = tokenizer.decode(ids[context : end - 1]), tokenizer.decode(ids[context:end])
        texts.append(text[len(os.path.commonprefix([before, text])) :])
        if not text.endswith("\ufffd") or end - begin >= MOST_BYTES:
            context, begin = begin, end
    return texts


def group_of(rows: Sequence[dict], found: Sequence[Sequence[np.ndarray]], tokenizer: Tokenizer | None) -> dict:
    """A group as the page reads it; `found` has coefficients and cuts [responses, T] of each objective."""
    spelled = [] if tokenizer is None else tokenizer.tokens()
    responses = []
    for number, row in enumerate(rows):
        mask, length = np.array(row["loss_mask"], bool), len(row["tokens"])
        current, behavior, reference = (np.array(row[f"{x}_logp"], float) for x in ("current", "behavior", "reference"))
        texts, ids = pieces(tokenizer, row["tokens"]), row["tokens"]
        responses.append(
            dict(
                rewards=json.loads(row["rewards"]), finished=row["finished"], sample=row["sample"],
                turns=np.reshape(row["turns"], (-1, 2)), text=texts, id=ids,
                name=[spelled[id] if id < len(spelled) else str(id) for id in ids],
                logp=short(current), behavior=short(np.where(mask, current - behavior, 0)),
                reference=short(np.where(mask, current - reference, 0)), entropy=short(row["entropy"]), age=row["age"],
                advantage=short(np.broadcast_to(row["advantage"], length)),
                weight=short(row["weight"]), coefficient=[short(x[number, :length]) for x, _ in found],
                cut=[np.flatnonzero(cut[number, :length]) for _, cut in found],
            )
        )  # fmt: skip
    responses.sort(key=lambda one: -float(np.mean(one["advantage"] or [0])))
    told = {name: rows[0][name] for name in ("step", "update", "problem", "task", "prompt", "answer")}
    return told | dict(responses=responses)


def short(values: Any) -> list[float]:
    """Four digits of each number: what the page can show."""
    return [float(f"{x:.4g}") for x in np.asarray(values, float)]


def to_html(contents: dict) -> str:
    """The page: a template with its style and script inside, which writes data as text only.

    Within the JSON no "<" is left that could end its element; and the policy of the page lets no other script run than
    the template's.
    """
    template = pathlib.Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = json.dumps(jsonable(contents), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("@SCRIPT@", f"'sha256-{digest}'").replace("@DATA@", text)
