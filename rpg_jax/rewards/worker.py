"""A worker process of the pool: calls a reward function or plays with an environment, one line of JSON in and one out.

Run as a script, `python worker.py WHERE NAME MEMORY_MB NETWORK KIND`, where WHERE is a Python file or the name of a
module, NETWORK is 1 if the function may use the network, and KIND is function or environment. It imports the standard
library only, to start within a few hundredths of a second. A question is [secret, values], where `values` are those of
`OURS` and the problem's columns by name, and its answer repeats the secret, so that what the function writes to the
pipe is no answer. The first question has no values; its answer says whether the function could be loaded, and, where
the network should be off and is not, why. An environment's values are those that `play` takes.

The function runs in this process and decides the score: no secret can be kept from it. What the function itself does
not trust, such as code that a model wrote, it must run in a process of its own, which inherits every limit.
"""

import collections
import contextlib
import ctypes
import decimal
import importlib
import importlib.util
import inspect
import json
import numbers
import os
import resource
import sys
import threading
import time
import traceback

# What a function may be given beside the columns of the problem's row.
OURS = ("prompt", "response", "answer", "task", "response_tokens")
ROUNDING = 1e-6  # beyond 0 and 1 that is still a sum of float32
_MOST_FILES = 256  # open at a time
_MOST_EPISODES = 4096  # that are kept; an older one is played again from its actions
_MOST_CHARACTERS = 1 << 20  # of an observation
_LARGEST = 1e9  # of a reward: in float32 the squares of returns stay finite
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET
_PR_SET_DUMPABLE = 4
_EITHER, _KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
_HERE = os.path.abspath(__file__)
_SHOWN = []  # the kind of the bug whose traceback this process has printed


def load(where: str, name: str, what: str = "function"):
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
        named = vars(module).items()
        own = [key for key, value in named if getattr(value, "__module__", None) == module.__name__ and callable(value)]
        raise Refused(f"{os.path.basename(where)} defines no {what} {name!r}; it defines {', '.join(own) or 'none'}")
    return function


def load_environment(where: str, name: str):
    """The class `name` of a Python file or module, which has `reset` and `step`; raises whatever loading it raises."""
    made = load(where, name, "class")
    lacking = [method for method in ("reset", "step") if not callable(getattr(made, method, None))]
    if lacking:
        raise Refused(f"{name} has no {' and no '.join(lacking)}; expected {ENVIRONMENT}")
    return made


ENVIRONMENT = (
    "a class with __init__(self, problem, seed), reset(self) -> observation or None and "
    "step(self, action) -> (observation or None, reward)"
)


class Episode:
    """An environment after some of its actions; one that is over keeps nothing else."""

    def __init__(self, made):
        self.made, self.observation, self.rewards = made, observed(made.reset(), "reset"), []

    def step(self, action: str) -> None:
        if self.made is None:
            raise Refused(f"ended after {len(self.rewards)} actions when they were played again, and not before")
        outcome = self.made.step(action)
        if not isinstance(outcome, tuple | list) or len(outcome) != 2:
            raise Refused(f"step returned {outcome!r:.60} ({type(outcome).__name__}), not (observation, reward)")
        self.observation, reward = observed(outcome[0], "step"), number_of(outcome[1])
        if reward is None or not abs(reward) <= _LARGEST:  # NaN too
            expected = f"not a number between -{_LARGEST:g} and {_LARGEST:g}"
            raise Refused(f"step returned the reward {outcome[1]!r:.60}, {expected}")
        self.rewards.append(reward)
        self.made = None if self.observation is None else self.made


def observed(value, method: str) -> str | None:
    """An observation, if it is one. Raises Refused."""
    if value is not None and not isinstance(value, str):
        raise Refused(f"{method} returned the observation {value!r:.60} ({type(value).__name__}), not text or None")
    if value is not None and len(value) > _MOST_CHARACTERS:
        raise Refused(f"{method} returned an observation of {len(value)} characters, more than {_MOST_CHARACTERS}")
    if value is not None:
        value.encode()  # raises for half of a surrogate pair
    return value


def play(kept: collections.OrderedDict, make, values: dict, where: str = "") -> dict:
    """{"value": [observation or None, rewards]} of an episode after its actions, or {"error": one line}.

    `values` are its name "episode", the "problem" with every column, the "seed", and all "actions" so far; none begins
    it. The value is None where an episode is not kept as it was before its last action, because this worker is another
    one, has too many, or ran out of memory with them: whoever asks has it played again from the beginning.
    """
    name, actions = values["episode"], values["actions"]
    episode = kept.pop(name, None)
    if actions and (episode is None or len(episode.rewards) != len(actions) - 1):
        return {"value": None}
    try:
        if actions:
            episode.step(actions[-1])
        else:
            episode = Episode(make(values["problem"], values["seed"]))
    except BaseException as error:  # SystemExit and MemoryError too: nothing that an environment does may end the run
        if not isinstance(error, MemoryError) or not kept:
            return {"error": _line(error, where)}
        episode = None  # other episodes may have the memory
    if episode is None:
        kept.clear()
        return play(kept, make, values, where)
    kept[name] = episode
    if len(kept) > _MOST_EPISODES:
        kept.popitem(last=False)
    return {"value": [episode.observation, episode.rewards]}


