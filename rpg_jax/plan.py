"""Whether a config fits a slice of TPUs or a machine of GPUs, and how long a step takes there, without either.

    python -m rpg_jax.plan --config=configs/paper.py:qwen3-4b,rpg-reinforce-urkl,8k --topology=v5p:2x2x4,h100:16

For TPUs every program of a step is compiled by libtpu: memory and collectives are those of the compiled programs.
FLOPs, HBM bytes and times, and everything about GPUs, are modelled from shapes. No data, tokenizer or weights are read;
a checkpoint that is not here is planned as the model size that its folder is named after. Chips are v5e, v5p and v6e
(slices as 4x8 or 2x2x4; a wrong one is told those that exist), a100, h100 and h200 (a number of them).
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types
from functools import partial

import jax
from absl import flags
from ml_collections import config_flags

from rpg_jax import build, cli
from rpg_jax.models import SIZES, huggingface, named
from rpg_jax.planning import chips, report, search
from rpg_jax.planning.estimates import Recipe

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
            check_libtpu()
        found = []
        for topology in topologies:
            if _ALONE.value:
                found.append(plan(config, topology, length, _SEARCH.value))
            else:
                found.append(in_own_process(topology))
                print(report.text(found[-1]), end="\n\n", flush=True)
        if len(found) > 1:
            print(report.comparison(found))
        if _JSON.value is not None:
            write_json(_JSON.value, found)


def check_libtpu():
    """Raises ValueError unless the libtpu that the installed jax goes with is there."""
    wanted = next(
        line.split(";")[0].strip() for line in importlib.metadata.requires("jax") if line.startswith("libtpu")
    )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"compiling for TPUs needs libtpu, which runs without one: pip install '{wanted}'")
    there = importlib.metadata.version("libtpu")
    if not there.startswith(wanted.removeprefix("libtpu==").rstrip("*")):
        raise ValueError(f"libtpu {there} does not go with jax {jax.__version__}: pip install '{wanted}'")


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


def write_json(path, found):
    file = pathlib.Path(path)
    partial_file = file.with_name(file.name + ".partial")
    partial_file.write_text(json.dumps(found, indent=1) + "\n")
    partial_file.replace(file)


def plan(config, topology, response_length: float, searching: bool) -> dict:
    """Everything about one topology, as `report.text` prints it."""
    size = planned_size(config)
    devices = topology_devices(topology) if topology.compiled else jax.devices()
    sketch = partial(sketched, devices=devices, size=size)
    run, parts, state, recipe = sketch(config)
    found = report.measure(topology, run, parts, state, recipe, response_length)
    found["size"], found["config"] = size, config.to_dict()
    if searching:
        found["largest"] = search.largest(config, topology, sketch, found)
    return found


def topology_devices(topology):
    """The devices of a slice of TPUs that is not there."""
    from jax.experimental import topologies

    sides = [int(side) for side in topology.name.partition(":")[2].split("x")]
    host = [min(side, 2) for side in sides[:2]] + [1]  # chips of a host, by which libtpu would round up
    return topologies.get_topology_desc(platform="tpu", topology_name=topology.name, chips_per_host_bounds=host).devices


def planned_size(config) -> str | None:
    """The named size that stands for a checkpoint that is not here; None where the config needs no such stand-in."""
    folder = config.model.checkpoint
    if folder is None or pathlib.Path(folder).exists():
        return None
    name = pathlib.Path(folder).name.lower()
    sizes = [size for size in SIZES if name.startswith(size)]
    if not sizes:
        raise ValueError(
            f"model.checkpoint={folder} is not here, and no model size is known by its name; name the folder after one "
            f"of: {', '.join(SIZES)}"
        )
    return max(sizes, key=len)


def sketched(config, *, devices, size):
    """(Run, Parts, abstract state, Recipe) of a config, without its data, tokenizer and weights."""
    config = config.copy_and_resolve_references()
    if size is not None:
        config.model.size, config.model.checkpoint = size, None
    size, checkpoint = config.model.size, config.model.checkpoint
    shape = named(size) if checkpoint is None else huggingface.read_config(checkpoint)
    tokenizer = types.SimpleNamespace(vocab_size=shape.vocab_size, stop_ids=(0,))
    problems = types.SimpleNamespace(tokenizer=tokenizer, problems=lambda split: [None])
    run = build.build_run(config, devices=devices, problems=problems)
    build.check_rows(config, run)
    state = build.abstract(run, partial(build.build_state, run))
    rest = dict.fromkeys(("stream", "checkpoints", "log", "should_stop", "traced"))
    parts = build.build_parts(config, run, state, **rest)
    weights = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    recipe = Recipe(
        model=run.model.config,
        remat=run.model.remat,
        item=run.model.dtype.itemsize,
        mesh=dict(run.mesh.shape),
        max_prompt=run.rollout.max_prompt,
        max_new=run.rollout.max_new,
        prompts=run.loop.prompts,
        fresh_prompts=run.rollout.fresh_prompts,
        samples=run.rollout.samples,
        slots=run.rollout.slots,
        minibatch_rows=run.loop.minibatch_prompts * run.loop.samples,
        microbatch_rows=run.loop.microbatch_rows,
        epochs=run.loop.epochs,
        pack=run.loop.pack,
        chunk=config.learner.logprob_chunk,
        moments=round(sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) / weights),
        separate_reference=state.reference.params is not None,
        offload=run.optimizer.offload,
    )
    return run, parts, state, recipe


if __name__ == "__main__":
    cli.run(main)
