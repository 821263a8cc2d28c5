"""What a GPU is told to run, read from the sequence of thunks that XLA dumps: kernels, command buffers (CUDA graphs),
and the branches and loops at which the host waits for the GPU."""

import pathlib
import re
from collections import Counter

_THUNK = re.compile(r"^( *)\d+: k(\w+)")
_NO_KERNELS = {"CommandBuffer", "While", "Conditional", "Sequential", "Copy", "Memzero", "Memset32BitValue"}


def dumped(folder: pathlib.Path) -> str:
    """The sequence of the one program that was compiled with `xla_dump_to=folder`."""
    found = {file.name.partition(".thunk_sequence")[2]: file for file in folder.glob("*.thunk_sequence*.txt")}
    return (found.get("_after_thunk_passes.txt") or found[".txt"]).read_text()  # the first if they changed anything


def step(text: str) -> dict[str, int]:
    """What one turn launches of the loop that decodes, which is the one with the most kernels outside of further loops.

    Returns:
      kernels, and those of them outside of command buffers; command_buffers; conditionals, and loops within it, all
      branches counted: at each of both the host waits for the GPU, as at the loop's own condition.
    """
    loops, around, buffered = [], [], None
    for line in text.splitlines():
        if not (found := _THUNK.match(line)):
            continue
        indent, kind = len(found[1]), found[2]
        around = [(start, loop) for start, loop in around if start < indent]
        buffered = None if buffered is not None and indent <= buffered else buffered
        for _, loop in around:
            loop[kind] += 1
            if kind not in _NO_KERNELS:
                loop["kernels"] += 1
                loop["outside"] += buffered is None
        if around and kind not in _NO_KERNELS:
            around[-1][1]["own"] += 1
        if kind == "While":
            loops.append(Counter())
            around.append((indent, loops[-1]))
        if kind == "CommandBuffer":
            buffered = indent
    turn = max(loops, key=lambda loop: loop["own"])
    counts = {"kernels": turn["kernels"], "outside": turn["outside"], "command_buffers": turn["CommandBuffer"]}
    return counts | {"conditionals": turn["Conditional"], "loops": turn["While"]}
