"""Preparation on disk, the global order, and rows of tokens."""

import functools
import json

import numpy as np
import processes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg_jax.data import Problem, ProblemStream, prepare, problems, prompt_rows, supervised_rows
from rpg_jax.data.tasks.guess import TURN

TASKS = {"arithmetic": dict(steps=2), "sorting": {}}
TINY = dict(tasks=TASKS, train_size=40, heldout_size=10, seed=0, vocab_size=512)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("data"), **TINY)


def test_written_and_read_back_exactly(prepared):
    splits = problems.generate(TASKS, 40, 10, 0)
    for split, expected in splits.items():
        assert list(prepared.problems(split)) == expected
    every = splits["train"] + splits["heldout"]
    assert [problem.id for problem in every] == list(range(100))
    assert [problem.task for problem in every[:4]] == ["arithmetic", "sorting"] * 2
    alone = problems.generate({"sorting": {}}, 40, 10, 0)["train"]
    prompts = [problem.prompt for problem in splits["train"] if problem.task == "sorting"]
    assert prompts == [problem.prompt for problem in alone], "whatever other tasks there are"
    folder = prepared.tokenizer.folder
    assert {path.name for path in folder.iterdir()} == {"problems", "settings.json", "tokenizer.model"}
    assert json.loads((folder / "settings.json").read_text())["tasks"]["arithmetic"]["steps"] == 2


def test_unicode_and_empty_strings_survive_the_disk(tmp_path):
    odd = [
        Problem(5, "t", " p ", "s\n\n", ""),
        Problem(6, "t", "p", "", "", {"level": [1.5, None, "é"]}),
        Problem(2**31 - 1, "tâche", "é\n😀\x00", "", '{"a": 1}'),
    ]
    problems.publish({"train": odd, "heldout": odd[:1]}, {}, tmp_path)
    source = problems.Records(tmp_path, "train")
    assert list(map(problems.to_problem, source)) == odd
    columns = {name: value for name, value in source[0].items() if name != "columns"}
    assert problems.to_problem(columns) == odd[0], "folders of earlier versions have no columns"


@pytest.mark.parametrize("name", ["*.array_record*", "dataset_info.json", "features.json"])
def test_a_damaged_folder_is_named(tmp_path, name):
    problems.publish({"train": [Problem(i, "t", "p", "s", "a") for i in range(9)]}, {}, tmp_path)
    file = next(tmp_path.rglob(name))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{tmp_path}: the prepared problems cannot be read .*; prepare them again"):
        list(problems.Records(tmp_path, "train"))


def test_prepare_is_cached_by_content(prepared):
    lines, made = [], prepared.tokenizer.folder
    folder, model = made.parent, made / "tokenizer.model"
    stamp = model.stat().st_mtime_ns
    for tasks in (TASKS, {"sorting": {}, "arithmetic": dict(operand=9, steps=2)}):  # 9 is the default
        assert prepare(folder, **TINY | dict(tasks=tasks), log=lines.append).tokenizer.folder == made
    assert model.stat().st_mtime_ns == stamp and lines == []
    other = prepare(folder, **TINY | dict(seed=1), log=lines.append)
    assert len(lines) == 1 and "80 train, 20 heldout problems" in lines[0]
    assert other.problems("train")[0] != prepared.problems("train")[0]
    assert {path.name for path in folder.iterdir()} == {made.name, other.tokenizer.folder.name}, "one is half built"


def test_a_failed_preparation_leaves_nothing(tmp_path):
    mistakes = {"stpes": dict(tasks={"arithmetic": dict(stpes=2)}), "no tasks": dict(tasks={"sorting": None})}
    mistakes["must be a section"] = dict(tasks={"sorting": 5})
    for says, bad in (mistakes | {"vocab_size=100": dict(vocab_size=100)}).items():
        with pytest.raises(ValueError, match=says):
            prepare(tmp_path / "new", **TINY | bad)
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())


