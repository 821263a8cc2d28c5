"""Answers to mathematical problems: the DAPO rule, boxes and math-verify, held against a table written by hand."""

import importlib.util
import json
import pathlib

import pyarrow.parquet
import pytest
from fuzzing import SECONDS, bounded
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from rpg_jax.data import Problem
from rpg_jax.rewards import RULES, Scorer, boxed_answer, stated_answer, voted_answer

DATA = pathlib.Path(__file__).parent / "data"
PAIRS = [json.loads(line) for line in (DATA / "answer_pairs.jsonl").open(encoding="utf-8")]
# Truth -> kind -> what stands in the box. The kind "computed" is right by math-verify alone.
SPELLINGS = json.loads((DATA / "answer_spellings.json").read_text(encoding="utf-8"))
SPELLED = [(truth, kind, text) for truth, kinds in SPELLINGS.items() for kind, some in kinds.items() for text in some]
SETS = pathlib.Path(__file__).parents[2] / "shared/data"
dapo, boxed = RULES["dapo"], RULES["boxed"]
sympy = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")


def answers_of_sets():
    """The answers of AIME and AMC, where they are."""
    answers = set()
    for file in SETS.glob("*.parquet"):
        rewards = pyarrow.parquet.read_table(file, columns=["reward_model"])["reward_model"].to_pylist()
        answers |= {reward["ground_truth"] for reward in rewards}
    return answers


def problem(answer, id=0):
    return Problem(id, "math", "prompt", "", answer)


def test_text_rules_on_the_tables():
    assert not [pair for pair in PAIRS if dapo(pair["response"], pair["answer"]) != pair["dapo"]]
    for truth, kind, written in SPELLED:
        assert boxed(rf"So it is $\boxed{{{written}}}$.", truth) == (kind == "right"), (truth, written)
        assert dapo(f"Answer: {written}", truth) == (kind == "right"), (truth, written)


@sympy
def test_math_verify_on_the_tables():
    boxes = [(truth, written, kind in ("right", "computed")) for truth, kind, written in SPELLED]
    boxes += [(answer, answer, True) for answer in sorted(answers_of_sets())]
    pairs = PAIRS + [dict(response=rf"It is $\boxed{{{text}}}$.", answer=a, math_verify=is_) for a, text, is_ in boxes]
    items = [(problem(pair["answer"], i), pair["response"]) for i, pair in enumerate(pairs)]
    with Scorer("math_verify", workers=1, timeout_seconds=20, memory_mb=1024) as scorer:
        scores = scorer.submit(items).result()
        assert scores.failures == []
        wrong = [p for p, correct in zip(pairs, scores.correct, strict=True) if correct != p["math_verify"]]
        assert not wrong
        again = scorer.submit(items[::-9]).result()
        assert again.correct.tolist() == scores.correct[::-9].tolist(), "depends on the order"


@sympy
def test_what_sympy_cannot_decide_is_wrong_and_stops_nothing():
    items = [(problem("0.5"), "Answer: 1/2"), (problem("5", 7), r"Answer: \binom{99999999}{50000000}")]
    with Scorer("math_verify", workers=1, timeout_seconds=1, memory_mb=1024, max_failures=0) as scorer:
        scores = scorer.submit(items).result()
    assert scores.correct.tolist() == [1, 0]
    assert len(scores.failures) == 1 and "problem 7 (math): reward function" in scores.failures[0]


def test_math_verify_that_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ModuleNotFoundError('no such module')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    message = "'math_verify' cannot be loaded in a worker of memory_mb=4096: .*pip install math-verify"
    with pytest.raises(ValueError, match=message):
        Scorer("math_verify")


@pytest.mark.skipif(not SETS.exists(), reason="the evaluation sets are not here")
def test_every_answer_of_the_evaluation_sets():
    answers = answers_of_sets()
    assert len(answers) > 70
    for answer in answers:
        for form in (answer, f"${answer}$.", f"**{answer}**", rf"\boxed{{{answer}}}", f"x = {answer}"):
            assert dapo(f"Therefore it is so.\nAnswer: {form}", answer), form
        assert boxed(rf"It is $\boxed{{{answer}}}$.", answer)
        for other in {*answers, f"{answer}1", f"-{answer}", f"1{answer}", f"{answer}.5"} - {answer}:
            assert not dapo(f"Answer: {other}", answer) and not boxed(rf"\boxed{{{other}}}", answer)


@pytest.mark.parametrize(("response", "inside"), [
    (r"\boxed{5}", "5"), (r"\boxed{4} \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (r"\boxed{x = \boxed{5}}", "5"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{5} \boxed{6", None), (r"\boxed{5", None), ("", None),
    (r"So \boxed {5}", "5"), (r"\fbox{5}", "5"), (r"\boxed{\boxed{5}}", "5"), (r"It is \boxed 5", "5"),
    (r"$\boxed 5$ and not $6$", "5"), (r"\(\boxed \frac{5}{1}\), as said", r"\frac{5}{1}"),
    (r"\boxed{5}. I was asked to use \boxed{} or \boxed{ }.", "5"), (r"\boxed {5", None),
    (r"\boxed{5}" + " " * 291, "5"), (r"\boxed{5}" + " " * 292, None),
])  # fmt: skip
def test_boxed_answer(response, inside):
    assert boxed_answer(response) == inside
    assert boxed(response, "-7") is False
    if inside == "5":
        assert boxed(response, "5.0")


