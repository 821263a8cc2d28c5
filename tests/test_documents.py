"""What documents say is so: every command is run, on the smoke variant of what it names, and every citation exists."""

import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import processes
import pytest
import real_path

from rpg_jax.lab.sweeping import variants

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGE, OWN = ((ROOT / f"docs/{name}.md").read_text() for name in ("adding_an_objective", "your_own_experiment"))
# tests/test_in_other_trainers.py runs the commands of its page; devices needs clusters and a compiler for TPUs.
ELSEWHERE = ("in_other_trainers", "devices")
FIRST = ("running", "your_own_experiment", "adding_an_objective")  # they train what the others evaluate and report
NAMES = sorted({page.stem for page in (ROOT / "docs").glob("*.md")} - {*ELSEWHERE, *FIRST})
PAGES = [(ROOT / f"docs/{name}.md").read_text() for name in (*FIRST, *NAMES)]
BLOCKS_OF = [re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for text in (README, *PAGES)]
BLOCKS = [block for blocks in BLOCKS_OF for block in blocks]
COMMANDS = [line.split("#")[0].strip() for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
# A block of no language says what the command before it prints.
PRINTED = {a.strip(): b for blocks in BLOCKS_OF for (_, a), (kind, b) in itertools.pairwise(blocks) if not kind}
SUITE = "./launch/test.sh"  # what is running now
REAL_MODEL = "./launch/real_model.sh"  # 45 minutes and a download: tests/test_real_model.py runs its commands in small
# The form with --json does the same as the one without and more; tests/test_verify.py runs it.
VERIFY = ("python -m rpg_jax.verify", "python -m rpg_jax.verify --json=out.json")
PEERS = "python third_party/"  # need packages of their own: tests/test_third_party.py does what can be done without


# What is too large for a test, and the flags that make it small.
SMALLER = {
    "quickstart.sh": "--config.model.size=micro",
    "train --config=configs/quickstart.py": "--config.model.size=micro --config.warm_start.steps=0",
    "configs/paper.py:": "--config.steps=1 --config.rollout.prompts=2 --config.rollout.samples=2 "
    "--config.rollout.slots=4 --config.rollout.cache_pages=64 --config.learner.scoring_rows=4 "
    "--config.rollout.dynamic_sampling=False --config.rollout.overlong_buffer=0 "
    "--config.rollout.max_prompt=256 --config.rollout.max_new=8 --config.learner.minibatch_prompts=2 "
    "--config.learner.microbatch_rows=2 --config.evaluation.k=2 "
    "--config.model.checkpoint={0}/checkpoints/Qwen3-4B --config.data.train={0}/data/dapo-math-17k "
    "\"--config.data.heldout=('{0}/data/aime24',)\"",
    "tradeoff --out": "--vocab=2 --length=3 --problems=4 --distances=0.01,1 --samples=1,100 "
    "--epsilons=0.2:0.28,2 --betas=0.01 --ceilings=3",
    "tradeoff --objective=tests/": "--vocab=2 --length=3 --problems=4 --distances=0.01,1 --samples=1,100",
    "configs/my_data.py": "--config.data.train={0}/data/mine/train.jsonl "
    "--config.data.heldout={0}/data/mine/heldout.jsonl "
    "--config.model.checkpoint={0}/checkpoints/Qwen2.5-0.5B-Instruct",
    "evaluate --workdir=runs/my_data": "--k=2",
    "sweep.sh docs/": "--seeds=0 --out={0}/runs/tempered_sweep",
    "evaluate --workdir=runs/urkl-8k": "--k=2",  # as in training: both run one compiled sampler
    "evaluate --workdir=runs/mine": "--k=4",
    "evaluate --checkpoint": "--k=2 --max_prompt=256 --max_new=8 --rows=2 --slots=4 --tensor=2 --out={0}/competitions",
}
# Of its four variants the first and the last are trained: the others differ from the first in a number.
SWEEP, POWERS, FIRST_POWER = "docs/tempered_sweep.py", "(0.0, 0.5, 1.0)", "(0.0,)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    sweep = (ROOT / SWEEP).read_text()
    assert len(variants.read(SWEEP).runs) == 4 * 5 and POWERS in sweep
    (folder / "tempered_sweep.py").write_text(sweep.replace(POWERS, FIRST_POWER))
    checkpoints = folder / "checkpoints"
    real_path.write_checkpoint(checkpoints / "Qwen3-4B", real_path.write_sets(folder), layers=1)
    (checkpoints / "Qwen2.5-0.5B-Instruct").symlink_to(checkpoints / "Qwen3-4B")
    (folder / "data" / "mine").mkdir(parents=True)
    problems = [{"question": f"{a} + {b} =", "answer": str(a + b), "level": 1} for a in range(5) for b in range(4)]
    for name, part in (("train", problems[4:]), ("heldout", problems[:4])):
        lines = "".join(json.dumps(problem) + "\n" for problem in part)
        (folder / "data" / "mine" / f"{name}.jsonl").write_text(lines)
    return folder


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c and not c.startswith((SUITE, REAL_MODEL, PEERS)) and c not in VERIFY]
)
def test_command(command, folder):
    if "gym" in command:
        pytest.importorskip("reasoning_gym")
    printed = PRINTED.get(command, "")
    environment = {"CONFIG": "configs/quickstart.py:smoke", "WORKDIR": str(folder / "quickstart")}
    command = " ".join([command, *(flags.format(folder) for part, flags in SMALLER.items() if part in command)])
    command = re.sub(r"(configs/quickstart|configs/my_data|docs/tempered_sweep)\.py(?!:)", r"\g<0>:smoke", command)
    command = command.replace(SWEEP, f"{folder}/tempered_sweep.py")
    command = re.sub(
        r"(?<![\w/.])((runs|exports|data|checkpoints)/|[\w-]+\.parquet|out\.json)", rf"{folder}/\1", command
    )
    python, _, module, *arguments = shlex.split(command) if command.startswith("python -m ") else [None] * 3
    if python and module.startswith("rpg_jax."):
        devices = {"JAX_NUM_CPU_DEVICES": "2"} if "--tensor=2" in command else {}
        done = processes.execute("-m", module, *arguments, **devices)
    else:  # the set-up is that of whoever runs this suite
        command = re.sub("^python ", f"{shlex.quote(sys.executable)} ", command)
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=os.environ | environment, timeout=600,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert all(line.split() in lines for line in printed.splitlines()), done.stdout


