"""The command that makes datasets: what it folds, counts, writes and refuses."""

import datetime
import decimal
import json
import os
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing import SECONDS, bounded, outcome
from test_datasets import Words

from rpg_jax.data import datasets, problems
from rpg_jax.data.folding import stated
from rpg_jax.data.sources import open_source


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Calls the command in `tmp_path` as cli.run does; (exit status, stdout, the lines of stderr without progress)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status, out, err = outcome("prepare", *arguments)
        return status, out, [line for line in err.splitlines() if not line.startswith("rows ")]

    return run


@pytest.fixture
def refused(call):
    """Calls the command and checks that it ends with status 2, the words in one line and no folder `new`; the line."""

    def run(says, *arguments):
        status, _, err = call(*arguments, "--target=new")
        assert status == 2 and len(err) == 1 and err[0].startswith("error: ") and says in err[0], (arguments, err)
        assert not pathlib.Path("new").exists()
        return err[0]

    return run


def written(folder="out"):
    return list(map(problems.to_problem, problems.Records(folder, "train")))


def row(problem, answer, **more):
    """A row in the format of the paper's scripts."""
    prompt = [{"content": problem, "role": "user"}]
    return {"prompt": prompt, "reward_model": {"ground_truth": answer, "style": "rule"}, **more}


def parquet(rows, file="in.parquet", **options):
    pq.write_table(pa.Table.from_pylist(rows), file, **options)


def jsonl(*rows, file="in.jsonl"):
    pathlib.Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_text_goes_through_the_template_and_numbers_become_text(call):
    nested = {"final": {"value": [540.0]}, "work": {"steps": "so\nAnswer: 540"}}
    jsonl({"question": "Größe ½?", **nested}, {"question": "b", "final": {"value": [0.5]}, "work": {"steps": None}})
    fields = ("--answer_field=final.value.0", "--solution_field=work.steps")
    assert call("--source=in.jsonl", "--target=out", *fields, "--name=mine")[0] == 0
    first, second = written()
    (message,) = json.loads(first.prompt)
    assert message["role"] == "user" and "\n\nGröße ½?\n\n" in message["content"] and "Größe" in first.prompt
    assert (first.answer, first.solution, first.task) == ("540", "so\nAnswer: 540", "mine")
    assert (second.answer, second.solution) == ("0.5", "")
    assert call("--source=in.jsonl", "--target=plain", *fields, "--template=none")[0] == 0
    assert json.loads(written("plain")[1].prompt) == [{"role": "user", "content": "b"}]


PENS = "6 boxes hold 6*12=<<6*12=72>>72 pens.\nAfter giving away 5 there are 72-5=<<72-5=67>>67 pens.\n"
STATED = [
    (1e22, "1" + "0" * 22), (2.5e-7, "0.00000025"), (1 / 3, "0.3333333333333333"), (-0.0, "0"),
    (PENS + "#### 67", "67"), (PENS + "####67\r\n\n", "67"), ("so\n#### $1,250", "$1250"), ("#### (1,200)", "(1,200)"),
    (PENS.replace("\n", " ") + "#### -1,234,567.5", "-1234567.5"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"Half of $\boxed{1}$ is $\boxed{\frac{1}{2}}$." + "\nDone.", r"\frac{1}{2}"), (r"It is \fbox {12}.", "12"),
    (r"It is $\boxed 7$.", "7"), (PENS + "**Answer:** 67.", "67"), ("So the final answer is 67.", "67"),
    ("Thus, the answer is: $x$", "$x$"), ("<think>\n6\n</think>\n<answer>6</answer> no\n<answer>\n67\n</answer>", "67"),
    # What states no other answer is the answer.
    ('["6", "7"]', '["6", "7"]'), ("###### 67", "###### 67"), ("answering", "answering"), ("#### 6 #### 7", "7"),
    ("\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}", "\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}"),
]  # fmt: skip


