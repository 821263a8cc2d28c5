"""What `python -m rpg_jax.plan` does: each topology planned in a process of its own, then printed and compared."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from ml_collections import ConfigDict

from rpg_jax import InputError
from rpg_jax.lab.planning import calibration, chips, decoding, measure, report
from rpg_jax.lab.planning.chips import Topology
from rpg_jax.lab.planning.sketch import planned_size, sketch
from rpg_jax.run.build import check_values
from rpg_jax.run.target import json_file
from rpg_jax.storage.logs import write_text_atomic

ENVIRONMENT = {  # without the device; libtpu asks no metadata server and logs nothing
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several plans at once, and after one that was killed
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # nothing can be loaded from it without the device
}
# The compiler for GPUs, of which JAX loads one.
PLUGIN = "jax-cuda12-plugin" if importlib.util.find_spec("jax_cuda12_plugin") else "jax-cuda13-plugin"


def main(options) -> None:
    """Plans what the flags of `rpg_jax.plan` name."""
    if options.calibrate and not options.given & {"config", "topology"}:
        print(calibration.text(calibrated()))
        return
    check_values(options.config)
    topologies, rollout = chips.parse(options.topology), options.config.rollout
    lengths = decoding.parse(options.lengths, rollout.max_new)
    prompt = rollout.max_prompt if options.prompt_length is None else options.prompt_length
    if not 0 < prompt <= rollout.max_prompt:
        raise InputError(f"--prompt_length={prompt}: expected above 0 and at most {rollout.max_prompt}")
    if options.measured and any(topology.chip.target is None for topology in topologies):
        raise InputError(f"--measured={options.measured} is of GPUs; --topology={options.topology} has TPUs")
    measured = calibration.read(options.measured) if options.measured else None
    output = json_file(options.json)
    check_compilers([*topologies, *chips.parse(calibration.TOPOLOGY)] if options.calibrate else topologies)
    plans = []
    for topology in topologies:
        if options.alone:
            plans.append(plan(options.config, topology, lengths, prompt, measured))
        else:
            plans.append(plan_in_process(topology, sys.argv[1:]))
            print(report.text(plans[-1]), end="\n\n", flush=True)
    if len(plans) > 1:
        print(report.comparison(plans))
    if options.calibrate and not options.alone:
        print(calibration.text(calibrated()))
    if output:
        write_text_atomic(output, json.dumps(plans, indent=1) + "\n")


def calibrated() -> dict:
    """The plan of the shape that was measured elsewhere."""
    [topology] = chips.parse(calibration.TOPOLOGY)
    check_compilers([topology])
    return plan_in_process(topology, calibration.FLAGS)


def plan_in_process(topology: Topology, flags: Sequence[str]) -> dict:
    """The plan of one topology, which the command makes with `flags` in a process with the environment for libtpu."""
    environment = os.environ | ENVIRONMENT
    environment.pop("XLA_FLAGS", None)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "plan.json")
        command = [sys.executable, "-m", "rpg_jax.plan", *flags, f"--topology={topology.name}"]
        command += [f"--json={file}", "--alone"]
        worker = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        if worker.returncode == 2:
            raise InputError(f"{topology.name}: {worker.stderr.strip().splitlines()[-1].removeprefix('error: ')}")
        if worker.returncode:
            raise RuntimeError(f"planning for {topology.name} ended with status {worker.returncode}:\n{worker.stderr}")
        return json.loads(file.read_text())[0]


def plan(
    config: ConfigDict, topology: Topology, lengths: np.ndarray, prompt_length: float, measured: list | None = None
) -> dict:
    """`measure.measure` of one topology with size, config, and what was `measured`; made in this process."""
    size = planned_size(config)
    devices = topology_devices(topology)
    sketched = partial(sketch, devices=devices, size=size, lengths=lengths, prompt_length=prompt_length)
    made = sketched(config)
    result = measure.measure(topology, made)
    result["measured"] = {}
    if measured:
        found = calibration.applied(measured, made.sides, result["step"]["seconds"])
        result["measured"] = found | {"seconds": measure.with_sum(found["seconds"], result["sampler"] is not None)}
    if config.mesh.sampler:
        hosts = Counter(device.process_index for device in devices)
        result["splits"] = measure.splits(topology, config, sketched, min(hosts.values()) - 1)
    return result | {"size": size, "config": config.to_dict()}


def topology_devices(topology: Topology) -> list[jax.Device]:
    """The devices of a topology that is not there."""
    from jax.experimental.topologies import get_topology_desc

    if topology.chip.target is None:
        sides = [int(side) for side in topology.shape.split("x")]
        host = [min(side, 2) for side in sides[:2]] + [1]  # chips of a host, to which libtpu would round up
        return get_topology_desc(topology.name, "tpu", chips_per_host_bounds=host).devices
    described = dict(topology=topology.shape, target_config=topology.chip.target)
    return get_topology_desc(topology.shape, "cuda", **described).devices


def check_compilers(topologies: Sequence[Topology]) -> None:
    """Raises InputError unless the compilers for these topologies are installed that the installed jax goes with."""
    listed = [line.split(";")[0].strip() for line in importlib.metadata.requires("jax")]
    for topology in topologies:
        package = "libtpu" if topology.chip.target is None else PLUGIN
        required = next(line for line in listed if re.match(rf"{package}[<=>]", line))
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            needs = f"--topology={topology.name} is compiled by {package}, which needs no such device"
            raise InputError(f"{needs}: pip install '{required}'") from None
        if not f"{installed}.".startswith(re.search(r"[=<]=([\d.]+)", required)[1]):
            raise InputError(f"{package} {installed} does not go with jax {jax.__version__}: pip install '{required}'")
