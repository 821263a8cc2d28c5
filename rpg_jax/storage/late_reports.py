"""What Orbax's reads of a damaged checkpoint would print, kept quiet: the failure itself is raised, and is enough.

Leaves are read side by side on an event loop. The first that fails closes it, and TensorStore's threads, which report
on the others to that loop, would each print a traceback. Python prints more when it collects what was left waiting.
"""

import asyncio
import contextlib
import gc
import sys


class _Loop(asyncio.SelectorEventLoop):
    """An event loop to which one may report after it was closed."""

    def call_soon_threadsafe(self, callback, *args, context=None):
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise

    def call_exception_handler(self, context):
        """Says nothing of the leaves that failed after the first."""


@contextlib.contextmanager
def ignored():
    """Event loops that are made within ignore reports that come too late."""
    usual, asyncio.new_event_loop = asyncio.new_event_loop, _Loop
    try:
        yield
    finally:
        asyncio.new_event_loop = usual


def forget():
    """Collects the coroutines that a failed read left unfinished, without a word about each."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    gc.collect()
    sys.unraisablehook = hook