def test_processes_that_prepare_at_once_agree(tmp_path):
    with processes.forks.Pool(2) as pool:
        made = pool.map(functools.partial(prepare, **TINY), [tmp_path] * 4, chunksize=1)
    assert [one.tokenizer.folder for one in made] == list(tmp_path.iterdir()) * 4


def stream(size=10, seed=3):
    return ProblemStream([Problem(i, "t", f"p{i}", "s", "a") for i in range(size)], seed)


def test_every_epoch_is_a_new_permutation():
    ids = [problem.id for problem in stream().next(30)]
    epochs = [ids[:10], ids[10:20], ids[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(10))
    assert [problem.id for problem in stream(seed=4).next(10)] != epochs[0]
    with pytest.raises(ValueError, match="empty"):
        ProblemStream([], seed=0)


@given(st.lists(st.integers(0, 5), max_size=8), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 4]))
@settings(max_examples=20)
def test_resume_on_another_number_of_processes(batches, before, after):
    """The processes' shares make up the global batch, through a resume with another process count."""
    whole = stream(1000)
    expected = [[p.id for p in whole.next(12 * n)] for n in batches]
    half, got, state = len(batches) // 2, [], 0
    for count, part in ((before, batches[:half]), (after, batches[half:])):
        job = [stream(1000) for _ in range(count)]
        for process in job:
            process.cursor = state
        for n in part:
            batch = np.zeros(12 * n, int)
            for i, process in enumerate(job):
                rows = np.arange(12 * n)[i::count]
                batch[rows] = [problem.id for problem in process.next(12 * n, rows)]
            got.append(batch.tolist())
        assert len({process.cursor for process in job}) == 1
        state = json.loads(json.dumps(job[0].cursor))
    assert got == expected and state == whole.cursor


def test_rows_hold_bos_prompt_solution_eos_and_padding_and_those_that_do_not_fit_are_named(prepared):
    rows, tokenizer = list(prepared.problems("train"))[:6], prepared.tokenizer
    tokens, lengths, positions = prompt_rows(rows, range(7, 13), tokenizer, 40)
    assert tokens.shape == (6, 40) and tokens.dtype == lengths.dtype == positions.dtype == np.int32
    assert positions.tolist() == list(range(7, 13))
    full, ends, response = supervised_rows(rows, tokenizer, 80)
    assert full.dtype == ends.dtype == np.int32 and response.dtype == bool
    for i, row in enumerate(rows):
        n, answer = int(lengths[i]), full[i][response[i]]
        assert tokens[i, 0] == tokenizer.bos_id and tokenizer.decode(tokens[i, 1:n]) == row.prompt
        assert (full[i, :n] == tokens[i, :n]).all()
        assert tokenizer.decode(answer[:-1]) == row.solution and answer[-1] == tokenizer.eos_id
        assert ends[i] == n + len(answer) and (np.flatnonzero(response[i]) == np.arange(n, ends[i])).all()
        assert (tokens[i, n:] == tokenizer.pad_id).all() and (full[i, ends[i] :] == tokenizer.pad_id).all()
    (full,), _, (said,) = supervised_rows([Problem(0, "t", "p", TURN.join("ABA"), "")], tokenizer, 80)  # B is observed
    assert full[said].tolist() == 2 * [*tokenizer.encode("A"), tokenizer.eos_id]
    longest = max(rows, key=lambda row: len(tokenizer.encode(row.prompt)))
    need = len(tokenizer.encode(longest.prompt)) + 1
    prompt_rows(rows, range(6), tokenizer, need)
    with pytest.raises(ValueError, match=rf"problem \d+ \(\w+\).* than rollout.max_prompt={need - 1}"):
        prompt_rows([longest], [0], tokenizer, need - 1)
    with pytest.raises(ValueError, match=r"problem 3 \(t\) has no worked solution; name its column"):
        supervised_rows([Problem(3, "t", "p", " ", "")], tokenizer, 80)
    with pytest.raises(ValueError, match=r"more than rollout.max_prompt \+ rollout.max_new=20; raise"):
        supervised_rows(rows, tokenizer, 20)
