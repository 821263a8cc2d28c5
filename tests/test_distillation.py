"""A teacher: exact gradients of two models of different sizes, and a run that learns from one without a reward."""

import dataclasses
import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from fuzzing import call
from processes import execute, metrics, succeed

from configs import distill
from rpg_jax import data
from rpg_jax.exact.targets import integrand
from rpg_jax.models import Model, ModelConfig, huggingface, quantization, token_logprobs
from rpg_jax.models.logprobs import token_logprobs_and_divergence, token_logprobs_of_two
from rpg_jax.objectives import make
from rpg_jax.objectives.divergences import full_vocabulary
from rpg_jax.storage import weights

KEY = jax.random.key(0, impl="threefry2x32")
SHAPES = [ModelConfig(vocab, width, 2 * width, 1, 2, 1, 4, qk_norm=True) for vocab, width in ((3, 4), (5, 8))]
STUDENT, TEACHER = (Model(shape, dtype=jnp.float64, scan=False) for shape in SHAPES)
TOKENS = np.array([(1, a, b) for a in range(3) for b in range(3)], np.int32)  # a prompt, then every response of two
MASK = np.array([[False, True, True]] * 9)
DIVERGENCES = ("ufkl", "js", "rkl")


def test_gradients_of_two_models_of_different_sizes_are_slopes_of_the_objective():
    """Summed over every response, off policy, at both levels and over the vocabulary, against finite differences."""
    models = enumerate((STUDENT, STUDENT, TEACHER))
    trees = [model.init(jax.random.key(seed)) for seed, model in models]
    params, drew, teacher = jax.tree.map(lambda x: np.asarray(x, np.float64), trees)
    direction = jax.tree.map(lambda x: np.random.default_rng(x.size).normal(size=x.shape), params)

    def table(model, params):  # log-probs of each history's next token, [9, 3, 3]
        logits = model.logits(params, model.hidden(params, TOKENS))[..., :3]
        return jax.nn.log_softmax(logits)[:, :2]

    def objectives(params):  # {level: {name: D}}
        log_p, log_q, log_mu = table(STUDENT, params), table(TEACHER, teacher), table(STUDENT, drew)
        picked = lambda x: jnp.take_along_axis(x, TOKENS[:, 1:, None], -1)[..., 0]  # noqa: E731
        rows, of_teacher = (jnp.exp(picked(x).sum(1)) for x in (log_p, log_q))
        visits = jnp.exp(picked(log_mu).sum(1))[:, None, None]
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        of = {name: integrand(name) for name in DIVERGENCES}
        whole = {name: jnp.sum(f(rows, of_teacher)) for name, f in of.items()}
        return {"sequence": whole, "token": {name: jnp.sum(visits * f(p, q)) for name, f in of.items()}}

    def losses(params):
        logp = partial(token_logprobs, tokens=TOKENS, mask=MASK, chunk=2)
        ours, behavior = logp(STUDENT, params), logp(STUDENT, drew)
        # The teacher's table has two more rows than the student's, which are no part of its distribution in any form.
        reference = logp(dataclasses.replace(TEACHER, ids=3), teacher)
        together = token_logprobs_of_two(STUDENT, drew, (TEACHER, teacher), TOKENS, MASK, chunk=2)
        reference = reference + 0.5 * (together[2] - reference)  # the same; were it another, no gradient would be right
        weight = jnp.exp(behavior.sum(1, keepdims=True))
        zeros, found = jnp.zeros((9, 1)), {}
        for name in DIVERGENCES:
            settings = dict(divergence=name, beta=1.0, clip="none", reduction="constant")
            common = dict(reference_logp=reference, weight=weight, denominator=1.0)
            for level in ("sequence", "token"):
                objective = make("rpg", level=level, **settings)
                found[f"{level} {name}"] = objective(ours, behavior, zeros, MASK, **common)[0]
            if name == "ufkl":
                continue
            objective = make("rpg", kl="full", **settings)
            pair = partial(full_vocabulary, objective.full_kl)
            _, full = token_logprobs_and_divergence(STUDENT, params, (TEACHER, teacher), pair, TOKENS, MASK, chunk=2)
            # A mean over responses is taken outside of the objective, whose full_kl has no weight of its own.
            found[f"full {name}"] = objective(ours, behavior, zeros, MASK, full_kl=full * weight, **common)[0]
        return found

    with jax.enable_x64():
        gradients = jax.jit(jax.jacrev(losses))(params)
        moved = lambda step: jax.tree.map(lambda x, d: x + step * d, params, direction)  # noqa: E731
        up, down = (jax.device_get(jax.jit(objectives)(moved(step))) for step in (1e-5, -1e-5))
    for key, gradient in gradients.items():
        level, name = key.split()
        level = "token" if level == "full" else level
        slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float(np.sum(np.asarray(g) * d)), gradient, direction)))
        expected = (up[level][name] - down[level][name]) / 2e-5
        assert abs(expected) > 1e-4 and slope == pytest.approx(expected, rel=1e-6), key


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With `teacher`, random weights of another size than the smoke run's policy, and its tokenizer."""
    folder = tmp_path_factory.mktemp("distillation")
    config = distill.get_config("smoke")
    settings = config.data.to_dict() | dict(directory=folder / "data")
    prepared = data.prepare(**settings, log=lambda line: None)
    (folder / "teacher").mkdir()
    shape = ModelConfig(prepared.tokenizer.vocab_size + 8, 48, 64, 2, 4, 2, 8, qk_norm=True, max_length=64)
    (folder / "teacher" / "config.json").write_text(json.dumps(huggingface.config_json(shape)))
    weights.save_safetensors(folder / "teacher", jax.jit(Model(shape).init)(KEY), 1e9)
    shutil.copyfile(prepared.tokenizer.folder / "tokenizer.model", folder / "teacher" / "tokenizer.model")
    return folder


