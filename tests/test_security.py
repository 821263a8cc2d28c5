"""What a model, a data set or a checkpoint says is never run: by the source of the package."""

import ast
import pathlib

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
    found = []
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"imports {name}" for name in names if name.split(".")[0] in PICKLES]
        if not isinstance(node, ast.Call):
            continue
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
