"""Sets of problems for training and evaluation, from prepared folders or raw files; prompts rendered and measured."""

import dataclasses
import functools
import json
import os
import pathlib

import grain
import numpy as np

from rpg_jax import InputError
from rpg_jax.data import problems
from rpg_jax.data.folding import fold
from rpg_jax.data.problems import Problem
from rpg_jax.data.sources import listed, open_gym, open_source
from rpg_jax.data.templates import named
from rpg_jax.data.tokenizer import Tokenizer
from rpg_jax.gym import PREFIX, line_about


@dataclasses.dataclass(frozen=True)
class Sets:
    """A tokenizer and the splits "train" and "heldout"."""

    tokenizer: Tokenizer
    splits: dict[str, grain.MapDataset]
    tasks: frozenset[str] = frozenset()  # of all problems, unless they are generated

    def problems(self, split: str) -> grain.MapDataset:
        """The `Problem`s of a split, each rendered when it is indexed; empty if the split has no set."""
        return self.splits[split]


def load(
    train=None, heldout=(), *, tokenizer: Tokenizer, max_prompt: int, overlong="drop", template_options=None,
    wording="paper", log=print,
) -> Sets:  # fmt: skip
    """Opens real sets for a model: renders chat messages and measures prompts.

    Args:
      train: a folder made by `rpg_jax.prepare`, or a source that it reads, folded as by its defaults. Of reasoning-gym
        (`gym:FAMILY(...)`), training problems and held-out ones have different questions.
      heldout: several of these, or one string with commas between them.
      max_prompt: the most tokens of a rendered prompt; longer ones are left out (overlong "drop") or raise ("refuse").
      wording: the template that makes a user message of a problem that is text, a name that `templates.named` knows.
      log: called with one line about dropped prompts, one about held-out problems that are trained on, and one about
        families of reasoning-gym that give no answers.

    Raises ValueError for a set that cannot be read, is empty, or has no problem within the limit, and for two held-out
    sets of one name.
    """
    fit = functools.partial(_fit, tokenizer, max_prompt, overlong, template_options or {}, named(wording), log)
    training, trained, tasks = [], set(), set()
    if train:
        dataset, prompts, tasks = fit("train", train)
        training, trained = [dataset], set(prompts)
    evaluated, owners = [], {}
    for title in filter(None, listed(heldout) if isinstance(heldout, str) else heldout):
        dataset, prompts, names = fit("heldout", title)
        for name in names:
            if name in owners:
                raise InputError(
                    f"{owners[name]} and {title} both hold a set named {name!r}; prepare one under another name, "
                    f"rpg_jax.prepare --name"
                )
            owners[name] = title
        if repeated := sum(prompt in trained for prompt in prompts):
            log(f"{title}: {repeated} of {len(prompts)} held-out problems are also in the training set {train}")
        evaluated.append(dataset)
    if "all" in owners and len(owners) > 1:
        raise InputError(f"{owners['all']}: all is the name of all sets together; rpg_jax.prepare --name gives another")
    return Sets(
        tokenizer, {"train": _joined(training), "heldout": _joined(evaluated)}, frozenset(tasks | owners.keys())
    )


def messages(problem: Problem) -> list[dict]:
    """The chat messages of a real set's problem; raises ValueError if the prompt is no JSON list."""
    try:
        chat = json.loads(problem.prompt)
    except ValueError:
        chat = None
    if not isinstance(chat, list):
        raise InputError("its prompt is not JSON of chat messages; make the folder with rpg_jax.prepare")
    return chat


def _fit(tokenizer, max_prompt, overlong, options, template, log, split, title):
    """(rendered problems of a set within the limit, their messages as JSON, the names of its tasks)."""
    rows, source, where = _open(title, template, split)
    if line := line_about(rows):
        log(line)

    def rendered(problem):
        return tokenizer.render(messages(problem), **options)

    lengths = np.zeros(len(rows), int)
    for i, problem in enumerate(rows):
        try:
            lengths[i] = len(tokenizer.encode_prompt(rendered(problem)))
            if not lengths[i]:
                raise InputError("its prompt has no tokens under the chat template; choose another data.template")
        except ValueError as error:
            raise InputError(f"{where(i)}: {error}") from error
    kept, over = np.flatnonzero(lengths <= max_prompt), np.flatnonzero(lengths > max_prompt)
    if overlong == "refuse" and len(over):
        raise InputError(
            f"{where(over[0])}: its prompt takes {lengths[over[0]]} tokens, more than max_prompt={max_prompt}, as do "
            f"{len(over)} in all (the longest {lengths.max()}); raise max_prompt, or choose overlong=drop"
        )
    if not len(kept):
        raise InputError(
            f"{where(0)}: no problems are left, all {len(lengths)} prompts take more than max_prompt={max_prompt} "
            f"tokens, the shortest {lengths.min()}; raise max_prompt"
        )
    if len(over):
        log(
            f"{title}: dropped {len(over)} of {len(rows)} problems with prompts of more than {max_prompt} "
            f"tokens (the longest {lengths.max()})"
        )

    numbers = grain.MapDataset.source(kept.tolist())
    dataset = numbers.map(lambda i: dataclasses.replace(source[i], prompt=rendered(source[i])))
    return dataset, [rows[i].prompt for i in kept], {problem.task for problem in rows}


def _open(title, template, split):
    """(all problems, a sequence that reads them again, index -> its place) of a prepared folder or another source."""
    title, path = str(title), pathlib.Path(title)
    if not os.path.isdir(title):  # False for a title that is longer than a file's name may be
        sources = open_gym([title], split) if title.startswith(PREFIX) else [open_source(title)]
        folded = fold(sources, template)
        return folded.problems, folded.problems, folded.origins.__getitem__
    if not (path / "problems").is_dir():
        raise InputError(f"{path} holds no prepared problems; name a folder made by rpg_jax.prepare, or a file")
    records = problems.Records(path, "train")
    source = grain.MapDataset.source(records).map(problems.to_problem)
    rows = list(map(problems.to_problem, records))
    return rows, source, lambda i: f"{path}, problem {rows[i].id}"


def _joined(datasets):
    return grain.MapDataset.concatenate(datasets) if datasets else grain.MapDataset.source([])
