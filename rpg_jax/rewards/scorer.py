"""Scoring responses: rules run in this process, functions that may hang or die in worker processes."""

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from rpg_jax import InputError
from rpg_jax.answer import EXTRACTIONS, final_answer
from rpg_jax.rewards.pool import Failure, Pool, file_and_name
from rpg_jax.rewards.rules import JUDGED, RULES, voted_answer
from rpg_jax.rewards.shaping import check_weights
from rpg_jax.rewards.verifiers import VERIFIERS
from rpg_jax.rewards.worker import OURS

_GYM = "gym"  # a problem of reasoning-gym has a task named gym:FAMILY
# The project's own functions that need a worker, by module and name.
_WORKERS = {"math_verify": ("rpg_jax.rewards.math_rule", "math_verify"), _GYM: ("rpg_jax.rewards.gym_rule", "gym")}
_IN_PROCESS = VERIFIERS | RULES
_FORMS = "Answer: {}", "\\boxed{{{}}}"  # of a response that states an answer

OWN = "verifier"  # the name of each task's own rule
ENVIRONMENT = "environment"  # the name of an episode's return, which comes with the response
ONE = "one"  # the name of the accuracy in the sum of rewards, where no reward has a name of its own
NO_REWARD = "none"  # in place of a function: that sum is 0, and the accuracy is what it would be with the key unset


@dataclasses.dataclass(frozen=True)
class Scores:
    """What is found of N responses."""

    correct: np.ndarray  # f32[N], accuracy: 1 right, 0 wrong, partial credit between; 0 where the function failed
    failures: list[str]  # one line for each call that failed, naming the problem
    # f32[N] of each named reward, before scale and weight; empty where `correct` is the one reward.
    rewards: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    environment_failures: int = 0  # episodes whose environment failed
    notes: list[str] = dataclasses.field(default_factory=list)  # one line for what else there is to know of an episode


@dataclasses.dataclass(frozen=True)
class Submitted:
    """Responses that are being scored; what is begun by two calls of `Scorer.submit` is one after an addition."""

    scorer: "Scorer"
    problems: list  # of each response
    verdicts: dict[str, list]  # of each function, a score of each response, or what has it as its result()
    named: dict[str, str]  # name of a reward -> its function

    def __add__(self, other: "Submitted") -> "Submitted":
        verdicts = {function: values + other.verdicts[function] for function, values in self.verdicts.items()}
        return dataclasses.replace(self, problems=self.problems + other.problems, verdicts=verdicts)

    def result(self) -> Scores:
        """Waits for all; ValueError if a user's function failed on more than `max_failures` of them."""
        scores, lines, broken = {}, [], []  # broken: responses whose environment failed, which are wrong
        for function, verdicts in self.verdicts.items():
            scores[function], failed = np.zeros(len(verdicts), np.float32), []
            for index, (problem, verdict) in enumerate(zip(self.problems, verdicts, strict=True)):
                try:
                    scores[function][index] = verdict if isinstance(verdict, float) else verdict.result()
                except Failure as failure:
                    title = self.scorer.title_of(function, problem.task)
                    failed.append((index, f"problem {problem.id} ({problem.task}): {title}: {failure}"))
            most = self.scorer.max_failures if ".py:" in function else 1.0
            most = self.scorer.environment.max_failures if function == ENVIRONMENT else most
            if len(failed) > most * len(verdicts):
                raise InputError(
                    f"{self.scorer.title_of(function)} failed on {len(failed)} of {len(verdicts)} responses, more than "
                    f"max_failures={most:g} of them; the first: {failed[0][1]}"
                )
            lines += failed
            broken += [index for index, _ in failed] if function == ENVIRONMENT else []
        rewards = {name: scores[function].copy() for name, function in self.named.items()}
        episodes = zip(self.problems, self.verdicts.get(ENVIRONMENT, ()), strict=False)
        notes = [f"problem {each.id} ({each.task}): {outcome.note}" for each, outcome in episodes if outcome.note]
        scores[self.scorer.judge][broken] = 0.0
        return Scores(scores[self.scorer.judge], [line for _, line in sorted(lines)], rewards, len(broken), notes)


