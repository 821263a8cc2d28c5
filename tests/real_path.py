"""A small Hugging Face checkpoint and sets in the paper's format, for the tests of what reads them."""

import json
import pathlib
import sys

import jax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rpg_jax.data.templates import named
from rpg_jax.models import Model, ModelConfig, huggingface
from rpg_jax.storage import weights

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "third_party" / "transformers"))
import word_problems  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_sets(folder, names=("dapo-math-17k", "aime-2024", "aime25"), size=8):
    """`NAME.parquet` of `size` word problems each, every row twice; no problem is in two sets."""
    rows = word_problems.distinct(size * len(names))
    for index, name in enumerate(names):
        own = rows[index * size : (index + 1) * size]
        word_problems.write(folder / f"{name}.parquet", own, named("paper"), repeats=2)
    return [named("paper")(text) + solution for text, solution, _ in rows]


def byte_level(texts, size, special):
    """A byte-level BPE tokenizer of `size` tokens trained on the texts; the special ones are the first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = dict(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(**options))
    return tokenizer


def write_checkpoint(folder, texts, layers=2):
    """A random Qwen3 with a byte-level tokenizer trained on the texts, as Hugging Face lays them out."""
    folder.mkdir(parents=True)
    tokenizer = byte_level(texts, 400, SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shape = ModelConfig(tokenizer.get_vocab_size() + 8, 16, 32, layers, 4, 2, 8, qk_norm=True, max_length=16384)
    (folder / "config.json").write_text(json.dumps(huggingface.config_json(shape)))
    weights.save_safetensors(folder, jax.jit(Model(shape).init)(jax.random.key(0)), 1e9)