def test_an_answer_is_text_and_that_of_a_worked_solution_what_it_states(call):
    jsonl(*({"problem": f"p {number}", "answer": text} for number, (text, _) in enumerate(STATED)))
    assert call("--source=in.jsonl", "--target=out")[0] == 0
    assert [problem.answer for problem in written()] == [answer for _, answer in STATED]


@pytest.mark.parametrize("text", ["\n", " ", "* ", "<answer>", "#### ", "answer is "])
def test_long_answers_are_read_in_linear_time(text):
    """A quadratic pattern would take hours, and is ended by the limit of `bounded`."""
    text *= 10**5
    for given in (text, f"answer:{text}x", f"{text}answer"):
        with bounded(SECONDS):
            assert stated(given) in given


@pytest.mark.parametrize(("kind", "held", "field"), [
    ("jsonl", {"answer": ["34"]}, "answer.0"), ("jsonl", {"answer": {"value": "34"}}, "answer.value"),
    ("parquet", {"reward_model": {"style": "rule", "ground_truth": ["34"]}}, "reward_model.ground_truth.0"),
])  # fmt: skip
def test_an_answer_in_a_container_is_refused_with_its_name(call, refused, held, field, kind):
    parquet([{"problem": "p", **held}]) if kind == "parquet" else jsonl({"problem": "p", **held})
    refused(f"--answer_field={field} of rpg_jax.prepare", f"--source=in.{kind}")
    assert call(f"--source=in.{kind}", "--target=out", f"--answer_field={field}")[0] == 0
    assert written()[0].answer == "34"


def test_messages_and_a_struct_may_be_json(call, refused):
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "ü [{1}]"}]
    texts = [json.dumps(chat), json.dumps(chat[1:], indent=1, ensure_ascii=False)]
    graded = {"reward_model": '{"ground_truth": "34"}'}
    jsonl(*({"prompt": text, **graded} for text in [*texts, '[{"a": 1}] has what role?']))
    assert call("--source=in.jsonl", "--target=out", "--template=none")[0] == 0
    text = [{"role": "user", "content": '[{"a": 1}] has what role?'}]
    assert [(json.loads(p.prompt), p.answer) for p in written()] == [(p, "34") for p in (chat, chat[1:], text)]
    for text, says in [
        (f"array({chat}, dtype=object)", "begins like chat messages and is not JSON; write them with json.dumps"),
        (json.dumps(chat[1]), "is dict; expected text, or a list of messages with role and content"),
        ('[{"from": "human", "value": "x"}]', "message 0 is no object with role and content"),
    ]:
        jsonl({"prompt": text, "answer": 1})
        refused(f"in.jsonl, line 1, column prompt: {says}", "--source=in.jsonl")


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
def test_conversations_as_other_trainers_write_them(call, kind):
    """A column `messages`, perhaps of parts; the reply at its end is the solution, and states the answer."""

    def write(*rows):
        if kind == "json":
            pathlib.Path("in.json").write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")
        else:
            parquet(rows) if kind == "parquet" else jsonl(*rows)

    def said(role, *parts):
        return {"role": role, "content": [{"type": "text", "text": part} for part in parts], "name": None}

    asked = [said("system", "s"), said("user", "p ", "q")]
    turns = [said("user", "r"), said("assistant", "1"), said("user", "t")]
    replies = said("assistant", "2 + 2\n", "#### 4"), said("assistant", "B")
    write({"messages": [*asked, replies[0]]}, {"messages": [*turns, replies[1]]})
    assert call(f"--source=in.{kind}", "--target=out")[0] == 0
    assert [(p.answer, p.solution) for p in written()] == [("4", "2 + 2\n#### 4"), ("B", "B")]
    chats = [[(m["role"], m["content"]) for m in json.loads(p.prompt)] for p in written()]
    assert chats[0] == [("system", "s"), ("user", "p q")] and len(chats[1]) == 3
    more = {"answer": 5, "solution": "work"}
    write({"messages": [*asked, said("assistant", "4")], **more}, {"messages": turns, **more})
    assert call(f"--source=in.{kind}", "--target=columns")[0] == 0
    assert [(p.answer, p.solution) for p in written("columns")] == [("5", "work")] * 2


