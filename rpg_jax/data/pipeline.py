"""From problems to NumPy arrays: one global order of problems with one cursor, and rows of tokens."""

from collections.abc import Iterable, Sequence

import grain
import numpy as np

from rpg_jax import InputError
from rpg_jax.data.problems import Problem
from rpg_jax.data.tasks.guess import TURN
from rpg_jax.data.tokenizer import Tokenizer


class ProblemStream:
    """An endless, seeded, globally shuffled order of problems, of which each process reads its share.

    The order depends on the source and the seed only, with a new shuffle every epoch. The state is one cursor, the
    number of problems that all processes have read together, so a run may resume with another number of processes.
    (Grain's iterator state belongs to one process and does not allow that.)
    """

    def __init__(self, source: Sequence[Problem] | grain.MapDataset, seed: int):
        """`seed` is in 0..2**32 - 1; raises ValueError for an empty source."""
        dataset = source if isinstance(source, grain.MapDataset) else grain.MapDataset.source(source)
        if not len(dataset):
            raise InputError("the problem source is empty")
        self._order = dataset.shuffle(seed).repeat()
        self.cursor = 0  # the number of problems read so far, over all processes

    def next(self, n: int, rows: Iterable[int] | None = None) -> list[Problem]:
        """Those of the next `n` problems of the global order at `rows`, a process's share of 0..n-1; all if None."""
        start = self.cursor
        self.cursor += n
        return [self._order[start + int(row)] for row in (range(n) if rows is None else rows)]

    def at(self, positions: Iterable[int]) -> list[Problem]:
        """The problems at these positions of the global order, which were read before; the cursor stays."""
        return [self._order[int(position)] for position in positions]


def prompt_rows(problems: Sequence[Problem], positions: Iterable[int], tokenizer: Tokenizer, length: int) -> tuple:
    """Rows of prompts, padded on the right: (tokens i32[P, length], length i32[P], positions i32[P]).

    `positions` are those of the problems in the stream's order, or in the set that is evaluated; the noise depends on
    them. Raises ValueError, with the problem, for one of more than `length` tokens.
    """
    rows = [tokenizer.encode_prompt(problem.prompt) for problem in problems]
    tokens, lengths = _pad(rows, problems, "prompt", length, tokenizer.pad_id, "rollout.max_prompt")
    return tokens, lengths, np.fromiter(positions, np.int32, len(problems))


def supervised_rows(problems: Sequence[Problem], tokenizer: Tokenizer, length: int) -> tuple:
    """Rows prompt ++ worked solution ++ EOS, padded on the right: (tokens i32[B, length], lengths i32[B], loss_mask
    bool[B, length]), with the mask true on the solution's own turns and the EOS after each.

    A solution of several turns has observations between them, each between two `TURN` characters. Raises ValueError as
    `prompt_rows` does.
    """
    rows, masks = [], np.zeros((len(problems), length), bool)
    for mask, problem in zip(masks, problems, strict=True):
        if not problem.solution.strip():
            raise InputError(
                f"problem {problem.id} ({problem.task}) has no worked solution; name its column with --solution_field "
                f"of rpg_jax.prepare, or set warm_start.steps=0"
            )
        rows.append(tokenizer.encode_prompt(problem.prompt))
        for number, text in enumerate(problem.solution.split(TURN)):
            ids = tokenizer.encode(text) + ([] if number % 2 else [tokenizer.eos_id])
            mask[len(rows[-1]) : len(rows[-1]) + len(ids)] = number % 2 == 0
            rows[-1] += ids
    key = "rollout.max_prompt + rollout.max_new"
    return *_pad(rows, problems, "prompt and solution", length, tokenizer.pad_id, key), masks


def _pad(rows, problems, what, length, pad_id, key):
    tokens = np.full((len(rows), length), pad_id, np.int32)
    for i, (row, problem) in enumerate(zip(rows, problems, strict=True)):
        if len(row) > length:
            raise InputError(
                f"problem {problem.id} ({problem.task}): its {what} take {len(row)} tokens, more than {key}={length}; "
                f"raise {key} to at least {len(row)}"
            )
        tokens[i, : len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)
