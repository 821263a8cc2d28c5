"""Checkpoints that transformers makes and reads, against ours: logits, log-probs, greedy text, and the way back.

python third_party/transformers/parity.py --peer_python=VENV/bin/python

PARITY_SHAPES=gemma3 in the environment leaves out shapes whose names do not begin so.

transformers saves random models of each family in odd shapes and with each rope scaling; both sides compute on what was
saved, in float32. Then `rpg_jax.convert` writes each anew, in several files, and transformers must
read the same tensors and give the same logits, bit for bit (counts of what differs, which must be zero). At last, the
log-probs that our sampler records of conversations are those that transformers gives to the same ids.
"""

import atexit
import contextlib
import io
import os
import pathlib
import shutil
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np
import parity

LINEAR = dict(rope_type="linear", factor=4.0)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
BARE = dict(rope_type="default")
COMMON = dict(vocab_size=67, hidden_size=48, intermediate_size=80, num_hidden_layers=2, max_position_embeddings=128)

EXPERTS = dict(head_dim=12, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=20)


def shape(family, heads, kv_heads, rope, tied, theta=1e4, files=1, dtype="float32", **more):
    """One checkpoint: what its config says, how many files it is cut into, and the dtype it is saved in."""
    rope = dict(rope, rope_theta=theta)
    config = dict(COMMON, num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied, **more)
    return dict(family=family, config=dict(config, rope_parameters=rope), files=files, dtype=dtype)


def windowed(heads, kv_heads, rope, window, layers, types=None, tied=True, **more):
    """A checkpoint of Gemma 3, whose windows are shorter than the rows; types: 1 for each global layer."""
    names = "sliding_attention", "full_attention"
    more |= dict(sliding_window=window, num_hidden_layers=layers, layer_types=types and [names[kind] for kind in types])
    given = shape("Gemma3", heads, kv_heads, rope, tied, theta=1e6, pad_token_id=None, **more)
    bases = dict(zip(names, (dict(BARE, rope_theta=1e4), given["config"]["rope_parameters"]), strict=True))
    return given | dict(config=given["config"] | dict(rope_parameters=bases))


SHAPES = {
    "qwen2": shape("Qwen2", 6, 2, BARE, True, theta=1e6),
    "qwen2 untied, one kv": shape("Qwen2", 4, 1, LINEAR, False, rms_norm_eps=1e-5),
    "qwen2 wide heads": shape("Qwen2", 4, 2, YARN, False, head_dim=22, files=4),
    "qwen2 llama3": shape("Qwen2", 6, 3, LLAMA3, True, dtype="bfloat16"),
    "qwen3": shape("Qwen3", 4, 2, BARE, True, theta=1e6, head_dim=32),
    "qwen3 linear, one kv": shape("Qwen3", 6, 1, LINEAR, False, head_dim=10),
    "qwen3 yarn": shape("Qwen3", 5, 5, dict(YARN, truncate=False, beta_fast=24.0), True, head_dim=16, files=3),
    "qwen3 llama3": shape("Qwen3", 4, 2, LLAMA3, False, head_dim=12, dtype="bfloat16"),
    "llama": shape("Llama", 4, 4, BARE, False, theta=5e5, rms_norm_eps=1e-5),
    "llama llama3, one kv": shape("Llama", 6, 1, LLAMA3, True, theta=5e5, files=2),
    "llama linear": shape("Llama", 4, 2, LINEAR, False, head_dim=26, dtype="float16"),
    "llama yarn": shape("Llama", 4, 2, dict(YARN, mscale=0.7, mscale_all_dim=1.4), True, head_dim=18),
    "llama yarn factor": shape("Llama", 2, 2, dict(YARN, attention_factor=1.3, beta_slow=2.0), True),
    "qwen3 moe": shape("Qwen3Moe", 4, 2, BARE, False, theta=1e6, norm_topk_prob=True, **EXPERTS),
    "qwen3 moe tied": shape("Qwen3Moe", 6, 1, YARN, True, files=3, dtype="bfloat16", **EXPERTS),
    "gemma3 1b": windowed(4, 1, BARE, 8, 7, head_dim=16, query_pre_attn_scalar=16),
    "gemma3 4b": windowed(8, 4, LINEAR, 12, 4, types=(0, 0, 1, 0), head_dim=10, query_pre_attn_scalar=24, files=3),
    "gemma3 untied": windowed(6, 3, LINEAR, 2, 2, types=(0, 1), tied=False, head_dim=8, dtype="bfloat16"),
}
PROMPTS, LONGEST, NEW = 6, 40, 32  # batch, prompt columns, greedy tokens
TALKS = ("qwen2", "qwen3", "llama", "gemma3 4b")  # shapes that converse
GRADIENTS = ("qwen3 moe", "qwen3 moe tied", "gemma3 1b", "gemma3 4b")  # and whose gradients of all log-probs' sum
SHAPES = {name: given for name, given in SHAPES.items() if name.startswith(os.environ.get("PARITY_SHAPES", ""))}
TALKS, GRADIENTS = (tuple(name for name in names if name in SHAPES) for names in (TALKS, GRADIENTS))


