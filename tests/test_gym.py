"""reasoning-gym: how its problems are named, that no question is in both splits, and how its families score answers."""

import dataclasses
import hashlib
import importlib.util
import json
import random
import types
from unittest import mock

import numpy as np
import pytest
import test_prepare
from test_datasets import Words
from test_prepare import written

from rpg_jax import gym
from rpg_jax.answer import EXTRACTIONS
from rpg_jax.data import datasets
from rpg_jax.data.folding import fold
from rpg_jax.data.sources import listed, open_gym
from rpg_jax.data.templates import TEMPLATES
from rpg_jax.gym import Part, parse
from rpg_jax.rewards import Scorer

# Found and not imported: every worker reads this file.
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("reasoning_gym"), reason="no reasoning_gym")
call = test_prepare.call
SUMS = "chain_sum(min_terms=2, max_terms=2, max_digits=1"


# Draws in this process, where `open_gym` starts another.
here = mock.patch.object(gym, "_replies", lambda request, title: gym.problems(**request))


@here
def draw(title, split="train"):
    return fold(open_gym([title], split), TEMPLATES["none"].format).problems


def questions(problems):
    return {json.loads(problem.prompt)[0]["content"] for problem in problems}


def answer_of(problem):
    return json.loads(problem.answer)["answer"]


def test_the_form_of_a_title():
    title = 'gym:chain_sum(max_terms=2, size=300) + gcd + gym:basic_arithmetic(operators=["+", "-"], seed=3)'
    assert parse(title) == [
        Part("chain_sum", {"max_terms": 2}, 0, 300),
        Part("gcd", {}, 0, 500),
        Part("basic_arithmetic", {"operators": ["+", "-"]}, 3, 500),
    ]
    assert listed(f"data/a, {title},b.parquet") == ["data/a", title, "b.parquet"]
    assert listed("a(x=(1, 2), y={3}),b") == ["a(x=(1, 2), y={3})", "b"] and listed(" , ") == []


@pytest.mark.parametrize(("title", "message"), [
    ("gym:", "expected gym:FAMILY"), ("gym:__import__('os').system(x=1)", "expected gym:FAMILY"),
    ("gym:gcd(min_value=open('x'))", "the values of gcd must be numbers, strings"),
    ("gym:gcd(size=0)", "size of gcd is 0; expected a number in 1..1048576"),
    ("gym:gcd(seed='a')", "seed of gcd is 'a'; expected a number in 0..2047"),
    ("gym:gdc", "there is no family 'gdc'; python -m rpg_jax.prepare --list_gym shows them"),
    ("gym:gcd(minimum=1)", "gcd has no parameter 'minimum'; there are: min_numbers, max_numbers, min_value"),
    ("gym:gcd(min_value=0)", "gcd refuses {'min_value': 0}: min_value must be positive"),
    ("gym:products(max_digits=1, max_terms=1, min_terms=1, size=11)", "products has only about 8 train problems"),
])  # fmt: skip
def test_another_form_and_what_a_family_refuses_are_one_line(title, message):
    with pytest.raises(ValueError) as error:
        draw(title)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_no_question_is_in_both_splits_whatever_the_seeds():
    """One-digit sums: few questions, so that every seed draws nearly all of them."""
    train, other = draw(f"gym:{SUMS}, size=120)"), draw(f"gym:{SUMS}, size=120, seed=1)")
    heldout = draw(f"gym:{SUMS}, size=12, seed=1) + {SUMS}, size=4, min_digits=1)", "heldout")
    assert len(questions(train)) == 120 and len(questions(heldout)) == 16
    assert not questions(heldout) & (questions(train) | questions(other))
    assert questions(train) != questions(other) and train == draw(f"gym:{SUMS}, size=120)")
    assert {problem.task for problem in train} == {"gym:chain_sum"}


