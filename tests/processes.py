"""Python processes that start fast: forks of a server that has imported JAX, Orbax and the like."""

import atexit
import gc
import json
import multiprocessing
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile
import types

import jax

ROOT = pathlib.Path(__file__).parent.parent
LIMIT = 1800  # seconds, for what hangs: beside much other work a short training has taken more than 400
AS_USERS = dict(JAX_DISABLE_MOST_OPTIMIZATIONS="0", XLA_FLAGS="")  # the compiler without what environment.py sets
CLOCKS = "time/", "throughput/", "compilations"  # how the keys of metrics begin that the machine decides
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["rpg_jax.run.train", "pandas", "tensorboardX", "matplotlib.figure", "matplotlib.ticker"])


def _become(command, environment, output, errors):
    """What `python COMMAND` does in the repository's root, with both streams in files."""
    gc.freeze()
    gc.set_threshold(100_000)  # as in conftest.py
    os.chdir(ROOT)
    os.environ.clear()  # readline, which pytest imports, gave the server a terminal's COLUMNS
    os.environ.update(environment)
    for name in ("JAX_NUM_CPU_DEVICES", "JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_LOG_COMPILES"):  # read at the import
        if name in environment:
            jax.config.update(name.lower(), int(environment[name]))
    for descriptor, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), descriptor)
    option, *arguments = command
    program = arguments.pop(0) if option in ("-m", "-c") else option
    sys.argv = [option, *arguments]
    try:
        if option == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        elif option == program:
            sys.path.insert(0, os.path.dirname(program))
            runpy.run_path(program, run_name="__main__")
        else:
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))
    finally:
        atexit._run_exitfuncs()  # multiprocessing's children do not: jax.distributed takes its leave in one


def fork(*command, **environment):
    """`python COMMAND`, as a running multiprocessing.Process, and its streams' files.

    COMMAND is -m MODULE, -c TEXT or FILE, and arguments. The environment is this process's and what is named here.
    """
    files = [tempfile.NamedTemporaryFile(mode="r", prefix="stream-") for _ in range(2)]
    paths = [file.name for file in files]
    process = forks.Process(target=_become, args=(list(map(str, command)), os.environ | environment, *paths))
    process.start()
    atexit.register(lambda: process.is_alive() and process.kill())  # of a test that failed; else pytest would wait
    return process, files


def finish(process, files, timeout=LIMIT):
    """Waits for what `fork` or `start` gave: (exit status, stdout, stderr)."""
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise subprocess.TimeoutExpired(str(process), timeout)
    return process.exitcode, *(pathlib.Path(file.name).read_text() for file in files)


def start(name, *arguments, **environment):
    """`python -m rpg_jax.NAME ARGUMENTS`, as `fork` gives it."""
    return fork("-m", f"rpg_jax.{name}", *arguments, **environment)


def execute(*command, timeout=LIMIT, **environment):
    """What `fork` starts, to its end, as subprocess.run gives it."""
    return subprocess.CompletedProcess(command, *finish(*fork(*command, **environment), timeout))


def run(name, *arguments, timeout=LIMIT, **environment):
    """`python -m rpg_jax.NAME ARGUMENTS` to its end, as subprocess.run gives it."""
    return execute("-m", f"rpg_jax.{name}", *arguments, timeout=timeout, **environment)


def fake(path, text):
    """A program in Bash at a path, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def metrics(run):
    """The rows of a run's metrics.jsonl, without what a clock wrote and what depends on where the run was cut."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(CLOCKS)} for row in rows]


def child(*arguments):
    """What a Python of its own prints, that is no fork, and must end with status 0."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def succeed(name, *arguments, **environment):
    """What `run` gives of a command that must end with status 0; a training compiles what learns, and looks, once."""
    done = run(name, *arguments, JAX_LOG_COMPILES="1", **environment)
    assert done.returncode == 0, done.stderr
    programs = re.findall(r"Finished XLA compilation of jit\((score|seen|update)\)", done.stderr)
    updates = 1 + ("compiling: warm start" in done.stderr)
    looks = ["seen"] * ("seen" in programs)
    assert name != "train" or sorted(programs) == ["score", *looks, *["update"] * updates], programs
    return done
