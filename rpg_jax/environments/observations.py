"""Observations as tokens: what a chat template puts after a reply for them, and nothing that was there before.

What the policy drew is never rendered or tokenized again. So only what follows a reply has to be told: the end of its
message, the observation, and how the next message begins. It is read off made-up conversations; how a template renders
the replies themselves, such as earlier ones without their thoughts, is not asked.
"""

import contextlib
import itertools
import os

from rpg_jax import InputError

QUESTION, REPLY, SAID, THOUGHT = (f"A made-up {name}" for name in ("question", "reply", "observation", "thought"))
FORMS = {  # a model's prompt may have opened the thought, and a message may have it beside the content
    "a reply": dict(content=REPLY),
    "a reply with a thought": dict(content=f"<think>\n{THOUGHT}\n</think>\n\n{REPLY}"),
    "a reply with the end of a thought": dict(content=f"{THOUGHT}\n</think>\n\n{REPLY}"),
    "a reply with a thought beside it": dict(content=REPLY, reasoning_content=THOUGHT),
}
TURNS = "first", "second", "third"
SHOWN = 30  # characters on both sides of where renderings part


class Observations:
    """Makes tokens of observations by a tokenizer's chat template; without one, the text is appended as it is.

    `forgets` is whether the template leaves thoughts out where it renders a conversation that goes on.
    """

    def __init__(self, tokenizer, role: str = "user", options: dict | None = None):
        """`options` are further variables of the template.

        Raises InputError: what follows a reply cannot be told. The template fails or leaves observations of this role
        out, or what it adds depends on what the reply held or on the turn; then the line shows where two of them part.
        """
        self._tokenizer, self._role, self._options, self.forgets = tokenizer, role, options or {}, False
        if tokenizer.has_template:
            self._before, *_, self._after = self._told().split(SAID)

    def _render(self, replies: list[dict], said: str | None) -> str:
        """A conversation of replies, each with an observation, of which the last is `said`; without that if None."""
        messages = [dict(role="user", content=QUESTION)]
        for left, reply in zip(reversed(range(len(replies))), replies, strict=True):
            content = reply["content"].replace(REPLY, "An earlier reply") if left else reply["content"]
            messages += [reply | dict(role="assistant", content=content)]
            messages += [dict(role=self._role, content="Go on" if left else said)]
        if said is None:
            return self._tokenizer.render(messages[:-1], **self._options | dict(add_generation_prompt=False))
        return self._tokenizer.render(messages, **self._options)

    def _tried(self, replies: list[dict], said: str | None) -> str:
        """The same, empty if the template fails; but for one reply and its observation nobody needs the rendering."""
        with contextlib.suppress(InputError):
            return self._render(replies, said)
        return ""

    def _after_reply(self, observation: str) -> str:
        return self._render([FORMS["a reply"]], observation).partition(REPLY)[2]

    def _told(self) -> str:
        """What follows a reply with the observation `SAID`: the same whatever the reply held, and in every turn."""
        try:
            expected = self._after_reply(SAID)
        except InputError as error:
            raise InputError(
                f"{error}; it is an observation of role {self._role}: set environment.role to one that the template "
                f"takes after a reply, or choose another template (data.template)"
            ) from None
        if SAID not in expected:
            raise InputError(
                f"the chat template leaves a message of role {self._role} out, which an observation is, or the reply "
                f"before it; set environment.role to one that it shows, such as user"
            )
        if REPLY in expected:
            raise InputError("the chat template shows a reply twice; choose another template (data.template)")
        for (name, reply), turn, earlier in itertools.product(FORMS.items(), range(len(TURNS)), FORMS.values()):
            text = self._tried([earlier] * turn + [reply], SAID)
            if text.count(REPLY) != 1:
                continue
            found = text.partition(REPLY)[2]
            if found != expected:
                at = len(os.path.commonprefix([expected, found]))
                plain, other = (part[max(at - SHOWN, 0) : at + SHOWN] for part in (expected, found))
                raise InputError(
                    f"what follows a turn of the policy cannot be told: after a reply the chat template goes on with "
                    f"{plain!r}, and after {name} in the {TURNS[turn]} turn with {other!r}; choose another template "
                    f"(data.template) or another environment.role"
                )
            if earlier is reply and text.count(THOUGHT) <= turn:
                self.forgets |= THOUGHT in reply["content"] + self._tried([reply], None)
        return expected

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
        before, suffix = self._before, self._after_reply(text)
        ended = before.lstrip()
        if rendered(ended)[:1] == [last] != encode(ended)[:1]:  # what stands before the end of a message was not drawn
            before, suffix = ended, suffix.lstrip()
        ids = rendered(suffix)
        if encode(text) != rendered(text):
            inner = suffix.removeprefix(before).removesuffix(self._after)
            ids = rendered(before) + encode(inner) + rendered(self._after)
        return ids[1:] if ids and ids[0] == last else ids
