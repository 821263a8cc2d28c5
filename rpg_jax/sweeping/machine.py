"""What this machine carries: cores, memory, accelerators. What cannot be found out does not limit."""

import glob
import os
import pathlib

FIRST_GUESS = 2**30  # bytes of a run, before one has shown what it takes
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd")


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def carries() -> int:
    """Runs at once: one a core, and one on accelerators, which a run takes whole."""
    on_cpu = os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
    return 1 if not on_cpu and any(glob.glob(pattern) for pattern in ACCELERATORS) else len(cores())


def share_cores(at_once: int) -> list[list[int]]:
    """Cores of each of the runs at once, as many for each as there are."""
    have = cores()
    return [have[number % len(have) :: at_once] if at_once <= len(have) else [have[number % len(have)]]
            for number in range(at_once)]  # fmt: skip


def available_memory() -> float:
    """Bytes that programs may still take, of the machine and of this container; infinite if unknown."""
    free = _fields("/proc/meminfo").get("MemAvailable", float("inf"))
    most, used = (_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    return min(free, most - used) if most and used else free


def resident_memory(pid: int) -> tuple[float, float]:
    """(bytes now, most bytes so far) that a process holds; zeros if unknown."""
    fields = _fields(f"/proc/{pid}/status")
    return fields.get("VmRSS", 0.0), fields.get("VmHWM", 0.0)


def room(pids, largest: float) -> bool:
    """Whether another process of `largest` bytes fits beside those of `pids`, once they too have grown so large."""
    still_to_come = sum(max(largest - resident_memory(pid)[0], 0.0) for pid in pids)
    return available_memory() >= largest + still_to_come


def _fields(path) -> dict:
    """The "Name:  123 kB" lines of a file of /proc, in bytes."""
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError:
        return {}
    words = [line.replace(":", " ").split() for line in lines if line.endswith(" kB")]
    return {name: 1024.0 * float(number) for name, number, _ in words}


def _number(path) -> float | None:
    try:
        text = pathlib.Path(path).read_text().strip()
    except OSError:
        return None
    return float(text) if text.isdigit() else None
