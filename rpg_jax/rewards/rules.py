r"""Rules for answers to mathematical problems: (response, answer) -> bool, without exceptions, in bounded steps."""

from collections.abc import Callable

from rpg_jax.answer import boxed_answer, stated_answer
from rpg_jax.rewards.same import canonical, same


def dapo(response: str, answer: str) -> bool:
    """The last `Answer:` in the final 300 characters states the answer, both normalized (DAPO, arXiv 2503.14476)."""
    stated = stated_answer(response)
    return stated is not None and same(stated, answer)


def boxed(response: str, answer: str) -> bool:
    r"""The last \boxed{...} in the final 300 characters holds the answer, both normalized."""
    inside = boxed_answer(response)
    return inside is not None and same(inside, answer)


def stated_or_boxed_answer(response: str) -> str | None:
    """The answer that a response states, else the contents of its last box."""
    answer = stated_answer(response)
    return boxed_answer(response) if answer is None else answer


def voted_answer(response: str, extract: Callable[[str], str | None] = stated_or_boxed_answer) -> str | None:
    """A response's vote in maj@k: what `extract` takes out of it, normalized; None for no vote."""
    answer = extract(response)
    return None if answer is None else canonical(answer)


RULES = {"dapo": dapo, "boxed": boxed}
# Where each rule looks for the answer; maj@k counts votes on the same text that the rule judges.
JUDGED = {"dapo": stated_answer, "boxed": boxed_answer, "math_verify": stated_or_boxed_answer}
