"""Options of the TPU compiler: every command runs with them, and `python -m rpg_jax.plan` compiles with them.

docs/devices.md has the compiler's estimate of what they bring. On other platforms they have no effect.
"""

from collections.abc import Mapping

VARIABLE = "LIBTPU_INIT_ARGS"  # where libtpu looks for options when it is loaded
OPTIONS = {
    # A product with a weight that fsdp divides can gather the weight first, or be cut into one product a shard while
    # shards arrive. Above this size of a weight in MiB the compiler cuts. Each part then contracts hidden_size / fsdp
    # numbers, 160 of Qwen3-4B on 16 chips, and leaves three quarters of a matrix unit idle: so never.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    # Bytes. The code generator for SparseCores, which may run a program's collectives, overflowed the stack that its
    # threads have by default: qwen3-4b on v6e:8x8 with devices that only sample.
    "fibers_default_thread_stack_size": "16777216",
}


def libtpu_arguments(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that gives libtpu the options, beside what the environment sets there, which takes precedence."""
    there = environment.get(VARIABLE, "")
    ours = [f"--{name}={value}" for name, value in OPTIONS.items() if f"--{name}=" not in there]
    return {VARIABLE: " ".join([*ours, *there.split()])}
