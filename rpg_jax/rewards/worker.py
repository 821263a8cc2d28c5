"""A worker process of the pool: calls a reward function, one line of JSON in and one out.

Run as a script, `python worker.py WHERE NAME MEMORY_MB NETWORK`, where WHERE is a Python file or the name of a module,
and NETWORK is 1 if the function may use the network. It imports the standard library only, to start within a few
hundredths of a second. A question is [secret, arguments], and its answer repeats the secret, so that what the function
writes to the pipe is no answer. The first question has no arguments; its answer says whether the function could be
loaded, and, where the network should be off and is not, why.

The function runs in this process and decides the score: no secret can be kept from it. What the function itself does
not trust, such as code that a model wrote, it must run in a process of its own, which inherits every limit.
"""

import ctypes
import importlib
import importlib.util
import json
import os
import resource
import sys
import threading
import time

_MOST_FILES = 256  # open at a time
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET
_PR_SET_DUMPABLE = 4


def load(where: str, name: str):
    """The callable `name` of a Python file or module; raises whatever loading it raises."""
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location("user_reward", where)
        module = importlib.util.module_from_spec(spec)
        sys.modules["user_reward"] = module
        sys.path.insert(0, os.path.dirname(os.path.abspath(where)))
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise LookupError(f"it defines no function {name!r}")
    return function


def judge(function, arguments) -> dict:
    """{"value": float in 0..1} or {"error": one line}."""
    try:
        value = function(*arguments)
        number = float(value)
        if not 0.0 <= number <= 1.0:
            return {"error": f"returned {value!r:.60}, not a number in 0..1"}
    except BaseException as error:  # SystemExit and MemoryError too: nothing that a reward does may end the run
        return {"error": _line(error)}
    return {"value": number}


def leave_network() -> str:
    """Takes this process, and all that it starts, off the network, loopback included; why not, if it cannot be done.

    A network namespace of its own has no interfaces. Without the right to make one, Linux gives it to a process that is
    alone in a user namespace, where the process keeps its user and group. It must have one thread.
    """
    if sys.platform != "linux":
        return f"{sys.platform} has no network namespaces"
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(_NEW_NETWORK) == 0:
        return ""
    if libc.unshare(_NEW_USER | _NEW_NETWORK):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{file}", "w") as settings:
            settings.write(text)
    return ""


def main(where, name, memory_mb, network):
    reachable = "" if network == "1" else leave_network()
    questions, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the user's input() gets nothing
    os.dup2(2, 1)  # the user's prints go to stderr
    limit = int(memory_mb) << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    files = min(_MOST_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])  # -1, no limit, does not occur for files
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if sys.platform == "linux":  # processes that the function starts may not look into this one, or into its pipe
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    worker = os.getpid()

    def reply(secret, message):
        if os.getpid() != worker:  # the user's function has forked, and the child returned too
            os._exit(0)
        replies.write(json.dumps(message | {"secret": secret}) + "\n")
        replies.flush()

    secret, _ = json.loads(questions.readline())
    try:
        function = load(where, name)
    except BaseException as error:
        return reply(secret, {"error": _line(error)})
    reply(secret, {"value": 1.0, "network": reachable})
    for line in questions:
        secret, arguments = json.loads(line)
        reply(secret, judge(function, arguments))


def _leave_with(parent):
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _line(error):
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # its __str__ raises
        text = type(error).__name__
    return " ".join(text.split())[:300]


if __name__ == "__main__":
    main(*sys.argv[1:])