@pytest.mark.parametrize(("text", "says"), [
    ('[{"problem": "p", "answer": 1}, 5]', ", item 1: holds int; expected a JSON object"), ("[]", ": holds no rows"),
    ('[{"problem": "p", "answer": 1}, {"problem": "q"}]', ", item 1: no column reward_model.ground_truth or answer"),
    ('{"data": [{"problem": "p"}], "n": 1}', ": holds dict; expected a list of rows, or a row in each line; write wh"),
    ('{"problem": ["p"], "answer": [1]}', ": holds dict; expected a list of rows, or a row in each line"),
    ('[{"problem": "p"', ": not JSON"), ("", ": not JSON"), ("[" * 10**5, ": not JSON"), ("5", ": holds int; expected"),
    ('{"problem": "p", "answer": ""}', ", item 0, column answer: is empty"),
    ('{"problem": "p", "answer": 1}\n[2]', ", line 2: holds list; expected a JSON object"),
])  # fmt: skip
def test_a_json_file_is_one_list_or_lines(refused, text, says):
    pathlib.Path("in.json").write_text(text)
    refused(f"in.json{says}", "--source=in.json")


def test_json_lines_of_every_editor(call):
    lines = [json.dumps({"prompt": [{"role": "user", "content": c}], "answer": c}) for c in "ab"]
    for file in ("in.jsonl", "in.json"):
        pathlib.Path(file).write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n  \r\n".join(lines).encode())
        assert call(f"--source={file}", f"--target={file[3:]}")[0] == 0
        assert [p.answer for p in written(file[3:])] == ["a", "b"]


def test_several_sources_make_one_dataset(call):
    jsonl({"problem": "p", "answer": 1}, {"problem": "q", "answer": 2}, file="a.jsonl")
    jsonl({"problem": "q", "answer": 2}, {"problem": "r", "answer": 3}, file="b.jsonl")
    status, out, _ = call("--source=a.jsonl,b.jsonl", "--target=deep/er/out", "--limit=3")
    assert status == 0 and [(p.task, p.answer) for p in written("deep/er/out")] == [("a", "1"), ("a", "2"), ("b", "3")]
    assert call("--source=b.jsonl,a.jsonl", "--target=other", "--limit=1")[0] == 0
    by_prompt = {p.prompt: p.id for p in written("deep/er/out")}
    assert [by_prompt[p.prompt] for p in written("other")] == [p.id for p in written("other")], "ids are stable"


def test_the_columns_of_a_row_are_kept_for_reward_functions(call):
    stamps = {"day": datetime.date(2025, 1, 2), "price": decimal.Decimal("1.50"), "image": b"\xff\xd8"}
    more = {"level": 3, "tags": ["a", "b"], "extra_info": {"index": 1, "solution": None}, "missing": None, **stamps}
    parquet([{**row("p", "4"), **more}, {**row("p", "4"), **more, "level": 5}])
    assert call("--source=in.parquet", "--target=out", "--template=none")[0] == 0
    (found,) = written()
    prompt = [{"content": "p", "role": "user"}]
    assert found.columns == {
        "prompt": prompt, "reward_model": {"ground_truth": "4", "style": "rule"}, "level": 3, "tags": ["a", "b"],
        "extra_info": {"index": 1, "solution": None}, "missing": None, "day": "2025-01-02", "price": 1.5,
    }  # fmt: skip
    jsonl({"question": "q", "answer": 2, "level": 0.5, "more": {"a": [1, None]}})
    for source in ("out", "in.parquet", "in.jsonl"):
        sets = datasets.load(source, tokenizer=Words(), max_prompt=9, wording="none")
        expected = {"question": "q", "answer": 2, "level": 0.5, "more": {"a": [1, None]}}
        assert sets.problems("train")[0].columns == (expected if source == "in.jsonl" else found.columns)


