"""Collectives of a compiled program, read from its HLO text and counted as often as they run."""

import functools
import math
import re
from typing import NamedTuple

_ITEM_BITS = re.compile(r"(?:pred|bf|f|s|u|c)(\d*)")
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


class Traffic(NamedTuple):
    """What one kind of collective does on one device."""

    count: float  # times that it runs
    sent: float  # bytes that the device sends


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


def collectives(text: str, traced: float) -> dict[str, Traffic]:
    """Collectives of a partitioned program on one device, by kind; those in loops count once for every iteration.

    Args:
      text: `compiled.as_text()`.
      traced: iterations of each loop whose trip count is not a constant of the program.

    Returns:
      Kind (all-gather, all-reduce, ...) to `Traffic`. Bytes are those of ring algorithms: of n devices each sends
      (n-1)/n of the larger side of an all-gather, a reduce-scatter or an all-to-all, and twice that for an all-reduce.
      Of a conditional the branch that sends most counts.
    """
    computations, entry = _parse(text)
    partitions = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    devices = int(partitions[1]) if partitions else 1

    @functools.cache
    def traffic_of(name: str) -> dict[str, Traffic]:
        """Traffic of one computation and of all that it calls."""
        total = {}

        def add(traffic, times=1):
            for kind, (count, sent) in traffic.items():
                before = total.get(kind, Traffic(0, 0))
                total[kind] = Traffic(before.count + times * count, before.sent + times * sent)

        for instruction in computations[name].values():
            kind = instruction.opcode.removesuffix("-start")  # of the asynchronous form, which also has a -done
            if kind in _KINDS:
                add({kind: Traffic(1, _sent(kind, instruction, devices))})
            elif kind == "while":
                add(traffic_of(instruction.computation("body")), _trip_count(instruction, computations, traced))
            elif kind == "conditional":
                branches = (traffic_of(branch) for branch in _branches(instruction))
                add(max(branches, key=lambda traffic: sum(each.sent for each in traffic.values())))
            elif kind in ("fusion", "call", "async"):
                add(traffic_of(instruction.computation("calls|to_apply")))
        return total

    return traffic_of(entry)


def _parse(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """({computation: {name: instruction}}, the name of the entry computation)."""
    computations, entry, instructions = {}, None, None
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            instructions = computations[header[1]] = {}
            entry = header[1] if line.startswith("ENTRY") else entry
        elif instructions is not None and (match := _INSTRUCTION.match(line)):
            instructions[match[1]] = _Instruction(*match.groups()[1:])
    return computations, entry


def _branches(conditional: _Instruction) -> list[str]:
    if listed := re.search(r"branch_computations=\{([^}]*)\}", conditional.rest):
        return [name.strip(" %") for name in listed[1].split(",")]
    return [conditional.computation(f"{branch}_computation") for branch in ("true", "false")]


def _trip_count(loop: _Instruction, computations, traced: float) -> float:
    """Iterations of a loop: as the compiler states them, or from a condition `counter < constant`; else `traced`."""
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
    return traced


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
    bits = 8 if dtype == "pred" else int(_ITEM_BITS.match(dtype)[1])
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
