"""Scoring responses: rules run in this process, functions that may hang or die in worker processes."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

import numpy as np

from rpg_jax.rewards.answer import EXTRACTIONS, final_answer
from rpg_jax.rewards.pool import Failure, Pool
from rpg_jax.rewards.rules import JUDGED, RULES, voted_answer
from rpg_jax.rewards.verifiers import VERIFIERS

_GYM = "gym"  # a problem of reasoning-gym has a task named gym:FAMILY
_MODULES = {"math_verify": "rpg_jax.rewards.math_rule"}  # the project's own functions that need a worker
_WORKERS = _MODULES | {_GYM: "rpg_jax.rewards.gym_rule"}
_IN_PROCESS = VERIFIERS | RULES


@dataclasses.dataclass(frozen=True)
class Scores:
    """N verdicts of `Scorer.score`, and the failures among them."""

    correct: np.ndarray  # f32[N], 1 right, 0 wrong, partial credit between; 0 where the function failed
    failures: list[str]  # one line for each sample whose scoring failed, naming its problem


class Scorer:
    """Scores responses by rule or with a function.

    A user's function, `NAME(prompt: str, response: str, answer: str, task: str) -> float in 0..1`, `math_verify` and
    the families of reasoning-gym run in `workers` processes. A call that raises, hangs, dies, takes too much memory,
    starts too many processes or returns anything else fails its sample: the sample counts as wrong and is reported,
    and a worker that died or hangs is replaced. `close`, or the end of a `with`, ends every process that the scorer or
    a function started.
    """

    def __init__(
        self, function=None, workers=2, timeout_seconds=10.0, memory_mb=4096, max_failures=0.25, extraction="stated",
        partial_credit=False, network=False, tasks=(),
    ):  # fmt: skip
        """Checks the settings and starts the workers that `function` and `tasks` need.

        Args:
          function: None, each task's own verifier and the DAPO rule for tasks without one; "dapo", "boxed" or
            "math_verify" for all tasks; or "FILE.py:NAME". Problems of reasoning-gym are scored by their family unless
            the function is a user's.
          workers: processes; timeout_seconds: for one sample, after which its worker is killed.
          memory_mb: address space of a worker, MiB.
          max_failures: the largest share of one call's samples on which a user's function may fail. What sympy or a
            family of reasoning-gym cannot score is wrong and does not count: the policy writes its input.
          extraction: where answers to problems of reasoning-gym are looked for, a name in `answer.EXTRACTIONS`.
          network: whether a user's function may use the network. Other workers never do.
          partial_credit: whether their scores between 0 and 1 are kept; otherwise they are 0.
          tasks: of the problems to come; the workers of those that are not named start with their first problem.

        Raises:
          ValueError: when a function cannot be loaded, or for a setting out of range.
        """
        if workers < 1:
            raise ValueError(f"reward workers={workers} must be at least 1")
        if not 0 < timeout_seconds < math.inf or memory_mb < 64:
            raise ValueError(f"reward {timeout_seconds=} must be positive and {memory_mb=} at least 64")
        if not 0 <= max_failures <= 1:
            raise ValueError(f"reward {max_failures=} is a share of the samples and must be in 0..1")
        if extraction not in EXTRACTIONS:
            raise ValueError(f"reward {extraction=} is unknown; known: {', '.join(EXTRACTIONS)}")
        self._function, self._max_failures = function, max_failures
        self._extract, self._partial_credit = EXTRACTIONS[extraction], partial_credit
        self._limits = dict(workers=workers, timeout_seconds=timeout_seconds, memory_mb=memory_mb)
        self._network, self._pools = network, {}
        needed = {self._function_of(task) for task in tasks} | ({function} if function is not None else set())
        try:
            for name in sorted(needed - _IN_PROCESS.keys()):
                self._pool(name)
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence) -> Scores:
        """Scores N pairs (problem, response); a problem has `id`, `task`, `prompt` and `answer`.

        Raises:
          RuntimeError: a user's function failed on more than `max_failures` of the samples.
          ValueError: the workers of reasoning-gym cannot be started.
        """
        correct, failures = np.zeros(len(items), np.float32), {}
        indices: dict[str, list[int]] = {}
        for index, (problem, _) in enumerate(items):
            indices.setdefault(self._function_of(problem.task), []).append(index)
        for function, chosen in indices.items():
            if rule := _IN_PROCESS.get(function):
                correct[chosen] = [rule(items[index][1], items[index][0].answer) for index in chosen]
            else:
                correct[chosen], failed = self._ask(function, [items[index] for index in chosen])
                failures |= {chosen[place]: reason for place, reason in failed.items()}
        return Scores(correct, [failures[index] for index in sorted(failures)])

    def vote(self, problem, response: str) -> str | None:
        """A response's vote in maj@k: the answer that the problem's rule judges, normalized; None if it finds none.

        What a user's function looks at is not known, so its responses vote with their whole text.
        """
        function = self._function_of(problem.task)
        if function in VERIFIERS:
            return voted_answer(response, final_answer)
        if function in JUDGED:
            return voted_answer(response, JUDGED[function])
        extracted = self._extract(response) if function == _GYM else response
        return " ".join((extracted or "").split()) or None

    def _function_of(self, task: str) -> str:
        """The name of the rule, verifier or function that scores a task's problems."""
        is_ours = self._function is None or self._function in RULES or self._function in _MODULES
        if task.startswith(f"{_GYM}:") and is_ours:
            return _GYM
        if self._function is not None:
            return self._function
        return task if task in VERIFIERS else "dapo"

    def _ask(self, function: str, items: Sequence) -> tuple[np.ndarray, dict[int, str]]:
        """(scores f32[N], {index: line about a failure}) of pairs (problem, response), from worker processes."""
        texts = [self._extract(response) if function == _GYM else response for _, response in items]
        asked = [index for index, text in enumerate(texts) if text is not None]
        correct = np.zeros(len(items), np.float32)
        questions = [
            [items[index][0].prompt, texts[index], items[index][0].answer, items[index][0].task] for index in asked
        ]
        correct[asked], failed = self._pool(function).map(questions)
        if function == _GYM and not self._partial_credit:
            correct = (correct == 1.0).astype(np.float32)
        lines = {}
        for place, reason in failed.items():
            problem = items[asked[place]][0]
            lines[asked[place]] = f"problem {problem.id} ({problem.task}): reward function {reason}"
        if function not in _WORKERS and len(lines) > self._max_failures * len(items):
            raise RuntimeError(
                f"reward function {function!r} failed on {len(lines)} of {len(items)} samples, more than "
                f"max_failures={self._max_failures:g} of them; the first: {next(iter(lines.values()))}"
            )
        return correct, lines

    def _pool(self, function: str) -> Pool:
        """The workers of a function, started when they are first asked for."""
        if function not in self._pools:
            where, name = (_WORKERS[function], function) if function in _WORKERS else _parse(function)
            try:
                network = self._network and function not in _WORKERS
                self._pools[function] = Pool(where, name, network=network, **self._limits)
            except Failure as failure:
                raise ValueError(
                    f"reward function {function!r} cannot be loaded in a worker of "
                    f"memory_mb={self._limits['memory_mb']}: {failure}"
                ) from None
        return self._pools[function]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

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
