"""Low-rank adapters: what they compute, what is trained and saved, resuming, exports, and what is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import real_path
import safetensors.numpy
from fuzzing import call
from processes import metrics, succeed

from rpg_jax import objectives, parallel
from rpg_jax.models import LoRA, Model, ModelConfig, join, merge
from rpg_jax.rewards import scorer
from rpg_jax.run import build
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.packing import Plan
from rpg_jax.training.update import init_state, make_update
from rpg_jax.types import Policy, TrainBatch

SHAPE = ModelConfig(64, 16, 32, 2, 4, 2, 8, qk_norm=True, max_length=64)
KEY = jax.random.key(0, impl="threefry2x32")
ADAPTERS = LoRA(4, 8.0, ("q", "o", "down"))
ROWS, LENGTH = 4, 10


def trees(lora=ADAPTERS, seed=1):
    """(frozen weights, adapters whose product is not zero)."""
    params = Model(SHAPE).init(KEY)
    adapters = lora.init(params, KEY)
    for index, adapter in enumerate(adapters["layers"].values()):
        adapter["lora_b"] = 0.1 * jax.random.normal(jax.random.fold_in(KEY, seed + index), adapter["lora_b"].shape)
    return params, adapters


def tokens():
    return np.random.default_rng(0).integers(0, SHAPE.vocab_size, (ROWS, LENGTH)).astype(np.int32)


hidden = jax.jit(Model(SHAPE, lora=ADAPTERS).hidden)


def test_the_first_policy_is_the_base_model():
    params, _ = trees()
    adapters = ADAPTERS.init(params, KEY)
    joined, merged = join(ADAPTERS, params, adapters), merge(ADAPTERS, params, adapters)
    np.testing.assert_array_equal(hidden(joined, tokens()), hidden(params, tokens()))
    jax.tree.map(np.testing.assert_array_equal, merged, params)
    bound = 16**-0.5  # of the 16 inputs of q
    assert 0.9 * bound < np.abs(adapters["layers"]["q"]["lora_a"]).max() <= bound


def test_adapters_beside_the_kernels_compute_what_merged_kernels_do():
    params, adapters = trees()
    joined, merged = join(ADAPTERS, params, adapters), merge(ADAPTERS, params, adapters)
    pair = (adapters["layers"]["down"][name] for name in ("lora_a", "lora_b"))
    down = params["layers"]["down"]["kernel"] + 2.0 * np.einsum("lir,lro->lio", *pair)
    np.testing.assert_allclose(merged["layers"]["down"]["kernel"], down, rtol=1e-5, atol=1e-7)
    assert merged["layers"]["up"] is params["layers"]["up"] and merged["embed"] is params["embed"]
    np.testing.assert_allclose(hidden(joined, tokens()), hidden(merged, tokens()), atol=2e-5)
    assert np.abs(hidden(merged, tokens()) - hidden(params, tokens())).max() > 0.1


def test_an_update_takes_the_gradient_of_the_adapters_and_leaves_the_base():
    mesh, optimizer = parallel.make_mesh(devices=jax.devices()[:1]), make_optimizer("adamw", learning_rate=1e-2)
    functions = dict(constrain=parallel.make_constrain(mesh), per_shard=parallel.make_per_shard(mesh))
    params, adapters = trees()
    ones = np.ones((ROWS, LENGTH), np.float32)
    mask = np.arange(LENGTH)[None] >= np.arange(1, ROWS + 1)[:, None]
    advantage = np.cos(np.arange(ROWS, dtype=np.float32))[:, None]
    batch = TrainBatch(tokens(), np.full(ROWS, LENGTH, np.int32), mask, -ones, -ones, advantage, ones)

    def loss(adapters):  # maximum likelihood, weighted by advantages, from the merged model's full logits
        whole = Model(SHAPE)
        merged = merge(ADAPTERS, params, adapters)
        logp = jax.nn.log_softmax(whole.logits(merged, whole.hidden(merged, batch.tokens)))[:, :-1]
        picked = jnp.take_along_axis(logp, batch.tokens[:, 1:, None], -1)[..., 0]
        return -jnp.sum(picked * batch.advantage * mask[:, 1:]) / mask.sum()

    gradient = jax.jit(jax.grad(loss))(adapters)
    frozen = jax.device_get(params)
    base = Policy(Model(SHAPE), params, jnp.int32(0))
    for scan in (True, False):
        model = Model(SHAPE, scan=scan, remat="full", lora=ADAPTERS, **functions)
        state = init_state(optimizer, mesh, jax.tree.map(jnp.copy, adapters))
        update = make_update(
            model, objectives.make("reinforce"), optimizer, mesh, state, rows=2, temperature=1.0, clip_norm=1e9,
            logprob_chunk=4,
        )  # fmt: skip
        state, _ = update(state, batch, Plan(jnp.int32(2), None), {"base": base})
        first_moment = jax.tree.map(lambda x: x / (1 - 0.9), state.opt_state[0].mu)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), first_moment, gradient)
        jax.tree.map(np.testing.assert_array_equal, base.params, frozen)
    trained = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)}
    assert len(trained) == 6 and jax.tree.structure(state.opt_state[0].mu) == jax.tree.structure(state.params)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    real_path.write_checkpoint(folder / "base", real_path.write_sets(folder, names=("train", "heldout")))
    return folder


def arguments(folder, name, *more):
    """Of a run of two steps with adapters, on the sets in a folder."""
    settings = dict(
        steps=2, seed=1, **{"model.checkpoint": folder / "base", "model.scan": True},
        **{"model.lora.rank": 2, "model.lora.targets": "q,up", "warm_start.steps": 1},
        **{"optimizer.learning_rate": 0.05, "optimizer.warmup_steps": 0, "checkpoint.every": 1},
        **{"optimizer.name": "schedule_free_adamw", "reference.mode": "fixed", "objective.beta": 0.1},
        **{"data.train": folder / "train.parquet", "data.heldout": f"('{folder}/heldout.parquet',)"},
        **{"data.tokenizer": folder / "base", "rollout.max_prompt": 300, "rollout.max_new": 8},
    )  # fmt: skip
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    return "--config=configs/word_problems.py:smoke", f"--workdir={folder / name}", *flags, *more


@pytest.fixture(scope="module")
def finished(folder):
    succeed("train", *arguments(folder, "whole"))
    return folder / "whole"


def test_checkpoints_hold_adapters_only_and_a_run_resumes_bit_for_bit(folder, finished):
    saved = sorted((finished / "checkpoints").glob("*/record/metadata"))[-1]
    leaves = json.loads(saved.read_text())["leaves"]
    assert all("lora_" in name for name in leaves if name.startswith(("state/params/", "reference/params/")))
    assert [name for name in leaves if name.startswith(("frozen", "checksums"))] == ["checksums/base"]
    shutil.copytree(finished, folder / "resumed")
    shutil.rmtree(folder / "resumed" / "checkpoints" / "2")
    succeed("train", *arguments(folder, "resumed"))
    assert metrics(folder / "resumed") == metrics(finished)
    assert metrics(finished)[-1]["train/kl_reference_k3"] > 0, "the fixed reference is not the policy any more"


def test_a_base_that_has_changed_is_refused(folder, finished):
    moved = folder / "base-as-it-was"
    shutil.copytree(folder / "base", moved)
    file = folder / "base" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"] + 1e-3
    safetensors.numpy.save_file(tensors, file)
    try:
        status, line = call("convert", f"--workdir={finished}", f"--target={folder}/never")
    finally:
        shutil.rmtree(folder / "base")
        moved.rename(folder / "base")
    assert status == 2 and "1 of 13 arrays differ, layers/up/kernel among them" in line


def test_exports_are_the_merged_model_and_the_adapters_as_peft_names_them(folder, finished, monkeypatch):
    """An export needs no problems and no workers."""
    monkeypatch.setattr(build, "build_data", None)
    monkeypatch.setattr(scorer, "Pool", None)
    for to, target in (("huggingface", "merged"), ("peft", "adapters")):
        arguments = f"--workdir={finished}", f"--target={folder / target}", f"--to={to}", "--which=last"
        assert call("convert", *arguments) == (0, "")
    merged, base = (safetensors.numpy.load_file(folder / name / "model.safetensors") for name in ("merged", "base"))
    adapters = safetensors.numpy.load_file(folder / "adapters" / "adapter_model.safetensors")
    described = json.loads((folder / "adapters" / "adapter_config.json").read_text())
    assert described["target_modules"] == ["q_proj", "up_proj"] and described["r"] == 2 and len(adapters) == 8
    for name in base:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in adapters:
            np.testing.assert_array_equal(merged[name], base[name])
            continue
        delta = adapters[f"{module}.lora_B.weight"] @ adapters[f"{module}.lora_A.weight"]
        assert np.abs(delta).max() > 1e-3
        expected = base[name] + described["lora_alpha"] / described["r"] * delta
        np.testing.assert_allclose(merged[name], expected, rtol=1e-5, atol=1e-6)
    status, line = call("convert", f"--source={folder / 'base'}", f"--target={folder / 'no'}", "--to=peft")
    assert status == 2 and "--to=peft writes the adapters of a run" in line


@pytest.mark.parametrize("flag, says", [
    ("rank=-1", "model.lora.rank is -1; it must be at least 0 and whole"),
    ("targets=q,router", "q,router; expected some of q,k,v,o,gate,up,down"),
    ("alpha=0.0", "model.lora.alpha is 0.0; it must be above 0 and finite"),
    ("rank=2 --config.model.checkpoint=", "set model.checkpoint, or model.lora.rank=0"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_at_the_door(folder, flag, says):
    status, line = call("train", *arguments(folder, "refused", *f"--config.model.lora.{flag}".split()))
    assert status == 2 and says in line
