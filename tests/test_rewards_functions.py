"""What a reward function is given and may return, several rewards with weights, and what accuracy is."""

import decimal
import fractions
import re

import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.data import Problem
from rpg_jax.rewards import Scorer, scale_named, weighted_sum, worker

COLUMNS = {"level": 3, "source": ["a", {"b": None}], "answer": "of the row"}
PROBLEM = Problem(7, "set", "1 + 1?", "", "2", COLUMNS)
OURS = dict(prompt="1 + 1?", response="It is 2", answer="2", task="set", response_tokens=5)
VALUES = COLUMNS | OURS


def plain(prompt, response, answer, task): ...
def fewer(answer, response): ...
def columns(level, response, *, source, answer="default", absent="default"): ...
def every(response, **columns): ...


@pytest.mark.parametrize(("function", "named"), [
    (plain, ["prompt", "response", "answer", "task"]), (fewer, ["response", "answer"]),
    (columns, ["level", "response", "source", "answer"]), (every, [*VALUES]),
])  # fmt: skip
def test_a_function_is_given_what_its_signature_names(function, named):
    assert worker.arguments(function, VALUES) == {name: VALUES[name] for name in named}


def mistyped(prompt, response, answer, levle): ...
def others(p, response, answer, task): ...
def only_places(response, /): ...


@pytest.mark.parametrize(("function", "name"), [(mistyped, "levle"), (others, "p"), (only_places, "response")])
def test_an_unknown_parameter_is_named_with_the_columns_that_there_are(function, name):
    with pytest.raises(worker.Refused, match=f"^its parameter {name!r} is neither prompt, .* level, source$"):
        worker.judge(function, **VALUES)


@pytest.mark.parametrize(("value", "number"), [
    (True, 1.0), (0.25, 0.25), (-1e-9, 0.0), (1.0000001, 1.0),
    (np.float32(0.1) * np.float32(10.0) + np.float32(1.2e-7), 1.0), (np.array(0.5, np.float16), 0.5),
    (jnp.float32(0.25), 0.25), (fractions.Fraction(1, 4), 0.25), (decimal.Decimal("0.5"), 0.5),
    (1.00001, "returned 1.00001, not a number in 0..1; return a share, and set its size by reward.weights"),
    (-0.001, "returned -0.001, not a number in 0..1"), (float("nan"), "returned nan, not"),
    ("1.0", "returned '1.0' (str), not a number"), (np.array([0.5]), "returned array([0.5]) (ndarray), not a number"),
    (None, "returned None (NoneType), not"), (10**400, "returned 1000"),
    ({"score": 1.0}, "returned {'score': 1.0} (dict), not"),
])  # fmt: skip
def test_numbers_of_any_library_are_scores_and_what_is_none_is_said(value, number):
    if isinstance(number, str):
        with pytest.raises(worker.Refused, match=re.escape(number)):
            worker.judge(lambda **_: value, **VALUES)
    else:
        found = worker.judge(lambda **_: value, **VALUES)
        assert found == number and type(found) is float and str(found)[0] != "-"


