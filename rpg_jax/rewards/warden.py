"""Runs a command and ends everything that it started: the parent process of a reward worker.

Run as a script, `python warden.py MOST_PROCESSES COMMAND...`. The command inherits its standard streams. The warden
kills every descendant and writes {"dead": reason} as a line of JSON when the command ends, when there are more than
MOST_PROCESSES descendants, on SIGTERM, or when its standard input closes, because then the trainer has died.

On Linux it adopts orphans (PR_SET_CHILD_SUBREAPER) and finds its descendants in /proc, so that a process that left the
session does not escape. A limit by rlimit would count the user's other processes and would not apply to root. On other
systems only the command's process group is killed. It imports the standard library only.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_MILLISECONDS = 100  # between two counts of descendants


def main(most, *command):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    told = []  # a handler that raised could interrupt what ends the descendants
    signal.signal(signal.SIGTERM, lambda *_: told.append("stopped"))
    worker, reason = None, "stopped"
    try:
        worker = subprocess.Popen(command, start_new_session=True)  # it cannot kill the warden with its own group
        reason = _watch(worker.pid, int(most), told)
    finally:
        if worker is not None:
            _signal(worker.pid, signal.SIGKILL, os.killpg)
        _end_descendants()
        with contextlib.suppress(OSError):
            os.write(1, json.dumps({"dead": reason}).encode() + b"\n")


def _watch(worker: int, most: int, told: list[str]) -> str:
    """Waits until there is a reason to end all processes, such as the first that it is told, and returns it."""
    ended, wake = os.pipe()
    for end in (ended, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(0, 0)  # reports only that the other end was closed
    poll.register(ended, select.POLLIN)
    family = _Family()
    while not told:
        status = _reap(worker)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        family.look(most)
        if len(family.alive) > most:
            return f"it had more than {most} processes"
        for descriptor, _ in poll.poll(_LOOK_MILLISECONDS):
            if descriptor == 0:
                return "stopped"
            os.read(ended, 1 << 12)
    return told[0]


def _reap(worker):
    """Reaps every child that has ended; returns the worker's status if it was among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == worker else status
    return status


class _Family:
    """The living descendants of this process. Other processes are looked at once: they never become descendants."""

    def __init__(self):
        self.alive, self._strangers = set(), set()

    def look(self, most=float("inf")):
        """Ends as soon as there are more than `most`: a fork bomb grows faster than all of it can be read."""
        try:
            listed = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        except OSError:
            listed = set()
        self.alive &= listed
        self._strangers &= listed
        parents, ancestors = {}, self.alive | {os.getpid()}
        for pid in sorted(listed - self.alive - self._strangers):  # parents first, where ids have not begun anew
            parents[pid] = _parent(pid)
            if parents[pid] in ancestors:
                self.alive.add(pid)
                ancestors.add(pid)
            if len(self.alive) > most:
                return
        while children := {pid for pid, parent in parents.items() if parent in ancestors} - self.alive:
            self.alive |= children
            ancestors = children
        self._strangers |= parents.keys() - self.alive


def _parent(pid: int) -> int:
    """The parent's id of a living process; 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except (OSError, ValueError):
        return 0
    return 0 if state in b"ZX" else int(parent)


def _end_descendants():
    """Stops all descendants, so that none can start another, then kills them; repeats until none is left."""
    while True:
        family, stopped = _Family(), set()
        family.look()
        while fresh := family.alive - stopped:
            for pid in fresh:
                _signal(pid, signal.SIGSTOP)
            stopped |= fresh
            family.look()
        for pid in stopped:
            _signal(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _signal(pid, number, send=os.kill):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, number)


if __name__ == "__main__":
    main(*sys.argv[1:])
