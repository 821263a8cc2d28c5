"""Files that came damaged, or from somebody with bad intentions: a line names the file, or the file is read."""

import json
import pathlib
import shutil

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import test_huggingface as checkpoint
import test_huggingface_tokenizer
from fuzzing import VALUES, budget, call, damaged_bytes, damaged_json
from hypothesis import strategies as st

from rpg_jax import InputError
from rpg_jax.data import datasets, tokenizer

ROWS = [
    {"prompt": [{"role": "user", "content": "1 + 1"}], "reward_model": {"ground_truth": "2"}, "solution": "2"},
    {"problem": "2 + 2", "answer": 4.0},
    {"question": "3 + 3", "answer": "6", "solution": None},
]
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
MODEL = dict(
    architectures=["Qwen3ForCausalLM"], vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=64, rope_theta=1e4,
    rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    tie_word_embeddings=True, rms_norm_eps=1e-6, hidden_act="silu", torch_dtype="float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands run, with whole files of every kind."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS[:1] * 40), folder / "rows.parquet")
    for name in ("bpe", "pieces", "model"):
        (folder / name).mkdir()
    checkpoint.save(folder / "model", MODEL, checkpoint.random_tensors(MODEL))
    test_huggingface_tokenizer.save(folder / "bpe", chat_template=TEMPLATE)
    (folder / "bpe/special_tokens_map.json").write_text(json.dumps(dict(eos_token={"content": "<|end|>"})))
    (folder / "bpe/generation_config.json").write_text(json.dumps(dict(eos_token_id=[1])))
    (folder / "pieces/tokenizer.model").write_bytes(tokenizer.train_tokenizer(["user: 1 + 1", "2 + 2"], 300))
    (folder / "pieces/chat_template.jinja").write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def refused_or_read(file, command, *arguments):
    """Calls a command that writes the folder `out`; its line must name the file, or the folder that holds it."""
    shutil.rmtree("out", ignore_errors=True)
    status, line = call(command, *arguments, "--target=out")
    assert status == 0 or any(part in line for part in file.split("/")), line
    assert pathlib.Path("out").exists() == (status == 0)


@budget(20)
@hypothesis.given(
    lines=st.lists(
        st.one_of(
            st.sampled_from(ROWS).flatmap(damaged_json).map(str.encode),
            st.sampled_from(ROWS).flatmap(lambda row: damaged_bytes(json.dumps(row).encode())),
            VALUES.map(lambda value: json.dumps(value).encode()),
        ),
        max_size=3,
    )
)
def test_json_lines(folder, lines):
    (folder / "fuzzed.jsonl").write_bytes(b"\n".join(lines))
    refused_or_read("fuzzed.jsonl", "prepare", "--source=fuzzed.jsonl")


@budget(20)
@hypothesis.given(data=st.data())
def test_parquet(folder, data):
    (folder / "fuzzed.parquet").write_bytes(data.draw(damaged_bytes((folder / "rows.parquet").read_bytes())))
    refused_or_read("fuzzed.parquet", "prepare", "--source=fuzzed.parquet")


def damaged_copy(data, source, name):
    """Copies a folder of whole files to `fuzzed`, and damages one of them."""
    shutil.rmtree("fuzzed", ignore_errors=True)
    shutil.copytree(source, "fuzzed")
    whole = (source / name).read_bytes()
    if name.endswith(".json") and data.draw(st.booleans()):
        damaged = data.draw(damaged_json(json.loads(whole))).encode()
    else:
        damaged = data.draw(damaged_bytes(whole))
    (pathlib.Path("fuzzed") / name).write_bytes(damaged)


TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]


@pytest.mark.parametrize("kind", ["bpe", "pieces"])
@budget(40)
@hypothesis.given(data=st.data())
def test_tokenizers(folder, kind, data):
    damaged_copy(data, folder / kind, data.draw(st.sampled_from(TOKENIZER)) if kind == "bpe" else "tokenizer.model")
    try:
        sets = datasets.load("rows.jsonl", tokenizer=tokenizer.load_tokenizer("fuzzed"), max_prompt=999)
        hypothesis.event("accepted")
        assert len(sets.problems("train"))
    except InputError as error:
        hypothesis.event("refused")
        assert "fuzzed" in str(error)


@budget(20)
@hypothesis.given(data=st.data())
def test_safetensors(folder, data):
    damaged_copy(data, folder / "model", data.draw(st.sampled_from(["config.json", "model.safetensors"])))
    refused_or_read("fuzzed", "convert", "--source=fuzzed")
