"""Reward functions of a campaign, for worker processes: `score`, which misbehaves on one response in sixteen.

How it misbehaves is the name in the variable FAULTS_VERIFIER: a function of MISBEHAVIOURS, whose results are no scores.
Without it, such responses score 0, which is what becomes of a failure: both trainings must end with the same bits.
Imports the standard library only.
"""

import ctypes
import os
import time
import zlib


def score(prompt: str, response: str, answer: str, task: str) -> float:
    """A verdict that depends on the response alone; every call leaves a byte in the file FAULTS_CALLS.

    The call with the answer as the response is the trial before a run.
    """
    if response == answer:
        return 0.0
    with open(os.environ["FAULTS_CALLS"], "ab", buffering=0) as calls:
        calls.write(b".")
    digest = zlib.crc32(f"{prompt}|{response}".encode())
    if digest % 16:
        return float(digest // 16 % 2)
    misbehave = MISBEHAVIOURS.get(os.environ.get("FAULTS_VERIFIER"))
    return misbehave() if misbehave else 0.0


def fork_and_leave_a_child():
    if os.fork() == 0:
        time.sleep(600)
    return "a child stays"


def eat_memory():
    eaten = []
    while True:
        eaten.append(bytearray(1 << 24))


# tests/test_rewards_pool.py has others: a function that hangs, exits, is stopped or starts other programs.
MISBEHAVIOURS = {
    "computes without end": lambda: sum(iter(int, 1)),
    "leaves a child": fork_and_leave_a_child,
    "eats memory": eat_memory,
    "crashes": lambda: ctypes.string_at(0),
    "returns a huge integer": lambda: 10**400,
    "returns a string": lambda: "right",
}
