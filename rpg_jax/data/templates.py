"""Prompt templates by name: functions from the text of a problem to the user's message."""

from collections.abc import Callable


def paper(problem: str) -> str:
    """The prompt of DAPO-Math-17k and of the paper's evaluation sets; its rule reads the last `Answer:` line."""
    return (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
        f'{problem}\n\nRemember to put your answer on its own line after "Answer:".'
    )


def none(problem: str) -> str:
    """The problem, unchanged."""
    return problem


def calculator(problem: str) -> str:
    """The problem, and how to call the tool of `environments.calculator`."""
    return (
        f"{problem}\n\nUse the calculator: write an expression between tags, such as <calc>12+34</calc>, and stop. You "
        "are told its value. Then say the answer."
    )


TEMPLATES: dict[str, Callable[[str], str]] = {"paper": paper, "none": none, "calculator": calculator}
