"""From problems to arrays: one global order with one cursor, and rows of tokens. NumPy only."""

from collections.abc import Sequence

import grain
import numpy as np

from rpg_jax.data.problems import Problem


class ProblemStream:
    """An endless, seeded, globally shuffled order of problems, of which each process reads its share.

    The order depends on the source and the seed alone, with a new shuffle every epoch. All processes hold the same
    cursor, the number of problems given to all of them together: it is the whole state, so a run may resume on
    another number of processes. (Grain's iterator state is per process and does not allow that.)
    """

    def __init__(self, source, seed: int, cursor=0):
        """`source` is a sequence or grain.MapDataset of problems; `seed` is in 0..2**32 - 1."""
        dataset = source if isinstance(source, grain.MapDataset) else grain.MapDataset.source(source)
        if not len(dataset):
            raise ValueError("the problem source is empty")
        self._order = dataset.shuffle(seed).repeat()
        self._cursor = cursor

    def next(self, n: int, rows=None) -> list[Problem]:
        """The next `n` problems of the global order; only those at `rows`, a process's share of 0..n-1, if given."""
        start = self._cursor
        self._cursor += n
        return [self._order[start + int(row)] for row in (range(n) if rows is None else rows)]

    def get_state(self) -> int:
        """The cursor: problems given out so far, over all processes."""
        return self._cursor

    def set_state(self, cursor: int) -> None:
        self._cursor = int(cursor)


def prompt_rows(problems: Sequence[Problem], tokenizer, length: int, key="prompt_length"):
    """Rows of prompts (`encode_prompt`), padded on the right.

    Args:
      length: tokens in a row. key: the config key of that limit, for the error.

    Returns:
      (tokens i32[P, length], mask bool[P, length], problem ids i32[P]).

    Raises:
      ValueError: naming the first problem whose prompt is longer.
    """
    rows = [tokenizer.encode_prompt(problem.prompt) for problem in problems]
    tokens, lengths = _pad(rows, problems, "prompt", length, tokenizer.pad_id, key)
    return tokens, np.arange(length) < lengths[:, None], np.array([p.id for p in problems], np.int32)


def supervised_rows(problems: Sequence[Problem], tokenizer, length: int, key="sequence_length"):
    """Rows prompt ++ worked solution + EOS, padded on the right.

    Returns:
      (tokens i32[B, length], response_mask bool[B, length]); the mask is true on the solution and its EOS.

    Raises:
      ValueError: naming the first problem that does not fit in `length` tokens, and `key`.
    """
    prompts = [tokenizer.encode_prompt(problem.prompt) for problem in problems]
    solutions = [[*tokenizer.encode(problem.solution), tokenizer.eos_id] for problem in problems]
    rows = [prompt + solution for prompt, solution in zip(prompts, solutions, strict=True)]
    tokens, lengths = _pad(rows, problems, "prompt and solution", length, tokenizer.pad_id, key)
    starts = np.array([len(prompt) for prompt in prompts])
    column = np.arange(length)
    return tokens, (column >= starts[:, None]) & (column < lengths[:, None])


def _pad(rows, problems, what, length, pad_id, key):
    tokens = np.full((len(rows), length), pad_id, np.int32)
    for i, (row, problem) in enumerate(zip(rows, problems, strict=True)):
        if len(row) > length:
            raise ValueError(
                f"problem {problem.id} ({problem.task}): its {what} take {len(row)} tokens, more than {key}={length}; "
                f"raise {key} to at least {len(row)}"
            )
        tokens[i, : len(row)] = row
    return tokens, np.array([len(row) for row in rows])