class Scorer(contextlib.ExitStack):
    """Scores responses by rules and functions.

    A user's function, `math_verify` and the families of reasoning-gym run in `workers` processes. A function is given
    what its signature names of `worker.OURS` and the columns of the problem's row, and returns a number in 0..1. A call
    that raises, hangs, dies, takes too much memory or returns anything else fails its response: that scores 0 and is
    reported, and its worker is replaced if it died, hangs or is full. `close`, or the end of a `with`, ends the workers
    and what they have started in their sessions.
    """

    def __init__(
        self, function=None, functions=(), weights=None, evaluation=None, workers=2, timeout_seconds=10.0,
        memory_mb=4096, max_failures=0.25, extraction="stated", partial_credit=False, network=False, tasks=(),
        generated=True, environment=None,
    ):  # fmt: skip
        """Checks the settings and starts the workers that the functions and `tasks` need.

        Args:
          function: "verifier" or None, each task's own verifier and the DAPO rule for tasks without one; "dapo",
            "boxed" or "math_verify" for all tasks; "FILE.py:NAME"; or "none", no reward. Problems of reasoning-gym are
            scored by their family unless the function is a user's.
          functions: in place of `function`, several of these, or one text with commas between them. Each is a reward
            named by its rule, its NAME, or a name of its own before it, "brief=FILE.py:NAME".
          evaluation: a function like these, or the name of a reward, whose score is the accuracy; None is the first.
          max_failures: the largest share of one call's responses on which a user's function may fail. What sympy or a
            family of reasoning-gym cannot score is wrong and does not count: the policy writes its input.
          network: whether a user's function may use the network. Other workers never do.
          tasks: of the problems to come; the workers of those that are not named start with their first problem.
          generated: whether the problems are generated; a prepared set may have the name of a task with a verifier.
          environment: an `environments.Environment`, whose episodes' returns are a reward named "environment", the
            first, and the only one unless functions are named. `close` closes it.

        The others are keys of `reward` in configs/base.py. Raises ValueError when a function cannot be loaded.
        """
        if extraction not in EXTRACTIONS:
            raise InputError(f"reward {extraction=} is unknown; known: {', '.join(EXTRACTIONS)}")
        super().__init__()
        self.environment = environment and self.enter_context(contextlib.closing(environment))
        self._rewards = named_rewards(function, functions, environment is not None)
        self.weights = {name: 1.0 for name in self._rewards} | check_weights(weights or {}, list(self._rewards))
        self.weights = self.weights or {ONE: 0.0, ENVIRONMENT: 0.0}  # reward.function=none
        self.judge = judge_of(self._rewards, evaluation, environment is not None)
        if (named := self._rewards.get(ENVIRONMENT, ENVIRONMENT)) != ENVIRONMENT:
            raise InputError(f"reward {named!r} has the name of an episode's return; put another name before it")
        if environment is None and ENVIRONMENT in {*self._rewards.values(), self.judge}:
            raise InputError(f"reward function {ENVIRONMENT!r} is an episode's return; set environment.name")
        is_first = self.judge == next(iter(self._rewards.values()), None)
        self._is_one = not functions and not environment and is_first and set(self.weights.values()) == {1.0}
        self._generated, self.max_failures = generated, max_failures
        self._extract, self._partial_credit = EXTRACTIONS[extraction], partial_credit
        self._limits = dict(workers=workers, timeout_seconds=timeout_seconds, memory_mb=memory_mb)
        self._network, self._pools = network, {}
        functions = {*self._rewards.values(), self.judge}
        needed = {self.function_of(name, task) for name in functions for task in tasks} | functions - {OWN}
        try:
            for name in sorted(needed - _IN_PROCESS.keys() - {ENVIRONMENT}):
                self._pool(name)
        except BaseException:
            self.close()
            raise

    def submit(
        self, items: Sequence, lengths: Sequence[int] | None = None, rewards: bool = True, outcomes: Sequence = ()
    ) -> "Submitted":
        """Begins to score N pairs (problem, response); a problem has `id`, `task`, `prompt`, `answer` and `columns`.

        Rules judge at once, in this process; worker processes go on until `result()` of what is returned asks for them.
        `lengths` are the responses' tokens, `outcomes` with an environment the `environments.Outcome` of each episode.
        With `rewards` false only the accuracy is found. Raises ValueError if reasoning-gym's workers cannot be started.
        """
        lengths = [None] * len(items) if lengths is None else lengths
        named = self._rewards if rewards and not self._is_one else {}
        verdicts = {
            function: [self._begin(function, *item, length) for item, length in zip(items, lengths, strict=True)]
            for function in dict.fromkeys([self.judge, *named.values()])
            if function != ENVIRONMENT
        }
        if self.environment is not None:
            verdicts[ENVIRONMENT] = list(outcomes)
        return Submitted(self, [problem for problem, _ in items], verdicts, named)

    def _begin(self, function: str, problem, response: str, length: int | None) -> "float | Future[float]":
        """The score of a response where `function` is set; "verifier" is another function for each task."""
        function = self.function_of(function, problem.task)
        if rule := _IN_PROCESS.get(function):
            return float(rule(response, problem.answer))
        text = self._extract(response) if function == _GYM else response
        return 0.0 if text is None else self._pool(function).submit(_question(problem, text, length))

    def try_out(self, problem, rewards: bool = True) -> None:
        """Calls each user's function once, with a problem's own answer as the response, and each rule for text.

        With `rewards` false only that of the accuracy. Raises ValueError where a call fails.
        """
        if self.environment is not None:
            self.environment.try_out(problem)
        for function in dict.fromkeys([*(self._rewards.values() if rewards else ()), self.judge]):
            if rule := RULES.get(self.function_of(function, problem.task)):
                if not any(rule(form.format(problem.answer), problem.answer) for form in _FORMS):
                    raise InputError(
                        f"{self.title_of(function, problem.task)} finds the answer of problem {problem.id} "
                        f"({problem.task}), {problem.answer!r:.60}, in no response: name another column with "
                        f"--answer_field of rpg_jax.prepare, or give a reward function of your own"
                    )
            if function in (OWN, ENVIRONMENT) or function in VERIFIERS or function in JUDGED:
                continue
            try:
                self._pool(function).submit(_question(problem, problem.answer, 1)).result()
            except Failure as failure:
                raise InputError(
                    f"reward function {function!r}, tried on problem {problem.id} ({problem.task}) with its answer "
                    f"{problem.answer!r:.60} as the response: {failure}"
                ) from None

    def vote(self, problem, response: str) -> str | None:
        """A response's vote in maj@k: the answer that the problem's rule judges, normalized; None if it finds none.

        What a user's function or an environment looks at is not known, so responses vote with their whole text there.
        """
        function = self.function_of(self.judge, problem.task)
        if extract := final_answer if function in VERIFIERS else JUDGED.get(function):
            return voted_answer(response, extract)
        extracted = self._extract(response) if function == _GYM else response
        return " ".join((extracted or "").split()) or None

    def title_of(self, function: str, task: str | None = None) -> str:
        """What a function is called in a line of text."""
        if function == ENVIRONMENT:
            return f"environment {self.environment.name}"
        return f"reward function {repr(function) if task is None else _name(self.function_of(function, task))}"

    def function_of(self, function: str, task: str) -> str:
        """The name of the rule, verifier or function that scores a task's problems where `function` is set."""
        if task.startswith(f"{_GYM}:") and (function == OWN or function in JUDGED):
            return _GYM
        if function != OWN:
            return function
        return task if task in VERIFIERS and self._generated else "dapo"

    def _pool(self, function: str) -> Pool:
        """The workers of a function, started when they are first asked for."""
        if function not in self._pools:
            known = ", ".join([OWN, *JUDGED])
            where, name = _WORKERS.get(function) or file_and_name("reward function", function, known)
            if function == _GYM and self._partial_credit:
                name = "credit"
            try:
                network = self._network and function not in _WORKERS
                pool = Pool(where, name, network=network, **self._limits)
                self._pools[function] = self.enter_context(contextlib.closing(pool))
            except Failure as failure:
                raise InputError(
                    f"reward function {function!r} cannot be loaded in a worker of "
                    f"memory_mb={self._limits['memory_mb']}: {failure}"
                ) from None
        return self._pools[function]


