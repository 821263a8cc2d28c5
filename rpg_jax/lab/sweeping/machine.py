"""How many runs this machine carries at once: its cores, memory and accelerators. What is unknown sets no limit."""

import glob
import os
import pathlib
from collections.abc import Sequence

FIRST_GUESS = 2**30  # bytes that a run takes, until one was measured
CGROUPS = pathlib.Path("/sys/fs/cgroup")  # version 2
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd")
UNLIMITED = float("inf")


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def carries() -> int:
    """Runs at once: one for each core, or one if there are accelerators, since a run takes all of them."""
    on_cpu = os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
    if not on_cpu and any(glob.glob(pattern) for pattern in ACCELERATORS):
        return 1
    return max(1, int(min(len(cores()), *map(_cpu_quota, _groups()), UNLIMITED)))


def share_cores(at_once: int) -> list[list[int]]:
    """The cores of each of `at_once` runs: equal shares, or one core each where there are more runs than cores."""
    have = cores()
    return [have[run::at_once] if at_once <= len(have) else [have[run % len(have)]] for run in range(at_once)]


def available_memory() -> float:
    """Bytes that programs may still take, of the machine and of this job or container; infinite if unknown."""
    free = _kilobyte_fields("/proc/meminfo").get("MemAvailable", UNLIMITED)
    return min(free, *map(_memory_left, _groups()), UNLIMITED)


def resident_memory(pid: int) -> tuple[float, float]:
    """(current, peak) bytes that a process holds; zeros if unknown."""
    fields = _kilobyte_fields(f"/proc/{pid}/status")
    return fields.get("VmRSS", 0.0), fields.get("VmHWM", 0.0)


def room(pids: Sequence[int], peak: float) -> bool:
    """Whether another process of `peak` bytes fits once the processes `pids` have grown to as many."""
    growth = sum(max(peak - resident_memory(pid)[0], 0.0) for pid in pids)
    return available_memory() >= peak + growth


def _groups() -> list[pathlib.Path]:
    """The control groups that limit this process: its own and its ancestors, as far as a container shows them."""
    own = next((line[3:] for line in _lines("/proc/self/cgroup") if line.startswith("0::")), "/")
    folder = CGROUPS / own.strip("/")
    return [group for group in (folder, *folder.parents) if group == CGROUPS or CGROUPS in group.parents]


def _cpu_quota(group: pathlib.Path) -> float:
    """Cores' worth of time that a control group may use."""
    quota, period = (" ".join(_lines(group / "cpu.max")) or "max 1").split()
    return UNLIMITED if quota == "max" else float(quota) / float(period)


def _memory_left(group: pathlib.Path) -> float:
    """Bytes that a control group may still take; its inactive file cache counts as free, because it can be dropped."""
    limit, used = (" ".join(_lines(group / f"memory.{name}")) for name in ("max", "current"))
    cache = dict(line.split() for line in _lines(group / "memory.stat")).get("inactive_file", 0)
    return float(limit) - float(used) + float(cache) if limit.isdigit() and used.isdigit() else UNLIMITED


def _kilobyte_fields(path) -> dict[str, float]:
    """The lines "Name:  123 kB" of a file of /proc, in bytes."""
    words = [line.replace(":", " ").split() for line in _lines(path) if line.endswith(" kB")]
    return {name: 1024.0 * float(number) for name, number, _ in words}


def _lines(path) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    try:
        return pathlib.Path(path).read_text().splitlines()
    except OSError:
        return []
