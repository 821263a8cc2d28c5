"""What a GPU is told to run, read from the sequence of thunks that XLA dumps: kernels, CUDA graphs, branches, loops."""

import re
from collections import Counter

_NO_KERNELS = {"CommandBuffer", "While", "Conditional", "Sequential", "Copy", "Memzero", "Memset32BitValue"}


def step(text: str) -> dict[str, int]:
    """What a turn of the loop that decodes launches, from a file `*thunk_sequence_after_thunk_passes.txt` that XLA left
    under `xla_dump_to`. It is the loop with the most kernels outside of loops within it.

    Returns the counts of kernels, its condition's among them; of those outside of command buffers (CUDA graphs); of
    command_buffers; of conditionals and of loops within. At each of both the host waits for the GPU, as at the loop's
    own condition, except for a loop whose number of turns XLA knows.
    """
    thunks = [(len(found[1]), found[2]) for found in re.finditer(r"(?m)^( *)\d+: k(\w+)", text)]

    def within(at):  # what stands deeper than a thunk, up to the next that does not
        deeper = (depth <= thunks[at][0] for depth, _ in thunks[at + 1 :])
        return range(at + 1, next((at + 1 + n for n, ends in enumerate(deeper) if ends), len(thunks)))

    def kernels(places):
        return [at for at in places if thunks[at][1] not in _NO_KERNELS]

    inside = {at: within(at) for at, (_, kind) in enumerate(thunks) if kind in ("While", "CommandBuffer")}
    loops = {at: places for at, places in inside.items() if thunks[at][1] == "While"}

    def own(at):
        return len(kernels(set(loops[at]).difference(*(loops[other] for other in loops[at] if other in loops))))

    turn = loops[max(loops, key=own)]
    buffered = set().union(*(places for at, places in inside.items() if at not in loops))
    kinds = Counter(thunks[at][1] for at in turn)
    counts = {"kernels": len(kernels(turn)), "outside": len(kernels(set(turn) - buffered))}
    named = {"command_buffers": "CommandBuffer", "conditionals": "Conditional", "loops": "While"}
    return counts | {name: kinds[kind] for name, kind in named.items()}
