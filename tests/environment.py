"""The environment of tests and of launch/parity.sh, so that compiling is kept short and they share what is compiled.

Run as a program, it prints what a shell has to export.
"""

import importlib.metadata
import os
import pathlib
import shlex

DEFAULTS = {
    "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(__file__).parent.parent / ".jax_cache"),
    # Single operations, too: thousands of them, compiled again in each file and in each process.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    # What is compiled here runs once: LLVM's expensive passes would take much of the suite's time. XLA's own stay.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}
if importlib.metadata.version("jaxlib").startswith("0.10."):  # another version may not know the flag, and ends there
    # The older of XLA's two code generators compiles a program of ours in half of the time, and in two thirds of that
    # without cutting it into parts for more cores, and for vectors of 256 bits.
    DEFAULTS["XLA_FLAGS"] = (
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_max_isa=AVX2"
    )


def environment() -> dict[str, str]:
    """What JAX reads when it is imported; a default gives way to what is set already."""
    return {name: os.environ.get(name, default) for name, default in DEFAULTS.items()}


if __name__ == "__main__":
    for name, value in environment().items():
        print(f"export {name}={shlex.quote(value)}")
