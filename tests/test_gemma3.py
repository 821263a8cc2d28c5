"""Gemma 3 against numpy in float64, its config.json, and tokenizers against SentencePiece itself."""

import dataclasses
import io
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
from test_families import check_files, gelu, mixed, parameters, rms

from rpg_jax import parallel
from rpg_jax.data import gguf_tokenizer, load_tokenizer
from rpg_jax.models import SIZES, Model, huggingface, rope, unstack_layers
from rpg_jax.models.families import gemma3
from rpg_jax.models.lora import TARGETS, LoRA, join
from rpg_jax.sampling.paged_attention import BLOCKS
from rpg_jax.sampling.running_softmax import table_width

CONFIG = gemma3.Config(
    31, 8, 12, 4, 4, 2, 6, rope_theta=1e3, max_length=64, rope_scaling=rope.Linear(4.0), window=5, period=3,
    local_rope_theta=50.0, query_scalar=7.0,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 31, (2, 14)).astype(np.int32)


def numpy_logits(params, tokens):
    """One sequence, one position and one head at a time."""
    x = [params["embed"]["embedding"][token] * np.sqrt(8) for token in tokens]
    for index in range(4):
        w = {name: next(iter(leaf.values()))[index] for name, leaf in params["layers"].items()}
        window, theta, factor = (len(x), 1e3, 4.0) if index == 2 else (5, 50.0, 1.0)
        h = [rms(token, w["attention_norm"]) for token in x]
        heads = {name: [(token @ w[name]).reshape(-1, 6) for token in h] for name in "qkv"}
        q, k = ([[rms(head, w[f"{n}_norm"]) for head in token] for token in heads[n]] for n in "qk")
        for t in range(len(x)):
            attended = mixed(q, k, heads["v"], t, window, theta, lambda x: x / np.sqrt(7), factor)
            x[t] = x[t] + rms(attended @ w["o"], w["attention_out_norm"])
            h = rms(x[t], w["mlp_in_norm"])
            x[t] = x[t] + rms(gelu(h @ w["gate"]) * (h @ w["up"]) @ w["down"], w["mlp_out_norm"])
    return np.array([params["embed"]["embedding"] @ rms(token, params["final_norm"]["scale"]) for token in x])


def test_logits_are_those_of_numpy():
    """With adapters beside every kernel, which add nothing yet."""
    with jax.enable_x64():
        params, model, lora = parameters(CONFIG), Model(CONFIG, dtype=jnp.float64), LoRA(2, 4.0, TARGETS)
        joined = join(lora, params, lora.init(params, jax.random.key(1)))
        logits = jax.jit(lambda params: model.logits(params, model.hidden(params, TOKENS)))(joined)
        for row, tokens in zip(logits, TOKENS, strict=True):
            np.testing.assert_allclose(row, numpy_logits(params, tokens), atol=1e-5)  # rotary angles are float32


def test_embeddings_are_multiplied_by_a_rounded_root():
    config = dataclasses.replace(CONFIG, hidden_size=640)  # whose root, 25.298, is 25.25 in bfloat16
    assert gemma3.embed(config, jnp.ones((1, 1, 640), jnp.bfloat16)).max() == 25.25


