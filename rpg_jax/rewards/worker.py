"""A worker process of the pool: calls a reward function or plays with an environment, one line of JSON in and one out.

Run as a script, `python worker.py DESCRIPTOR WHERE NAME MEMORY_MB NETWORK KIND`: a socket, a Python file or module, a
name in it, 1 if it may use the network, and function or environment. A question has values by name; its answer is
{"value": ...} or {"error": one line}, with "last" if the process can give no other. The first question loads the
function; its answer says why the network is on where it should be off. Only the standard library is imported here, so
that a worker starts within a few hundredths of a second.

The function decides the score, and is trusted to mean no harm. Code that it does not trust, such as a model's, it must
run in a process of its own, which inherits every limit.
"""

import contextlib
import ctypes
import decimal
import fcntl
import functools
import importlib
import importlib.util
import inspect
import json
import numbers
import os
import resource
import signal
import sys
import traceback

# What a function may be given beside the columns of the problem's row.
OURS = ("prompt", "response", "answer", "task", "response_tokens")
ROUNDING = 1e-6  # beyond 0 and 1 that is still a sum of float32
_MOST_EPISODES = 4096  # that are kept; an older one is played again from its actions
_MOST_CHARACTERS = 1 << 20  # of an observation
_LARGEST = 1e9  # of a reward: in float32 the squares of returns stay finite
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET
_METHODS = {
    "reset": "reset(self) -> observation or None",
    "step": "step(self, action) -> (observation or None, reward)",
}


class Refused(Exception):
    """What is wrong with a function, in our words."""


def load(where: str, name: str, kind: str):
    """The function, or environment's class, `name` of a Python file or module; raises whatever loading it raises."""
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location("user_reward", where)
        module = sys.modules["user_reward"] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, os.path.dirname(where))
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    found, is_environment = getattr(module, name, None), kind == "environment"
    if not callable(found):
        named = vars(module).items()
        own = [key for key, value in named if getattr(value, "__module__", None) == module.__name__ and callable(value)]
        lacks = f"{os.path.basename(where)} defines no {'class' if is_environment else kind} {name!r}"
        raise Refused(f"{lacks}; it defines {', '.join(own) or 'none'}")
    lacking = [method for method in _METHODS if is_environment and not callable(getattr(found, method, None))]
    if lacking:
        expected = ", ".join(["__init__(self, problem, seed)", *_METHODS.values()])
        raise Refused(f"{name} has no {' and no '.join(lacking)}; expected a class with {expected}")
    return found


def play(kept: dict, make, episode: str, problem: dict, seed: int, actions: list[str]) -> list | None:
    """[observation or None, rewards] of an episode after the last of its actions; none begins it.

    None where `kept` does not have it as it was before that: whoever asks has it played again from the beginning.
    """
    made, rewards = kept.pop(episode, (None, None))
    if not actions:
        made, rewards = make(problem, seed), []
        observation = observed(made.reset(), "reset")
    elif rewards is None or len(rewards) != len(actions) - 1:
        return None
    elif made is None:
        raise Refused(f"ended after {len(rewards)} actions when they were played again, and not before")
    else:
        outcome = made.step(actions[-1])
        if not isinstance(outcome, tuple | list) or len(outcome) != 2:
            raise Refused(f"step returned {outcome!r:.60} ({type(outcome).__name__}), not (observation, reward)")
        observation, reward = observed(outcome[0], "step"), number_of(outcome[1])
        if reward is None or not abs(reward) <= _LARGEST:  # NaN too
            expected = f"not a number between -{_LARGEST:g} and {_LARGEST:g}"
            raise Refused(f"step returned the reward {outcome[1]!r:.60}, {expected}")
        rewards.append(reward)
        made = None if observation is None else made
    kept[episode] = made, rewards
    if len(kept) > _MOST_EPISODES:
        del kept[next(iter(kept))]
    return [observation, rewards]


def observed(value, method: str) -> str | None:
    """An observation, if it is one. Raises Refused."""
    if value is not None and not isinstance(value, str):
        raise Refused(f"{method} returned the observation {value!r:.60} ({type(value).__name__}), not text or None")
    if len(value or "") > _MOST_CHARACTERS:
        raise Refused(f"{method} returned an observation of {len(value)} characters, more than {_MOST_CHARACTERS}")
    (value or "").encode()  # raises for half of a surrogate pair
    return value