def test_items_are_drawn_again_where_they_are_scored():
    """Of one, the items depend on the hash seed of Python; the data of the second is not what JSON makes of it.

    The last, list_functions, uses the global random numbers in one of its seventeen kinds.
    """
    same = "gym:list_functions(size=60)"
    title = "gym:isomorphic_strings(size=1) + rearc(size=1) + gcd(size=1)"
    drawn = fold(open_gym([title, same], "train"), TEMPLATES["none"].format).problems
    random.seed(7)
    state = random.getstate(), np.random.get_state()[1].tolist()
    assert draw(same) == drawn[3:]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state, "whoever else draws is left alone"
    items = [(problem, f"<answer>{answer_of(problem)}</answer>") for problem in drawn]
    items += [(problem, "<answer>?</answer>") for problem in drawn[:2]] + [(drawn[2], "<answer>999983</answer>")]
    with Scorer(workers=1, timeout_seconds=60.0, extraction="tags", partial_credit=True) as scorer:
        scores = scorer.submit(items).result()
    assert (scores.correct[:63] == 1).all() and (scores.correct[63:] < 1).all() and not scores.failures
    assert scores.correct[-1] > 0, "gcd gives half a point for any number"


def test_families_that_leave_out_their_answer():
    """Their example of one is right; two have none, which a line says."""
    drawn = draw("gym:graph_color(size=2) + propositional_logic(size=2) + rubiks_cube(size=2) + boxnet(size=1)")
    own = [(gym.own_answer(problem.answer), problem) for problem in drawn]
    assert [gym.credit("", answer, problem.answer, problem.task) for answer, problem in own] == [1] * 6 + [0]
    assert own[-1][0] == "" and gym.line_about(drawn[:6]) is None
    assert gym.line_about(drawn).startswith("gym:boxnet: has no answers of its own")


def test_scoring_is_seeded_too(monkeypatch):
    entry = {"question": "?"}
    dataset = types.SimpleNamespace(score_answer=lambda response, entry: random.random() + np.random.random())
    monkeypatch.setattr(gym, "_item", lambda *_: (dataset, entry))
    record = dict(family="f", parameters={}, seed=3, index=1)
    record["digest"] = hashlib.blake2b(b"f\n?", digest_size=8).hexdigest()
    scores = {gym.credit("", "", json.dumps(record | {"index": index}), "gym:f") for index in (1, 1, 2)}
    assert len(scores) == 2


def test_scores_votes_and_failures():
    sums = draw(f"gym:{SUMS}, size=3)")
    (factors,) = draw("gym:prime_factorization(size=1)")
    (letters,) = draw("gym:gcd(size=1)")
    record = json.loads(sums[0].answer) | {"digest": "0" * 16}
    other = dataclasses.replace(sums[0], answer=json.dumps(record))
    right = [answer_of(problem) for problem in sums]
    items = [(sums[0], f"Answer: {right[0]}"), (sums[0], f"So it is\nAnswer: **{right[0]}.**"), (sums[1], "Answer: 77")]
    items += [(sums[1], f"it is {right[1]}"), (letters, "Answer: 999983")]
    items += [(factors, "Answer: two times three"), (other, "Answer: 1")]
    with Scorer("dapo", workers=1) as scorer:
        scores = scorer.submit(items).result()
        assert [scorer.vote(*item) for item in items[:4]] == [right[0], right[0], "77", None]
    assert scores.correct.tolist() == [1, 1, 0, 0, 0, 0, 0]
    failed, changed = scores.failures
    assert failed.startswith(f"problem {factors.id} (gym:prime_factoriz") and "ValueError" in failed
    assert "draws another question here; prepare the set again" in changed


