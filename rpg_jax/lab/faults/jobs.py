"""Jobs of two processes of which one is killed, frozen or told to stop, the coordinator (process 0) among them."""

import os
import pathlib
import signal
import subprocess
import time

import numpy as np

from rpg_jax.lab.faults.bench import LIMIT_SECONDS, LOST, SAME, TOLD, Bench, Trial
from rpg_jax.lab.faults.processes import Ended
from rpg_jax.lab.faults.signals import Watch

SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP, "terminated": signal.SIGTERM}
LAUNCHER = pathlib.Path(__file__).parents[3] / "launch" / "multihost_cpu.sh"
# Processes learn of a lost one after ten seconds without its heartbeat, and the launcher waits a few more.
NOTICE_SECONDS = 60.0


class Job:
    """A training by two processes, as launch/multihost_cpu.sh starts it."""

    def __init__(self, bench: Bench, workdir: pathlib.Path):
        workdir.parent.mkdir(parents=True, exist_ok=True)
        self._files = [workdir.with_suffix(f".{stream}") for stream in ("out", "err")]
        environment = os.environ | {"FAULTS_CALLS": str(bench.calls(workdir))}
        flags = bench.flags("short", workdir, steps=3)
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self._process = subprocess.Popen(
                ["bash", LAUNCHER, "2", "--", *flags], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=environment, start_new_session=True,
            )  # fmt: skip
        self.poll, self._begin = self._process.poll, time.monotonic()

    def err(self) -> str:
        return self._files[1].read_text(errors="replace")

    def members(self) -> list[int]:
        """Process ids in the order of their indices, as soon as they are trainings."""
        children = pathlib.Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return sorted(int(pid) for pid in children if "rpg_jax.train" in _command(int(pid)))

    def wait(self, seconds: float) -> Ended:
        """Waits for its end; at the limit, everything in its session is killed."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        out, err = (file.read_text(errors="replace") for file in self._files)
        return Ended(status, out, err, time.monotonic() - self._begin, [])


def _command(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def undisturbed(bench: Bench) -> pathlib.Path:
    """The workdir of a job that nothing disturbed."""
    workdir = bench.folder / "undisturbed" / "job"
    if not (workdir / "summary.json").exists():
        ended = Job(bench, workdir).wait(2 * LIMIT_SECONDS)
        if ended.status != 0:
            raise RuntimeError(f"the undisturbed job ended with {ended.status}: {ended.err}")
    return workdir


def member_lost(bench: Bench, rng: np.random.Generator) -> list[Trial]:
    """One of two processes is killed, frozen or terminated; the job must end by itself, and go on once started."""
    begin, whole, workdir = time.monotonic(), undisturbed(bench), bench.new()
    job = Job(bench, workdir)
    watch, rows, who = Watch(bench, workdir, job), int(rng.integers(0, 3)), int(rng.integers(0, 2))
    how = str(rng.choice(list(SIGNALS)))
    while watch.rows < rows and job.poll() is None:
        watch.phase()
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 1.0 if rows else 15.0))
    members, phase = job.members() if job.poll() is None else [], watch.phase()
    for pid in members[who : who + 1]:
        os.kill(pid, SIGNALS[how])
    ended = job.wait(LIMIT_SECONDS if not members else NOTICE_SECONDS + LIMIT_SECONDS * (how == "terminated"))
    said = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    wrong = ""
    if ended.status is None:
        wrong = f"no end within {ended.seconds:.0f} s"
    elif ended.status == 1 and (not said or "start again" not in said[-1]):
        wrong = "status 1 without the line that says so"
    elif ended.status not in (0, 1, 75):
        wrong = f"status {ended.status}: {ended.err[-300:]}"
    if not wrong:
        again = Job(bench, workdir).wait(2 * LIMIT_SECONDS)
        wrong = (
            f"started again: {again.err[-300:]}" if again.status else bench.differences("short", workdir, whole=whole)
        )
    if not wrong:
        bench.remove(workdir)
    outcome, line = (LOST, wrong) if wrong else (TOLD, said[-1]) if said else (SAME, "")
    what = f"process {who}, {phase}, {watch.rows} rows"
    return [Trial(f"one of two processes {how}", what, outcome, line, time.monotonic() - begin)]
