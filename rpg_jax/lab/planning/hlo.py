"""What a compiled program does, read from its HLO text: collectives, the compiler's own estimate of cycles, kernels;
and what a GPU is told to launch, read from the sequence of thunks that XLA dumps."""

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
NUMBERS = ("cycles", "kernels", "kernel_flops", "grouped_flops", "grouped_bytes", "sent")  # that a program always has
_KERNEL = 'custom_call_target="tpu_custom_call"'
# Splash attention: matrix products over all visible pairs of tokens in each of its kernels.
_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
_NO_KERNELS = {"CommandBuffer", "While", "Conditional", "Sequential", "Copy", "Memzero", "Memset32BitValue"}

Work = Mapping[str, float]


class _Instruction(NamedTuple):
    type: str  # of its result, as bf16[8,4]{1,0}
    opcode: str
    rest: str  # operands, attributes and metadata

    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])

    def computation(self, attribute: str) -> str:
        """The name of a computation that it calls."""
        return re.search(rf"\b(?:{attribute})=%?([\w.\-]+)", self.rest)[1]

    def constant(self) -> int:
        return int(self.rest.partition(")")[0])

    def cycles(self) -> float:
        """XLA's estimate of the cycles that it takes; 0 where XLA makes none or gives the largest int64 for unknown."""
        stated = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
        return float(stated[1]) if stated and int(stated[1]) < 2**63 - 1 else 0.0


def work(
    text: str, traced: float, apart: tuple[str, ...] = (), outside: float = 1, experts: int = 0, within: float = 1
) -> Work:
    """The work of a partitioned program, `compiled.as_text()`, on one device; a loop counts once for every iteration.

    Args:
      traced: iterations of each loop whose trip count is not a constant of the program.
      apart: names of `jax.named_scope` whose loops and conditionals do not count.
      outside: the share that counts of what is outside of all loops.
      experts: of a layer on the device, if there are any; the kernels of others are not read.
      within: iterations of a loop whose trip count is not a constant inside of another such loop.

    Returns:
      cycles: the sum of the `estimated_cycles` that XLA for TPUs writes on every fusion, without custom calls and
      without waiting; kernels and kernel_flops: calls of Pallas kernels, and their FLOPs where they follow from shapes;
      grouped_flops and grouped_bytes: of products of experts, as if every row had one, and of the experts' kernels;
      sent: bytes to other devices; and for each kind of collective, KIND times and KIND sent. Bytes are those of ring
      algorithms: of n devices each sends (n-1)/n of the larger side of an all-gather, a reduce-scatter or an
      all-to-all, and twice that for an all-reduce. Of a conditional the branch that takes the most cycles counts; where
      none has any, the one that sends the most.
    """
    computations, entry = _parse(text)
    partitions = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    devices = int(partitions[1]) if partitions else 1

    @functools.cache
    def work_of(computation: str, share: float = 1, traced: float = traced) -> Work:
        """The work of one computation and of all that it calls; `share` counts of what is outside of its loops."""
        total = {}

        def add(part: Work, times: float = 1) -> None:
            for name, number in part.items():
                total[name] = total.get(name, 0.0) + times * number

        for name, instruction in computations[computation].items():
            kind = instruction.opcode.removesuffix("-start")  # of the asynchronous form, which also has a -done
            stated = instruction.cycles()
            if kind in ("while", "conditional") and any(f"/{scope}/" in instruction.rest for scope in apart):
                continue
            if kind in KINDS:
                sent = _sent(kind, instruction, devices)
                add({f"{kind} times": 1, f"{kind} sent": sent, "sent": sent}, share)
            elif kind == "while":
                known = _trip_count(instruction, computations)
                body = work_of(instruction.computation("body"), 1, within if known is None else traced)
                add(body, traced if known is None else known)
            elif kind == "conditional":
                branches = [work_of(branch, share, traced) for branch in _branches(instruction)]
                add(max(branches, key=lambda branch: (branch.get("cycles", 0), branch.get("sent", 0))))
            elif kind in ("fusion", "call", "async"):
                called = work_of(instruction.computation("calls|to_apply"), share, traced)
                # A fusion's own estimate covers what is fused in it.
                add({**called, "cycles": share * stated} if stated else called)
            elif _KERNEL in instruction.rest and name.startswith(("ragged-dot", "tgmm")):
                add(_grouped(instruction, experts), share)
            elif _KERNEL in instruction.rest:
                add({"kernels": 1, "kernel_flops": _kernel_flops(name, instruction)}, share)
            else:
                add({"cycles": stated}, share)
        return total

    return dict.fromkeys(NUMBERS, 0.0) | work_of(entry, outside)


def _kernel_flops(name: str, call: _Instruction) -> float:
    """FLOPs of one call of a splash kernel, from the shape of its queries [..., T, D]; 0 for any other kernel.

    Half of all pairs of tokens are visible, and each matrix product takes 2 D FLOPs for a pair.
    """
    products = next((count for start, count in _PRODUCTS.items() if name.startswith(start)), None)
    if products is None:
        return 0.0
    shapes = [tuple(map(int, dimensions.split(","))) for _, dimensions in _operands(call) if dimensions]
    largest = max(shapes, key=math.prod, default=(0, 0))
    return products * math.prod(largest) * largest[-2]