def test_columns_with_dots_and_solutions_within_extra_info(call):
    more = {"extra_info": {"solution": "worked", "index": 1}, "the.answer": 5}
    parquet([{**row("p", "4"), **more}])
    assert call("--source=in.parquet", "--target=out", "--answer_field=the.answer")[0] == 0
    assert [(p.answer, p.solution) for p in written()] == [("5", "worked")]
    assert call("--source=in.parquet", "--target=none", "--solution_field=")[0] == 0
    assert [(p.answer, p.solution) for p in written("none")] == [("4", "")]


def test_contradicting_answers_are_refused_with_both_rows_or_dropped(call, refused):
    rows = [{"problem": p, "answer": a} for p, a in [("p", 1), ("q", 2), ("p", 1), ("p", 3), ("q", 2.0)]]
    jsonl(*rows)
    assert "'1' and '3'" in refused("in.jsonl, line 1, and in.jsonl, line 4", "--source=in.jsonl")
    status, out, _ = call("--source=in.jsonl", "--target=out", "--conflicts=drop")
    assert status == 0 and [p.answer for p in written()] == ["2"]
    summary = json.loads(pathlib.Path("out/summary.json").read_text())
    assert summary["contradictory answers"] == 1 and summary["repeats folded"] == 3


@pytest.mark.parametrize(("kind", "bad", "says"), [
    ("parquet", row("p", "1") | {"prompt": None}, "row 2, column prompt: is null"),
    ("parquet", row("p", None), "row 2, column reward_model.ground_truth: is null"),
    ("jsonl", row("p", " "), "line 3, column reward_model.ground_truth: is empty"),
    ("jsonl", row(" \n", "1"), "line 3, column prompt: is empty"),
    ("parquet", row(None, "1"), "row 2, column prompt: the content of message 0 is null"),
])  # fmt: skip
def test_a_bad_row_is_named(refused, kind, bad, says):
    rows = [row("p", "1"), row("q", "2"), bad, row("r", "3")]
    parquet(rows) if kind == "parquet" else jsonl(*rows)
    refused(f"in.{kind}, {says}", f"--source=in.{kind}")
    assert [path.name for path in pathlib.Path(".").iterdir()] == [f"in.{kind}"], "nothing is left behind"


