"""Answers, verifiers and shaping."""

import json
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rpg_jax.rewards import VERIFIERS, final_answer, overlong_penalty, scale_named
from rpg_jax.rewards.verifiers import evaluate


@pytest.mark.parametrize(("response", "answer"), [
    ("1+1=2\nAnswer: 2", "2"), ("answer :  $2$. ", "2"), ("**Answer: `x  y`**", "x y"), ("Answer:", None),
    ("the result is 2", None), ("Answer: 2" + " " * 300, None), ("x" * 1000 + "Answer: 7", "7"),
])  # fmt: skip
def test_final_answer(response, answer):
    assert final_answer(response) == answer


def test_verifiers_by_example():
    arithmetic, countdown, guess, sorting = (VERIFIERS[name] for name in sorted(VERIFIERS))
    assert arithmetic("Answer: 42", "42") and arithmetic("Answer: +42.", "42") and arithmetic("Answer: -3", "-3")
    others = "4 2", "42.0", "0x2a", "4_2", "٤٢", "42 or 43", "--42"
    assert not any(arithmetic(f"Answer: {text}", "42") for text in others)
    goal = json.dumps({"numbers": [2, 3, 3, 12], "target": 8})
    right = ["2+3+3", "12-(3+3)+2", "12 / 3 * 2", "(12*2)/3", "((2+3))+3", "12/(3/2)"]
    wrong = ["8", "2+2+2+2", "3+3+3-1", "12/0", "2+3+3=8", "2+3+3)", "(2+3+3", "-2+12", "2+3 3", "2**3", "+", "12-3-1"]
    assert all(countdown(f"Answer: {text}", goal) for text in right)
    assert not any(countdown(f"Answer: {text}", goal) for text in wrong)
    assert sorting("Answer: a, b", '"a,b"') and not sorting("Answer: b,a", '"a,b"')
    said = 2, 3, 9, 10, 10**9 + 5, "9" * 10**4
    assert [guess(f"not 5 but {n}.", "[3, 9]") for n in said] == [False, True, True, False, False, False]


numbers = st.integers(0, 10**10 - 1)
expressions = st.recursive(
    numbers.map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join) | inner.map("({})".format),
    max_leaves=20,
)


@given(expressions)
def test_evaluate_agrees_with_python(expression):
    """Against Python's own parser on exact fractions, wherever the expression is within our bounds."""
    exact = re.sub(r"\d+", r"Fraction(\g<0>)", expression)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        expected = None
    got = evaluate(expression)
    depth = max(expression[:i].count("(") - expression[:i].count(")") for i in range(len(expression) + 1))
    if len(re.findall(r"\d+|\D", expression)) > 64 or depth > 16 or expected is None:
        assert got is None
    else:
        assert got == (expected, [int(number) for number in re.findall(r"\d+", expression)])


@given(st.text("0123456789+-*/() .,=\n", max_size=200) | st.text(max_size=200), st.sampled_from(sorted(VERIFIERS)))
@example("(" * 200, "countdown")
@example("9" * 250, "countdown")
@example("1" * 200, "arithmetic")
@example("/".join(["9999999999"] * 26), "countdown")
@example("1/(1-1)", "countdown")
def test_verifiers_give_a_verdict_on_any_text(text, name):
    answers = {"arithmetic": "7", "guess": "[1, 9]", "countdown": '{"numbers": [1, 2], "target": 3}'}
    answer = answers.get(name, '"a,b"')
    for response in (text, f"Answer: {text}"):
        assert VERIFIERS[name](response, answer) in (True, False)


def test_overlong_penalty_is_dapos():
    """Equation 13 of DAPO: 0 as far as the buffer, a line to -1 at the maximum, -1 beyond it."""
    lengths, maximum, buffer = np.arange(140), 100, 20
    got = overlong_penalty(lengths, maximum, buffer)
    np.testing.assert_allclose(got, np.interp(lengths, [maximum - buffer, maximum], [0, -1]), rtol=0, atol=1e-6)
    assert got.dtype == np.float32
    assert overlong_penalty([100], maximum, buffer, factor=0.5)[0] == -0.5


def test_scales_of_rewards():
    unit = scale_named("unit")([1, 0, 0.5])
    assert scale_named("signed")([1, 0]).tolist() == [1, -1] and unit.tolist() == [1, 0, 0.5]
    assert unit.dtype == np.float32
    with pytest.raises(ValueError, match="reward.scale is 'sign'; known: signed, unit"):
        scale_named("sign")