def _question(problem, response: str, tokens) -> dict:
    """What a function may be given: the columns of a problem's row, and ours in place of those with the same names."""
    ours = problem.prompt, response, problem.answer, problem.task, tokens
    return problem.columns | dict(zip(OURS, ours, strict=True))


def judge_of(rewards: dict[str, str], evaluation: str | None, environment: bool = False) -> str:
    """The function whose score is the accuracy: `evaluation`, which may be the name of a reward; else the first reward,
    or where there is none what would be the first."""
    first = next(iter(rewards.values()), ENVIRONMENT if environment else OWN)
    return rewards.get(evaluation, evaluation) if evaluation else first


def named_rewards(
    function: str | None, functions: str | Sequence[str] | None = (), environment: bool = False
) -> dict[str, str]:
    """{name: function} of `reward.function` or `reward.functions`, in order, after an environment's return; {} where
    the function is "none"."""
    if function == NO_REWARD and not functions:
        return {}
    if environment:
        others = named_rewards(function, functions) if function or functions else {}
        return {ENVIRONMENT: ENVIRONMENT} | others
    if not functions:
        return {_name(function or OWN): function or OWN}
    if function:
        raise InputError(f"reward.function={function!r} and reward.functions are both set; set one of them")
    titles = functions.split(",") if isinstance(functions, str) else functions
    pairs = [re.fullmatch(r"(?:\s*(\w+)\s*=)?\s*(.*?)\s*", title, re.DOTALL).groups() for title in titles]
    named = {name or _name(function): function for name, function in pairs}
    if len(named) < len(pairs):
        raise InputError(
            f"reward.functions has two of one name, of {', '.join(map(str.strip, titles))}; give one another name "
            f"before it, such as other=FILE.py:NAME"
        )
    return named


def _name(function: str) -> str:
    return function.rpartition(":")[2]
