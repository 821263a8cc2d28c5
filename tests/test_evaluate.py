"""`python -m rpg_jax.evaluate` on checkpoints that are elsewhere, that are on their way, or that are not whole."""

import json
import shutil
import types

import jax
import jax.numpy as jnp
import pytest
from fuzzing import outcome

from configs import quickstart
from rpg_jax.run import build, evaluate, states
from rpg_jax.storage import workdir
from rpg_jax.storage.checkpoints import Checkpoints
from rpg_jax.training import evaluation
from rpg_jax.training.update import init_params


def make_run(root, place):
    """A run of two steps, whose checkpoints lie elsewhere."""
    config = quickstart.get_config("smoke")
    config.data.directory, config.model.size = str(root / "data"), "micro"
    workdir.open_workdir(root / "run", config, False, place)
    settings = json.loads((place / "config.json").read_text())
    del settings["environment"], settings["model"]["router_balance"]  # of an old run
    (place / "config.json").write_text(json.dumps(settings))
    save(place, build.build_run(config, log=lambda _: None), 1, 2)
    # On their way: one that Orbax has not renamed yet, and one that is being copied here, without its arrays.
    shutil.copytree(place / "checkpoints" / "2", place / "checkpoints" / "4.orbax-checkpoint-tmp-7")
    unwritten = shutil.ignore_patterns("d", "ocdbt*")
    shutil.copytree(place / "checkpoints" / "2", place / "checkpoints" / "3", ignore=unwritten)


def save(place, run, *steps, scale=1.0):
    with run.scorer, Checkpoints(place / "checkpoints", keep_last=9) as checkpoints:
        for step in steps:
            params = jax.tree.map(lambda leaf: leaf * scale, init_params(run.model, run.mesh, step))
            checkpoints.save(step, states.build_state(run, params), {}, wait=True)


def evaluated(*arguments):
    code, out, err = outcome("evaluate", *arguments)
    progress = "responses ", "reading ", "loading "
    said = [line for line in err.splitlines() if line.startswith("responses ")]
    lines = [line for line in err.splitlines() if not line.startswith(progress)]
    return dict(code=code, out=out, lines=lines, progress=said)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each command said, and the files of a whole evaluation and of one that was cut and done again."""
    root = tmp_path_factory.mktemp("evaluate")
    place, out, new, run = root / "bucket", root / "out", root / "new", f"--workdir={root / 'run'}"
    make_run(root, place)

    def files():
        return [(out / name).read_text() for name in ("responses.jsonl", "evaluation.json")]

    found = {"last": evaluated(run, "--which=2", f"--out={out}"), "whole": files()}
    (out / "responses.jsonl").write_text(found["whole"][0][: int(0.6 * len(found["whole"][0]))])
    found |= {"again": evaluated(run, "--which=2", f"--out={out}"), "cut": files()}
    by_place = f"--workdir={new}", f"--checkpoint_dir={place}"
    found["top_k"] = evaluated(run, f"--top_k={2**31}")
    found["on its way"] = evaluated(*by_place, "--which=last", f"--out={root / 'newest'}")
    save(place, states.read_run(place)[1], 5, scale=jnp.nan)
    for name, flags in {
        "temperature": (run, "--which=2", f"--out={out}", "--temperature=0.5"),
        "template": (run, "--template=plain"), "wording": (run, "--wording=none"), "data": (run, "--data=mine.jsonl"),
        "other place": (run, f"--checkpoint_dir={root}"), "no run": (f"--workdir={root / 'nowhere'}",),
        "no step": (run, "--which=9"), "not finite": (run, "--which=5"),
    }.items():  # fmt: skip
        found[name] = evaluated(*flags)
    shutil.rmtree(place / "checkpoints" / "2")
    save(place, states.read_run(place)[1], 2, scale=2)
    settings = json.loads((place / "config.json").read_text())
    settings["data"]["heldout_size"] = 5
    (place / "config.json").write_text(json.dumps(settings))
    found["weights"] = found["problems"] = evaluated(run, "--which=2", f"--out={out}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "make_evaluate", lambda *_, **__: lambda *_: jnp.zeros((1 << 50,)))
        found["memory"] = evaluated(run, "--which=1", f"--out={root / 'memory'}")
    return found


def test_responses_are_written_and_those_that_are_missing_are_drawn_again(found):
    """Cut in the middle of a problem, an evaluation ends with the same responses."""
    assert found["last"]["code"] == 0 and "step-2" in found["last"]["out"], found["last"]
    assert [found[name]["progress"][-1].split(" | ")[0] for name in ("last", "again")] == ["responses 48/48"] * 2
    assert " | accuracy " in found["last"]["progress"][-1]
    assert found["again"]["code"] == 0 and found["cut"] == found["whole"]
    responses, scores = [json.loads(line) for line in found["whole"][0].splitlines()], json.loads(found["whole"][1])
    assert len(responses) == 4 * 12 and "mean@4" in found["last"]["out"] and "sorting" in found["last"]["out"]
    assert scores["all/mean@4"] == pytest.approx(sum(row["correct"] for row in responses) / len(responses))


def test_a_checkpoint_that_is_not_whole_yet_is_passed_over(found):
    """Also in a place that no workdir names."""
    newest = found["on its way"]
    assert newest["code"] == 0 and "step-2" in newest["out"], newest
    assert len(newest["lines"]) == 1 and "checkpoint 3" in newest["lines"][0], "one warning"


def test_variables_of_a_template_are_an_object():
    for text, words in (("{", "is not JSON"), ("[1]", "is no JSON object")):
        with pytest.raises(ValueError, match=f"^--template_options=.* {words}"):
            evaluate.read_sets(types.SimpleNamespace(template_options=text), None, 1)


REFUSED = {
    "temperature": "temperature: 1.0 -> 0.5", "other place": "--checkpoint_dir=", "no run": "nowhere",
    "no step": "no checkpoint of step 9", "not finite": "step-5: parameters are NaN or infinite",
    "memory": "'evaluation' (RESOURCE_EXHAUSTED", "template": "--template is for a --checkpoint",
    "wording": "--wording is for the sets of --data=SET,...", "data": "a run of generated tasks knows no other text",
    "weights": "weights: '", "problems": "problems: '", "top_k": "--top_k=2147483648",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_one_line(found, name):
    refused = found[name]
    assert refused["code"] == 2, refused
    assert len(refused["lines"]) == 1 and refused["lines"][0].startswith("error: ")
    assert REFUSED[name] in refused["lines"][0]