class Refused(Exception):
    """What is wrong with a function, in our words."""


def judge(function, values: dict, where: str = "") -> dict:
    """{"value": float in 0..1} or {"error": one line} of the function in the file `where`."""
    try:
        return {"value": score(function(**arguments(function, values)))}
    except BaseException as error:  # SystemExit and MemoryError too: nothing that a reward does may end the run
        return {"error": _line(error, where)}


def arguments(function, values: dict) -> dict:
    """What a call is given by name: the values that the signature names, or all of them for **columns."""
    parameters = inspect.signature(function).parameters.values()
    named = [parameter for parameter in parameters if parameter.kind in (_EITHER, _KEYWORD)]
    for parameter in parameters:
        absent = parameter in named and parameter.name not in values and parameter.default is parameter.empty
        if absent or parameter.kind is parameter.POSITIONAL_ONLY:
            columns = ", ".join(name for name in values if name not in OURS) or "none"
            raise Refused(
                f"its parameter {parameter.name!r} is neither {', '.join(OURS)} nor a column of the problem's row, "
                f"which has the columns {columns}"
            )
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    wanted = {parameter.name for parameter in named}
    return {name: value for name, value in values.items() if everything or name in wanted}


def score(value) -> float:
    """A number in 0..1 from what a function returned: a number of any library, but no text. Raises Refused."""
    number = number_of(value)
    if number is None:
        raise Refused(f"returned {value!r:.60} ({type(value).__name__}), not a number in 0..1")
    if not -ROUNDING <= number <= 1.0 + ROUNDING:
        raise Refused(f"returned {number!r}, not a number in 0..1; return a share, and set its size by reward.weights")
    return min(max(0.0, number), 1.0)


def number_of(value) -> float | None:
    """A number of any library as a float; None for anything else."""
    number = value.item() if getattr(value, "shape", None) == () else value  # NumPy's, JAX's, torch's
    return float(number) if isinstance(number, (numbers.Real, decimal.Decimal)) else None


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


def main(where, name, memory_mb, network, kind):
    where = os.path.abspath(where) if where.endswith(".py") else where  # the function may change the folder
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
        function = load_environment(where, name) if kind == "environment" else load(where, name)
    except BaseException as error:
        return reply(secret, {"error": _line(error, where)})
    reply(secret, {"value": 1.0, "network": reachable})
    kept = collections.OrderedDict()
    for line in questions:
        secret, values = json.loads(line)
        reply(secret, play(kept, function, values, where) if kind == "environment" else judge(function, values, where))


def _leave_with(parent):
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _line(error, where) -> str:
    """What was raised, after the file and line of the innermost frame in the function's file or one beside it.

    The first bug in a user's file that a worker meets is shown with its traceback as well.
    """
    if where.endswith(".py") and not isinstance(error, Refused) and not _SHOWN:
        _SHOWN.append(error.__class__)
        with contextlib.suppress(Exception):  # there may be no memory for it
            trace = error.__traceback__  # from the first frame of a user's on
            while trace is not None and trace.tb_frame.f_code.co_filename.startswith((__file__, "<frozen importlib")):
                trace = trace.tb_next
            traceback.print_exception(error.with_traceback(trace))
    try:
        text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        if isinstance(error, SyntaxError):
            text = f"{type(error).__name__}: {error.msg}"
    except BaseException:  # its __str__ raises
        text = type(error).__name__
    place = "" if isinstance(error, Refused) or not where.endswith(".py") else _place(error, where)
    return " ".join(f"{place}{text}".split())[:300]


def _place(error, file) -> str:
    """FILE.py:LINE and a colon, or nothing for an error that has no frame of that file or one beside it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}:{error.lineno}: "
    trace = traceback.walk_tb(error.__traceback__)  # reads no file, for which there may be no memory
    frames = [(os.path.abspath(frame.f_code.co_filename), line) for frame, line in trace]
    own = [frame for frame in frames if os.path.dirname(frame[0]) == os.path.dirname(file) and frame[0] != _HERE]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}: " if own else ""


if __name__ == "__main__":
    main(*sys.argv[1:])
