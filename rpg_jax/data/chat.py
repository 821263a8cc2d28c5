"""Chat templates: from messages to a model's prompt text, by the Jinja template in the folder of its weights."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import weakref

from rpg_jax import InputError

_WORKER = pathlib.Path(__file__).with_name("chat_worker.py")
_CPU_SECONDS, _MEMORY_MB = 5, 512  # limits of compiling a template, or of one rendering
_REASONING = ("reasoning_content", "thinking", "reasoning")

# For models without a template: the contents of the messages, each ended by a newline.
PLAIN = "{% for message in messages %}{{ message.content + '\\n' }}{% endfor %}"


class ChatTemplate:
    """A compiled Jinja chat template, rendered in a separate process with limits; see `chat_worker`."""

    def __init__(self, source: str, where: str, variables: dict[str, str] | None = None):
        """Compiles `source`.

        Args:
          where: the template's file, for errors.
          variables: of every rendering, such as `bos_token` and `eos_token`.

        Raises:
          ValueError: a syntax error, or a template that exceeds the limits, naming `where`.
        """
        self._source, self._where, self._variables = source, where, variables or {}
        self._process, self._lock = None, threading.Lock()
        self._start()

    def render(self, messages: list[dict], add_generation_prompt: bool = True, **options) -> str:
        """The text of `messages`, equal to that of transformers' `apply_chat_template(..., tokenize=False)`.

        Only the date differs: `strftime_now` is of 26 July 2024 on every day, so that prompts can be had again.

        Args:
          messages: each with `role` and `content`; keys whose value is None count as missing.
          options: further variables of the template, JSON values, such as `enable_thinking=False`.

        Raises:
          ValueError: the template raised an error or exceeded a limit; names its file and the last message.
        """
        if not messages or not all(isinstance(message, dict) for message in messages):
            raise InputError(f"{self._where}: expected a list of messages (role and content), not {str(messages)[:80]}")
        messages = [_standard(message) for message in messages]
        variables = {"tools": None, "documents": None, **self._variables, **options}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        with self._lock:
            if self._process is None:
                self._start()
            reply = self._ask(variables)
        if "error" in reply:
            raise InputError(
                f"{self._where}: the chat template fails on {len(messages)} message(s), the last "
                f"{str(messages[-1].get('content'))[:60]!r}: {reply['error']}"
            )
        return reply["text"]

    def _start(self):
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(_CPU_SECONDS), str(_MEMORY_MB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"TZ": "UTC0", "PYTHONHASHSEED": "0"},  # a prompt is the same on every machine
        )
        self._finalizer = weakref.finalize(self, _end, self._process)
        reply = self._ask(self._source)
        if "error" in reply:
            self._finalizer()
            raise InputError(f"{self._where}: the chat template does not compile: {reply['error']}")

    def _ask(self, question) -> dict:
        """The worker's reply, or the reason why it ended; the next rendering then starts another worker."""
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died between two questions; its exit status follows
        line = self._process.stdout.readline()
        if line.endswith(b"\n"):
            return json.loads(line)
        self._finalizer()
        status, self._process = self._process.returncode, None
        if status == -signal.SIGXCPU:
            return {"error": f"it takes more than {_CPU_SECONDS} s"}
        return {"error": f"its process ended with status {status}"}


def _standard(message: dict) -> dict:
    """A message as transformers gives it to templates: without None, its reasoning under each name that they read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning} | message | {"reasoning_content": reasoning}


def _end(process):
    """Ends a worker, which exits when its input is closed."""
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass  # it died with a question in the pipe
    process.stdout.close()
    process.wait()
