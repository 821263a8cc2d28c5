"""Scoring responses: rules run in this process, functions that may hang or die in worker processes."""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from rpg_jax.rewards.answer import final_answer
from rpg_jax.rewards.pool import Failure, Pool
from rpg_jax.rewards.rules import EXTRACTIONS, RULES, dapo, voted_answer
from rpg_jax.rewards.verifiers import VERIFIERS

_MODULES = {"math_verify": "rpg_jax.rewards.math_rule"}  # the project's own functions that need a worker


@dataclasses.dataclass(frozen=True)
class Scores:
    """N verdicts of `Scorer.score`, and the failures among them."""

    correct: np.ndarray  # f32[N], 1 right, 0 wrong, partial credit between; 0 where the function failed
    failures: list[str]  # one line for each sample whose scoring failed, naming its problem


class Scorer:
    """Scores responses by rule or with a function.

    A user's function, `NAME(prompt: str, response: str, answer: str, task: str) -> float in 0..1`, and `math_verify`
    run in `workers` processes. A call that raises, hangs, dies, takes too much memory, starts too many processes or
    returns anything else fails its sample: the sample counts as wrong and is reported, and a worker that died or hangs
    is replaced. `close`, or the end of a `with`, ends every process that the scorer or a function started.
    """

    def __init__(self, function=None, workers=2, timeout_seconds=10.0, memory_mb=4096, max_failures=0.25):
        """Checks the settings and starts the workers.

        Args:
          function: None, each task's own verifier and the DAPO rule for tasks without one; "dapo", "boxed" or
            "math_verify" for all tasks; or "FILE.py:NAME".
          workers: processes; timeout_seconds: for one sample, after which its worker is killed.
          memory_mb: address space of a worker, MiB.
          max_failures: the largest share of one call's samples on which a user's function may fail. What sympy cannot
            decide within the limits is wrong and does not count: the policy writes its input.

        Raises:
          ValueError: when the function cannot be loaded, or for a setting out of range.
        """
        if workers < 1:
            raise ValueError(f"reward workers={workers} must be at least 1")
        if timeout_seconds <= 0 or memory_mb < 64:
            raise ValueError(f"reward {timeout_seconds=} must be positive and {memory_mb=} at least 64")
        if not 0 <= max_failures <= 1:
            raise ValueError(f"reward {max_failures=} is a share of the samples and must be in 0..1")
        self._function = function
        self._max_failures = 1.0 if function in _MODULES else max_failures
        self._pool = None
        if function is not None and function not in RULES:
            where, name = (_MODULES[function], function) if function in _MODULES else _parse(function)
            try:
                self._pool = Pool(where, name, workers, timeout_seconds, memory_mb)
            except Failure as failure:
                raise ValueError(
                    f"reward function {function!r} cannot be loaded in a worker of {memory_mb=}: {failure}"
                ) from None

    def score(self, items: Sequence) -> Scores:
        """Scores N pairs (problem, response); a problem has `id`, `task`, `prompt` and `answer`.

        Raises:
          RuntimeError: a user's function failed on more than `max_failures` of the samples.
        """
        if self._pool is None:
            verdicts = [self._rule(problem.task)(response, problem.answer) for problem, response in items]
            return Scores(np.array(verdicts, np.float32), [])
        questions = [[problem.prompt, response, problem.answer, problem.task] for problem, response in items]
        correct, failures = self._pool.map(questions)
        failed = [(items[index][0], reason) for index, reason in failures.items()]
        lines = [f"problem {problem.id} ({problem.task}): reward function {reason}" for problem, reason in failed]
        if len(lines) > self._max_failures * len(items):
            raise RuntimeError(
                f"reward function {self._function!r} failed on {len(lines)} of {len(items)} samples, more than "
                f"max_failures={self._max_failures:g} of them; the first: {lines[0]}"
            )
        return Scores(correct, lines)

    def vote(self, problem, response: str) -> str | None:
        """A response's vote in maj@k: the answer that the problem's rule judges, normalized; None if it finds none.

        What a user's function looks at is not known, so its responses vote with their whole text.
        """
        if self._function is None:
            return voted_answer(response, final_answer if problem.task in VERIFIERS else EXTRACTIONS["dapo"])
        if self._function in EXTRACTIONS:
            return voted_answer(response, EXTRACTIONS[self._function])
        return " ".join(response.split()) or None

    def _rule(self, task):
        return VERIFIERS.get(task, dapo) if self._function is None else RULES[self._function]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _parse(function: str) -> tuple[str, str]:
    file, _, name = function.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        known = ", ".join([*RULES, *_MODULES])
        raise ValueError(f"reward function {function!r} must be one of {known}, or of the form FILE.py:NAME")
    if not pathlib.Path(file).is_file():
        raise ValueError(f"reward function {function!r}: there is no file {file!r}")
    return file, name