def judge(function, /, **values) -> float:
    """The score in 0..1 of a function, which is given what its signature names: a number of any library, but no text.

    Raises Refused, or what the function raises.
    """
    value = function(**arguments(function, values))
    number = number_of(value)
    if number is None:
        raise Refused(f"returned {value!r:.60} ({type(value).__name__}), not a number in 0..1")
    if not -ROUNDING <= number <= 1.0 + ROUNDING:
        raise Refused(f"returned {number!r}, not a number in 0..1; return a share, and set its size by reward.weights")
    return min(max(0.0, number), 1.0)


def arguments(function, values: dict) -> dict:
    """What a call is given by name: the values that the signature names, or all of them for **columns."""
    parameters = inspect.signature(function).parameters.values()
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    for each in parameters:
        absent = each.name in named and each.name not in values and each.default is each.empty
        if absent or each.kind is each.POSITIONAL_ONLY:
            columns = ", ".join(name for name in values if name not in OURS) or "none"
            raise Refused(
                f"its parameter {each.name!r} is neither {', '.join(OURS)} nor a column of the problem's row, "
                f"which has the columns {columns}"
            )
    everything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return {name: value for name, value in values.items() if everything or name in named}


def number_of(value) -> float | None:
    """A number of any library as a float; None for anything else."""
    number = value.item() if getattr(value, "shape", None) == () else value  # NumPy's, JAX's, torch's
    with contextlib.suppress(OverflowError):  # of an integer
        return float(number) if isinstance(number, (numbers.Real, decimal.Decimal)) else None


def described(error: BaseException, where: str) -> str:
    """A line: what was raised, after the file and line of the innermost frame in the user's file or one beside it."""
    if isinstance(error, Refused):
        return str(error)
    frames = [(os.path.abspath(f.f_code.co_filename), line) for f, line in traceback.walk_tb(error.__traceback__)]
    lines = traceback.format_exception_only(error)  # of an error whose __str__ raises, too
    if isinstance(error, SyntaxError) and error.filename:
        frames, lines = [*frames, (error.filename, error.lineno)], lines[-1:]
    beside = where.endswith(".py") and os.path.dirname(where)
    own = [frame for frame in frames if os.path.dirname(frame[0]) == beside and frame[0] != os.path.abspath(__file__)]
    place = f"{os.path.basename(own[-1][0])}:{own[-1][1]}: " if own else ""
    return " ".join(f"{place}{' '.join(lines)}".split())[:300]


def leave_network() -> str:
    """Takes this process and all that it starts off the network, loopback included; why not, if it cannot be done.

    A network namespace of its own has no interfaces. Who may not make one may within a user namespace of one thread.
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


def leave_with_trainer() -> None:
    """Has Linux kill this process group, whatever runs, when the other end of stdin closes; stdin is then empty."""
    end = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    fcntl.fcntl(end, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(end, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(end, fcntl.F_SETFL, os.O_ASYNC)


def main(descriptor, where, name, memory_mb, network, kind):
    connection, held, worker, kept, call, shown = int(descriptor), [int(descriptor)], os.getpid(), {}, None, False
    answer = functools.partial(play, kept) if kind == "environment" else judge
    os.set_inheritable(connection, False)
    os.register_at_fork(after_in_child=lambda: held and os.close(held.pop()))  # it closes when this process ends
    if sys.platform == "linux":
        leave_with_trainer()
    reachable, most = "" if network == "1" else leave_network(), resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (min(int(memory_mb) << 20, most % (1 << 63)), most))  # -1 is no limit
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, replies = open(connection), open(connection, "w", closefd=False)
    for line in questions:
        try:
            values = json.loads(line)
            message = {"value": call(**values) if call else reachable}
            call = call or functools.partial(answer, load(where, name, kind))
        except BaseException as error:  # SystemExit and MemoryError too: nothing that a function does may end the run
            message, is_short = {"last": call is None}, isinstance(error, MemoryError)
            if is_short:  # a process that leaks is replaced, and its other episodes may have the memory
                resource.setrlimit(resource.RLIMIT_AS, (most, most))  # so that there is some to say so
                message = {"value": None, "last": True} if kept else {"last": True}
            elif not (shown or isinstance(error, Refused)) and where.endswith(".py"):  # the first bug, as a whole
                shown = True
                traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
            if "value" not in message:
                message["error"] = described(error, where) + f" ({memory_mb=!s})" * is_short
        if os.getpid() != worker:  # the function has forked, and the child returned too
            os._exit(0)
        replies.write(json.dumps(message) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
