"""Collectives of a compiled program, read from its HLO text and counted as often as they run."""

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


def collectives(text: str, traced: float = 1) -> dict[str, Traffic]:
    """Collectives of a partitioned program, by kind, on one device; loops count as often as they turn.

    Args:
      text: `compiled.as_text()`.
      traced: turns of each loop whose count is not a constant of the program.

    Returns:
      Kind (all-gather, all-reduce, ...) to `Traffic`. Bytes are those that a ring sends: of n devices each sends
      (n-1)/n of what an all-gather, a reduce-scatter or an all-to-all makes or takes, and twice that for an all-reduce.
      Of a conditional the branch that sends more counts.
    """
    computations, entry = _computations(text)
    partitions = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    return _counted(entry, computations, traced, int(partitions[1]) if partitions else 1, {})


def _computations(text):
    """Name -> [(instruction, type, opcode, rest of the line)], and the name of the entry."""
    found, entry, lines = {}, None, None
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            lines = found[opened[1]] = []
            entry = opened[1] if line.startswith("ENTRY") else entry
        elif lines is not None and (read := _INSTRUCTION.match(line)):
            lines.append(read.groups())
    return found, entry


def _counted(name, computations, traced, devices, known) -> dict:
    """Traffic of one computation, with all that it calls."""
    if name in known:
        return known[name]
    total = {}
    for _, kind, opcode, rest in computations[name]:
        collective = opcode.removesuffix("-start")
        if collective in _KINDS and not opcode.endswith("-done"):
            sent = _sent(collective, kind, rest, devices, started=opcode != collective)
            _add(total, {collective: Traffic(1, sent)}, 1)
        elif opcode == "while":
            turns = _turns(rest, computations, traced)
            _add(total, _counted(_named("body", rest), computations, traced, devices, known), turns)
        elif opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", rest)
            names = (
                branches[1] if branches else f"{_named('true_computation', rest)},{_named('false_computation', rest)}"
            )
            each = [_counted(one.strip(" %"), computations, traced, devices, known) for one in names.split(",")]
            _add(total, max(each, key=lambda traffic: sum(one.sent for one in traffic.values())), 1)
        elif opcode in ("fusion", "call", "async-start"):
            _add(total, _counted(_named("calls|to_apply", rest), computations, traced, devices, known), 1)
    known[name] = total
    return total


def _add(total, more, times):
    for kind, traffic in more.items():
        before = total.get(kind, Traffic(0, 0))
        total[kind] = Traffic(before.count + times * traffic.count, before.sent + times * traffic.sent)


def _named(key, rest) -> str:
    return re.search(rf"\b(?:{key})=%?([\w.\-]+)", rest)[1]


def _turns(rest, computations, traced) -> float:
    """How often a loop turns: as the compiler knows it, or where its condition is `counter < constant`."""
    if known := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', rest):
        return int(known[1])
    condition, body = (_by_name(computations[_named(key, rest)]) for key in ("condition", "body"))
    comparisons = [rest for opcode, rest in condition.values() if opcode == "compare"]
    if len(comparisons) == 1 and "direction=LT" in comparisons[0]:
        counter, limit = (condition.get(name, ("", "")) for name in _operands(comparisons[0]))
        index = re.search(r"index=(\d+)", counter[1])
        if limit[0] == "constant" and index:
            made = next(rest for opcode, rest in reversed(body.values()) if opcode == "tuple")
            step = _added(_operands(made)[int(index[1])], body)
            return -(-_constant(limit[1]) // step)
    return traced


def _by_name(instructions) -> dict:
    """Name -> (opcode, rest of the line)."""
    return {name: (opcode, rest) for name, _, opcode, rest in instructions}


def _operands(rest) -> list[str]:
    return re.findall(r"%([\w.\-]+)", rest.partition(")")[0])


def _constant(rest) -> int:
    return int(rest.partition(")")[0])


def _added(name, body) -> int:
    """By how much a turn raises the loop's counter: the sum of the constants added on the way to `name`; at least 1."""
    total = 0
    while name in body and body[name][0] in ("add", "copy"):
        operands = _operands(body[name][1])
        constants = [operand for operand in operands if body.get(operand, ("",))[0] == "constant"]
        total += sum(_constant(body[operand][1]) for operand in constants)
        name = next((operand for operand in operands if operand not in constants), None)
    return max(total, 1)


def _bytes(dtype, dimensions) -> float:
    size = 1
    for dimension in filter(None, dimensions.split(",")):
        size *= int(dimension)
    return size * (1 if dtype == "pred" else int(_ITEM_BITS.match(dtype)[1]) / 8)


def _sent(kind, shape, rest, devices, started) -> float:
    """Bytes that a device sends in one collective whose result has the HLO type `shape`."""
    sizes = [_bytes(*array) for array in _ARRAY.findall(shape) if not (started and array == ("u32", ""))]
    # The asynchronous form's type is (operands, results) but for an all-reduce, whose operands are its results.
    results = sum(sizes[len(sizes) // 2 :] if started and kind != "all-reduce" else sizes)
    group = _group(rest, devices)
    share = {
        "all-gather": (group - 1) / group,
        "all-reduce": 2 * (group - 1) / group,
        "reduce-scatter": group - 1,
        "all-to-all": (group - 1) / group,
    }
    return results * share.get(kind, 1)


def _group(rest, devices) -> int:
    """Devices that take part together, from any of the three ways in which HLO writes them."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return listed[1].count(",") + 1
    if shaped := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(shaped[1])
    if over := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", over[1]))
        size = 1
        for axis in re.findall(r"'([^']+)'", over[2]):
            size *= int(sizes[axis])
        return size
    return devices