def _operands(call: _Instruction) -> list[tuple[str, str]]:
    """(dtype, dimensions) of the operands of a custom call."""
    return _ARRAY.findall(call.rest.partition("operand_layout_constraints=")[2])


def _grouped(call: _Instruction, experts: int) -> Work:
    """Of a product of rows [m, k], kernels [g, k, n] and rows [m, n], any two of which give the third; the call before
    it, which lists the groups, is nothing."""
    arrays = [*_operands(call), *_ARRAY.findall(call.type)]
    rows, kernels = ([array for array in arrays if array[1].count(",") == rank - 1] for rank in (2, 3))
    if not rows or not kernels:
        return {}
    (m, _), (groups, k, n) = (tuple(map(int, dimensions.split(","))) for _, dimensions in (rows[0], kernels[0]))
    return {"grouped_flops": 2 * m * k * n, "grouped_bytes": _bytes(*kernels[0]) * min(experts / groups, 1)}


def _parse(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """({computation: {name: instruction}}, the name of the entry computation)."""
    computations, entry, instructions = {}, None, None
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            instructions = computations[header[1]] = {}
            entry = header[1] if line.startswith("ENTRY") else entry
        elif instructions is not None and (match := _INSTRUCTION.match(line)):
            name = match[1]
            instructions[name] = _Instruction(*match.groups()[1:])
        elif instructions and line.startswith(('"', "}}")):  # attributes of a kernel go on over several lines
            instructions[name] = instructions[name]._replace(rest=instructions[name].rest + line)
    return computations, entry


def _branches(conditional: _Instruction) -> list[str]:
    if listed := re.search(r"branch_computations=\{([^}]*)\}", conditional.rest):
        return [name.strip(" %") for name in listed[1].split(",")]
    return [conditional.computation(f"{branch}_computation") for branch in ("true", "false")]


def _trip_count(loop: _Instruction, computations) -> int | None:
    """Iterations of a loop: as the compiler states them, or from a condition `counter < constant`; else None."""
    if stated := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.rest):
        return int(stated[1])
    condition, body = (computations[loop.computation(key)] for key in ("condition", "body"))
    comparisons = [instruction for instruction in condition.values() if instruction.opcode == "compare"]
    if len(comparisons) == 1 and "direction=LT" in comparisons[0].rest:
        counter, limit = (condition.get(name, _Instruction("", "", "")) for name in comparisons[0].operands())
        index = re.search(r"index=(\d+)", counter.rest)
        if limit.opcode == "constant" and index:
            carry = next(instruction for instruction in reversed(body.values()) if instruction.opcode == "tuple")
            return -(-limit.constant() // _increment(carry.operands()[int(index[1])], body))
    return None


def _increment(name: str, body: dict[str, _Instruction]) -> int:
    """By how much an iteration raises the counter: the sum of the constants added on the way to `name`; at least 1."""
    total = 0
    while name in body and body[name].opcode in ("add", "copy"):
        operands = body[name].operands()
        constants = [operand for operand in operands if operand in body and body[operand].opcode == "constant"]
        total += sum(body[operand].constant() for operand in constants)
        name = next((operand for operand in operands if operand not in constants), None)
    return max(total, 1)


def _sent(kind: str, instruction: _Instruction, devices: int) -> float:
    """Bytes that a device sends in one collective."""
    started = instruction.opcode != kind
    arrays = [array for array in _ARRAY.findall(instruction.type) if not (started and array == ("u32", ""))]
    sizes = [_bytes(*array) for array in arrays]
    # The asynchronous form's type is (operands, results), except that an all-reduce has results only.
    result = sum(sizes[len(sizes) // 2 :] if started and kind != "all-reduce" else sizes)
    n = _group_size(instruction.rest, devices)
    share = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1}  # of the result
    share |= dict.fromkeys(("all-gather", "all-to-all"), (n - 1) / n)
    return result * share.get(kind, 1)


def _bytes(dtype: str, dimensions: str) -> float:
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return math.prod(map(int, filter(None, dimensions.split(",")))) * (bits / 8)


def _group_size(attributes: str, devices: int) -> int:
    """Devices that take part together, from any of the three ways in which HLO writes them."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return listed[1].count(",") + 1
    if shaped := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(shaped[1])
    if over := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", over[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", over[2]))
    return devices


def launches(text: str) -> dict[str, int]:
    """What a turn of the loop that decodes launches, the one with the most kernels outside of loops within it, from a
    file `*thunk_sequence_after_thunk_passes.txt` that XLA left under `xla_dump_to`.

    Counts of kernels, its condition's among them; of those outside of command buffers (CUDA graphs); of these; and of
    conditionals and loops within, at which the host waits for the GPU unless XLA knows a loop's number of turns.
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
