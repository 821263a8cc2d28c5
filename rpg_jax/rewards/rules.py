r"""Rules for answers to mathematical problems: (response, answer) -> bool, without exceptions, in bounded steps."""

from rpg_jax.rewards.answer import boxed_answer, stated_answer
from rpg_jax.rewards.normalize import canonical, same


def dapo(response: str, answer: str) -> bool:
    """The last `Answer:` in the final 300 characters states the answer, both normalized (DAPO, arXiv 2503.14476)."""
    stated = stated_answer(response)
    return stated is not None and same(stated, answer)


def boxed(response: str, answer: str) -> bool:
    r"""The last \boxed{...} in the final 300 characters holds the answer, both normalized."""
    inside = boxed_answer(response)
    return inside is not None and same(inside, answer)


def voted_answer(response: str) -> str | None:
    """A response's vote in maj@k: the answer that it states, else its last box, normalized; None for no vote."""
    answer = stated_answer(response) or boxed_answer(response)
    return None if answer is None else canonical(answer)


RULES = {"dapo": dapo, "boxed": boxed}
