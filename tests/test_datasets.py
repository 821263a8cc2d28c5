"""Real sets: the paper's template, rendering, limits and contamination."""

import json
import pathlib
import types

import numpy as np
import pyarrow.parquet as pq
import pytest

from rpg_jax import data
from rpg_jax.data import folding, problems
from rpg_jax.data.folding import fold
from rpg_jax.data.sources import open_source
from rpg_jax.data.templates import named

SHARED = pathlib.Path(__file__).parents[2] / "shared/data"
paper = named("paper")
FILES = ["aime-2024", "aime25", "amc-23"]


class Words:
    """A tokenizer of words, with the interface of the real ones."""

    def render(self, messages, end="<assistant>"):
        return " ".join(f"<{m['role']}> {m['content']}" for m in messages) + f" {end}"

    def encode_prompt(self, text):
        return [hash(word) for word in text.split()]


def load(*args, **kwargs):
    lines = []
    kwargs = dict(tokenizer=Words(), max_prompt=1000) | kwargs
    return data.load(*args, log=lines.append, **kwargs), lines


def jsonl(path, *texts):
    path.write_text("".join(json.dumps({"problem": text, "answer": i}) + "\n" for i, text in enumerate(texts)))
    return path


def prepared(path, file):
    problems.publish({"train": fold([open_source(str(file))]).problems}, {}, path)
    return path


@pytest.mark.skipif(not SHARED.exists(), reason="no shared evaluation sets here")
def test_evaluation_sets_have_the_papers_template_and_are_read_as_they_are():
    for file in FILES:
        rows = pq.read_table(SHARED / f"{file}.parquet").to_pylist()
        assert len(rows) in (960, 1280)
        for row in rows:
            assert [paper(row["extra_info"]["raw_problem"])] == [message["content"] for message in row["prompt"]]
    sets, lines = load(heldout=[SHARED / f"{file}.parquet" for file in FILES])
    heldout = list(sets.problems("heldout"))
    assert [sum(p.task == file for p in heldout) for file in FILES] == [30, 30, 40] and not lines
    assert heldout[0].prompt.startswith("<user> Solve the following") and heldout[0].prompt.endswith(" <assistant>")
    assert len(sets.problems("train")) == 0


def test_a_prepared_folder_is_the_file_it_was_made_of(tmp_path):
    file = jsonl(tmp_path / "set.jsonl", "é 1", "two", "three")
    folder = prepared(tmp_path / "folder", file)
    raw, made = load(file, template_options={"end": "!"})[0], load(folder, template_options={"end": "!"})[0]
    assert list(raw.problems("train")) == list(made.problems("train"))
    first = made.problems("train")[0]
    assert first.prompt == f"<user> {paper('é 1')} !" and first.answer == "0" and first.task == "set"


def test_long_prompts_are_counted_and_dropped_or_refused(tmp_path):
    most = len(paper("a").split()) + 2
    file = jsonl(tmp_path / "set.jsonl", "a b", "c", "d " * 50_000, "e")
    for source in (file, prepared(tmp_path / "folder", file)):
        sets, lines = load(source, heldout=(), max_prompt=most)
        assert [p.answer for p in sets.problems("train")] == ["1", "3"]
        assert len(lines) == 1 and "dropped 2 of 4" in lines[0] and str(source) in lines[0]
        with pytest.raises(ValueError, match=rf"{source.name}, .*takes {most + 1} tokens.*as do 2"):
            load(source, max_prompt=most, overlong="refuse")
        with pytest.raises(ValueError, match="no problems are left, all 4"):
            load(source, max_prompt=3)
        tokenizer = types.SimpleNamespace(render=Words().render, encode_prompt=lambda text: [])
        with pytest.raises(ValueError, match=rf"{source.name}, .*its prompt has no tokens under the chat template"):
            load(source, tokenizer=tokenizer)


def test_held_out_problems_that_are_trained_on_are_reported(tmp_path):
    train = jsonl(tmp_path / "train.jsonl", "a", "b", "c")
    first, second = jsonl(tmp_path / "first.jsonl", "x", "b", "a"), jsonl(tmp_path / "second.jsonl", "y")
    _, lines = load(prepared(tmp_path / "train", train), heldout=f"{first},{second}")
    assert len(lines) == 1 and "2 of 3 held-out problems are also in the training set" in lines[0]
    assert "first.jsonl" in lines[0]
    for name, says in {"all": "all is the name of all sets together", "gym:a": "'gym:a' is for reasoning-gym"}.items():
        with pytest.raises(ValueError, match=f"{name}.jsonl: {says}"):
            load(heldout=[first, jsonl(tmp_path / f"{name}.jsonl", "z")])


def test_folders_that_are_no_sets(tmp_path):
    (tmp_path / "empty").mkdir()
    problems.publish({"train": [data.Problem(7, "t", "1 + 1 =", "", "2")]}, {}, tmp_path / "plain")
    for name, says in {
        "empty": " holds no prepared problems", "no.jsonl": ": there is no such file",
        "plain": ", problem 7: its prompt is not JSON",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}{says}"):
            load(tmp_path / name)


def test_ids_are_distinct_and_stable_31_bit_hashes(monkeypatch, tmp_path):
    file = jsonl(tmp_path / "set.jsonl", *map(str, range(300)))
    ids = [p.id for p in fold([open_source(str(file))]).problems]
    assert len(set(ids)) == 300 and min(ids) >= 0 and max(ids) < 2**31 and np.ptp(ids) > 2**29
    same = types.SimpleNamespace(digest=lambda: b"\xff" * 4)
    monkeypatch.setattr(folding.hashlib, "blake2b", lambda *args, **kwargs: same)
    collided = [p.id for p in fold([open_source(str(file))]).problems]
    assert collided[:3] == [2**31 - 1, 0, 1] and len(set(collided)) == 300
