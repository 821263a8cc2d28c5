"""GGUF files: what convert makes of each architecture and quantization, its tokenizer, and what is refused."""

import json
import pathlib
import struct
import sys

import fuzzing
import numpy as np
import pytest
import safetensors.numpy

from rpg_jax.data import gguf_tokenizer, load_tokenizer
from rpg_jax.models import huggingface, rope
from rpg_jax.storage import gguf_files

gguf = pytest.importorskip("gguf")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "third_party/common"))
import gguf_models  # noqa: E402

TOKENIZER = gguf_models.vocabulary()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


def written(folder, name, *args, **kwargs):
    kwargs.setdefault("tokenizer", TOKENIZER)
    gguf_models.write(folder / f"{name}.gguf", *args, **kwargs)
    return folder / f"{name}.gguf"


def convert(*arguments):
    assert fuzzing.call("convert", *arguments) == (0, "")


def by_the_package(file):
    """{tensor: float32 array} as the gguf package reads the file."""
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        for tensor in gguf.GGUFReader(file).tensors
    }


@pytest.mark.parametrize("architecture", gguf_models.ARCHITECTURES)
def test_a_file_becomes_a_checkpoint(architecture, folder):
    file = written(folder, architecture, architecture, "Q4_1", tied=architecture == "qwen3")
    target = folder / f"{architecture}-converted"
    convert(f"--source={file}", f"--target={target}")
    theirs, tensors = by_the_package(file), safetensors.numpy.load_file(target / "model.safetensors")
    assert len(tensors) == len(theirs)
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.down_proj.weight"], theirs["blk.1.ffn_down.weight"])
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], theirs["token_embd.weight"])
    query, paired = tensors["model.layers.1.self_attn.q_proj.weight"], theirs["blk.1.attn_q.weight"]
    if architecture == "llama":  # row 2i of a head, then row 2i + 1, are rows i and i + 32 of ours
        heads, stored = query.reshape(4, 64, -1), paired.reshape(4, 64, -1)
        np.testing.assert_array_equal(heads[:, :32], stored[:, 0::2])
        np.testing.assert_array_equal(heads[:, 32:], stored[:, 1::2])
    else:
        np.testing.assert_array_equal(query, paired)
    config = huggingface.read_config(target)
    assert (config.qk_norm, config.qkv_bias) == (architecture in ("qwen3", "gemma3"), architecture == "qwen2")
    assert (config.norm_epsilon, config.rope_theta, config.max_length) == (1e-5, 1e4, 512)
    assert config.tied_embeddings == (architecture == "qwen3")
    norm, stored = tensors["model.layers.1.input_layernorm.weight"], theirs["blk.1.attn_norm.weight"]
    np.testing.assert_array_equal(norm, stored - (architecture == "gemma3"))
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == [2]


def test_each_tensor_keeps_its_type(folder):
    convert(f"--source={written(folder, 'narrow', quantization='BF16')}", f"--target={folder}/kept")
    tensors = safetensors.numpy.load_file(folder / "kept" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"bfloat16", "float32"}
    assert load_tokenizer(folder / "kept").eos_id == 2


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q5_1", "Q6_K", "IQ3_S", "TQ1_0", "MXFP4"])  # one of each family
def test_each_quantization_is_read_as_the_package_reads_it(kind, folder):
    file = written(folder, kind, "qwen2", kind)
    theirs, tensors = by_the_package(file), gguf_files.contents(gguf_files.read_header(file))
    names = {"model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight", "lm_head.weight": "output.weight"}
    for ours, name in names.items():
        array = tensors[ours].rows(3, 200)
        np.testing.assert_array_equal(array.astype(np.float32), theirs[name][3:200])
        assert np.abs(theirs[name]).max() > 0.01


