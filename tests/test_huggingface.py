"""Hugging Face checkpoints: configs, names and numbers against a float64 forward pass of their own; what is refused."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import processes
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg_jax.models import Model, ModelConfig, huggingface, rope
from rpg_jax.storage import weights

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN, YARN512 = (dict(factor=4.0, original_max_position_embeddings=length) for length in (16, 512))
COMMON = dict(vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, max_position_embeddings=64)
# As their config.json say it: old and new keys of rope, tied and not, one KV head, heads wider than hidden / heads.
CONFIGS = {
    "qwen2": dict(
        architectures=["Qwen2ForCausalLM"], num_attention_heads=6, num_key_value_heads=2, head_dim=4, rope_theta=1e4,
        rope_scaling={"type": "linear", "factor": 2.5}, tie_word_embeddings=True, use_sliding_window=False,
    ),
    "qwen3": dict(
        architectures=["Qwen3ForCausalLM"], num_attention_heads=4, num_key_value_heads=2, head_dim=10,
        rope_theta=1e6, rope_scaling=None, tie_word_embeddings=False,
    ),
    "qwen3-yarn": dict(
        architectures=["Qwen3ForCausalLM"], num_attention_heads=4, num_key_value_heads=1, head_dim=12,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "truncate": False, "beta_fast": 16, **YARN},
        tie_word_embeddings=True,
    ),
    "llama": dict(
        architectures=["LlamaForCausalLM"], num_attention_heads=4, rope_theta=5e5, rms_norm_eps=1e-5,
        rope_scaling={"rope_type": "llama3", **LLAMA3}, head_dim=None, mlp_bias=False, attention_bias=False,
    ),
    "llama-mscale": dict(
        model_type="llama", num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
        rope_scaling=YARN512 | dict(rope_type="yarn", mscale=0.7, mscale_all_dim=1.5), rope_theta=1e4,
    ),
}  # fmt: skip
CONFIGS = {name: COMMON | config for name, config in CONFIGS.items()}


def random_tensors(raw, dtype=np.float32, seed=0):
    """What a checkpoint of that config holds, named and shaped as on the hub."""
    rng = np.random.default_rng(seed)
    heads, hidden, mlp = raw["num_attention_heads"], raw["hidden_size"], raw["intermediate_size"]
    head_dim, kv = raw.get("head_dim") or hidden // heads, raw.get("num_key_value_heads", heads)
    kind = (raw.get("architectures") or [raw["model_type"]])[0].lower()
    sizes = {"model.embed_tokens": (raw["vocab_size"], hidden), "model.norm": (hidden,)}
    if not raw.get("tie_word_embeddings"):
        sizes["lm_head"] = (raw["vocab_size"], hidden)
    for layer in range(raw["num_hidden_layers"]):
        attention = {"q_proj": (heads * head_dim, hidden), "k_proj": (kv * head_dim, hidden)}
        attention |= {"v_proj": (kv * head_dim, hidden), "o_proj": (hidden, heads * head_dim)}
        parts = {f"self_attn.{name}": size for name, size in attention.items()}
        if kind.startswith("qwen3"):
            parts |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
        parts |= {"mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp)}
        parts |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        sizes |= {f"model.layers.{layer}.{name}": size for name, size in parts.items()}
    tensors = {f"{name}.weight": rng.normal(size=size) * size[-1] ** -0.5 for name, size in sizes.items()}
    if kind.startswith("qwen2"):
        for name, size in sizes.items():
            if name[-6:] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{name}.bias"] = rng.normal(size=size[:1])
    return {name: tensor.astype(dtype) for name, tensor in tensors.items()}


def save(folder, raw, tensors, files=1):
    """As transformers saves it: one file, or several with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if files == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {name: f"model-{i % files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        held = {name: tensors[name] for name in tensors if weight_map[name] == file}
        safetensors.numpy.save_file(held, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@functools.cache
def shapes_of(config, dtype=jnp.float32):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), Model(config).shapes)


