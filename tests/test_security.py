"""What a model, a data set or a checkpoint says is never run: by the source of the package, and in an audited run."""

import ast
import json
import pathlib

import processes
import test_huggingface as checkpoint
import test_huggingface_tokenizer
from test_architecture import imports

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "rpg_jax").rglob("*.py"))
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch", "yaml"}
RUNS = {"eval", "exec", "compile", "__import__", "system", "popen", "run_path", "run_module", "exec_module"}
RUNS |= {"import_module", "unsafe_load", "full_load"}
# Where Python that the user names on the command line, or in a config, is run: a reward, an objective, a sweep.
OF_THE_USER = {
    ("rpg_jax/rewards/worker.py", "exec_module"), ("rpg_jax/rewards/worker.py", "import_module"),
    ("rpg_jax/objectives/own.py", "exec_module"), ("rpg_jax/run/cli.py", "run_path"),
}  # fmt: skip


def dangers(module: str, source: str) -> list[str]:
    """What of a module can run, or unpickle, data: one line each."""
    found = [f"imports {name}" for name in imports(module, source) if name.split(".")[0] in PICKLES]
    for node in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        is_method = name == "compile" and owner != "builtins" and owner  # of re, or of a lowered XLA program
        if name in RUNS and not is_method and (module, name) not in OF_THE_USER:
            found.append(f"calls {called}")
        for keyword in node.keywords:
            if keyword.arg in ("shell", "allow_pickle") and ast.unparse(keyword.value) != "False":
                found.append(f"calls {called} with {keyword.arg}")
    return found


def test_no_source_runs_or_unpickles_data():
    found = {module: dangers(module, (ROOT / module).read_text()) for module in MODULES}
    assert len(found) > 100 and not {module: lines for module, lines in found.items() if lines}


def test_what_runs_or_unpickles_data_is_found():
    for line in (
        "import pickle", "from torch import load", "eval(text)", "exec(text)", "builtins.compile(text, '', 'exec')",
        "os.system(text)", "subprocess.run(text, shell=True)", "np.load(file, allow_pickle=True)", "import yaml.cyaml",
        "runpy.run_path(file)", "importlib.import_module(name)",
    ):  # fmt: skip
        assert len(dangers("rpg_jax/data/sources.py", line)) == 1, line


CANARY = "canary_3f1c"
HOOK = """
import sys
compiled = 0

def audit(event, arguments):
    global compiled
    if event == "pickle.find_class":
        raise SystemError(f"unpickles {arguments}")
    if event in ("os.system", "os.exec") or event == "subprocess.Popen" and "CANARY" in str(arguments):
        raise SystemError(f"{event} {arguments}")
    if event == "compile":
        source = arguments[0] if isinstance(arguments[0], str) else (arguments[0] or b"").decode(errors="ignore")
        compiled += 1
        if "CANARY" in source:
            raise SystemError(f"compiles {source[:80]}")

sys.addaudithook(audit)
from absl import flags
from rpg_jax.run import cli

def command(name, *arguments):
    owners = flags.FLAGS.flags_by_module_dict()  # commands share names of flags
    for flag in [flag.name for module in owners if module.startswith("rpg_jax.") for flag in owners[module]]:
        delattr(flags.FLAGS, flag)
    module = __import__(f"rpg_jax.{name}", fromlist=["main"])
    try:
        cli.run(module.main, [name, *arguments])
    except SystemExit as left:
        assert not left.code, left.code

FOLDER = sys.argv[1]
command("prepare", f"--source={FOLDER}/rows.jsonl", f"--target={FOLDER}/set")
command("convert", f"--source={FOLDER}/model", f"--target={FOLDER}/copy")
from rpg_jax import data
sets = data.load(f"{FOLDER}/set", tokenizer=data.load_tokenizer(f"{FOLDER}/bpe"), max_prompt=999)
(problem,) = sets.problems("train")
assert "CANARY" in problem.prompt
print(compiled)
"""


def test_no_text_of_data_or_of_weights_is_compiled_or_unpickled(tmp_path):
    """An audit hook sees every source that Python compiles, every class that a pickle names, and every process."""
    code = f"__import__('os').system('{CANARY}')"
    rows = [{"prompt": [{"role": "user", "content": code}], "reward_model": {"ground_truth": code}, "solution": code}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bpe").mkdir()
    test_huggingface_tokenizer.save(tmp_path / "bpe")
    (tmp_path / "bpe" / "chat_template.jinja").write_text("{{ messages[0].content }}{# " + CANARY + " #}")
    config = checkpoint.CONFIGS["qwen3"]
    checkpoint.save(tmp_path / "model", config | {"auto_map": {"AutoModel": code}}, checkpoint.random_tensors(config))
    done = processes.execute("-c", HOOK.replace("CANARY", CANARY), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 0, "the hook sees what Python compiles"
    assert (tmp_path / "set" / "summary.json").exists() and (tmp_path / "copy" / "config.json").exists()
