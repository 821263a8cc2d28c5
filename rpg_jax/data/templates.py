"""Prompt templates by name: functions from the text of a problem to the user's message."""

from collections.abc import Callable

from rpg_jax import InputError


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
        f"{problem}\n\nDo not calculate yourself. First write the sum between tags, for example <calc>12+34</calc>. "
        "Once you are told the value, for example 46, finish with the sentence: The answer is 46."
    )


TEMPLATES: dict[str, Callable[[str], str]] = {"paper": paper, "none": none, "calculator": calculator}


def named(name: str, what: str = "the wording of problems") -> Callable[[str], str]:
    """The template of that name; raises ValueError, which says what has the name, for another one."""
    if name not in TEMPLATES:
        raise InputError(f"{what} is {name!r}; known: {', '.join(TEMPLATES)}")
    return TEMPLATES[name]