def arguments(folder, name, **settings):
    settings = {"data.directory": folder / "data", "reference.checkpoint": folder / "teacher"} | settings
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    return "--config=configs/distill.py:smoke", f"--workdir={folder / name}", *flags


def test_a_student_learns_from_a_teacher_that_is_never_saved_and_must_stay_the_same(folder, tmp_path):
    settings = {"objective.divergence": "rkl", "objective.kl": "full", "objective.estimator": "reinforce"}
    settings |= {"warm_start.steps": 0, "learner.minibatch_prompts": 8}
    settings |= {"reference.dtype": "int8", "optimizer.learning_rate": 0.01}
    flags = arguments(folder, "run", **settings)
    succeed("train", *flags)
    run = folder / "run"
    first, last = (row for row in metrics(run) if "train/reward" in row)
    assert first["train/reward"] == last["train/reward"] == 0 and "eval/all/mean@4" in last
    assert first["train/kl_reference_full"] == pytest.approx(first["train/kl_reference_reverse"], rel=1e-3)
    assert last["train/kl_reference_reverse"] < first["train/kl_reference_reverse"]
    assert first["train/kl_reference_forward"] > 0 and 0 <= first["train/greedy_agreement"] < 1
    assert 0 < first["train/reference_entropy"] < np.log(512)
    record = json.loads((run / "checkpoints" / "2" / "record" / "metadata").read_text())
    assert all(name.startswith("state/") for name in record["leaves"])
    (folder / "teacher").rename(tmp_path / "teacher")  # the policy is exported and goes on without it
    assert call("convert", f"--workdir={run}", f"--target={tmp_path}/student", "--which=last")[0] == 0
    shutil.copytree(tmp_path / "teacher", folder / "teacher")
    tensors = safetensors.numpy.load_file(folder / "teacher" / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + np.float32(0.5)
    safetensors.numpy.save_file(tensors, folder / "teacher" / "model.safetensors")
    status, line = call("train", *flags)
    shutil.rmtree(folder / "teacher")
    (tmp_path / "teacher").rename(folder / "teacher")
    assert status == 2 and "1 of 21 arrays differ, final_norm/scale among them; restore the folder" in line


def test_a_teacher_in_8_bits_scores_as_the_weights_that_it_is_rounded_to():
    """And near to those that it was rounded from: here a log-prob moves by 0.01 nats on average."""
    model = Model(ModelConfig(64, 32, 48, 2, 4, 2, 8, tied_embeddings=False))
    params = jax.jit(model.init)(KEY)
    tokens = jax.random.randint(KEY, (8, 24), 0, 64)
    held = quantization.quantize_params(params, "int8")
    rounded = quantization.dequantized(held, jnp.float32)
    score = jax.jit(lambda tree: token_logprobs(model, tree, tokens, jnp.ones_like(tokens, bool), chunk=16))
    was, is_now, should_be = (np.asarray(score(tree)) for tree in (params, held, rounded))
    np.testing.assert_allclose(is_now, should_be, rtol=0, atol=1e-5)
    assert 1e-4 < np.abs(is_now - was).mean() < 0.03


ON_TWO_DEVICES = """
import json, jax, numpy as np
from functools import partial
from rpg_jax import parallel
from rpg_jax.models import Model, ModelConfig, quantize_params, token_logprobs_of_two
sizes = ModelConfig(60, 32, 64, 2, 4, 2, 8, qk_norm=True), ModelConfig(64, 48, 96, 2, 8, 4, 8, tied_embeddings=False)
trees = [jax.jit(Model(size).init)(jax.random.key(i)) for i, size in enumerate(sizes)]
tokens = np.random.default_rng(0).integers(0, 60, (4, 12)).astype(np.int32)

def scores(tensor, held_in):
    mesh = parallel.make_mesh(1, 1, tensor, devices=jax.devices()[:tensor])
    functions = dict(constrain=parallel.make_constrain(mesh), per_shard=parallel.make_per_shard(mesh))
    models, laid_out = [Model(size, **functions) for size in sizes], []
    for tree, held in zip(trees, (None, held_in)):
        tree = quantize_params(tree, held) if held else tree
        laid_out.append(jax.device_put(tree, parallel.shardings(mesh, tree)))
    split = [x.sharding.is_fully_replicated for x in jax.tree.leaves(laid_out) if x.ndim == 3]
    score = jax.jit(lambda a, b: token_logprobs_of_two(models[0], a, (models[1], b), tokens, tokens >= 0, chunk=5))
    return np.stack(score(*laid_out)), split

for held_in in (None, "int8"):
    (one, whole), (two, split) = scores(1, held_in), scores(2, held_in)
    print(json.dumps([float(abs(one - two).max()), float(abs(one).max()), not any(split) and len(split)]))
"""


def test_a_tensor_axis_splits_student_and_teacher_and_their_scores_stay():
    done = execute("-c", ON_TWO_DEVICES, JAX_NUM_CPU_DEVICES="2")
    assert done.returncode == 0, done.stderr[-4000:]
    plain, in_8_bits = map(json.loads, done.stdout.splitlines())
    for distance, largest, matrices in (plain, in_8_bits):
        assert distance < 2e-5 < 1 < largest and matrices >= 14


@pytest.mark.parametrize("settings, says", [
    ({"reference.mode": "iterative"}, "set reference.mode=fixed, or unset reference.checkpoint"),
    ({"reference.checkpoint": "", "reference.dtype": "float32"}, "set reference.checkpoint, or unset it"),
    ({"reference.checkpoint": "/absent"}, "reference.checkpoint=/absent is no teacher: /absent: there is no such"),
    ({"data.train_size": 60}, "has another vocabulary than the run's tokenizer"),
    ({"reference.dtype": "float8"}, "reference.dtype is 'float8'; it must be one of bfloat16, float16"),
    ({"rollout.dynamic_sampling": True, "rollout.samples": 2}, "with reward.function=none that is every group"),
    ({"reward.function": "verifier"}, "rollout.samples=1 with objective.advantage=group_mean"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_at_the_door(folder, settings, says):
    status, line = call("train", *arguments(folder, "refused", **settings))
    assert status == 2 and says in line, line


def test_a_teacher_without_weights_is_refused_before_the_warm_start(folder, tmp_path):
    shutil.copytree(folder / "teacher", tmp_path / "hollow", ignore=shutil.ignore_patterns("*.safetensors"))
    status, line = call("train", *arguments(folder, "refused", **{"reference.checkpoint": tmp_path / "hollow"}))
    assert status == 2 and "hollow" in line and not (folder / "refused").exists(), line
