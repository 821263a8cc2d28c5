"""A run as shapes on devices that are not there: what `plan` compiles or models; no data, tokenizer or weights."""

import importlib.metadata
import importlib.util
import pathlib
import types
from functools import partial

import jax

from rpg_jax.lab.planning import report, search
from rpg_jax.lab.planning.estimates import Recipe
from rpg_jax.models import SIZES, huggingface, named
from rpg_jax.run import build, states


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
    state = states.abstract(run, partial(states.build_state, run))
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
