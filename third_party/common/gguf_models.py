"""Small random models as GGUF files, by the gguf package's own writer."""

import json

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, LAYERS = 256, 4, 2, 2  # rows of 256 numbers hold a block of every quantization
WINDOW = 8  # of Gemma 3
HEAD_DIM = {"llama": 64, "qwen2": 64, "qwen3": 128, "gemma3": 256}  # transformers takes 128 for any Qwen3
ARCHITECTURES = tuple(HEAD_DIM)
TEXT = "the cat sat on the mat, then 12 cats sat on 345 mats; wasn't that café fun?\n\n  Yes!\tIt was. "


def quantizations() -> list[str]:
    """The names of those that the package dequantizes."""
    names = []
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
            names.append(kind.name)
        except NotImplementedError:
            pass
    return names


def vocabulary(pre="smollm") -> dict:
    """The keys of a byte-level BPE tokenizer: bytes, merges learnt on `TEXT`, and special tokens."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([TEXT] * 3, trainer)
    ids = model.get_vocab()
    merges = [" ".join(pair) for pair in json.loads(model.to_str())["model"]["merges"]]
    tokens = [*sorted(ids, key=ids.get), "<tool>", "[PAD]"]
    kinds = [3] * 3 + [1] * (len(ids) - 3) + [4, 5]
    return dict(model="gpt2", pre=pre, tokens=tokens, token_type=kinds, merges=merges) | dict(
        bos_token_id=1, eos_token_id=2, padding_token_id=2, unknown_token_id=0, add_bos_token=False
    )


def write(file, architecture="llama", quantization="F32", tied=False, tokenizer=None, more=(), tensors=(), seed=0):
    """Writes a model with matrices of one quantization.

    Args:
      tokenizer: the keys after `tokenizer.ggml.`; those of `vocabulary` if None.
      more: {key of the metadata: number or text}, in place of what would be written; tensors: {name: array} likewise.
    """
    rng, kind = np.random.default_rng(seed), gguf.GGMLQuantizationType[quantization]
    tokenizer = vocabulary() if tokenizer is None else tokenizer
    vocab = len(tokenizer["tokens"])
    head_dim = HEAD_DIM[architecture]
    metadata = {
        "context_length": 512, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.key_length": head_dim, "attention.value_length": head_dim,
        "rope.dimension_count": head_dim, "rope.freq_base": 10000.0,
    }  # fmt: skip
    metadata |= {"attention.sliding_window": WINDOW} if architecture == "gemma3" else {}
    metadata = {f"{architecture}.{key}": value for key, value in metadata.items()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    metadata |= {
        "general.name": "random",
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    writer = gguf.GGUFWriter(file, dict(more).pop("general.architecture", architecture))
    for key, value in (metadata | dict(more)).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value) if key != "general.architecture" else None
        else:
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    matrices = {"token_embd": (vocab, HIDDEN)} | ({} if tied else {"output": (vocab, HIDDEN)})
    vectors = {"output_norm.weight": HIDDEN}
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        q, kv = HEADS * head_dim, KV_HEADS * head_dim
        matrices |= {f"{name}attn_q": (q, HIDDEN), f"{name}attn_k": (kv, HIDDEN), f"{name}attn_v": (kv, HIDDEN)}
        matrices |= {f"{name}attn_output": (HIDDEN, q)}
        matrices |= {f"{name}ffn_{part}": (HIDDEN, HIDDEN) for part in ("gate", "up", "down")}
        vectors |= {f"{name}attn_norm.weight": HIDDEN, f"{name}ffn_norm.weight": HIDDEN}
        if architecture == "qwen2":
            vectors |= {f"{name}attn_q.bias": q, f"{name}attn_k.bias": kv, f"{name}attn_v.bias": kv}
        if architecture == "gemma3":
            vectors |= {f"{name}post_attention_norm.weight": HIDDEN, f"{name}post_ffw_norm.weight": HIDDEN}
        if architecture in ("qwen3", "gemma3"):
            vectors |= {f"{name}attn_q_norm.weight": head_dim, f"{name}attn_k_norm.weight": head_dim}
    vectors = {name: (1 + 0.2 * rng.standard_normal(size)).astype(np.float32) for name, size in vectors.items()}
    for name, array in (vectors | dict(tensors)).items():
        writer.add_tensor(name, array)
    for name, shape in matrices.items():
        writer.add_tensor(f"{name}.weight", _packed(rng, shape, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _packed(rng, shape, kind):
    """Random numbers, packed. The package does not pack some kinds: of these it is random blocks of small numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        return gguf.quantize((0.06 * rng.standard_normal(shape)).astype(np.float32), kind)
    except NotImplementedError:
        pass
    blocks, wanted = np.empty((0, size), np.uint8), shape[0] * shape[1] // block
    # Equal rows of the vocabulary matrix would tie: any of them is the greedy token. A row of one block has its own.
    distinct = min(wanted, 512 if block == shape[1] else 64)
    with np.errstate(all="ignore"):
        while len(blocks) < distinct:
            drawn = rng.integers(0, 256, (4096, size), np.uint8)
            values = gguf.dequantize(drawn, kind)
            small = np.isfinite(values).all(1) & (np.abs(values).max(1) < 0.3) & (np.abs(values).max(1) > 0.01)
            blocks = np.concatenate([blocks, drawn[small]])
    return blocks[rng.permutation(max(wanted, len(blocks)))[:wanted] % len(blocks)].reshape(shape[0], -1)
