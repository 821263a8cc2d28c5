"""Chat templates: messages to the text that a model reads, as the folder of its weights says."""

import json
import pathlib
import signal
import subprocess
import sys
import threading
import weakref

_WORKER = pathlib.Path(__file__).with_name("chat_worker.py")
_MEMORY_MB = 512
_REASONING = ("reasoning_content", "thinking", "reasoning")

# For models without a template: what the messages say, each ended by a newline.
PLAIN = "{% for message in messages %}{{ message.content + '\\n' }}{% endfor %}"


class ChatTemplate:
    """A compiled Jinja chat template, rendered in a process of its own with limits; see `chat_worker`."""

    def __init__(self, source: str, where: str, variables: dict[str, str] | None = None, seconds=5):
        """Compiles `source`.

        Args:
          where: the file that it is from, for errors.
          variables: what every rendering sees: `bos_token`, `eos_token` and the like.
          seconds: CPU time, whole seconds, that compiling or one rendering may take.

        Raises:
          ValueError: a syntax error, or a template that the limits stop, naming `where`.
        """
        self._source, self._where, self._variables, self._seconds = source, where, variables or {}, seconds
        self._process, self._lock = None, threading.Lock()
        self._start()

    def render(self, messages: list[dict], add_generation_prompt=True, **options) -> str:
        """The text of `messages`: what transformers' `apply_chat_template(..., tokenize=False)` gives.

        Args:
          messages: each with `role` and `content`; keys whose value is None count as absent.
          options: further variables of the template, JSON values, such as `enable_thinking=False`.

        Raises:
          ValueError: what the template raised, or which limit it met, naming its file and the messages.
        """
        if not messages or not all(isinstance(message, dict) for message in messages):
            raise ValueError(f"{self._where}: expected a list of messages (role and content), not {str(messages)[:80]}")
        messages = [_standard(message) for message in messages]
        variables = {"tools": None, "documents": None, **self._variables, **options}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        with self._lock:
            if self._process is None:
                self._start()
            reply = self._ask(variables)
        if "error" in reply:
            raise ValueError(
                f"{self._where}: the chat template fails on {len(messages)} message(s), the last "
                f"{str(messages[-1].get('content'))[:60]!r}: {reply['error']}"
            )
        return reply["text"]

    def _start(self):
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(self._seconds), str(_MEMORY_MB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._finalizer = weakref.finalize(self, _end, self._process)
        reply = self._ask(self._source)
        if "error" in reply:
            self._finalizer()
            raise ValueError(f"{self._where}: the chat template does not compile: {reply['error']}")

    def _ask(self, question) -> dict:
        """The worker's reply, or what is to be said of its end; the next rendering then starts another."""
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died between two questions; reading tells
        line = self._process.stdout.readline()
        if line.endswith(b"\n"):
            return json.loads(line)
        self._finalizer()
        status, self._process = self._process.returncode, None
        if status == -signal.SIGXCPU:
            return {"error": f"it takes more than {self._seconds} s"}
        return {"error": f"its process ended with status {status}"}


def _standard(message: dict) -> dict:
    """A message as transformers shows it to templates: no None, and its reasoning under the names that they read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning} | message | {"reasoning_content": reasoning}


def _end(process):
    """Ends a worker: it leaves when its input is closed."""
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass  # it was dead, with a question in the pipe
    process.stdout.close()
    process.wait()
