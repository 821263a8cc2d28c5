"""`python -m rpg_jax.evaluate` on checkpoints that are elsewhere, that are on their way, or that are not whole."""

import json

import processes
import pytest

# One process for all, as compiling takes longest: makes a run of two steps, and says what each command did.
DRIVER = """
import contextlib, io, json, pathlib, shutil, sys
import jax, jax.numpy as jnp
from absl.testing import flagsaver
from configs import quickstart
from rpg_jax import evaluate
from rpg_jax.run import build, cli, states
from rpg_jax.storage import workdir
from rpg_jax.training import evaluation
from rpg_jax.storage.checkpoints import Checkpoints
from rpg_jax.training.update import init_params

root = pathlib.Path(sys.argv[1])
place = root / "bucket"
screen = io.StringIO()

def make_run():
    config = quickstart.get_config("smoke")
    config.data.directory, config.model.size = str(root / "data"), "micro"
    workdir.open_workdir(root / "run", config, False, place)
    settings = json.loads((place / "config.json").read_text())
    del settings["environment"], settings["model"]["router_balance"]  # of an old run
    (place / "config.json").write_text(json.dumps(settings))
    run = build.build_run(config, log=lambda _: None)
    with Checkpoints(place / "checkpoints") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, states.build_state(run, init_params(run.model, run.mesh, step)), {}, wait=True)
    run.scorer.close()
    # On their way: one that Orbax has not renamed yet, and one that is being copied here, without its arrays.
    shutil.copytree(place / "checkpoints" / "2", place / "checkpoints" / "4.orbax-checkpoint-tmp-7")
    unwritten = shutil.ignore_patterns("d", "ocdbt*")
    shutil.copytree(place / "checkpoints" / "2", place / "checkpoints" / "3", ignore=unwritten)

def main(*arguments):
    out = io.StringIO()
    with flagsaver.flagsaver(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(screen):
        try:
            cli.run(evaluate.main, ["evaluate", *arguments])
        except SystemExit as left:
            code = left.code
    progress = "responses ", "reading ", "loading "
    lines = [line for line in screen.getvalue().splitlines() if not line.startswith(progress)]
    screen.truncate(screen.seek(0))
    return dict(code=code, out=out.getvalue(), lines=lines)

make_run()
run, found = f"--workdir={root / 'run'}", {}
found["last"] = main(run, "--which=2", f"--out={root / 'out'}")
def files():
    return [(root / "out" / name).read_text() for name in ("responses.jsonl", "evaluation.json")]

found["whole"] = files()
(root / "out" / "responses.jsonl").write_text(found["whole"][0][: int(0.6 * len(found["whole"][0]))])
found["again"] = main(run, "--which=2", f"--out={root / 'out'}")
found["cut"] = files()
found["temperature"] = main(run, "--which=2", f"--out={root / 'out'}", "--temperature=0.5")
found["template"], found["wording"] = main(run, "--template=plain"), main(run, "--wording=none")
found["data"] = main(run, "--data=mine.jsonl")
found["on its way"] = main(run, "--which=last", f"--out={root / 'newest'}")
def save_nan():
    config, run = states.read_run(place)
    with run.scorer, Checkpoints(place / "checkpoints", keep_last=9) as checkpoints:
        params = jax.tree.map(lambda leaf: leaf * jnp.nan, init_params(run.model, run.mesh, 0))
        checkpoints.save(5, states.build_state(run, params), {}, wait=True)

save_nan()
new = root / "new"
found["elsewhere"] = main(f"--workdir={new}", f"--checkpoint_dir={place}", "--which=1", f"--out={new}")
for name, flags in {
    "other place": (run, f"--checkpoint_dir={root}"),
    "no run": (f"--workdir={root / 'nowhere'}",),
    "no step": (run, "--which=9"),
    "not finite": (run, "--which=5"),
}.items():
    found[name] = main(*flags)
evaluation.make_evaluate = lambda *_, **__: lambda *_: jnp.zeros((1 << 50,))
found["memory"] = main(run, "--which=1", f"--out={root / 'memory'}")
json.dump(found, sys.__stdout__)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    done = processes.execute("-c", DRIVER, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_run_is_found_by_its_workdir_or_by_its_place(found):
    assert found["last"]["code"] == 0 and "step-2" in found["last"]["out"], found["last"]
    assert found["elsewhere"]["code"] == 0, found["elsewhere"]


def test_responses_are_written_and_those_that_are_missing_are_drawn_again(found):
    """Cut in the middle of a problem, an evaluation ends with the same responses."""
    assert found["again"]["code"] == 0 and found["cut"] == found["whole"]
    responses, scores = [json.loads(line) for line in found["whole"][0].splitlines()], json.loads(found["whole"][1])
    assert len(responses) == 4 * 12 and "mean@4" in found["last"]["out"] and "sorting" in found["last"]["out"]
    assert scores["all/mean@4"] == pytest.approx(sum(row["correct"] for row in responses) / len(responses))


def test_a_checkpoint_that_is_not_whole_yet_is_passed_over(found):
    newest = found["on its way"]
    assert newest["code"] == 0 and "step-2" in newest["out"], newest
    assert len(newest["lines"]) == 1 and "checkpoint 3" in newest["lines"][0], "one warning"


REFUSED = {
    "temperature": "temperature: 1.0 -> 0.5", "other place": "--checkpoint_dir=", "no run": "nowhere",
    "no step": "no checkpoint of step 9", "not finite": "step-5: parameters are NaN or infinite",
    "memory": "'evaluation' (RESOURCE_EXHAUSTED", "template": "--template is for a --checkpoint",
    "wording": "--wording is for the sets of --data=SET,...", "data": "a run of generated tasks knows no other text",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_one_line(found, name):
    refused = found[name]
    assert refused["code"] == 2, refused
    assert len(refused["lines"]) == 1 and refused["lines"][0].startswith("error: ")
    assert REFUSED[name] in refused["lines"][0]
