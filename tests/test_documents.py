"""What documents say is so: every command is run, on the smoke variant of what it names, and every citation exists."""

import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess

import processes
import pytest
import real_path
from fuzzing import begin, outcome

from rpg_jax import gym
from rpg_jax.lab.tradeoff import measure
from rpg_jax.run import evaluate, train

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGE, OWN = ((ROOT / f"docs/{name}.md").read_text() for name in ("adding_an_objective", "your_own_experiment"))
# tests/test_in_other_trainers.py and test_rollouts.py run what the first two pages say; the last needs clusters and
# a compiler for TPUs.
ELSEWHERE = ("in_other_trainers", "asynchrony", "devices")
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
PEERS = "python third_party/"  # need packages of their own: tests/test_third_party.py does what can be done without
SESSION = "launch/gpu_session.sh"  # needs a GPU: tests/test_launch.py
# Tests of verify and of gym run these as they stand, the first one with --json, which does the same and more.
AS_THEY_ARE = ("verify", "verify --json=out.json", "prepare --list_gym")


# What is too large for a test, and the flags that make it small.
SMALLER = {
    "quickstart.sh": "--config.model.size=micro --config.warm_start.steps=0",
    "smoke --workdir=runs/first": "--config.model.size=micro --config.warm_start.steps=0",
    "configs/paper.py:": "--config.steps=1 --config.rollout.prompts=2 --config.rollout.samples=2 "
    "--config.rollout.slots=4 --config.rollout.cache_pages=64 --config.learner.scoring_rows=4 "
    "--config.rollout.dynamic_sampling=False --config.rollout.overlong_buffer=0 "
    "--config.rollout.max_prompt=256 --config.rollout.max_new=8 --config.learner.minibatch_prompts=2 "
    "--config.learner.microbatch_rows=2 --config.evaluation.k=2 "
    "--config.model.checkpoint={0}/checkpoints/Qwen3-4B --config.data.train={0}/data/dapo-math-17k "
    "\"--config.data.heldout=('{0}/data/aime24',)\"",
    "configs/my_data.py": "--config.data.train={0}/data/mine/train.jsonl "
    "--config.data.heldout={0}/data/mine/heldout.jsonl "
    "--config.model.checkpoint={0}/checkpoints/Qwen2.5-0.5B-Instruct",
    "sweep.sh docs/": "--dry-run --out={0}/runs/tempered_sweep",  # tests/test_sweep.py trains a variant of it
    "evaluate --workdir=runs/urkl-8k": "--k=2",  # as in training: both run one compiled sampler
    "evaluate --workdir=runs/first": "--k=4",  # as the script evaluates it
    "evaluate --checkpoint": "--k=2 --max_prompt=256 --max_new=8 --rows=2 --slots=4 --tensor=2 --out={0}/competitions",
}
# What differs from other commands here, or from those of tests of distillation and of the trade-off, in its input
# alone: it is read and built, and begins. What then reads such a run reads another one.
BEGUN = {
    r"train .*=runs/(try|mine|my_data|distill|hot)": (train, "train"),
    "evaluate .*runs/my_data": (evaluate, "evaluate"),
    "tradeoff --(out|objective=tests/)": (measure, "measure"),
}
READ = {"report runs/tempered_sweep": "report runs/first", "runs/mine": "runs/first", "runs/my_data": "runs/urkl-8k"}
READ |= {"look --workdir=runs/quickstart": "look --workdir=runs/first"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    checkpoints = folder / "checkpoints"
    real_path.write_checkpoint(checkpoints / "Qwen3-4B", real_path.write_sets(folder), layers=1)
    (checkpoints / "Qwen2.5-0.5B-Instruct").symlink_to(checkpoints / "Qwen3-4B")
    (folder / "data" / "mine").mkdir(parents=True)
    problems = [{"question": f"{a} + {b} =", "answer": str(a + b), "level": 1} for a in range(5) for b in range(4)]
    for name, part in (("train", problems[4:]), ("heldout", problems[:4])):
        lines = "".join(json.dumps(problem) + "\n" for problem in part)
        (folder / "data" / "mine" / f"{name}.jsonl").write_text(lines)
    return folder


@pytest.mark.parametrize("command", [
    command for command in COMMANDS if command and not command.startswith((SUITE, REAL_MODEL, PEERS, SESSION))
    if command not in [f"python -m rpg_jax.{name}" for name in AS_THEY_ARE]
])  # fmt: skip
def test_command(command, folder, monkeypatch):
    if "gym" in command:
        pytest.importorskip("reasoning_gym")  # which draws in a process of its own in test_gym
        monkeypatch.setattr(gym, "_replies", lambda request, title: gym.problems(**request))
    monkeypatch.chdir(ROOT)
    printed, begun = PRINTED.get(command, ""), [of for pattern, of in BEGUN.items() if re.search(pattern, command)]
    for run, other in READ.items() if ".train " not in command else ():
        command = command.replace(run, other)
    # What the script trains is what the first command of docs/running.md finds finished.
    environment = {"CONFIG": "configs/quickstart.py:smoke", "WORKDIR": str(folder / "runs" / "first")}
    command = " ".join([command, *(flags.format(folder) for part, flags in SMALLER.items() if part in command)])
    command = re.sub(r"(configs/quickstart|configs/my_data)\.py(?!:)", r"\g<0>:smoke", command)
    files = r"(?<![\w/.])((runs|exports|data|checkpoints)/|[\w-]+\.parquet|out\.json)"
    command = re.sub(files, rf"{folder}/\1", command)
    if not command.startswith("python -m "):  # the set-up is that of whoever runs this suite
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=os.environ | environment, timeout=600,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        status, out, err = done.returncode, done.stdout, done.stderr
    else:
        _, _, module, *arguments = shlex.split(command)
        name = module.removeprefix("rpg_jax.")
        if begun:
            monkeypatch.setattr(*begun[0], begin)
            status, out, err = outcome(name, *arguments)
            status = 0 if err.endswith("error: accepted\n") else status
        elif name in ("train", "evaluate", "configs.paper"):
            devices = {"JAX_NUM_CPU_DEVICES": "2"} if "--tensor=2" in command else {}
            status, out, err = processes.finish(*processes.fork("-m", module, *arguments, **devices))
        else:
            status, out, err = outcome(name, *arguments)
    assert status == 0, out[-2000:] + err[-2000:]
    lines = [line.split() for line in out.splitlines()]
    assert all(line.split() in lines for line in printed.splitlines()), out


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
    assert len(step) == 10 and not missing, f"rl_step has no {missing}"


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