def load(folder, dtype=jnp.float32):
    config = huggingface.read_config(folder)
    return config, weights.load(folder, shapes_of(config, dtype))


def assert_same(one, other):
    """Names, dtypes and bits are the same."""
    bits = lambda x: (x.dtype, np.asarray(x).tobytes())  # noqa: E731
    same = jax.tree.map(lambda x, y: bits(x) == bits(y), one, other)
    assert jax.tree.all(same), same


# The reference: float64, from the papers and the tensors as they lie on disk.


def numpy_frequencies(raw, head_dim):
    given = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    theta, kind = given["rope_theta"], given.get("rope_type", given.get("type"))
    waves = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if kind is None:
        return waves, 1.0
    factor, old = given["factor"], given.get("original_max_position_embeddings")
    if kind == "linear":
        return [wave / factor for wave in waves], 1.0
    if kind == "llama3":

        def stretched(wave):
            turns = old * wave / (2 * math.pi)
            share = (turns - given["low_freq_factor"]) / (given["high_freq_factor"] - given["low_freq_factor"])
            share = min(max(share, 0.0), 1.0)
            return wave * (share + (1 - share) / factor)

        return [stretched(wave) for wave in waves], 1.0
    low, high = (
        head_dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (given.get("beta_fast", 32), given.get("beta_slow", 1))
    )
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(head_dim // 2)]
    grown = 0.1 * math.log(factor) + 1
    if "mscale" in given:
        grown = (0.1 * given["mscale"] * math.log(factor) + 1) / (0.1 * given["mscale_all_dim"] * math.log(factor) + 1)
    return [wave * (1 - share + share / factor) for wave, share in zip(waves, ramp, strict=True)], grown


def numpy_logits(raw, tensors, tokens):
    tensors = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    heads, epsilon = raw["num_attention_heads"], raw.get("rms_norm_eps", 1e-6)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    waves, grown = numpy_frequencies(raw, head_dim)
    turn = grown * np.exp(1j * np.outer(np.arange(len(tokens)), waves))[:, None]

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * tensors[f"{name}.weight"]

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)

    def rotated(x, name):
        x = x.reshape(len(tokens), -1, head_dim)
        x = norm(x, name) if f"{name}.weight" in tensors else x
        turned = (x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    x = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(raw["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = norm(x, at + "input_layernorm")
        q = rotated(linear(h, at + "self_attn.q_proj"), at + "self_attn.q_norm")
        k = rotated(linear(h, at + "self_attn.k_proj"), at + "self_attn.k_norm")
        v = linear(h, at + "self_attn.v_proj").reshape(len(tokens), -1, head_dim)
        k, v = (np.repeat(z, heads // z.shape[1], axis=1) for z in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(head_dim)
        scores = np.exp(np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf))
        mixed = np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), v)
        x = x + linear(mixed.reshape(len(tokens), -1), at + "self_attn.o_proj")
        h = norm(x, at + "post_attention_layernorm")
        gate = linear(h, at + "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, at + "mlp.up_proj"), at + "mlp.down_proj")
    tied = "lm_head.weight" not in tensors
    return norm(x, "model.norm") @ tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].T


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_numpy(name, tmp_path):
    raw, tokens = CONFIGS[name], np.random.default_rng(1).integers(0, 37, 40)
    tensors = random_tensors(raw)
    config, params = load(save(tmp_path, raw, tensors, files=1 + 2 * (name == "llama")))
    model = Model(config)
    found = jax.jit(lambda p: model.logits(p, model.hidden(p, tokens[None])))(params)[0]
    expected = numpy_logits(raw, tensors, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    scaled = {**raw, "rope_scaling": None, "rope_parameters": None, "rope_theta": 1e4}
    assert np.abs(numpy_logits(scaled, tensors, tokens) - expected).max() > 1e-2, "rope changes nothing here"


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_dtype_is_read_to_the_bit(kind, tmp_path):
    raw = CONFIGS["qwen3"]
    tensors = random_tensors(raw, kind)
    config, wide = load(save(tmp_path, raw, tensors, files=3))
    kept = weights.with_stored_dtypes(tmp_path, shapes_of(config))
    assert {x.dtype for x in jax.tree.leaves(kept)} == {np.dtype(kind)}
    found = weights.load(tmp_path, kept)
    assert_same(jax.tree.map(lambda x: np.asarray(x, np.float32), found), wide)
    weights.save_safetensors(tmp_path, found, 1e9)
    assert_same(safetensors.numpy.load_file(tmp_path / "model.safetensors"), tensors)


SHARDED = """
import sys, jax
import test_huggingface as t
from rpg_jax import parallel
from rpg_jax.storage import weights
config, whole = t.load(sys.argv[1])
for axes in (dict(data=1, fsdp=2, tensor=2), dict(data=1, fsdp=4), dict(data=4)):
    shapes = t.shapes_of(config)
    like = parallel.shardings(parallel.make_mesh(**axes), shapes)
    found = weights.load(sys.argv[1], jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, like))
    t.assert_same(found, whole)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, sharding: x.sharding == sharding, found, like)))
"""


def test_every_device_of_a_mesh_gets_its_shards(tmp_path):
    raw = CONFIGS["qwen3"] | {"vocab_size": 40, "tie_word_embeddings": False}
    save(tmp_path, raw, random_tensors(raw, ml_dtypes.bfloat16), files=2)
    processes.execute("-c", SHARDED, tmp_path, JAX_NUM_CPU_DEVICES="4").check_returncode()


def test_all_that_is_wrong_is_one_error(tmp_path):
    raw = CONFIGS["qwen3"]
    tensors = random_tensors(raw)
    gone = ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
    for name in gone:
        del tensors[name]
    tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((24, 16), np.float32)
    tensors["lm_head.weight"] = np.zeros((36, 16), np.float32)
    tensors["model.layers.0.input_layernorm.weight"] = np.zeros(16, np.int32)
    with pytest.raises(ValueError) as error:
        load(save(tmp_path, raw, tensors))
    text = str(error.value)
    assert str(tmp_path) in text and "\n" not in text and f"2 missing: {gone[0]}, {gone[1]}" in text
    assert "1 unexpected: model.layers.7.mlp.up_proj.weight" in text
    assert "lm_head.weight is [36, 16], [37, 16] expected" in text and "input_layernorm.weight (I32)" in text


@pytest.mark.parametrize("prefix, tied", [("_orig_mod.", True), ("module._orig_mod.", False)])
def test_names_of_a_wrapped_model_are_one_short_line_with_the_mend(tmp_path, prefix, tied):
    raw = CONFIGS["qwen2"] | {"tie_word_embeddings": tied}
    tensors = {f"{prefix}{name}": tensor for name, tensor in random_tensors(raw).items()}
    with pytest.raises(ValueError) as error:
        load(save(tmp_path, raw, tensors))
    text = str(error.value).replace(str(tmp_path), "")
    assert f"all {len(tensors)} names begin with '{prefix}' ({prefix}" in text and f" {len(tensors) - 3} more" in text
    assert "model._orig_mod, model.module, or model.merge_and_unload()" in text and len(text) < 500
    raw["tie_word_embeddings"] = True
    tensors = {name.removeprefix("model."): tensor for name, tensor in random_tensors(raw).items()}
    with pytest.raises(ValueError, match=rf"all {len(tensors)} names lack 'model.' .*AutoModelForCausalLM"):
        load(save(tmp_path, raw, tensors))  # as transformers' AutoModel saves it


def test_a_tensor_that_is_not_finite_is_named(tmp_path):
    raw = CONFIGS["qwen3"]
    first, one, last = "model.embed_tokens.weight", "model.layers.1.self_attn.k_norm.weight", "lm_head.weight"
    for name, value in ((first, np.nan), (one, np.inf), (last, -np.inf)):
        tensors = random_tensors(raw, ml_dtypes.bfloat16)
        tensors[name].reshape(-1)[5] = value
        with pytest.raises(ValueError, match=f"model-[012].safetensors: {name} holds NaN or infinity"):
            load(save(tmp_path, raw, tensors, files=3))


def test_tied_heads_and_constants_that_were_saved_too(tmp_path):
    raw = CONFIGS["qwen2"]
    tensors = random_tensors(raw)
    _, params = load(save(tmp_path, raw, tensors))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    assert_same(load(save(tmp_path, raw, tensors))[1], params)
    tensors["lm_head.weight"][-1, -1] += 1
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        load(save(tmp_path, raw, tensors))


def test_a_damaged_file_and_a_wrong_index_are_named(tmp_path):
    raw = CONFIGS["qwen3"]
    save(tmp_path, raw, random_tensors(raw), files=2)
    file = tmp_path / "model-1.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[next(name for name in header if "norm" in name)]["data_offsets"] = [0, 64]
    text = json.dumps(header).encode()
    overlap = len(text).to_bytes(8, "little") + text + content[8 + length :]
    for damaged in (b"", content[:40], content[:-1], b"\xff" * 8 + content[8:], overlap):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="model-1.safetensors is not a whole safetensors file") as error:
            load(tmp_path)
        assert "\n" not in str(error.value)
    file.write_bytes(content)
    file = tmp_path / "model.safetensors.index.json"
    right = json.loads(file.read_text())["weight_map"]
    for file_of_norm, match in (
        ("model-7.safetensors", "not there: model-7.safetensors .tensors model.norm"),
        ("../model-0.safetensors", "name of a file in the same folder"),
    ):
        file.write_text(json.dumps({"weight_map": right | {"model.norm.weight": file_of_norm}}))
        with pytest.raises(ValueError, match=match):
            load(tmp_path)
    for text, match in (('{"weight_map": []}', "weight_map must give"), ("{", "index.json is not JSON")):
        file.write_text(text)
        with pytest.raises(ValueError, match=match):
            load(tmp_path)
    file.unlink()
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(ValueError, match="neither model.safetensors nor .*pytorch_model.bin is a pickle"):
        load(tmp_path)


@pytest.mark.parametrize(("name", "change", "match"), [
    ("qwen2", dict(architectures=["MistralForCausalLM"]), "'MistralForCausalLM' is not supported; known: Qwen2For"),
    ("qwen3", dict(rope_scaling={"rope_type": "longrope", "factor": 2}), "'longrope' is not supported; known: def"),
    ("qwen3", dict(rope_scaling={"rope_type": "linear"}), "linear lacks factor"),
    ("llama", dict(rope_scaling={"full_attention": {}}), "expected one object"),
    ("llama", dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
    ("llama", dict(hidden_size=18), "hidden_size .18. is not a multiple"),
    ("llama", dict(quantization_config={"quant_method": "awq"}), "'awq'.*quantized"),
    ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1), "sliding_attention"),
    ("qwen2", dict(hidden_size=None), "key hidden_size is missing"),
    ("qwen2", dict(num_hidden_layers="2"), "num_hidden_layers is '2'"),
])  # fmt: skip
def test_a_config_beyond_us_is_refused(name, change, match, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | change))
    with pytest.raises(ValueError, match=match) as error:
        huggingface.read_config(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ") and "\n" not in str(error.value)


def test_what_transformers_assumes_is_assumed(tmp_path):
    def read(**raw):
        (tmp_path / "config.json").write_text(json.dumps({**COMMON, "num_attention_heads": 64, **raw}))
        return huggingface.read_config(tmp_path)

    assert read(model_type="qwen3").head_dim == 128 and read(model_type="qwen3").kv_heads == 32
    llama = read(model_type="llama", hidden_size=128, max_position_embeddings=None)
    assert (llama.head_dim, llama.kv_heads, llama.max_length, llama.rope_theta) == (2, 64, 2048, 1e4)
    windowed = dict(model_type="qwen2", hidden_size=128, use_sliding_window=True, sliding_window=8)
    assert read(**windowed).qkv_bias, "no layer reaches max_window_layers"
    for name in CONFIGS:
        assert read(**CONFIGS[name], rope_unknown=1).norm_epsilon in (1e-5, 1e-6)
    yarn = read(model_type="llama", hidden_size=128, rope_scaling={**YARN, "rope_type": "yarn", "factor": None})
    assert yarn.rope_scaling == rope.Yarn(4.0, 16)


QWEN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)


