"""RPG-JAX: Regularized Policy Gradient (Zhang et al., arXiv 2505.17508) in JAX."""

import signal
import sys

# `python -m rpg_jax.COMMAND` imports for seconds. Until `run.cli` takes over, Ctrl-C ends it without a traceback.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

__version__ = "0.2.0"
