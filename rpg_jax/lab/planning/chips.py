"""Memory, bandwidth and FLOP/s of accelerators, as their vendors publish them, and the slices that exist."""

import math
from typing import NamedTuple

from rpg_jax import InputError

GIB = 2**30
_GOOGLE = "https://docs.cloud.google.com/tpu/docs"
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")


class Chip(NamedTuple):
    """One accelerator, which JAX sees as one device."""

    memory: float  # bytes of HBM that programs may use
    bandwidth: float  # bytes/s between HBM and the cores
    flops: float  # dense bfloat16 FLOP/s at peak
    clock: float | None  # cycles/s, the unit of the compiler's estimates; None for GPUs, whose compiler makes none
    links: float  # bytes/s that it sends to its neighbors: half of the published bidirectional figure
    network: float | None  # bytes/s that it sends to other machines; None for TPUs, whose slice is one interconnect
    machine: int | None  # chips of a machine, beyond which `network` is the limit; None for TPUs
    topologies: tuple[str, ...] | None  # slices that exist; None for GPUs: a part of a machine, or several whole ones
    source: str
    target: str | None = None  # XLA's GpuTargetConfigProto as text; None for TPUs, which libtpu knows


def _target(
    name: str, capability: int, cores: int, lanes: int, shared: int, cache: int, clock: float, bandwidth: int, size: int
) -> str:  # fmt: skip
    """A GPU as XLA's target configs describe it (openxla/xla, xla/backends/gpu/target_config/specs). Lanes are float32
    units of a core; shared memory is a core's; sizes are in bytes, the clock is in GHz. Without versions of runtime and
    driver XLA would put no cuDNN kernel and no loop into a command buffer."""
    return f"""gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
        shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared - 1024} shared_memory_per_core: {shared}
        core_count: {cores} fpus_per_core: {lanes} clock_rate_ghz: {clock} l2_cache_size: {cache}
        memory_bandwidth: {bandwidth} device_memory_size: {size} cuda_compute_capability {{ major: {capability} }}
        runtime_version: "13.0.0" driver_version: "13.0.0"
    }}
    platform_name: "CUDA" device_description_str: "{name}"
    dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} patch: {CUDNN[2]} }}"""


CUDNN = (9, 12, 0)  # the least that jax[cuda13] takes
_HOPPER = (9, 132, 128, 233472, 52428800, 1.98)  # an H200 is an H100 with other memory
_A100 = _target("NVIDIA A100-SXM4-80GB", 8, 108, 64, 167936, 41943040, 1.41, 2039040000000, 85100068864)
_H100 = _target("NVIDIA H100 80GB HBM3", *_HOPPER, 3352320000000, 84978434048)
_H200 = _target("NVIDIA H200", *_HOPPER, 4800000000000, 151397597184)

# Memory of TPUs is what the compiler of libtpu 0.0.42 allows, as its error for too large a program states it. The pages
# below say 16, 95 and 32 GB, of which the system keeps a little. A clock is the peak over what a cycle does: 4, 8 and 4
# matrix units of 128 x 128 (v6e: 256 x 256) multiplications and additions.
CHIPS = {
    "v5e": Chip(15.75 * GIB, 819e9, 197e12, 1.5e9, 200e9, None, None, _FLAT, f"{_GOOGLE}/v5e"),
    "v5p": Chip(95.74 * GIB, 2765e9, 459e12, 1.75e9, 600e9, None, None, _CUBES, f"{_GOOGLE}/v5p"),
    "v6e": Chip(31.25 * GIB, 1638e9, 918e12, 1.75e9, 400e9, None, None, _FLAT, f"{_GOOGLE}/v6e"),
    # SXM modules in DGX machines: NVLink between the GPUs of a machine, one InfiniBand adapter for each GPU beyond it.
    "a100": Chip(80e9, 2039e9, 312e12, None, 300e9, 25e9, 8, None, f"{_NVIDIA}/a100 (80GB), {_NVIDIA}/dgx-a100", _A100),
    "h100": Chip(80e9, 3350e9, 989e12, None, 450e9, 50e9, 8, None, f"{_NVIDIA}/h100 (SXM), {_NVIDIA}/dgx-h100", _H100),
    "h200": Chip(141e9, 4800e9, 989e12, None, 450e9, 50e9, 8, None, f"{_NVIDIA}/h200 (SXM), {_NVIDIA}/dgx-h200", _H200),
}


class Topology(NamedTuple):
    """A slice of TPUs or a number of GPUs."""

    name: str
    chip: Chip
    devices: int

    @property
    def shape(self) -> str:
        """As its compiler takes it: a slice of TPUs, or partitions x machines x GPUs of a machine."""
        if self.chip.machine is None:
            return self.name.partition(":")[2]
        machines = -(-self.devices // self.chip.machine)
        return f"1x{machines}x{self.devices // machines}"

    def wire(self) -> float:
        """Bytes/s that a device sends in a collective over all devices."""
        chip = self.chip
        return chip.links if chip.machine is None or self.devices <= chip.machine else chip.network


def parse(names: str) -> list[Topology]:
    """Reads names such as `v5p:2x2x4,h100:8`; ValueError for one that does not exist, with those that do."""
    return [_parse(name.strip()) for name in names.split(",")]


def _parse(name: str) -> Topology:
    kind, _, shape = name.partition(":")
    if kind not in CHIPS:
        raise InputError(f"--topology={name}: unknown chip {kind!r}; known: {', '.join(CHIPS)}, as v5p:2x2x4 or h100:8")
    chip = CHIPS[kind]
    if chip.topologies is not None:
        if shape not in chip.topologies:
            raise InputError(f"--topology={name} does not exist; there are {kind}:{{{','.join(chip.topologies)}}}")
        return Topology(name, chip, math.prod(map(int, shape.split("x"))))
    count = int(shape) if shape.isdecimal() and len(shape) < 6 else 0
    if count < 1 or (count > chip.machine and count % chip.machine):
        raise InputError(
            f"--topology={name} does not exist; there are {kind}:N with N up to {chip.machine} GPUs of one machine, or "
            f"a multiple of {chip.machine} below 100,000"
        )
    return Topology(name, chip, count)