@pytest.mark.parametrize(("change", "scaling", "longest"), [
    (dict(max_position_embeddings=40960, rope_scaling=QWEN), rope.Yarn(4.0, 32768), 131072),  # Qwen3's
    (dict(max_position_embeddings=262144, rope_scaling=QWEN), rope.Yarn(4.0, 32768), 262144),
    (dict(max_position_embeddings=131072, rope_parameters=QWEN | dict(factor=None)), rope.Yarn(4.0, 32768), 131072),
    (dict(max_position_embeddings=100, rope_scaling=dict(type="yarn", factor=2.5)), rope.Yarn(2.5, 100), 250),
    (dict(max_position_embeddings=32768, rope_scaling=QWEN | dict(factor=0.5)), rope.Yarn(0.5, 32768), 32768),
    (dict(max_position_embeddings=64, rope_scaling={"type": "linear", "factor": 4.0}), rope.Linear(4.0), 64),
    (dict(max_position_embeddings=131072, rope_scaling={"rope_type": "llama3", **LLAMA3, "factor": 32.0}),
     rope.Llama3(**LLAMA3 | dict(factor=32.0)), 131072),
])  # fmt: skip
def test_yarn_extends_the_longest_sequence(change, scaling, longest):
    config = huggingface.parse_config(CONFIGS["qwen3"] | dict(rope_theta=None, rope_scaling=None) | change)
    assert (config.rope_scaling, config.max_length) == (scaling, longest)
    added = huggingface.parse_config(CONFIGS["qwen3-yarn"] | dict(rope_scaling=QWEN))
    assert (added.rope_theta, added.rope_scaling.factor) == (1e4, 4.0), "rope_theta stands in rope_parameters alone"


