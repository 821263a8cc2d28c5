"""Adapters that ours writes, as Hugging Face's peft loads them: logits of a base model with them, in float32.

python third_party/peft/parity.py --peer_python=VENV/bin/python

Random models of each family with random adapters on some or all kernels of a layer. Ours computes with adapters beside
the kernels, as in training, and with merged kernels, as in sampling; peft with its own modules around transformers'.
"""

import atexit
import contextlib
import io
import json
import math
import pathlib
import shutil
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np
import parity

SHAPE = dict(vocab_size=67, hidden_size=48, mlp_size=80, layers=3, heads=4, kv_heads=2, head_dim=16, max_length=128)
CASES = {  # name -> shape, rank, alpha, targets
    "qwen2": (dict(SHAPE, qkv_bias=True), 4, 8.0, ("q", "v")),
    "qwen3": (dict(SHAPE, qk_norm=True), 3, 10.0, ("o", "gate", "up", "down")),
    "llama": (dict(SHAPE, tied_embeddings=False), 16, 16.0, ("q", "k", "v", "o", "gate", "up", "down")),
}


def ours():
    folder = tempfile.mkdtemp(prefix="peft-parity-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    work = {}
    for seed, name in enumerate(CASES):
        tokens = np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], (4, 24))
        given = dict(folder=np.array(f"{folder}/{name}"), tokens=tokens)
        logits = computed(pathlib.Path(f"{folder}/{name}"), tokens, *CASES[name])
        work[name] = given, lambda _, logits=logits: logits
    return work


def computed(folder, tokens, shape, rank, alpha, targets):
    """Writes the base model and its adapters into a folder; returns logits of both ways to compute with them."""
    import jax

    from rpg_jax.models import LoRA, Model, ModelConfig, huggingface, join, merge
    from rpg_jax.storage import weights

    key, lora = jax.random.key(0), LoRA(rank, alpha, targets)
    model = Model(ModelConfig(**shape), lora=lora)
    params = model.init(key)
    adapters = lora.init(params, key)
    for index, adapter in enumerate(adapters["layers"].values()):  # B is zero at first
        adapter["lora_b"] = 0.2 * jax.random.normal(jax.random.fold_in(key, index), adapter["lora_b"].shape)
    for place in ("base", "adapters"):
        (folder / place).mkdir(parents=True)
    with contextlib.redirect_stderr(io.StringIO()):  # progress
        weights.save_safetensors(folder / "base", params, math.inf)
        weights.save_safetensors(folder / "adapters", adapters, math.inf, name="adapter_model")
    (folder / "base" / "config.json").write_text(json.dumps(huggingface.config_json(model.config)))
    described = huggingface.adapter_config(lora, str(folder / "base"))
    (folder / "adapters" / "adapter_config.json").write_text(json.dumps(described))
    logits = jax.jit(lambda tree: model.logits(tree, model.hidden(tree, tokens)))
    return {"beside": logits(join(lora, params, adapters)), "merged": logits(merge(lora, params, adapters))}


def theirs(arrays):
    import peft
    import torch
    import transformers

    folder = str(arrays["folder"])
    base = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, f"{folder}/adapters").eval()
    tokens = torch.from_numpy(arrays["tokens"])
    with torch.inference_mode():
        beside = model(tokens).logits.numpy()
        merged = model.merge_and_unload()(tokens).logits.numpy()
    return {"beside": beside, "merged": merged}


if __name__ == "__main__":
    parity.main(__file__, "peft", ours, dict.fromkeys(CASES, theirs), tolerance=1e-5)
