"""A worker process of the pool: calls a user's reward function, one line of JSON in and one out.

Run as a script, `python worker.py FILE.py NAME MEMORY_MB`; it imports the standard library alone, so it starts in a few
hundredths of a second. The first line out tells whether the function could be loaded.
"""

import importlib.util
import json
import math
import os
import resource
import sys
import threading
import time


def load(file: str, name: str):
    """The callable `name` of the Python file; raises whatever loading it raises."""
    spec = importlib.util.spec_from_file_location("user_reward", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["user_reward"] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise LookupError(f"it defines no function {name!r}")
    return function


def judge(function, arguments) -> dict:
    """{"value": float in 0..1} or {"error": one line}."""
    try:
        value = function(*arguments)
        number = float(value)
    except BaseException as error:  # SystemExit and MemoryError too: nothing that a reward does may end the run
        return {"error": _line(error)}
    if not math.isfinite(number) or not 0.0 <= number <= 1.0:
        return {"error": f"returned {value!r:.60}, not a number in 0..1"}
    return {"value": number}


def main(file, name, memory_mb):
    replies = os.fdopen(os.dup(1), "w")  # the user's prints go to stderr instead
    os.dup2(2, 1)
    limit = int(memory_mb) << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()

    def reply(message):
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        function = load(file, name)
    except BaseException as error:
        return reply({"error": _line(error)})
    reply({"value": 1.0})
    for line in sys.stdin:
        reply(judge(function, json.loads(line)))


def _leave_with(parent):
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    main(*sys.argv[1:])
