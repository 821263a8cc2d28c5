"""A run as shapes on devices that are not there: no data, tokenizer or weights are read."""

import dataclasses
import pathlib
import types
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from rpg_jax import InputError
from rpg_jax.lab.planning.workload import PHASES, SAMPLED, Workload
from rpg_jax.models import SIZES, active_parameter_count, huggingface, named
from rpg_jax.run import build, states
from rpg_jax.training.loop import Parts
from rpg_jax.types import Checkpoint


class Sketch(NamedTuple):
    """What a run is made of, before anything is computed."""

    run: build.Run
    parts: Parts  # the jitted functions of an RL step
    checkpoint: Checkpoint  # abstract, with shardings
    sides: dict[str, Workload]  # of each phase: that of the devices that sample, or of those that learn
    conversation: bool  # whether environments answer
    chunks: int  # of a row, whose logits are computed one after the other

    @property
    def workload(self) -> Workload:
        """Of the devices that learn."""
        return self.sides["update"]

    @property
    def is_split(self) -> bool:
        """Whether some devices only sample."""
        return self.run.sampler_mesh is not self.run.mesh


def sketch(
    config: ConfigDict, *, devices: Sequence[jax.Device], size: str | None, lengths: np.ndarray, prompt_length: float
) -> Sketch:
    """Builds a config's run for `devices`; `size` is the named model size that stands for its checkpoint, if any."""
    config = config.copy_and_resolve_references()
    if size is not None:
        config.model.size, config.model.checkpoint = size, None
    conversation, config.environment.name = bool(config.environment.name), None  # no program knows which it is
    size, checkpoint = config.model.size, config.model.checkpoint
    shapes = [named(size) if checkpoint is None else huggingface.read_config(checkpoint)]
    if teacher := config.reference.checkpoint:  # of the same vocabulary, which a size may have more rows for
        shapes.append(huggingface.read_config(teacher))
    tokenizer = types.SimpleNamespace(vocab_size=min(shape.vocab_size for shape in shapes), stop_ids=(0,))
    problems = types.SimpleNamespace(tokenizer=tokenizer, problems=lambda split: [None], tasks=())
    if count := config.mesh.sampler * len({device.process_index for device in devices}):
        # Neighbors: for a mesh of every second row of v6e:8x8 libtpu 0.0.42 ends with a failed check. The first ones
        # sample, because this process asks for its rows of their mesh.
        devices = devices[count:], devices[:count]
    run = build.build_run(config, devices=devices, problems=problems)
    build.check_rows(config, run)
    # No program of a step has in its arguments what rollout.carry_over keeps.
    checkpoint = dataclasses.replace(states.abstract(run, partial(states.build_state, run)), pending=None)
    state, reference = checkpoint.state, float(run.reference.mode != "iterative")
    if run.teacher is not None:
        reference = active_parameter_count(run.teacher.config) / active_parameter_count(run.model.config)
    unused = dict.fromkeys(("stream", "checkpoints", "log", "should_stop", "traced"))
    parameters, moments = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (state.params, state.opt_state))
    workload = Workload(
        model=run.model,
        mesh=run.mesh.shape,
        rollout=run.rollout,
        loop=run.loop,
        lengths=lengths,
        prompt_length=prompt_length,
        moments=round(moments / parameters),
        reference_passes=reference,
    )
    sampling = dataclasses.replace(workload, model=run.sampler_model, mesh=run.sampler_mesh.shape)
    sides = {phase: sampling if phase in SAMPLED else workload for phase in PHASES}
    columns = run.loop.packed_columns or run.rollout.max_prompt + run.rollout.max_new
    chunks = -(-columns // config.learner.logprob_chunk)
    return Sketch(run, build.build_parts(config, run, state, **unused), checkpoint, sides, conversation, chunks)


def planned_size(config: ConfigDict) -> str | None:
    """The named model size that stands for a checkpoint which is not on this machine; None if it is not needed.
    InputError where its folder's name begins with no known one."""
    folder = config.model.checkpoint
    if folder is None or pathlib.Path(folder).exists():
        return None
    name = pathlib.Path(folder).name.lower()
    sizes = [size for size in SIZES if name.startswith(size)]
    if not sizes:
        raise InputError(
            f"model.checkpoint={folder} is not here, and no model size is known by its name; name the folder after one "
            f"of: {', '.join(SIZES)}"
        )
    return max(sizes, key=len)