positive = st.floats(0.01, 1e6)
scalings = st.one_of(
    st.none(),
    st.builds(rope.Linear, positive),
    st.builds(rope.Llama3, positive, st.floats(0.5, 1), st.floats(2, 8), st.integers(1, 1 << 17)),
    st.builds(
        rope.Yarn, positive, st.integers(1, 1 << 17), st.none() | positive, st.floats(9, 64), st.floats(0.5, 8),
        st.booleans(),
    ),
)  # fmt: skip


@given(
    st.builds(
        ModelConfig, *[st.integers(1, 9)] * 4, heads=st.sampled_from([4, 8]), kv_heads=st.sampled_from([1, 2, 4]),
        head_dim=st.sampled_from([2, 6, 128]), rope_theta=st.floats(1.5, 1e7), norm_epsilon=st.floats(1e-8, 1e-3),
        qk_norm=st.booleans(), tied_embeddings=st.booleans(), rope_scaling=scalings,
    ),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=60)
def test_a_config_comes_back_as_it_was(tmp_path_factory, config, bias):
    config = dataclasses.replace(config, qkv_bias=bias and not config.qk_norm)
    raw, folder = huggingface.config_json(config), tmp_path_factory.getbasetemp()
    for without in ((), ("rope_parameters",), ("rope_scaling", "rope_theta")):
        (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k not in without}))
        assert huggingface.read_config(folder) == config
    table, factor = rope.frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    assert table.dtype == np.float32 and np.isfinite(table).all() and math.isfinite(factor)
    with pytest.raises(ValueError, match="both qk_norm and qkv_bias"):
        huggingface.config_json(dataclasses.replace(config, qk_norm=True, qkv_bias=True))
