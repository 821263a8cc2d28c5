"""How many programs XLA has compiled in this process, so that a run can show that nothing recompiles."""

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """`count` grows by one for every program compiled since it was made."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event, _seconds, **_):
        self.count += event == _EVENT
