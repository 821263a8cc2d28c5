r"""Rules for answers to mathematical problems: (response, answer) -> bool, without exceptions, in bounded steps."""

from collections.abc import Callable
from functools import partial

from rpg_jax.answer import boxed_answer, stated_answer
from rpg_jax.rewards.same import canonical, same


def stated_or_boxed_answer(response: str) -> str | None:
    """The answer that a response states, else the contents of its last box."""
    answer = stated_answer(response)
    return boxed_answer(response) if answer is None else answer


def voted_answer(response: str, extract: Callable[[str], str | None] = stated_or_boxed_answer) -> str | None:
    """A response's vote in maj@k: what `extract` takes out of it, normalized; None for no vote."""
    answer = extract(response)
    return None if answer is None else canonical(answer)


def finds(extract: Callable[[str], str | None], response: str, answer: str) -> bool:
    """Whether what `extract` takes out of a response is the answer, both normalized."""
    found = extract(response)
    return found is not None and same(found, answer)


# Where each rule looks for the answer, within the final 300 characters: dapo is that of DAPO (arXiv 2503.14476). maj@k
# counts votes on the same text that the rule judges.
JUDGED = {"dapo": stated_answer, "boxed": boxed_answer, "math_verify": stated_or_boxed_answer}
RULES = {name: partial(finds, JUDGED[name]) for name in ("dapo", "boxed")}
