"""Generators against the verifiers, the splits, and what they refuse."""

import json
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg_jax.data.tasks import TASKS, chains, check_difficulty, countdown, defaults, draw, split_of
from rpg_jax.rewards import VERIFIERS, final_answer

SETTINGS = [
    ("arithmetic", {}), ("arithmetic", dict(steps=5, operand=12, maximum=500, operators="*+-")),
    ("arithmetic", dict(steps=1, operand=3, maximum=9, operators="-")), ("countdown", {}),
    ("countdown", dict(numbers=3, used=2, largest=20, attempts=0)),
    ("countdown", dict(numbers=6, used=6, largest=25, maximum=999, operators="+-*/", attempts=4)), ("sorting", {}),
    ("sorting", dict(length=12, letters=12)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "difficulty"), SETTINGS)
def test_worked_solutions_verify_and_corrupted_ones_do_not(name, difficulty):
    rng, verify = np.random.default_rng(0), VERIFIERS[name]
    sums = name != "sorting" and "*" not in difficulty.get("operators", "")  # whose every line is true
    for _ in range(200):
        prompt, solution, answer = TASKS[name].generate(rng, **difficulty)
        json.loads(answer)
        assert prompt.endswith("\n") and solution.splitlines()[-1].startswith("Answer: ")
        assert verify(solution, answer)
        for line in solution.splitlines()[:-1] if sums else ():
            left, right = line.split("=")
            assert sum(map(int, re.findall(r"[+-]?\d+", left))) == int(right)
        final = final_answer(solution)
        assert not verify(solution.removesuffix("Answer: " + final), answer)
        for wrong in (final + "1", final + ",q", "", "(" + final, f"{final}a{final}", final + "+0.5"):
            assert not verify(f"Answer: {wrong}", answer)
        if name == "countdown":
            spare = next(n for n in range(1, 99) if n not in json.loads(answer)["numbers"])
            assert not verify(f"Answer: {final}+{spare}-{spare}", answer), "a number that was not given"


@pytest.mark.parametrize("name", TASKS)
def test_splits_are_disjoint_and_fill_their_shares(name):
    canonical = TASKS[name].canonical
    train = draw(name, "train", 700, np.random.default_rng(0))
    heldout = draw(name, "heldout", 100, np.random.default_rng(1))
    keys = [{canonical(prompt) for prompt, _, _ in problems} for problems in (train, heldout)]
    assert len(keys[0]) == 700 and len(keys[1]) == 100, "problems repeat within a split"
    assert not keys[0] & keys[1]
    rng = np.random.default_rng(2)
    share = np.mean([split_of(name, TASKS[name].generate(rng)[0]) == "heldout" for _ in range(4000)])
    assert abs(share - 1 / 8) < 0.03


def test_commuted_problems_are_the_same_problem():
    arithmetic, countdown, sorting = (TASKS[name].canonical for name in ("arithmetic", "countdown", "sorting"))
    assert arithmetic("Compute 3+5-8+5\n") == arithmetic("Compute 5+5+3-8\n")
    assert arithmetic("Compute (3+5)*2*4\n") == arithmetic("Compute (5+3)*4*2\n")
    assert arithmetic("Compute 3*5+2\n") == arithmetic("Compute 5*3+2\n")
    assert arithmetic("Compute 3+5-8\n") != arithmetic("Compute 3-5+8\n")
    assert arithmetic("Compute 3*5+2\n") != arithmetic("Compute (3+5)*2\n")
    assert arithmetic("Compute 12+3\n") != arithmetic("Compute 1+23\n")
    assert countdown("Make 8 from 9,3,2,3\n") == countdown("Make 8 from 3,2,9,3\n")
    assert countdown("Make 9 from 8,3,2,3\n") != countdown("Make 8 from 9,3,2,3\n")
    assert sorting("Sort d,b,a\n") == sorting("Sort a,d,b\n") != sorting("Sort a,d,c\n")


@given(st.integers(1, 99), st.lists(st.tuples(st.sampled_from("+-*/"), st.integers(1, 9)), max_size=6))
@settings(max_examples=200)
def test_chain_text_means_the_chain(start, steps):
    """What the generators print, read by Python's own parser, has the value that they computed."""
    exact = re.sub(r"\d+", r"Fraction(\g<0>)", chains.text(start, steps))
    assert eval(exact, {"Fraction": Fraction}) == chains.value(start, steps)


def test_determined_by_the_seed():
    assert TASKS.keys() == VERIFIERS.keys()
    assert not list(countdown._tries([1] * 30, 15, "+", 14))  # of 155 million chains
    assert check_difficulty("arithmetic", dict(steps=2)) == defaults("arithmetic") | dict(steps=2)
    for name in TASKS:
        first, again, other = (draw(name, "train", 50, np.random.default_rng(seed)) for seed in (7, 7, 8))
        assert first == again and first != other


@pytest.mark.parametrize(("name", "difficulty", "says"), [
    ("sums", {}, "unknown task 'sums'"), ("arithmetic", dict(step=3), "'step'.*did you mean 'steps'"),
    ("arithmetic", dict(steps="3"), "steps='3' must be of type int"),
    ("arithmetic", dict(maximum=-1), "maximum=-1 must not be negative"),
    ("arithmetic", dict(operators="+%"), "operators='\\+%'"),
    ("arithmetic", dict(operators="-", steps=20, maximum=10), "steps=20.*maximum=10"),
    ("countdown", dict(used=6), "used=6.*numbers=5"),
    ("countdown", dict(operators="*", largest=9, maximum=1, used=4), "maximum=1"),
    ("sorting", dict(length=9, letters=8), "length=9 and letters=8"),
    ("arithmetic", dict(steps=1, operand=2, maximum=5),
     r"'arithmetic' has only about \d+ heldout problems.*heldout_size asks for 200"),
])  # fmt: skip
def test_unfit_settings_name_the_key_and_a_family_too_small_its_split(name, difficulty, says):
    with pytest.raises(ValueError, match=says) as error:
        draw(name, "heldout", 200, np.random.default_rng(0), **difficulty)
    assert "\n" not in str(error.value)
