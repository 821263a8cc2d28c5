"""The paper's experiments: every variant builds, with the published hyperparameters; its scores map both ways."""

import csv
import itertools
import pathlib
import types

import pytest

from configs import paper
from rpg_jax.run import build

ROOT = pathlib.Path(__file__).parents[1]
EVERY = list(itertools.product(paper.MODELS, paper.OBJECTIVES, paper.CONTEXTS))


def run_of(config, monkeypatch):
    """What `build` makes of a config, without the weights and the data that are not here."""
    problems = types.SimpleNamespace(problems=lambda split: [split], tokenizer=None, tasks=())
    monkeypatch.setattr(build, "build_data", lambda config, log: problems)
    model = types.SimpleNamespace(config=None, dtype="bfloat16", attention=None)
    monkeypatch.setattr(build, "build_model", lambda *_, **__: model)
    monkeypatch.setattr(build, "Scorer", lambda **settings: settings)
    return build.build_run(config)


def test_every_variant_builds_with_the_published_hyperparameters(monkeypatch):
    for model, objective, context in EVERY:
        config = paper.get_config(f"{model},{objective},{context}")
        run = run_of(config, monkeypatch)
        grpo, response = objective == "grpo", {"2k": 2048, "4k": 4096, "8k": 8192}[context]
        loop, rollout, settings = run.loop, run.rollout, run.objective.settings
        assert (loop.steps, loop.prompts, loop.samples, loop.minibatch_prompts, loop.epochs) == (400, 512, 16, 32, 1)
        assert (rollout.max_new, rollout.temperature, loop.evaluate_every, config.evaluation.k) == (response, 1, 10, 32)
        assert rollout.fresh_prompts == (512 if grpo else 3 * 512) and rollout.dynamic_sampling != grpo
        assert (rollout.overlong_buffer, rollout.overlong_factor) == (0 if grpo else response // 4, 1.0)
        assert run.reference.mode == ("fixed" if grpo else "iterative")
        assert config.reward.scale == "signed" and run.objective.reduction == "token_mean"
        assert settings["beta"] == {"grpo": 1e-3, "dapo": 0.0}.get(objective, 1e-4)
        assert (settings["clip_low"], settings["clip_high"]) == (0.2, 0.2 if grpo else 0.28)
        optimizer = config.optimizer
        assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == ("adamw", 1e-6, 0.1)
        assert (optimizer.warmup_steps, optimizer.decay, optimizer.clip_norm) == (160, None, 1.0)
        assert config.model.checkpoint.partition("/")[2].lower().removesuffix("-instruct") == model
        assert config.data.train == "data/dapo-math-17k"
        assert config.data.heldout == ("data/aime24", "data/aime25", "data/amc23") and config.warm_start.steps == 0
        if objective.startswith("rpg"):
            reinforce = "reinforce" in objective
            assert (settings["divergence"], settings["advantage"]) == (objective.split("-")[-1], "group_mean")
            assert settings["clip"] == ("rpg" if reinforce else "dual") and settings["clip_c"] == 10
            assert settings["estimator"] == ("reinforce" if reinforce else "differentiable")
        else:
            advantage = {"reinforce++": "whitened_return", "reinforce++-baseline": "whitened_group_mean"}
            assert settings["advantage"] == advantage.get(objective, "group_mean_std")


@pytest.mark.parametrize("model", paper.MODELS)
def test_as_released_rpg_reinforce_is_one_algorithm_without_a_kl(monkeypatch, model):
    """DAPO's actor without division by the deviation, for every divergence, at half the learning rate."""
    names = "fkl", "rkl", "ufkl", "urkl"
    configs = [paper.get_config(f"{model},rpg-reinforce-{name},4k,as-released") for name in names]
    assert len({config.to_json() for config in configs}) == 1 and configs[0].optimizer.learning_rate == 5e-7
    run = run_of(configs[0], monkeypatch)
    assert (run.objective.beta, run.objective.divergence, run.objective.advantage) == (0.0, None, "group_mean")
    settings = run.objective.settings
    bounds = (settings["clip_low"], settings["clip_high"], settings["clip_c"])
    assert bounds == (0.2, 0.28, 10.0) and settings["estimator"] == "differentiable"
    dapo = run_of(paper.get_config(f"{model},dapo,4k,as-released"), monkeypatch).objective
    different = {key for key, value in settings.items() if dapo.settings[key] != value}
    assert different == {"advantage"} and dapo.advantage == "group_mean_std"
    for name in names:
        config = paper.get_config(f"{model},rpg-{name},4k,as-released,schedule-free")
        objective = run_of(config, monkeypatch).objective
        assert (objective.divergence, objective.beta, config.optimizer.learning_rate) == (name, 1e-4, 1e-6)
        assert objective.settings["clip"] == "dual_reward" and objective.advantage == "group_mean"
    for name in ("grpo", "dapo", "reinforce++-baseline", "rpg-urkl"):  # 5e-7 is RPG-REINFORCE's alone
        assert paper.get_config(f"{model},{name},4k,schedule-free").optimizer.learning_rate == 1e-6


@pytest.mark.parametrize("model, learning_rate", [("qwen3-4b", 1e-6), ("qwen2.5-7b", 5e-7)])
def test_options(monkeypatch, model, learning_rate):
    config = paper.get_config(f"{model},rpg-reinforce-urkl,4k,schedule-free,clip-0.1,fixed,minerva-olympiad")
    run = run_of(config, monkeypatch)
    assert (config.optimizer.name, config.optimizer.learning_rate) == ("schedule_free_adamw", learning_rate)
    assert (run.objective.settings["clip_low"], run.objective.settings["clip_high"]) == (0.1, 0.1)
    assert run.reference.mode == "fixed" and config.data.heldout[3:] == ("data/minerva", "data/olympiadbench")
    assert paper.parse(f"{model},grpo,4k,iterative,clip-0.2-0.28")[4:6] == ("clip-0.2-0.28", "iterative")


def test_every_published_score_belongs_to_a_variant_and_back():
    rows = paper.scores()
    assert len(rows) == 106 and {row.table for row in rows} == {3, 5, 6, 7, 8}
    for row in rows:
        assert row in paper.published(f"{row.variant},minerva-olympiad")
    for model, objective, context in EVERY:
        variant = f"{model},{objective},{context}"
        found = paper.published(f"{variant},minerva-olympiad")
        assert {row.variant for row in found} <= {variant}
        assert paper.published(f"{variant},adamw") == [row for row in found if row.table != 7]
        assert not paper.published(f"{variant},schedule-free")
    assert [row.table for row in paper.published("qwen3-4b,dapo,4k,minerva-olympiad")] == [5, 5, 5, 7, 7]
    odd = [row for row in rows if row.last > row.best]
    assert [(row.table, row.method, row.benchmark, bool(row.note)) for row in odd] == [(3, "RPG-URKL", "AIME25", True)]
    path = ROOT.parent / "shared/data/published_scores.csv"
    if path.exists():
        with open(path) as file:
            assert [tuple(row.values()) for row in csv.DictReader(file)] == [
                (str(r.table), r.model, r.context, r.method, r.benchmark, f"{r.last:g}", f"{r.best:g}") for r in rows
            ]


@pytest.mark.parametrize("variant, words", [
    ("", ["MODEL,OBJECTIVE,CONTEXT", "python -m configs.paper"]),
    ("qwen3-4", ["model 'qwen3-4'", "nearest is 'qwen3-4b'", "qwen2.5-7b"]),
    ("qwen3-4b,rpg-reinforce-ukl,8k", ["objective", "nearest is 'rpg-reinforce-urkl'"]),
    ("qwen3-4b,dapo,16k", ["context '16k'", "2k, 4k, 8k"]),
    ("qwen3-4b,dapo,8k,adamw,schedule-free", ["'adamw' and 'schedule-free'", "exclude"]),
    ("qwen3-4b,dapo,8k,fixed", ["dapo has no KL"]),
    ("qwen3-4b,rpg-reinforce-urkl,8k,as-released,fixed", ["rpg-reinforce-urkl has no KL as released"]),
    ("qwen3-4b,reinforce++,8k,as-released", ["'as-released'", "docs/paper.md"]),
])  # fmt: skip
def test_wrong_variants_name_what_is_right(variant, words):
    with pytest.raises(ValueError) as error:
        paper.get_config(variant)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