def test_python_blocks_run():
    for kind, text in BLOCKS:
        if kind == "python":
            exec(compile(text, "README.md", "exec"), {})


def test_pages_show_the_files_they_name():
    shown = re.findall(r"\]\(([\w/.]+\.py)\)[^`]*```python\n(.*?)```", PAGE, re.DOTALL)
    shown += re.findall(r"\]\(([\w/.]*my_\w+\.py)\).*?```python\n(.*?)```", OWN, re.DOTALL)
    assert len(shown) == 4 and len(shown[-1][1].partition("get_config(\n")[2].splitlines()) == 1 + 10
    for name, text in shown:
        lines = (ROOT / "docs" / name).read_text().splitlines()
        missing = [line for line in text.splitlines() if line not in lines]
        assert not missing, f"docs/{name} has no line {missing[0]!r}"


def test_the_step_in_the_readme_is_that_of_the_code():
    (shown,) = [text for kind, text in BLOCKS if kind == "py"]
    loop = (ROOT / "rpg_jax/training/loop.py").read_text()
    step, code = ([line.split("  #")[0].strip() for line in text.splitlines()] for text in (shown, loop))
    missing = [line for line in step if line not in code]
    assert len(step) == 8 and not missing, f"rl_step has no {missing}"


def test_the_map_names_what_exists():
    for name in re.findall(r"`((?:rpg_jax|configs|launch|tests|third_party)/[\w/.]*)`", README):
        assert (ROOT / name).exists(), f"README names {name}"
    for image in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / image).exists(), f"README shows {image}"


DOCUMENT = re.compile(r"[\w./:-]*\w\.md\b(?!\.\w)")  # page.md.jinja is a template
WRITTEN = {"report.md", "study.md"}  # what commands write, not what somebody is to read here
SECTIONS = re.compile(r"docs/method\.md (\d[\d.]*(?:,? (?:and |to )?\d[\d.]*)*)")
HEADINGS = set(re.findall(r"^#{2,3} (\d+(?:\.\d+)?)\.? ", (ROOT / "docs/method.md").read_text(), re.MULTILINE))


def missing(path: pathlib.Path, text: str) -> list[str]:
    """What a file cites that is not there: documents, and sections of docs/method.md."""
    documents = {name for name in DOCUMENT.findall(text) if "://" not in name} - WRITTEN
    absent = [name for name in documents if not any((place / name).is_file() for place in (ROOT, path.parent))]
    sections = {number for listed in SECTIONS.findall(text) for number in re.findall(r"\d+(?:\.\d+)?", listed)}
    return sorted(absent) + [f"docs/method.md {number}" for number in sorted(sections - HEADINGS)]


def test_what_is_cited_exists():
    """In code, scripts and documents; links and their anchors are checked where the site is built."""
    places = ("rpg_jax", "configs", "docs", "launch", "tests", "third_party", "studies")
    files = [*ROOT.glob("*"), *(file for place in places for file in (ROOT / place).rglob("*"))]
    files = [file for file in files if file.suffix in (".py", ".sh", ".md")]
    assert {ROOT / "README.md", ROOT / "launch/test.sh", ROOT / "rpg_jax/objectives/surrogates.py"} <= set(files)
    cited = {file.relative_to(ROOT).as_posix(): missing(file, file.read_text()) for file in files}
    assert not any(cited.values()), {path: names for path, names in cited.items() if names}
    # Put together here, for this file is searched as well.
    made_up = "[a](absent" + ".md#part), docs/method.md " + "3 and 99.1; https://example.org/absent.md"
    assert missing(ROOT / "docs/method.md", made_up) == ["absent" + ".md", "docs/method.md " + "99.1"]