def test_a_box_after_answer_is_read_by_every_rule():
    for box in (r"\boxed {5}", r"\fbox{5}", r"\boxed 5", r"\boxed5", r"\boxed{\boxed{5}}", r"$\boxed {5}$."):
        assert dapo(f"Answer: {box}", "5") and boxed(f"Answer: {box}", "5")
        assert not dapo(f"Answer: {box}", "6") and not dapo(f"Answer: {box} or 6", "5")


FRAGMENTS = (
    r"""1 0 7 , . - + = / ^ _ $ ( ) [ ] { } \{ \} % \% " * ** \ \\ \frac \frac{1}{2} \sqrt \text{ \text{cm} \boxed{
\boxed \circ ^\circ \left \right \pi \cdot \, \! \; cm units degrees and or a an the x Answer: <= >= ½ ² √ ０ − ∞
\begin{pmatrix} \end{pmatrix} & 1,000 3.50 1e5 million""".split()
    + [" ", "\t", "\0", "\u200b", "\u2028"]
)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join) | st.text(max_size=100)


@given(texts, texts)
@settings(max_examples=100)
def test_any_text_has_a_verdict_by_its_end_alone(response, answer):
    for text in (response, f"Answer: {response}", rf"\boxed{{{response}}}", f"Answer: {answer}\n{response}"):
        for rule in (dapo, boxed):
            verdict = rule(text, answer)
            assert verdict in (True, False)
            tail = text.rjust(300)
            for before in (r"Answer: \boxed{", "x" * 500, answer):
                assert rule(before + tail, answer) == verdict


@given(texts)
@example("$5$ or $6$")
@example(r"\(x=1, y=2\)")
@settings(max_examples=200)
def test_an_answer_equals_itself(answer):
    """Wherever it is one line without a marker of its own, and does not normalize to nothing."""
    from rpg_jax.rewards.same import same

    assume("answer" not in answer.lower() and not set(answer) & set("\r\n") and answer.strip())
    assume(same(answer, answer))
    assert dapo(f"Reasoning.\nAnswer: {answer}", answer)
    assert not dapo(f"Reasoning.\nAnswer: {answer}", answer + "7731"), "a truth that continues"


@given(st.integers(-(10**20), 10**20), st.integers(-(10**20), 10**20))
def test_integers_are_equal_as_numbers(left, right):
    forms = f"{left}|{left:,}|${left}$.|{left}.00|x = {left}|{left:+d}|{left} units|Rs. {left}|£{left:,}".split("|")
    for form in (*forms, rf"{left}\text{{ m/s}}", rf"\text{{{left} apples}}"):
        assert dapo(f"Answer: {form}", str(left)) and dapo(f"Answer: {left}", form)
        assert dapo(f"Answer: {form}", str(right)) == (left == right)


def test_stated_answer_is_the_rest_of_its_line():
    assert stated_answer("Answer: 1\nAnswer: 2 \n3") == "2 "
    assert stated_answer("Answer:") is None and stated_answer("Answer 5") is None


# fmt: off
PIECES = [
    " ", "$", "{", "\\frac", "\\frac{", "\\frac{{a}", "\\text{a", "^{", "1,111", "1 000", "0", ".0", "cm ", "a ",
    "and ", "Rs. ", "{a\\over", "10^{9}", "{,}", "\\text{is", "\\text{ m}", "\\frac{\\text{m}}", "5 m/s ", "\\mu",
    "illion", "(B) ", "B: ", "x=", "answer:", "\\boxed{", "\\boxed", "\\boxed ", "\\fbox", "\\boxed1", "\\", "½",
    "\u0301", "\ud800", "<=", "**", "111,", "5cm ", ", ", "(", "\\begin",
]
# fmt: on


@pytest.mark.parametrize("piece", PIECES)
def test_time_is_linear_in_the_text(piece):
    """10^5 characters: the slowest takes 0.5 s; a quadratic pattern takes minutes, and is ended by a limit."""
    text = (piece * 100_000)[:100_000]
    with bounded(SECONDS):
        for rule in (dapo, boxed):
            assert rule("Answer: 5", text) is False and rule(text, "5") in (True, False)


def test_votes_are_what_the_verifier_reads_counted_by_what_an_answer_means():
    assert voted_answer("Answer: $1{,}000$") == voted_answer("so **Answer:** 1000.") == voted_answer(r"\boxed{1000}")
    assert voted_answer(r"Answer: \frac12") == voted_answer("Answer: 1/2") != voted_answer("Answer: 2")
    assert voted_answer("no answer") is None and voted_answer("Answer: $$") is None
    # One response, its stated answer and its box apart: each rule votes with the one that it judges.
    both = "so \\boxed{7}, or rather\nAnswer: 1{,}000"
    with Scorer() as scorer:
        assert scorer.vote(problem("1000"), both) == "1000"
        assert scorer.vote(problem("7"), r"\boxed{7}") is None, "the dapo rule does not look at boxes"
        task = Problem(0, "arithmetic", "", "", "7")
        assert scorer.vote(task, "Answer: 7.") == "7" and scorer.vote(task, "Answer:\n7") is None
    with Scorer("boxed") as scorer:
        assert scorer.vote(problem("7"), both) == "7" and scorer.vote(problem("7"), "Answer: 7") is None
