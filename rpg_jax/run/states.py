"""The state of a run: fresh, as shapes, or restored; and the weights that it starts from."""

from functools import partial

import jax
from ml_collections import ConfigDict

from rpg_jax import parallel
from rpg_jax.models import unstack_layers
from rpg_jax.run.build import Run
from rpg_jax.storage import weights
from rpg_jax.storage.checkpoints import Checkpoints
from rpg_jax.training.optimizer import layout
from rpg_jax.training.reference import make_refresh
from rpg_jax.training.update import init_params, init_state


def to_read(config):
    """A run's config, to read its checkpoints on this machine: its devices may be fewer, or of another kind.

    The objective is one that goes with any, since nothing is learned: one of the user's own need not be here.
    """
    config.model.attention = "auto"
    config.objective = ConfigDict(dict(name="reinforce", advantage="batch_mean", denominator=None))
    try:
        parallel.make_mesh(**config.mesh)
    except ValueError:
        config.mesh.update(dict.fromkeys(config.mesh, 1) | {"fsdp": -1})
    return config


def build_state(run: Run, params):
    """A fresh RL state around given parameters, holding the reference tree if the schedule needs one."""
    state = init_state(run.optimizer, run.mesh, params)
    return state if run.reference.mode == "iterative" else make_refresh(run.optimizer, run.mesh, state)(state)


def abstract(run: Run, build):
    """Shapes and shardings of the state that `build(params)` makes, without making it: what a restore looks like."""
    key = jax.random.key(0, impl="threefry2x32")
    shapes = jax.eval_shape(lambda: build(run.model.init(key)))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        layout(run.optimizer, run.mesh, shapes),
    )


def restore_state(folder, run: Run, which: str):
    """(step, state) of a run's checkpoint in `folder`/checkpoints: "best" by held-out accuracy, "last", or a step.

    Raises ValueError for another `which`, a step that is not there, or a run without checkpoints.
    """
    folder = folder / "checkpoints"
    if which not in ("best", "last") and not which.isdigit():
        raise ValueError(f"--which={which}: expected best, last, or the number of a step")
    if not folder.exists():
        raise ValueError(f"{folder} does not exist: the run has saved no checkpoint there yet")
    shapes = abstract(run, partial(build_state, run))
    with Checkpoints(folder) as checkpoints:
        step = checkpoints.best_step() if which == "best" else None if which == "last" else int(which)
        found = checkpoints.restore(shapes, step)
    if found is None:
        raise ValueError(f"{folder} holds no checkpoint yet; train first")
    step, state, _ = found
    return step, state


def initial_params(config, run: Run):
    """The checkpoint's weights, or random ones: float32, laid out for training."""
    if config.model.checkpoint is None:
        return init_params(run.model, run.mesh, config.seed)
    return weights.load(config.model.checkpoint, abstract(run, lambda params: params))


def checkpoint_params(folder, model, mesh):
    """A checkpoint's weights in the model's dtype, laid out for sampling."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    laid_out = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, model.dtype, sharding=sharding),
        shapes,
        parallel.shardings(mesh, shapes),
    )
    out_shardings = parallel.shardings(mesh, jax.eval_shape(unstack_layers, shapes), parallel.SAMPLING)
    return jax.jit(unstack_layers, out_shardings=out_shardings)(weights.load(folder, laid_out))
