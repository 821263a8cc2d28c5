"""Prompt templates by name: a user's message, with {} where the text of a problem stands."""

from collections.abc import Callable

from rpg_jax import InputError

TEMPLATES = {
    # Of DAPO-Math-17k and of the paper's evaluation sets; its rule reads the last `Answer:` line.
    "paper": "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    '{}\n\nRemember to put your answer on its own line after "Answer:".',
    "none": "{}",
    # Says how to call the tool of `environments.calculator`.
    "calculator": "{}\n\nDo not calculate yourself. First write the sum between tags, for example <calc>12+34</calc>. "
    "Once you are told the value, for example 46, finish with the sentence: The answer is 46.",
}


def named(name: str, what: str = "the wording of problems") -> Callable[[str], str]:
    """Fills the template of that name; raises ValueError, which says what has the name, for another one."""
    if name not in TEMPLATES:
        raise InputError(f"{what} is {name!r}; known: {', '.join(TEMPLATES)}")
    return TEMPLATES[name].format
