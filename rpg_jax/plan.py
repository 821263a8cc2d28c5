"""Whether a config fits a slice of TPUs or a machine of GPUs, and how long a step takes there, without either.

    python -m rpg_jax.plan --config=configs/paper.py:qwen3-4b,rpg-reinforce-urkl,8k --topology=v5p:2x2x4,h100:16

For TPUs every program of a step is compiled by libtpu: memory and collectives are those of the compiled programs.
FLOPs, HBM bytes and times, and everything about GPUs, are modelled from shapes. No data, tokenizer or weights are read;
a checkpoint that is not here is planned as the model size that its folder is named after. Chips are v5e, v5p and v6e
(slices as 4x8 or 2x2x4; a wrong one is told those that exist), a100, h100 and h200 (a number of them).
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from absl import flags
from ml_collections import config_flags

from rpg_jax.lab.planning import chips, report, sketch
from rpg_jax.run import cli
from rpg_jax.storage.logs import write_text_atomic

_CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment: FILE.py or FILE.py:VARIANT.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "Slices to plan for, as v5p:2x2x4,v5e:8x8,h100:8.")
_LENGTH = flags.DEFINE_float("response_length", None, "Mean tokens of a response; unset: half of rollout.max_new.")
_SEARCH = flags.DEFINE_bool("search", False, "Find the largest microbatch, slots and generation batch that fit.")
_JSON = flags.DEFINE_string("json", None, "File to write everything to.")
_ALONE = flags.DEFINE_bool("alone", False, "Plan in this process, whose environment is set up: one topology's worker.")

ENVIRONMENT = {  # libtpu without a TPU: no metadata server is asked, and nothing is logged
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several plans at once, and after one that was killed
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
}


def main(_):
    with cli.door():
        if _CONFIG.value is None or _TOPOLOGY.value is None:
            raise ValueError("--config=FILE.py and --topology=CHIP:SHAPE are needed; see --help")
        topologies = chips.parse(_TOPOLOGY.value)
        config, length = _CONFIG.value, _LENGTH.value
        length = config.rollout.max_new / 2 if length is None else length
        if not 0 < length <= config.rollout.max_new:
            raise ValueError(f"--response_length={length}: expected above 0 and at most {config.rollout.max_new}")
        if _JSON.value is not None and not pathlib.Path(_JSON.value).absolute().parent.is_dir():
            raise ValueError(f"--json={_JSON.value}: there is no such folder; make it first")
        if any(topology.compiled for topology in topologies):
            sketch.check_libtpu()
        found = []
        for topology in topologies:
            if _ALONE.value:
                found.append(sketch.plan(config, topology, length, _SEARCH.value))
            else:
                found.append(in_own_process(topology))
                print(report.text(found[-1]), end="\n\n", flush=True)
        if len(found) > 1:
            print(report.comparison(found))
        if _JSON.value is not None:
            write_text_atomic(pathlib.Path(_JSON.value), json.dumps(found, indent=1) + "\n")


def in_own_process(topology) -> dict:
    """The plan for one topology, from a process with the environment that libtpu or simulated devices need."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "plan.json")
        again = [*sys.argv[1:], f"--topology={topology.name}", f"--json={file}", "--alone"]
        environment = (
            os.environ | ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": "1" if topology.compiled else str(topology.devices)}
        )
        environment.pop("XLA_FLAGS", None)
        worker = subprocess.run(
            [sys.executable, "-m", "rpg_jax.plan", *again], env=environment, stderr=subprocess.PIPE, text=True
        )
        if worker.returncode:
            said = worker.stderr.strip().splitlines() or ["nothing"]
            if worker.returncode == 2:
                raise ValueError(f"{topology.name}: {said[-1].removeprefix('error: ')}")
            raise OSError(f"planning for {topology.name} ended with status {worker.returncode} and said: {said[-1]}")
        return json.loads(file.read_text())[0]


if __name__ == "__main__":
    cli.run(main)
