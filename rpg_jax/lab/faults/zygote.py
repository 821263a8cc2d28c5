"""A Python process that has imported what a training imports, and forks one for each line that it reads.

A training takes seconds to import JAX and its libraries, and a campaign starts a thousand. The zygote has no threads
but the idle ones of OpenBLAS and of Arrow's jemalloc, which mind forks, and has initialised no backend of JAX, so
that a fork goes on like a process of its own: it becomes `python -m MODULE ARGUMENTS` with its own streams and
environment, and ends as an interpreter ends. Lines on stdin are JSON: {"start": …} is answered with a process id,
{"poll": id} with its exit status (-N for signal N), or null while it runs.
"""

import gc
import importlib
import json
import os
import resource
import runpy
import sys
import warnings

PRELOADED = ("run.train", "run.evaluate", "run.convert", "run.prepare", "lab.reporting.training_curves")
LIBRARIES = ("pandas", "tensorboardX", "matplotlib.figure", "matplotlib.ticker", "tensorflow_datasets")


def become(module: str, arguments: list[str], environment: dict, streams: list[str], most_bytes: int | None) -> None:
    """Turns this process into `python -m module arguments`; files larger than `most_bytes` cannot be written."""
    os.setsid()
    os.environ.update(environment)
    for descriptor, path in enumerate(["/dev/null", *streams]):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if descriptor else os.O_RDONLY
        os.dup2(os.open(path, flags, 0o644), descriptor)
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    for module in [*(f"rpg_jax.{name}" for name in PRELOADED), *LIBRARIES]:
        importlib.import_module(module)
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    gc.freeze()  # a collection in a fork would copy every page
    gc.set_threshold(100_000)  # tracing allocates by the million
    orders, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    for line in orders:
        order = json.loads(line)
        if "start" in order:
            answer = os.fork()
            if not answer:
                orders.close()
                answers.close()
                return become(**order["start"])
        else:
            ended, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()


if __name__ == "__main__":
    main()