@pytest.mark.parametrize(("line", "says"), [
    (b'{"problem": "p", "answer": 1', "line 2: not JSON"), (b"[" * 100_000, "line 2: not JSON"),
    (b'{"problem": "\xff", "answer": 1}', "line 2: not JSON"), (b"[1]", "line 2: holds list; expected a JSON object"),
    (b'{"problem": "p", "final": {"a": 1}}', "line 2: no column reward_model.ground_truth or answer or"),
    (b'{"problem": "p", "answer": true}', "line 2, column answer: is bool"),
    (b'{"problem": 5, "answer": 1}', "line 2, column problem: is int"),
    (b'{"problem": "\\ud800", "answer": 1}', "line 2, column problem: "),
    (b'{"prompt": ["p"], "answer": 1}', "line 2, column prompt: message 0 is no object"),
    (b'{"prompt": [{"role": "assistant", "content": "x"}], "answer": 1}', "ends with the assistant's message"),
    (b'{"prompt": [{"role": "user", "content": [1]}], "answer": 1}', "the content of message 0 is list"),
    (b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": 1}', "has a part of type 'image'; "),
    (b'{"prompt": [{"role": "user", "content": []}], "answer": 1}', "line 2, column prompt: is empty"),
    (b'{"messages": [{"role": "assistant", "content": "x"}]}', "column messages: ends with the assistant's message"),
    (b'{"messages": [{"role": "user", "content": null}], "answer": 1}', "the content of message 0 is null"),
    (b'{"messages": [{"role": "user", "content": "p"}]}', "line 2: no column reward_model.ground_truth or answer or"),
    (b'{"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "\\\\boxed{"}]}',
     "line 2, column messages: has a box that is never closed"),
    (b'{"problem": "p", "answer": 1, "solution": [1]}', "line 2, column solution: is list"),
])  # fmt: skip
def test_a_bad_line_is_named(refused, line, says):
    pathlib.Path("in.jsonl").write_bytes(b'{"problem": "o", "answer": 1}\n' + line + b"\n")
    assert refused(says, "--source=in.jsonl").startswith("error: in.jsonl, ")


def test_bad_parquet_files(refused):
    parquet([{"id": 1, "meta": {"a": 1, "b": [1]}}], "columns.parquet")
    parquet([{"prompt": 5, "answer": "1"}], "type.parquet")
    pq.write_table(pa.table(dict.fromkeys(("problem", "answer"), pa.array([], pa.string()))), "zero.parquet")
    parquet([row(f"problem {i} {i**9}", str(i)) for i in range(2000)], "good.parquet")
    whole = pathlib.Path("good.parquet").read_bytes()
    pathlib.Path("short.parquet").write_bytes(whole[: len(whole) // 2])
    pathlib.Path("corrupt.parquet").write_bytes(whole[:2000] + bytes(2000) + whole[4000:])
    binary = pa.array([b"fine", b"\xff"], pa.binary())
    pq.write_table(pa.table({"problem": binary, "answer": pa.array(["1", "2"])}), "binary.parquet")
    texts = pa.array(["1", "2"])
    pq.write_table(pa.table([texts, texts, texts], ["problem", "answer", "answer"]), "twice.parquet")
    times = pa.array([2**53, 0], pa.timestamp("ms"))
    pq.write_table(pa.table({"problem": texts, "answer": texts, "at": times}), "times.parquet")
    for file, says in {
        "columns": ", row 0: no column prompt or problem or question or messages for the problem; ther",
        "type": ", row 0, column prompt: is int", "zero": ": holds no rows", "short": ": not a whole parquet file",
        "corrupt": ", from row 0 on: ", "binary": ", row 1, column problem: 'utf-8' codec",
        "twice": ": has 2 columns named 'answer'", "times": ", from row 0 on: date value out of range",
        "missing": ": there is no such file",
    }.items():  # fmt: skip
        refused(f"{file}.parquet{says}", f"--source={file}.parquet")


def test_many_columns_and_a_name_that_is_no_text(call, refused):
    jsonl({f"column {i}": i for i in range(9999)})
    refused(", column 19, 9979 more; name one with --problem_field of rpg_jax.prepare", "--source=in.jsonl")
    file = os.fsdecode(b"\xff-\xc3\xa9.jsonl")
    jsonl({"problem": "p", "answer": 1}, file=file)
    assert call(f"--source={file}", "--target=out")[0] == 0
    assert written()[0].task == "\ufffd-é"


def test_flags_that_make_no_sense(call, refused):
    jsonl({"problem": "p", "answer": 1})
    pathlib.Path("full").mkdir()
    pathlib.Path("full/file").touch()
    pathlib.Path("empty").mkdir()
    for name, says in (("", "--target=FOLDER are needed"), ("full", "full exists"), ("full/file", "full/file exists")):
        status, _, err = call("--source=in.jsonl", *([f"--target={name}"] if name else []))
        assert status == 2 and len(err) == 1 and says in err[0], (name, err)
    assert [path.name for path in pathlib.Path("full").iterdir()] == ["file"]
    refused("'in.txt' is no source", "--source=in.txt")
    for flag, says in {
        "name=": "--name is empty", "limit=0": "limit", "template=mine": "template",
        "answer_field=a.b": "no column a.b for the answer; there are problem, answer",
    }.items():  # fmt: skip
        refused(says, "--source=in.jsonl", f"--{flag}")
    assert call("--source=in.jsonl", "--target=empty")[0] == 0 and len(written("empty")) == 1


def test_memory_does_not_grow_with_repeats(call):
    once = [row(f"{i} " + "word " * 200, str(i)) for i in range(20)]
    parquet(once * 2000, row_group_size=4000)
    before, largest = pa.total_allocated_bytes(), 0
    for number, _ in open_source("in.parquet").records:
        if number % 1000 == 0:
            largest = max(largest, pa.total_allocated_bytes() - before)
    size = 20 * 2000 * 1000
    assert largest < size / 4, f"{largest} bytes held while reading {size}"