REWARDS = """
import functools
calls = []

def right(response, answer): return response == answer
def brief(response_tokens, limit=4): return response_tokens <= limit
def level(*, level): return level / 4
def text(response): return "1.0"
def inverse(response): return 1 / len(response)
def divide(response): return helper(len(response))
def helper(n): return 1 / 0
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    return tmp_path / "mine.py"


ITEMS = [(PROBLEM, "2"), (PROBLEM, "3"), (Problem(8, "set", "", "", "2", {"level": 4}), "2")]


def test_several_rewards_are_scored_by_name_and_accuracy_is_the_first_without_its_weight(file):
    functions = f"{file}:right, short={file}:brief,{file}:level"
    weights = {"right": 0.5, "short": -0.25}
    with Scorer(functions=functions, weights=weights, workers=1) as scorer:
        scores = scorer.submit(ITEMS, [5, 4, 3]).result()
        alone = scorer.submit(ITEMS, [5, 4, 3], rewards=False).result()
    found = {name: values.tolist() for name, values in scores.rewards.items()}
    assert found == {"right": [1, 0, 1], "short": [0, 1, 1], "level": [0.75, 0.75, 1]}
    assert scores.correct.tolist() == alone.correct.tolist() == [1, 0, 1] and alone.rewards == {}
    assert scorer.weights == {"right": 0.5, "short": -0.25, "level": 1.0}
    total = weighted_sum(scores.rewards, scorer.weights, scale_named("unit"))
    assert total.dtype == np.float32 and total.tolist() == [1.25, 0.5, 1.25]
    signed = weighted_sum(scores.rewards, scorer.weights, scale_named("signed"))
    assert signed.tolist() == [0.5 + 0.25 + 0.5, -0.5 - 0.25 + 0.5, 0.5 - 0.25 + 1]
    # Sums that are equal but for rounding are equal.
    values = {"a": np.float32([1, 0]), "b": np.float32([1, 0]), "c": np.float32([0, 1])}
    first, second = weighted_sum(values, {"a": 0.1, "b": 0.2, "c": 0.3}, scale_named("unit"))
    assert first == second and 0.1 + 0.2 != 0.3


@pytest.mark.parametrize("evaluation", [None, "good", "verifier"])
def test_accuracy_is_a_score_of_its_own(file, evaluation):
    expected = [1, 0, 0] if evaluation else [0, 1, 1]
    items = [(PROBLEM, "Answer: 2"), (PROBLEM, "Answer: 3"), (PROBLEM, "2")]
    with Scorer(functions=[f"{file}:brief", "good=dapo"], evaluation=evaluation, workers=1) as scorer:
        scores = scorer.submit(items, [5, 4, 3]).result()
        votes = [scorer.vote(*item) for item in items]
    assert scores.correct.tolist() == expected and scores.rewards["brief"].tolist() == [0, 1, 1]
    assert votes == (["Answer: 2", "Answer: 3", "2"] if evaluation is None else ["2", "3", None])


def test_a_prepared_set_may_have_the_name_of_a_task_with_a_verifier():
    items = [(Problem(0, "arithmetic", "", "", "12"), "Answer: 12.0")]
    for generated, expected in ((True, 0), (False, 1)):
        with Scorer(functions=["verifier"], generated=generated) as scorer:
            assert scorer.submit(items).result().correct.tolist() == [expected]


@pytest.mark.parametrize(("settings", "says"), [
    (dict(function="dapo", functions="boxed"), "'dapo' and reward.functions are both set"),
    (dict(functions="dapo,dapo=boxed"), "has two of one name"),
    (dict(functions="dapo", weights={"brief": 1.0}), "reward.weights has 'brief', which is no reward; there are:"),
    (dict(functions="dapo", weights={"dapo": "1"}), "reward.weights.dapo is '1'; it must be a finite number"),
    (dict(functions="dapo", weights={"dapo": np.inf}), "reward.weights.dapo is inf; it must be a finite number"),
    (dict(functions="environment=dapo"), "'dapo' has the name of an episode's return"),
    (dict(function="environment"), "'environment' is an episode's return; set environment.name"),
    (dict(evaluation="environment"), "'environment' is an episode's return; set environment.name"),
    (dict(function="dapo", evaluation="brief"), "reward function 'brief' must be one of verifier, dapo"),
])  # fmt: skip
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ValueError, match=says):
        Scorer(**settings)


@pytest.mark.parametrize(("name", "says"), [
    ("text", "returned '1.0' (str), not a number in 0..1"),
    ("divide", "mine.py:11: ZeroDivisionError: division by zero"), ("inverse", None),
])  # fmt: skip
def test_each_function_is_tried_on_a_problem_with_its_own_answer(file, name, says):
    with Scorer(functions=["dapo", f"{file}:{name}"], workers=1, max_failures=1.0) as scorer:
        scorer.try_out(PROBLEM, rewards=False)  # only what gives accuracy, a rule
        if says is None:
            return scorer.try_out(PROBLEM)
        tried = f"mine.py:{name}', tried on problem 7 (set) with its answer '2' as the response: {says}"
        with pytest.raises(ValueError, match=re.escape(tried)):
            scorer.try_out(PROBLEM)
        failures = scorer.submit(ITEMS[:1], [1]).result().failures
        assert failures[0].startswith(f"problem 7 (set): reward function {name}: {says}")


@pytest.mark.parametrize("answer", ["first\nlast", "word " * 99])
def test_an_answer_that_a_rule_cannot_find_is_refused_before_anything_is_sampled(answer, file):
    prose = Problem(7, "set", "1 + 1?", "", answer)
    for settings in (dict(), dict(function=f"{file}:level", evaluation="dapo")):
        with Scorer(**settings, workers=1) as scorer, pytest.raises(ValueError, match="in no response: name another"):
            scorer.try_out(prose, rewards=False)
    with Scorer(f"{file}:inverse", workers=1) as scorer:
        scorer.try_out(prose)


def test_what_is_submitted_is_scored_meanwhile_and_added_up(file):
    items = [(PROBLEM, "2"), (PROBLEM, "3"), (PROBLEM, "")]
    with Scorer(functions=[f"{file}:inverse", "dapo"], workers=2, max_failures=0.4) as scorer:
        parts = [scorer.submit([item], [4]) for item in items]
        whole = parts[0] + parts[1] + parts[2]
        scores = whole.result()
        assert scores.correct.tolist() == [1, 1, 0] and scores.rewards["dapo"].tolist() == [0, 0, 0]
        assert len(scores.failures) == 1 and "ZeroDivisionError" in scores.failures[0]
        assert whole.result().correct.tolist() == scores.correct.tolist() and parts[0].result().failures == []
        with pytest.raises(ValueError, match="failed on 1 of 1 responses, more than max_failures=0.4"):
            parts[2].result()


def test_a_scorer_that_is_closed_does_not_wait_for_what_hangs(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ndef slow(response): time.sleep(1000)\n")
    with Scorer(f"{tmp_path}/slow.py:slow", workers=1, timeout_seconds=600) as scorer:
        scorer.submit([(PROBLEM, "2")] * 3)
