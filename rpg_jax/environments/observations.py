"""Observations as tokens: what a chat template adds to a conversation for them, and nothing that was there before.

What the policy drew is never rendered or tokenized again, so an observation must be a suffix. It is read off two
renderings of a made-up conversation, one that ends with the assistant's message, and one that goes on.
"""

from rpg_jax import InputError

QUESTION, REPLY, SAID = "A made-up question", "A made-up reply", "A made-up observation"
THOUGHT = "<think>\nA made-up thought\n</think>\n\n"
SHOWN = 30  # characters on both sides of where renderings part


class Observations:
    """Makes tokens of observations by a tokenizer's chat template; without one, the text is appended as it is."""

    def __init__(self, tokenizer, role: str = "user", options: dict | None = None):
        """`options` are further variables of the template.

        Raises InputError: a longer rendering does not begin with the shorter one, as of a template that strips earlier
        thinking; it shows where they part.
        """
        self._tokenizer, self._role, self._options = tokenizer, role, options or {}
        if tokenizer.has_template:
            for reply in (REPLY, THOUGHT + REPLY):
                self._check(reply)

    def _messages(self, reply: str, observation: str | None = None) -> list[dict]:
        said = [dict(role="user", content=QUESTION), dict(role="assistant", content=reply)]
        return said if observation is None else [*said, dict(role=self._role, content=observation)]

    def _check(self, reply: str) -> None:
        shorter = self._tokenizer.render(self._messages(reply), **self._options | dict(add_generation_prompt=False))
        longer = self._tokenizer.render(self._messages(reply, SAID), **self._options)
        if longer.startswith(shorter) and longer.count(REPLY) == 1 == longer.count(SAID):
            return
        if SAID not in longer:
            raise InputError(
                f"the chat template leaves a message of role {self._role} out, which an observation is; set "
                f"environment.role to one that it shows, such as user"
            )
        at = next((n for n, pair in enumerate(zip(shorter, longer, strict=False)) if pair[0] != pair[1]), len(longer))
        before, after = (text[max(at - SHOWN, 0) : at + SHOWN] for text in (shorter, longer))
        raise InputError(
            f"the chat template renders {after!r} in a conversation that goes on with an observation of role "
            f"{self._role}, and {before!r} where it ends: what the policy has said would change; choose another "
            f"template (data.template) or another environment.role, such as tool"
        )

    def __call__(self, text: str, last: int | None) -> list[int]:
        """The ids that follow the policy's turn: the rest of its message, the observation, and what begins the next.

        Special tokens that `text` spells are text: nothing that an environment says can end its message.

        Args:
          last: the last token of the turn, which may be the one that ends a message; None before the first turn, which
            is then an empty message.
        """
        encode, rendered = self._tokenizer.encode, self._tokenizer.encode_rendered
        if not self._tokenizer.has_template:
            return encode(text)
        ids = rendered(self._after_reply(text))
        if encode(text) != rendered(text):
            before, after = self._after_reply(SAID).split(SAID)
            ids = rendered(before) + encode(text) + rendered(after)
        return ids[1:] if ids and ids[0] == last else ids

    def _after_reply(self, observation: str) -> str:
        return self._tokenizer.render(self._messages(REPLY, observation), **self._options).partition(REPLY)[2]
