"""Chat templates: from messages to a model's prompt text, by the Jinja template in the folder of its weights.

Templates are programs that come with weights from anywhere. They are rendered as transformers 5 does, in Jinja's
sandbox, which refuses access to anything outside of the template; time and memory are not limited.
"""

import datetime
import json
import random

import jinja2.ext
import jinja2.sandbox

from rpg_jax import InputError

_REASONING = ("reasoning_content", "thinking", "reasoning")
_TODAY = datetime.datetime(2024, 7, 26)  # for every template: prompts do not depend on the day of the run

# For models without a template: the contents of the messages, each ended by a newline.
PLAIN = "{% for message in messages %}{{ message.content + '\\n' }}{% endfor %}"


class ChatTemplate:
    """A compiled Jinja chat template."""

    def __init__(self, source: str, where: str, variables: dict[str, str] | None = None):
        """Compiles `source` of the file `where`; `variables`, such as `bos_token`, are of every rendering."""
        self._where, self._variables = where, variables or {}
        try:
            self._template = _environment().from_string(source)
        except Exception as error:
            raise InputError(f"{where}: the chat template does not compile: {_described(error)}") from None

    def render(self, messages: list[dict], add_generation_prompt: bool = True, **options) -> str:
        """The text of `messages`, equal to that of transformers' `apply_chat_template(..., tokenize=False)`.

        Only the date differs: `strftime_now` is of 26 July 2024 on every day, so that prompts can be had again.
        Messages have `role` and `content`; keys whose value is None count as missing. `options` are further variables,
        such as `enable_thinking=False`. Raises ValueError, with the file and the last message, for its errors.
        """
        messages = [_standard(message) for message in messages]
        variables = {"tools": None, "documents": None, **self._variables, **options}
        try:
            text = self._template.render(variables, messages=messages, add_generation_prompt=add_generation_prompt)
            text.encode()  # raises for half of a surrogate pair, which JSON can hold and no tokenizer accepts
        except Exception as error:
            raise InputError(
                f"{self._where}: the chat template fails on {len(messages)} message(s), the last "
                f"{str(messages[-1].get('content'))[:60]!r}: {_described(error)}"
            ) from None
        return text


def _standard(message: dict) -> dict:
    """A message as transformers gives it to templates: without None, its reasoning under each name that they read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning} | message | {"reasoning_content": reasoning}


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %} … {% endgeneration %}, which marks assistants' text for transformers: no effect."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace` without names that begin with an underscore, as in transformers."""

    def __init__(*args, **attributes):
        self, *pairs = args  # an attribute may then be called `self`
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*pairs, **attributes).items():
            self[name] = value

    def __setitem__(self, name, value):
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace attribute may not be called {name!r}")
        super().__setitem__(name, value)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox that raises an error for a refused attribute, where Jinja's may give an empty text."""

    def unsafe_undefined(self, obj, attribute):
        raise jinja2.exceptions.SecurityError(
            f"the sandbox refuses attribute {attribute!r} of a {type(obj).__name__} object"
        )


def _environment() -> _Environment:
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    made.filters |= {"tojson": _to_json, "random": lambda values: random.Random(0).choice(values)}
    made.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _TODAY.strftime,
        "namespace": _Namespace,
        "dict": lambda *pairs, **items: dict(*pairs, **items),  # not the class, whose unbound methods change mappings
    }
    return made


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Replaces Jinja's own filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _described(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
