"""How many runs this machine carries at once: by its cores, memory and accelerators, or those of its container."""

import glob
import os
import pathlib

A_RUN = 2**30  # bytes of memory that a run is taken to need
CONTAINER = pathlib.Path("/sys/fs/cgroup")  # version 2: the limits of a container, as seen from inside
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd")


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def carries() -> int:
    """Runs at once: one for each core and GiB of free memory, or one if there are accelerators, which a run takes."""
    on_cpu = os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
    if not on_cpu and any(glob.glob(pattern) for pattern in ACCELERATORS):
        return 1
    (quota, period), (memory,) = _limit("cpu.max", 2), _limit("memory.max", 1)
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        memory = min(memory, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return int(max(1, min(len(cores()), quota / period, memory / A_RUN)))


def _limit(file: str, count: int) -> list[float]:
    """The numbers in a file of the container's limits, of which the first is infinite where there is no limit."""
    try:
        words = (CONTAINER / file).read_text().split()
    except OSError:
        words = []
    words = words if len(words) == count and words[0].isdigit() else ["inf", *["1"] * (count - 1)]
    return [float(word) for word in words]


def share_cores(at_once: int) -> list[list[int]]:
    """The cores of each of `at_once` runs: equal shares, or one core each where there are more runs than cores."""
    have = cores()
    return [have[run::at_once] if at_once <= len(have) else [have[run % len(have)]] for run in range(at_once)]