def test_decoding_looks_back_as_far_as_training_does():
    """Token by token over pages, beside one pass with adapters, which add nothing yet."""
    model, length = Model(dataclasses.replace(CONFIG, layers=2, period=2)), TOKENS.shape[1]
    params = jax.tree.map(jnp.asarray, parameters(CONFIG, np.float32))
    params["layers"] = jax.tree.map(lambda leaf: leaf[:2], params["layers"])
    table, lora = jnp.arange(table_width(16, 4))[None], LoRA(2, 4.0, TARGETS)
    turns = model.turns(jnp.arange(length)[None])

    def step(pools, t):
        def attend(kind, pool, q, k, v):
            pool = BLOCKS.write(pool, k[:, 0], v[:, 0], table[0, t // 4][None], t[None] % 4)
            return BLOCKS.attend(q, pool, table, t[None], 4, kind), pool

        own = jax.tree.map(lambda x: x[:, t][:, None], turns)
        hidden, pools, _ = model.cached(unstack_layers(params), jnp.asarray(TOKENS)[:1, t][:, None], own, attend, pools)
        return pools, hidden[:, 0]

    @jax.jit
    def both(joined):
        pools = [BLOCKS.empty(model.config, jnp.float32, table.size, 4)] * 2
        return jax.lax.scan(step, pools, jnp.arange(length))[1][:, 0], model.hidden(joined, TOKENS[:1])[0]

    decoded, trained = both(join(lora, params, lora.init(params, jax.random.key(1))))
    np.testing.assert_allclose(decoded, trained, atol=1e-4)


def test_every_matrix_is_split_over_a_mesh():
    for model in (Model(SIZES["gemma3-4b"]), Model(SIZES["gemma3-270m"])):
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.shapes):
            split = parallel.sharding.spec_of(path, parallel.sharding.TRAINING) != parallel.sharding.REPLICATED
            assert split == (parallel.leaf_name(path).endswith(("kernel", "embedding"))), path
            assert leaf.dtype == jnp.float32


# As the larger sizes have it: transformers supplies the rest.
FOUR = dict(
    architectures=["Gemma3ForCausalLM"], hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
    sliding_window=1024,
)  # fmt: skip
LINEAR = dict(rope_type="linear", factor=8.0)


def test_configs_of_both_versions_of_transformers():
    newer = dict(rope_parameters=dict(full_attention=LINEAR | dict(rope_theta=1e6), sliding_attention=None))
    explicit = dict(sliding_window_pattern=6, query_pre_attn_scalar=256, rope_local_base_freq=1e4)
    layers = dict(layer_types=[*(["sliding_attention"] * 5 + ["full_attention"]) * 5, *["sliding_attention"] * 4])
    older = dict(rope_scaling=LINEAR)
    for more in (newer, older, older | explicit, older | layers):
        assert huggingface.parse_config(FOUR | more) == SIZES["gemma3-4b"]


def test_files_and_sizes_are_written_and_read(tmp_path):
    check_files(CONFIG, parameters(CONFIG, np.float32), tmp_path)
    for name in ("gemma3-270m", "gemma3-1b", "gemma3-4b"):
        assert huggingface.parse_config(json.loads(json.dumps(huggingface.config_json(SIZES[name])))) == SIZES[name]
    few = dataclasses.replace(CONFIG, layers=2)
    assert huggingface.parse_config(huggingface.config_json(few)) == few, "all of its layers are local"


@pytest.mark.parametrize(("more", "words"), [
    (dict(attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0; only None is supported"),
    (dict(hidden_activation="gelu"), "hidden_activation is 'gelu'; only 'gelu_pytorch_tanh'"),
    (dict(layer_types=["full_attention"] + ["sliding_attention"] * 33), "layer_types are .*every n-th of 34"),
    (dict(head_dim=128), "query_pre_attn_scalar is missing, and heads have 128 numbers"),
    (dict(rope_parameters=LINEAR), "rope_parameters is .*an object for each of full_attention"),
    (dict(rope_parameters=dict(sliding_attention=LINEAR)), "sliding_attention are of type 'linear'; only"),
])  # fmt: skip
def test_what_is_not_supported_is_named(more, words):
    with pytest.raises(ValueError, match=words):
        huggingface.parse_config(FOUR | more)


# SentencePiece's tokenizer.

TEXT = "the cat sat on the mat, then 12 cats sat on 345 mats; wasn't that fun? Yes! It was. " * 4
PIECES = [
    "the", " cat", " ", "  ", "   ", "     ", "\n", "\n\n", "\t", "12", "é", "日本", "😀", "ß", "<td>", "sat", "n't",
]  # fmt: skip


def trained():
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT]), model_writer=written, model_type="bpe", vocab_size=340, byte_fallback=True,
        hard_vocab_limit=False, add_dummy_prefix=False, remove_extra_whitespaces=False, pad_id=0, eos_id=1, bos_id=2,
        unk_id=3, normalization_rule_name="identity", minloglevel=2, num_threads=1,
        user_defined_symbols=["\n", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "<td>"],
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def metadata(model, **more):
    """The keys of a GGUF file, as llama.cpp writes them."""
    ids = range(model.vocab_size())
    kinds = [3 if model.is_control(i) else 2 if model.is_unknown(i) else 6 if model.is_byte(i) else 1 for i in ids]
    tokens = [model.id_to_piece(i) for i in ids]
    for i, token in enumerate(tokens):
        if token.strip("\n\u2581") == "" != token and token != "\u2581" or token == "<td>":
            kinds[i], tokens[i] = 4, token.replace("\u2581", " ")
    scores = [-1000.0 if kinds[i] in (3, 4) else model.get_score(i) for i in ids]
    keys = dict(model="llama", pre="default", tokens=tokens, token_type=kinds, scores=scores, add_space_prefix=False)
    keys |= dict(bos_token_id=2, eos_token_id=1, unknown_token_id=3, padding_token_id=0, add_bos_token=True) | more
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def test_ids_are_those_of_sentencepiece_and_other_models_are_refused(tmp_path):
    model = trained()
    for file, values in gguf_tokenizer.files(metadata(model)).items():
        (tmp_path / file).write_text(values if isinstance(values, str) else json.dumps(values))
    ours, rng = load_tokenizer(tmp_path), random.Random(0)
    texts = ["", " ", "     the  cat\n\n\nsat", "x\u00a0<td>\t", TEXT]
    texts += ["".join(rng.choices(PIECES, k=rng.randint(1, 12))) for _ in range(200)]
    for text in texts:
        assert ours.encode(text) == model.encode(text) and ours.decode(ours.encode(text)) == text
    assert ours.encode_prompt("the")[0] == ours.bos_id == 2 and (ours.eos_id, ours.pad_id) == (1, 0)
    assert ours.encode("<eos>") == model.encode("<eos>"), "text is no special token"
    for key, value, words in (("add_space_prefix", True, "is not false"), ("scores", [0.0], "or .* is missing")):
        with pytest.raises(ValueError, match=f"tokenizer.ggml.{key} {words}"):
            gguf_tokenizer.files(metadata(model, **{key: value}))
