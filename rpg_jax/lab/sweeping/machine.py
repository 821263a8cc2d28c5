"""What this machine carries: cores, memory, accelerators. What cannot be found out does not limit."""

import glob
import os
import pathlib

FIRST_GUESS = 2**30  # bytes of a run, before one has shown what it takes
CGROUPS = pathlib.Path("/sys/fs/cgroup")  # version 2
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd")


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def carries() -> int:
    """Runs at once: one a core, and one on accelerators, which a run takes whole."""
    on_cpu = os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
    if not on_cpu and any(glob.glob(pattern) for pattern in ACCELERATORS):
        return 1
    return max(1, int(min(len(cores()), *map(_cores_worth, _groups()), float("inf"))))


def share_cores(at_once: int) -> list[list[int]]:
    """Cores of each of the runs at once, as many for each as there are."""
    have = cores()
    return [have[number % len(have) :: at_once] if at_once <= len(have) else [have[number % len(have)]]
            for number in range(at_once)]  # fmt: skip


def available_memory() -> float:
    """Bytes that programs may still take, of the machine and of this job or container; infinite if unknown."""
    free = _fields("/proc/meminfo").get("MemAvailable", float("inf"))
    return min(free, *map(_left_to, _groups()), float("inf"))


def resident_memory(pid: int) -> tuple[float, float]:
    """(bytes now, most bytes so far) that a process holds; zeros if unknown."""
    fields = _fields(f"/proc/{pid}/status")
    return fields.get("VmRSS", 0.0), fields.get("VmHWM", 0.0)


def room(pids, largest: float) -> bool:
    """Whether another process of `largest` bytes fits beside those of `pids`, once they too have grown so large."""
    still_to_come = sum(max(largest - resident_memory(pid)[0], 0.0) for pid in pids)
    return available_memory() >= largest + still_to_come


def _groups() -> list[pathlib.Path]:
    """The control groups that limit this process: its own and those around it, as far as a container lets see."""
    own = next((line[3:] for line in _lines("/proc/self/cgroup") if line.startswith("0::")), "/")
    folder = CGROUPS / own.strip("/")
    return [group for group in (folder, *folder.parents) if group == CGROUPS or CGROUPS in group.parents]


def _cores_worth(group) -> float:
    """The cores' time that a control group may take."""
    most, period = (" ".join(_lines(group / "cpu.max")) or "max 1").split()
    return float("inf") if most == "max" else float(most) / float(period)


def _left_to(group) -> float:
    """The memory that a control group may still take; the cache of files in it is there for the taking."""
    most, used = (" ".join(_lines(group / f"memory.{name}")) for name in ("max", "current"))
    cache = dict(line.split() for line in _lines(group / "memory.stat")).get("inactive_file", 0)
    return float(most) - float(used) + float(cache) if most.isdigit() and used.isdigit() else float("inf")


def _fields(path) -> dict:
    """The "Name:  123 kB" lines of a file of /proc, in bytes."""
    words = [line.replace(":", " ").split() for line in _lines(path) if line.endswith(" kB")]
    return {name: 1024.0 * float(number) for name, number, _ in words}


def _lines(path) -> list[str]:
    """Those of a file; none if it cannot be read."""
    try:
        return pathlib.Path(path).read_text().splitlines()
    except OSError:
        return []