@pytest.mark.parametrize(("name", "response", "answer"), [
    ("stated", "1 and 2\nAnswer: **3**.", "3"), ("boxed", r"so \boxed{x + 1}", "x + 1"),
    ("tags", "<answer>1</answer> no: <answer>\n2 3\n4 5\n</answer>", "2 3\n4 5"), ("tags", "<answer></answer>", None),
    ("tags", "<answer>a<answer>b</answer></answer> <answer>c", "b"), ("tags", "<answer>" * 10**5, None),
    ("number", "7 + 8 = 15.", "15"), ("number", "between 3-4, or 1,234.50", "1,234.50"),
    ("number", "-5 - -3 = -2", "-2"), ("text", " a b\n", "a b"),
])  # fmt: skip
def test_where_an_answer_is_looked_for(name, response, answer):
    assert EXTRACTIONS[name](response) == answer
    with pytest.raises(ValueError, match="extraction='last' is unknown; known: stated, boxed, tags, number, text"):
        Scorer(extraction="last")


def test_workers_that_problems_need_are_started_at_once():
    with pytest.raises(ValueError, match="reward function 'gym' cannot be loaded in a worker of memory_mb=128: "):
        Scorer("dapo", workers=1, memory_mb=128, tasks={"aime24", "gym:gcd"})
    with Scorer("dapo", workers=1, memory_mb=128, tasks={"aime24"}) as scorer:
        assert not scorer._pools


@here
def test_sets_are_loaded_by_title():
    tokenizer, lines = Words(), []
    longer_than_a_file_name = " + ".join(f"{SUMS}, size=5, seed={seed})" for seed in range(6))
    titles = dict(train=f"gym:{longer_than_a_file_name}", heldout=f"gym:{SUMS}, size=5, seed=2), gym:gcd(size=4)")
    sets = datasets.load(**titles, tokenizer=tokenizer, max_prompt=200, wording="none", log=lines.append)
    train, heldout = sets.problems("train"), sets.problems("heldout")
    assert len(train) == 30 and [problem.task for problem in heldout] == ["gym:chain_sum"] * 5 + ["gym:gcd"] * 4
    assert "State the final answer to the following arithmetic problem" in train[0].prompt and not lines
    assert sets.tasks == {"gym:chain_sum", "gym:gcd"}
    with pytest.raises(ValueError, match="the wording of problems is 'mine'; known: paper, none"):
        datasets.load(**titles, tokenizer=tokenizer, max_prompt=200, wording="mine")


def test_prepare_writes_and_lists_them(call):
    source = f"--source=gym:{SUMS}, size=20) + gcd(size=4)"
    with here:
        assert call(source, "--target=out", "--template=none")[0] == 0
        assert call(source.replace("20", "6"), "--target=heldout", "--split=heldout")[0] == 0
    train, heldout = written("out"), written("heldout")
    assert [problem.task for problem in train] == ["gym:chain_sum"] * 20 + ["gym:gcd"] * 4
    assert len(heldout) == 10 and "Remember to put your answer" in heldout[0].prompt
    assert json.loads(open("heldout/summary.json").read())["split"] == "heldout"
    for arguments, says in [
        ([source, "--name=mine"], "--name=mine: problems of reasoning-gym have the name of their family"),
        (["--source=gym:gcd(min_value=0)"], "gym:gcd(min_value=0): gcd refuses {'min_value': 0}: "),
        (["--source=gym:gcd("], "gym:gcd(: expected gym:FAMILY("),
        (["--source=in.jsonl", "--split=heldout"], "--split=heldout is for gym: sources"),
    ]:
        status, _, err = call(*arguments, "--target=refused")
        assert status == 2 and len(err) == 1 and says in err[0], err
    status, out, _ = call("--list_gym")
    lines = out.splitlines()
    assert status == 0 and len(lines) > 90 and not any(line.startswith("composite") for line in lines)
    assert "gcd(min_numbers=2, max_numbers=2, min_value=1, max_value=1000)" in lines


def test_an_item_that_a_family_cannot_draw_is_named():
    class Broken:
        def __getitem__(self, index):
            raise IndexError("no such board")

    gym._item.cache_clear()
    with mock.patch.object(gym, "_dataset", lambda *_: Broken()):
        with pytest.raises(ValueError, match="gcd fails to draw item 0 of seed 0: no such board"):
            draw("gym:gcd(size=1)")
