"""Commands in processes of their own that start fast: forks of a server that has imported JAX, Orbax and the like."""

import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["rpg_jax.run.train", "pandas", "tensorboardX", "matplotlib.figure", "matplotlib.ticker"])


def _become(module, arguments, output, errors):
    """What `python -m MODULE ARGUMENTS` does, with both streams in files."""
    os.chdir(ROOT)
    for descriptor, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_TRUNC), descriptor)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def start(name, *arguments):
    """`python -m rpg_jax.NAME ARGUMENTS` as a running multiprocessing.Process, and the files of its two streams."""
    files = [tempfile.NamedTemporaryFile(prefix=f"{name}-") for _ in range(2)]
    paths = [file.name for file in files]
    process = _forks.Process(target=_become, args=(f"rpg_jax.{name}", list(map(str, arguments)), *paths))
    process.start()
    return process, files


def run(name, *arguments, timeout=400):
    """`python -m rpg_jax.NAME ARGUMENTS` to its end, as subprocess.run gives it."""
    process, files = start(name, *arguments)
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise subprocess.TimeoutExpired(name, timeout)
    return subprocess.CompletedProcess(arguments, process.exitcode, *(file.read().decode() for file in files))
