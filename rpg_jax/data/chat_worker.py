"""A worker process that renders one chat template: a line of JSON in, a line of JSON out.

Run as a script, `python chat_worker.py CPU_SECONDS MEMORY_MB`, by `rpg_jax.data.chat`. The first input line is the
template as a JSON string, every other line the variables of a rendering; each reply is {"text": string} or
{"error": string}. Templates are programs that come with weights from anywhere. The sandbox refuses access to anything
outside of the template, and the limits of this process (CPU time, memory, no files, no processes) hold in any case;
reward workers, whose functions are the user's own code and may use files and processes, have a mechanism of their own.
"""

import datetime
import encodings.unicode_escape  # noqa: F401  Jinja imports it and jinja2.debug when files are forbidden
import json
import random
import resource
import signal
import sys
import time

import jinja2.debug
import jinja2.ext
import jinja2.sandbox

LONGEST = 1 << 22  # most characters of a rendering
TODAY = datetime.datetime(2024, 7, 26)  # for every template: prompts do not depend on the day of the run


class Generation(jinja2.ext.Extension):
    """The tag {% generation %} … {% endgeneration %}, which marks assistants' text for transformers: no effect."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


class Namespace(jinja2.utils.Namespace):
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


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox that raises an error for a refused attribute, where Jinja's may give an empty text."""

    def unsafe_undefined(self, obj, attribute):
        raise jinja2.exceptions.SecurityError(
            f"the sandbox refuses attribute {attribute!r} of a {type(obj).__name__} object"
        )


def environment() -> Environment:
    """The environment in which transformers 5 renders chat templates."""
    made = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": TODAY.strftime,
        "namespace": Namespace,
        "dict": lambda *pairs, **items: dict(*pairs, **items),  # not the class, whose unbound methods change mappings
    }
    return made


def main(seconds: str, memory_mb: str):
    for name, limit in [("AS", int(memory_mb) << 20), ("NOFILE", 0), ("NPROC", 0), ("CORE", 0)]:
        kind = getattr(resource, f"RLIMIT_{name}")
        allowed = resource.getrlimit(kind)[1]
        limit = limit if allowed == resource.RLIM_INFINITY else min(limit, allowed)
        resource.setrlimit(kind, (limit, limit))
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for ignored in (signal.SIGINT, signal.SIGTERM):  # meant for the trainer, which closes this process's input on exit
        signal.signal(ignored, signal.SIG_IGN)
    template = None
    for line in sys.stdin:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + int(seconds) + 1, most))
        request = json.loads(line)  # the template, then variables
        try:
            if template is None:
                template, text = environment().from_string(request), ""
            else:
                random.seed(0)  # of the filter `random`
                text = template.render(request)
            if len(text) > LONGEST:
                raise jinja2.TemplateError(f"its text has {len(text):,} characters, more than {LONGEST:,}")
            text.encode()  # raises for half of a surrogate pair, which JSON can hold and no tokenizer accepts
            reply = {"text": text}
        except BaseException as error:
            reply = {"error": _describe(error, memory_mb)}
        print(json.dumps(reply), flush=True)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Replaces Jinja's own filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _describe(error, memory_mb) -> str:
    if isinstance(error, MemoryError):
        return f"it takes more than {memory_mb} MiB of memory"
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    if isinstance(error, jinja2.TemplateError):
        return str(error)
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(*sys.argv[1:])