def arrays():
    rng = np.random.default_rng(0)
    folder = tempfile.mkdtemp(prefix="parity-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    length = np.array([LONGEST, 1, 7, 23, 39, 12])
    tokens = rng.integers(0, COMMON["vocab_size"], (PROMPTS, LONGEST))
    return dict(folder=np.array(folder), tokens=tokens * (np.arange(LONGEST) < length[:, None]), length=length)


def place(arrays, name, suffix=""):
    return pathlib.Path(str(arrays["folder"])) / (name.replace(" ", "-").replace(",", "") + suffix)


def ours():
    given = arrays()
    return {"import": (given, imported), "export": (given, exported), "conversation": (given, conversed)}


def imported(arrays):
    """Of each checkpoint as transformers saved it; leaves an export of ours beside it."""
    import jax
    import jax.numpy as jnp

    from rpg_jax.models import Model, huggingface, token_logprobs, unstack_layers
    from rpg_jax.sampling import Decoding, Sampling, generate, prompts_to_answer
    from rpg_jax.storage import weights

    found, tokens = {}, jnp.asarray(arrays["tokens"], jnp.int32)
    mask = jnp.arange(LONGEST) < jnp.asarray(arrays["length"])[:, None]
    sizes = dict(samples=1, max_new=NEW)
    prompts = prompts_to_answer(tokens, arrays["length"], np.arange(PROMPTS), **sizes)
    for name in SHAPES:
        model = Model(huggingface.read_config(place(arrays, name)))
        params = weights.load(place(arrays, name), jax.eval_shape(model.init, jax.random.key(0)))
        logits = jax.jit(lambda p, model=model: model.logits(p, model.hidden(p, tokens)))(params)
        found[f"{name}: logits"] = logits * mask[..., None]
        found[f"{name}: log-probs"] = token_logprobs(model, params, tokens, mask)
        if name in GRADIENTS:
            gradient = jax.grad(lambda p, model=model: token_logprobs(model, p, tokens, mask).sum())(params)
            found[f"{name}: gradients"] = flat(huggingface_tensors(gradient))
        rollout = generate(
            model,
            unstack_layers(params),
            prompts,
            key=jax.random.key(0, impl="threefry2x32"),
            step=0,
            sampling=Sampling.make(temperature=0.0),
            decoding=Decoding(4),
            **sizes,
        )
        responses = np.asarray(rollout.tokens)[np.asarray(rollout.loss_mask)]
        found[f"{name}: greedy"] = responses.reshape(PROMPTS, NEW)
        if name in TALKS:
            converse(model, unstack_layers(params), prompts, place(arrays, name, ".npz"))
        convert(place(arrays, name), place(arrays, name, ".exported"), "--max_shard_gb=5e-5")
    return found


def huggingface_tensors(tree):
    """A tree as Hugging Face's tensors, {name: array}."""
    import jax

    from rpg_jax import parallel
    from rpg_jax.models import huggingface

    leaves = {parallel.leaf_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    places = huggingface.places(leaves)
    tensors = {name: leaves[place.leaf][place.index] for name, place in places.items()}
    return {name: tensor.T if places[name].transposed else tensor for name, tensor in tensors.items()}


def flat(tensors):
    """All numbers of {name: tensor}, in the order of the names."""
    return np.concatenate([np.ravel(tensors[name]) for name in sorted(tensors)])


def their_gradients(model, tokens, mask):
    """The same of a model of transformers 5, which in memory stacks experts and joins their gates and ups."""
    logp = model(tokens, attention_mask=mask.long()).logits.log_softmax(-1)[:, :-1]
    (logp.gather(-1, tokens[:, 1:, None])[..., 0] * mask[:, 1:]).sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        module, _, last = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        if not module.endswith("experts"):
            found[name] = parameter.grad.numpy()
            continue
        for expert, kernel in enumerate(parameter.grad.numpy()):
            for part, rows in zip(parts[last], np.split(kernel, len(parts[last])), strict=True):
                found[f"{module}.{expert}.{part}.weight"] = rows
    return found


class Talk:
    """Answers each turn of six tokens by what depends on its last one."""

    stops = None

    def __call__(self, rows, seconds):
        from rpg_jax.sampling.turns import Answer

        prompts = [LONGEST, 1, 7, 23, 39, 12]
        answers = []
        for row in rows:
            said = len(row.tokens) - prompts[row.number]
            observation = [(row.tokens[-1] + n) % COMMON["vocab_size"] for n in range(3)] if said else []
            limit = said + len(observation) + 6
            answers.append(Answer(row.number, observation, limit, ended=limit > NEW))
        return answers


def converse(model, params, prompts, file):
    """Draws a conversation from each prompt; writes its ids, which are the policy's, and their log-probs."""
    import jax

    from rpg_jax.sampling import Decoding, Sampling, generate

    settings = dict(samples=1, max_new=NEW, sampling=Sampling.make(), decoding=Decoding(4), conversation=Talk())
    rows = generate(model, params, prompts, key=jax.random.key(1, impl="threefry2x32"), step=0, **settings)
    np.savez(file, tokens=rows.tokens, mask=rows.loss_mask, logp=rows.model_logp)


def conversed(arrays):
    return {name: np.load(place(arrays, name, ".npz"))["logp"] for name in TALKS}


def their_conversation(arrays):
    import torch
    import transformers

    found = {}
    for name in TALKS:
        model = transformers.AutoModelForCausalLM.from_pretrained(place(arrays, name), dtype=torch.float32).eval()
        with np.load(place(arrays, name, ".npz")) as rows:
            tokens, mask = torch.from_numpy(rows["tokens"]).long(), torch.from_numpy(rows["mask"])
        with torch.inference_mode():  # padding is on the right: causal attention keeps it out
            logp = model(tokens).logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
        assert (mask.sum(1) > 12).all() and (mask[:, :-1] & ~mask[:, 1:]).any(1).all()  # turns and observations
        found[name] = np.pad((logp * mask[:, 1:]).numpy(), ((0, 0), (1, 0)))
    return found


def exported(arrays):
    """What must differ: nothing."""
    return {f"{name}: {what}": np.zeros(()) for name in SHAPES for what in ("tensors", "logits")}


def convert(source, target, *more):
    from absl.testing import flagsaver

    from rpg_jax import convert as command
    from rpg_jax.run import cli

    with contextlib.redirect_stdout(io.StringIO()), flagsaver.flagsaver():
        try:
            cli.run(command.main, ["convert", f"--source={source}", f"--target={target}", *more])
        except SystemExit as left:
            if left.code:
                raise


def their_import(arrays):
    import torch
    import transformers

    found, tokens = {}, torch.from_numpy(arrays["tokens"])
    mask = torch.arange(LONGEST) < torch.from_numpy(arrays["length"])[:, None]
    left = torch.stack([row.roll(int(LONGEST - n)) for row, n in zip(tokens, arrays["length"], strict=True)])
    left_mask = torch.arange(LONGEST) >= LONGEST - torch.from_numpy(arrays["length"])[:, None]
    for seed, (name, given) in enumerate(SHAPES.items()):
        text = "Text" if given["family"] == "Gemma3" else ""
        config = getattr(transformers, f"{given['family']}{text}Config")(**given["config"])
        torch.manual_seed(seed)
        model = getattr(transformers, f"{given['family']}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():  # also norms, made as ones, and biases, made as zeros
                parameter.add_(torch.randn_like(parameter) * 0.2)
        model = model.to(getattr(torch, given["dtype"]))
        size = sum(p.numel() * p.element_size() for p in model.parameters()) // given["files"] + 1
        model.save_pretrained(place(arrays, name), max_shard_size=size if given["files"] > 1 else "5GB")
        model = transformers.AutoModelForCausalLM.from_pretrained(place(arrays, name), dtype=torch.float32).eval()
        with torch.inference_mode():
            logits = model(tokens, attention_mask=mask.long()).logits
            logp = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
            text = model.generate(
                left,
                attention_mask=left_mask.long(),
                do_sample=False,
                max_new_tokens=NEW,
                eos_token_id=None,
                pad_token_id=0,
            )
        if name in GRADIENTS:
            found[f"{name}: gradients"] = flat(their_gradients(model, tokens, mask))
        found[f"{name}: logits"] = (logits * mask[..., None]).numpy()
        found[f"{name}: log-probs"] = np.pad((logp * mask[:, 1:]).numpy(), ((0, 0), (1, 0)))
        found[f"{name}: greedy"] = text[:, LONGEST:].numpy()
    return found


def their_export(arrays):
    import safetensors.torch
    import torch
    import transformers

    def read(folder):
        files = sorted(folder.glob("*.safetensors"))
        tensors = {name: x for file in files for name, x in safetensors.torch.load_file(file).items()}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert model.dtype == next(iter(tensors.values())).dtype
        with torch.inference_mode():
            return tensors, model.float()(torch.from_numpy(arrays["tokens"])).logits

    found = {}
    for name in SHAPES:
        (before, logits), (after, logits_after) = (read(place(arrays, name, suffix)) for suffix in ("", ".exported"))
        same = {n for n in before.keys() & after.keys() if before[n].dtype == after[n].dtype}
        same = {n for n in same if torch.equal(before[n], after[n])}
        found[f"{name}: tensors"] = np.float64(len((before.keys() | after.keys()) - same))
        found[f"{name}: logits"] = (logits != logits_after).sum().double().numpy()
    return found


if __name__ == "__main__":
    theirs = {"import": their_import, "export": their_export, "conversation": their_conversation}
    parity.main(__file__, "transformers", ours, theirs, tolerance=1e-4)
