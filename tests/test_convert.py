"""`python -m rpg_jax.convert`: there and back to the bit, a run at its evaluation point, and what is refused."""

import contextlib
import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import test_huggingface as checkpoint
from fuzzing import outcome

from configs import quickstart
from rpg_jax.models import huggingface
from rpg_jax.run import build, states
from rpg_jax.storage import workdir
from rpg_jax.storage.checkpoints import Checkpoints
from rpg_jax.training.update import init_params

EXTRAS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def make_run(path):
    """A run of the quickstart after no step, its two points set apart, and these."""
    config = quickstart.get_config("smoke")
    config.data.directory = f"{path}-data"
    workdir.open_workdir(path, config, False)
    run = build.build_run(config, log=lambda _: None)
    fresh = states.build_state(run, init_params(run.model, run.mesh, 0))
    state = fresh.state
    state.opt_state.z["embed"]["embedding"] = state.opt_state.z["embed"]["embedding"] + 0.5
    with Checkpoints(path / "checkpoints") as checkpoints:
        checkpoints.save(7, fresh, {}, wait=True)
    run.scorer.close()
    return jax.device_get((state.params["embed"]["embedding"], state.opt_state.z["embed"]["embedding"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    raw = checkpoint.CONFIGS["qwen3-yarn"] | dict(bos_token_id=3, torch_dtype="bfloat16", custom="kept")
    tensors = checkpoint.random_tensors(raw, ml_dtypes.bfloat16)
    checkpoint.save(folder / "source", raw, tensors, files=2)
    for name in EXTRAS:
        (folder / "source" / name).write_text(f'"{name}"')
    (folder / "source" / "README.md").write_text("not ours to copy")
    raw = checkpoint.CONFIGS["llama"]
    tensors = checkpoint.random_tensors(raw)
    checkpoint.save(folder / "truncated", raw, tensors)
    file = folder / "truncated" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    tensors["model.norm.weight"][0] = np.nan
    checkpoint.save(folder / "nan", raw, tensors)
    (folder / "taken").mkdir()
    (folder / "taken" / "file").write_text("mine")
    (folder / "empty").mkdir()
    (folder / "unwritable").write_text("")
    return folder


CASES = {
    "made": ["--source=source", "--target=made/whole"],
    "back": ["--source=made/whole", "--target=back", "--max_shard_gb=1e-5"],
    "wide": ["--source=source", "--target=empty", "--to=huggingface", "--dtype=float32"],
    "run": ["--workdir=run", "--target=exported", "--which=7"],
    "narrow run": ["--workdir=run", "--target=narrow", "--dtype=bfloat16"],
}
REFUSED = {
    "truncated": (["--source=truncated", "--target=x1"], "truncated/model.safetensors is not a whole safetensors file"),
    "nan": (["--source=nan", "--target=x2"], "nan/model.safetensors: model.norm.weight holds NaN"),
    "no run": (["--workdir=nowhere", "--target=x5"], "no run has begun in "),
    "no step": (["--workdir=run", "--target=x6", "--which=8"], "no checkpoint of step 8"),
    "taken": (["--source=source", "--target=taken"], "taken exists and is no empty folder"),
    "neither": (["--target=x8"], "one of --source=FOLDER and --workdir=FOLDER"),
    "which": (["--source=source", "--target=x10", "--which=best"], "--which=best is for"),
    "shards": (["--workdir=run", "--target=x11", "--max_shard_gb=1", "--to=peft"], "--max_shard_gb is for --to="),
    "dtype": (["--source=source", "--target=x12", "--dtype=int8"], "int8"),
    "parent": (["--source=source", "--target=unwritable/a/x13"], "unwritable is no folder"),
}


@pytest.fixture(scope="module")
def points(folder):
    return make_run(folder / "run")


@pytest.fixture(scope="module")
def found(folder, points):
    """{case: (exit status, stdout, lines of stderr without progress)}."""
    cases = CASES | {name: arguments for name, (arguments, _) in REFUSED.items()}
    with contextlib.chdir(folder):
        said = {case: outcome("convert", *arguments) for case, arguments in cases.items()}
    progress = "loading", "reading", "writing"
    return {
        case: (status, out, [line for line in err.splitlines() if not line.startswith(progress)])
        for case, (status, out, err) in said.items()
    }


def tensors_in(folder):
    return {n: x for file in folder.glob("*.safetensors") for n, x in safetensors.numpy.load_file(file).items()}


@pytest.mark.parametrize("case", CASES)
def test_the_summary_counts(case, found):
    status, out, err = found[case]
    lines = [line.replace("│", " ").split() for line in out.splitlines()]
    assert (status, err) == (0, []) and ["tensors", "46" if "run" in case else "24"] in lines
    assert ["dtype", "float32" if case in ("wide", "run") else "bfloat16"] in lines
    assert "to read" in out and "parameters" in out


def test_there_and_back_to_the_bit(folder, found):
    before, after = tensors_in(folder / "source"), tensors_in(folder / "back")
    assert before.keys() == after.keys() and len(list((folder / "back").glob("*.safetensors"))) > 1
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and after[name].tobytes() == tensor.tobytes(), name
    index = json.loads((folder / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in before.values())
    for name in sorted(set(index["weight_map"].values())):
        held = safetensors.numpy.load_file(folder / "back" / name)
        assert sum(x.nbytes for x in held.values()) <= 1e4
        assert held.keys() == {tensor for tensor, file in index["weight_map"].items() if file == name}
    wide = tensors_in(folder / "empty")
    assert all((wide[name] == tensor.astype(np.float32)).all() for name, tensor in before.items())
    assert {x.dtype for x in wide.values()} == {np.dtype(np.float32)}


def test_what_belongs_to_weights_comes_along(folder, found):
    for target in ("made/whole", "back", "empty"):
        for name in EXTRAS:
            assert (folder / target / name).read_text() == f'"{name}"'
        assert not (folder / target / "README.md").exists()
        assert huggingface.read_config(folder / target) == huggingface.read_config(folder / "source")
        raw = json.loads((folder / target / "config.json").read_text())
        assert raw["bos_token_id"] == 3 and raw["custom"] == "kept"
        assert raw["torch_dtype"] == ("float32" if target == "empty" else "bfloat16")
    assert (folder / "back").stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in (folder / "back").iterdir()} == {0o644}


def test_a_run_is_exported_at_its_evaluation_point(folder, points, found):
    y, z = points
    exported = tensors_in(folder / "exported")["model.embed_tokens.weight"]
    np.testing.assert_allclose(exported, (y - 0.1 * z) / 0.9, rtol=1e-5, atol=1e-6)
    assert np.abs(exported - y).max() > 0.05
    config = huggingface.read_config(folder / "exported")
    assert config.qk_norm and config.vocab_size == len(exported) and config.max_length == 1024
    raw = json.loads((folder / "exported" / "config.json").read_text())
    assert raw["architectures"] == ["Qwen3ForCausalLM"]
    assert json.loads((folder / "exported" / "generation_config.json").read_text())["eos_token_id"] == [2]
    model = next((folder / "run-data").glob("*/tokenizer.model")).read_bytes()
    assert (folder / "exported" / "tokenizer.model").read_bytes() == model
    _, narrow = checkpoint.load(folder / "narrow", jax.numpy.float32)
    np.testing.assert_array_equal(narrow["embed"]["embedding"], exported.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_one_line_and_leaves_nothing(case, folder, found):
    status, _, err = found[case]
    assert status == 2 and len(err) == 1 and REFUSED[case][1] in err[0], err
    targets = [argument.removeprefix("--target=") for argument in REFUSED[case][0] if argument.startswith("--target=")]
    left = sorted(path.name for path in folder.iterdir())
    assert not any(name.startswith(".") or name in targets for name in left if name != "taken"), left
    assert (folder / "taken" / "file").read_text() == "mine"