def test_scalings_of_rotary_positions_and_that_of_llama_31_by_its_divisors(folder):
    scaling = rope.Llama3(8.0, 1.0, 4.0, 8192)
    plain, scaled = (rope.frequencies(64, 5e5, kind)[0] for kind in (None, scaling))
    more = {"llama.rope.freq_base": 5e5}
    file = written(folder, "llama31", more=more, tensors={"rope_freqs.weight": (plain / scaled).astype(np.float32)})
    assert gguf_files.read_config(gguf_files.read_header(file)).rope_scaling == scaling
    other = {"rope_freqs.weight": np.linspace(1, 8, 32, dtype=np.float32)}
    file = written(folder, "longrope", more=more, tensors=other)
    with pytest.raises(ValueError, match="longrope.gguf: rope_freqs.weight does not hold the scaling of Llama 3.1"):
        gguf_files.read_config(gguf_files.read_header(file))
    for kind, expected in (("linear", rope.Linear(4.0)), ("yarn", rope.Yarn(4.0, 128))):
        values = dict(type=kind, factor=4.0) | (dict(original_context_length=128) if kind == "yarn" else {})
        more = {f"qwen2.rope.scaling.{key}": value for key, value in values.items()}
        file = written(folder, kind, "qwen2", more=more)
        assert gguf_files.read_config(gguf_files.read_header(file)).rope_scaling == expected


_ZEROS = np.zeros(256, np.float32)
REFUSED = {
    "architecture": (dict(more={"general.architecture": "gemma2"}), "architecture 'gemma2' is not supported; known"),
    "window": (dict(more={"llama.attention.sliding_window": 4096}), "llama.attention.sliding_window is 4096, which is"),
    "rotary": (dict(more={"llama.rope.dimension_count": 32}), "llama.rope.dimension_count is 32; only the 64 of a he"),
    "scaling": (dict(more={"llama.rope.scaling.type": "longrope"}), "rope.scaling.type is 'longrope'; known: none"),
    "layers": (dict(more={"llama.block_count": 10**9}), "llama.block_count is 1000000000, and there are 21 tensors"),
    "split": (dict(more={"split.count": 2}), "is one of 2 files; join them with llama-gguf-split --merge"),
    "bias": (dict(tensors={"blk.0.attn_q.bias": _ZEROS}), "unexpected: model.layers.0.self_attn.q_proj.bias"),
    "odd": (dict(tensors={"blk.0.odd": _ZEROS}), "1 unexpected: blk.0.odd"),
    "kind": (dict(tensors={"blk.0.odd": _ZEROS.astype(np.int8)}), "tensor blk.0.odd has the quantization I8, which is"),
    "nan": (dict(tensors={"output_norm.weight": _ZEROS * np.nan}), "model.norm.weight holds NaN or infinity"),
    "model": (dict(tokenizer=TOKENIZER | {"model": "bert"}), "tokenizer.ggml.model is 'bert'; only gpt2"),
    "pre": (dict(tokenizer=TOKENIZER | {"pre": "tekken"}), "tokenizer.ggml.pre is 'tekken', which is not supported"),
    "eos": (dict(tokenizer=TOKENIZER | {"eos_token_id": 999}), "tokenizer.ggml.eos_token_id is 999, not an id of"),
    "merge": (dict(tokenizer=TOKENIZER | {"merges": ["qqq q"]}), "tokenizer.ggml.merges: 'qqq q' is no pair of"),
    "twice": (dict(tokenizer=TOKENIZER | {"tokens": ["a"] * 292}), "tokenizer.ggml.tokens holds a token twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(case, folder):
    settings, message = REFUSED[case]
    file, target = written(folder, f"refused-{case}", **settings), folder / "refused"
    status, line = fuzzing.call("convert", f"--source={file}", f"--target={target}")
    assert status == 2 and message in line and file.name in line and not target.exists()


# A damaged file: truncated anywhere, or with a number of its header replaced.


@pytest.fixture(scope="module")
def whole(folder):
    return written(folder, "whole", quantization="Q8_0").read_bytes()


def refused(file, data):
    file.write_bytes(data)
    status, complaint = fuzzing.call("convert", f"--source={file}", f"--target={file.parent / 'damaged'}")
    assert status == 2 and str(file) in complaint
    assert not (file.parent / "damaged").exists()


def test_a_truncated_file_another_format_and_sizes_that_cannot_be_are_one_line(whole, folder, monkeypatch):
    for share in (0.0, 1e-5, 0.02, 0.999):
        refused(folder / "cut.gguf", whole[: int(share * len(whole))])
    for data in (b"GGML" + bytes(64), b"GGUF" + struct.pack("<IQQ", 1, 0, 0), b"GGUF\0\0\0\3" + bytes(64)):
        refused(folder / "other.gguf", data)
    # Shapes whose product is 0 modulo 2**64, and more values than a header has.
    at = whole.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4
    refused(folder / "product.gguf", whole[:at] + struct.pack("<QQ", 2**32, 2**32) + whole[at + 16 :])
    monkeypatch.setattr(gguf_files, "_MOST_VALUES", 1000)
    refused(folder / "many.gguf", whole)


@pytest.mark.parametrize("size", [2**64 - 1, 2**40])
@pytest.mark.parametrize("place", ["tensors", "keys", "key", "string", "numbers", "strings", "axes", "shape", "offset"])
def test_declared_sizes_take_no_memory(place, size, whole, folder):
    if place in ("tensors", "keys"):
        at = 8 if place == "tensors" else 16
        data = whole[:at] + struct.pack("<Q", size) + whole[at + 8 :]
    elif place in ("axes", "shape", "offset"):
        name = b"output_norm.weight"
        at = whole.index(name) + len(name)  # then u32 axes, u64 size, u32 kind, u64 offset
        at, code = {"axes": (at, "<I"), "shape": (at + 4, "<Q"), "offset": (at + 16, "<Q")}[place]
        value = min(size, 2**32 - 1) if code == "<I" else size
        data = whole[:at] + struct.pack(code, value) + whole[at + struct.calcsize(code) :]
    else:
        begin = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
        kind = {"string": (8,), "numbers": (9, 0), "strings": (9, 8)}.get(place)
        key = struct.pack("<Q1s", 1, b"k") + struct.pack(f"<{len(kind)}I", *kind) if kind else b""
        data = begin + key + struct.pack("<Q", size) + bytes(4096)
    refused(folder / "huge.gguf", data)


# Tokenizers.


def tokenizer(folder, name, template="{{ messages[0].content }}", **keys):
    metadata = {f"tokenizer.ggml.{key}": value for key, value in (TOKENIZER | keys).items()}
    files = gguf_tokenizer.files(metadata | {"tokenizer.chat_template": template})
    (folder / name).mkdir()
    for file, values in files.items():
        (folder / name / file).write_text(values if isinstance(values, str) else json.dumps(values))
    return load_tokenizer(folder / name)


def test_the_tokenizer_splits_as_its_family_does(tmp_path):
    text = "it 12345 café "
    cut = {}
    for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
        ours = tokenizer(tmp_path, pre, pre=pre)
        assert ours.decode(ours.encode(text)) == text
        pieces = ours._model.pre_tokenizer.pre_tokenize_str(text)
        cut[pre] = [piece.replace("Ġ", "_") for piece, _ in pieces]
    assert cut["gpt-2"] == ["it", "_12345", "_cafÃ©", "_"]
    assert cut["smollm"][:7] == cut["qwen2"][:7] == ["it", "_", "1", "2", "3", "4", "5"]
    assert cut["llama-bpe"][:4] == ["it", "_", "123", "45"]
    decomposed, composing = "cafe\u0301", tokenizer(tmp_path, "nfc", pre="qwen2")
    assert composing.encode(decomposed) == composing.encode("café")
    assert ours.encode(decomposed) != ours.encode("café"), "llama-bpe keeps text as it is"


def test_special_tokens_are_those_of_the_file(tmp_path):
    ours = tokenizer(tmp_path, "a")
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.stop_ids) == (1, 2, 2, (2,))
    user = ours.encode_prompt("<|im_start|>the cat<|im_end|><tool>")
    assert (user[0], user[-2], user[-1]) == (1, 2, TOKENIZER["tokens"].index("<tool>"))
    assert ours.decode(user) == "the cat<tool>" and ours.encode("<|im_end|>") != [2]
    assert ours.vocab_size == len(TOKENIZER["tokens"]) - 1, "an unused token is none"
    assert ours.render([{"role": "user", "content": "Hi"}]) == "Hi"
    more = tokenizer(tmp_path, "b", eot_token_id=0, add_bos_token=True, template=None)
    assert more.stop_ids == (2, 0)
    more = load_tokenizer(tmp_path / "b", "plain")
    assert more.encode_prompt("cat")[0] == 1 and more.encode_prompt("cat")[1:] == ours.encode_prompt("cat")
