"""The state of a run: fresh, as shapes, or restored from a checkpoint; and the weights that it starts from."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from rpg_jax import InputError, parallel
from rpg_jax.data import Sets
from rpg_jax.models import Model, quantize_params, unstack_layers
from rpg_jax.rewards.scorer import ENVIRONMENT, NO_REWARD, OWN, judge_of, named_rewards
from rpg_jax.run.build import Run, build_run, read_tokenizer
from rpg_jax.storage import weights, workdir
from rpg_jax.storage.checkpoints import Checkpoints, DamagedCheckpoint, checksums, saved_steps
from rpg_jax.training.collect import nothing_pending
from rpg_jax.training.optimizer import layout
from rpg_jax.training.phases import say
from rpg_jax.training.policies import BASE, REFERENCE, make_policies
from rpg_jax.training.update import init_params, init_state
from rpg_jax.types import Checkpoint, Params, Policy

# What a checkpoint says of frozen weights, and the key of their folder.
OF_FROZEN = {BASE: ("holds adapters", "model.checkpoint"), REFERENCE: ("has a teacher", "reference.checkpoint")}
DELETION_SECONDS = 1.0  # in which a checkpoint that is being deleted goes out of the list of steps


def for_inference(config: ConfigDict) -> ConfigDict:
    """Changes a run's config so that its policy can be sampled or exported here; returns it.

    This machine may have other devices than the run's. Nothing is learned, so any objective will do; the run's own may
    be in a file that is not here.
    """
    config.model.attention = "auto"
    if config.reference.checkpoint:  # a teacher is no part of the policy, and may not be here
        config.reference.update(mode="iterative", checkpoint=None, dtype=None)
    config.objective = ConfigDict(dict(name="reinforce", advantage="batch_mean", denominator=None))
    config.behavior.source = "sampler"  # which goes with any such config
    config.rollout.cache_pages = None
    config.mesh.update(sampler=0)
    try:
        parallel.make_meshes(**config.mesh)
    except ValueError:
        config.mesh.update(dict.fromkeys(config.mesh, 1) | {"fsdp": -1, "sampler": 0})
    return config


def read_run(
    folder: epath.Path, heldout=None, reward: str | None = None, extraction: str | None = None, network: bool = False
) -> tuple[ConfigDict, Run]:
    """The config in a folder of checkpoints, and the run of it, for sampling.

    Its scorer has the function of the accuracy alone.

    `heldout` (problem sets), `reward` (a function's name) and `extraction` (a rule's) stand in place of the run's own
    if they are given. With `network` the function may use the network, also where the run's could not.
    """
    config = for_inference(workdir.read_config(folder))
    if "tasks" not in config.data:  # the training set is not needed, and may not be on this machine
        config.data.update(heldout=heldout or config.data.heldout)
        del config.data["train"]
    section, talks = config.reward, bool(config.environment.name)
    own = judge_of(named_rewards(section.function, section.functions, talks), config.evaluation.function, talks)
    judge = reward or own
    function = None if talks and judge == ENVIRONMENT else "dapo" if heldout and judge == OWN else judge
    section.function, section.functions, section.weights = function, None, ConfigDict()
    config.evaluation.function = function if talks else None
    if extraction:
        config.reward.extraction = extraction
    if network:
        config.reward.network = True
    return config, build_run(config)


def read_policy(folder: epath.Path) -> tuple[ConfigDict, Run]:
    """The config in a folder of checkpoints, and the run of it, for export.

    What answers and scores, and sets of problems that are not generated, are no part of it, and may not be here.
    """
    config = for_inference(workdir.read_config(folder))
    config.environment.name = config.evaluation.function = config.reward.functions = None
    config.reward.function, config.reward.weights = NO_REWARD, ConfigDict()
    config.rollout.dynamic_sampling = False  # which asks for a reward
    return config, build_run(config, problems=None if "tasks" in config.data else Sets(read_tokenizer(config), {}))


def build_state(run: Run, params: Params, **frozen: Any) -> Checkpoint:
    """What a run begins with: a fresh state around trained parameters, the `frozen` weights of `load_frozen` beside
    them, a reference if its schedule needs one and no teacher is it, with `rollout.delay` the policies that the first
    rollouts are drawn from, the initial one, and with `rollout.carry_over` room for what is pending."""
    state = init_state(run.optimizer, run.mesh, params)
    reference, past, pending = None, (), None
    policies = make_policies(run.model, run.optimizer, run.mesh, state)
    if run.reference.mode != "iterative" and run.teacher is None:
        reference = policies.reference(policies.current(state))
    if run.loop.delay:
        past = (policies.past(policies.current(state)),) * run.loop.policies_kept
    if run.rollout.carry_over:
        pending = nothing_pending(run.rollout, run.optimizer, run.sampler_mesh, run.rollout.recorded(run.model.config))
    return Checkpoint(state, reference, past, pending, **frozen)


def abstract(run: Run, build: Callable[..., Any]) -> Any:
    """The tree that `build(params, **frozen)` makes, as shapes with shardings and without memory: what is restored."""
    key, model = jax.random.key(0, impl="threefry2x32"), run.model

    def frozen_policy(model, params):
        held = in_dtype(model, params)
        return Policy(dataclasses.replace(model, lora=None), held, jnp.zeros((), jnp.int32))

    def build_shapes(params, teacher):
        frozen = {} if run.teacher is None else {REFERENCE: frozen_policy(run.teacher, teacher)}
        if model.lora is None:
            return build(params, frozen=frozen)
        sums = jnp.zeros(len(jax.tree.leaves(params)), jnp.uint32)
        frozen = {BASE: frozen_policy(model, params)} | frozen
        return build(model.lora.init(params, key), frozen=frozen, checksums={BASE: sums})

    shapes = jax.eval_shape(build_shapes, model.shapes, run.teacher and run.teacher.shapes)
    laid_out = layout(run.optimizer, run.mesh, shapes)
    if isinstance(shapes, Checkpoint):
        pending = layout(run.optimizer, run.sampler_mesh, {"pending": shapes.pending})
        laid_out = dataclasses.replace(laid_out, **pending)
    shaped = jax.ShapeDtypeStruct
    return jax.tree.map(lambda leaf, where: shaped(leaf.shape, leaf.dtype, sharding=where), shapes, laid_out)


def in_dtype(model: Model, params: Params) -> Params:
    """Frozen weights as they are held: in the model's dtype, matrices in 8 bits where it says so."""
    params = jax.tree.map(lambda x: x.astype(model.dtype), params)
    return params if model.held_in is None else quantize_params(params, model.held_in)


def restore(
    checkpoints: Checkpoints, shapes: Checkpoint, load: Callable[[], dict], step: int | None = None
) -> tuple[int, Checkpoint, dict] | None:
    """As `Checkpoints.restore`, with the frozen policies that `load()` gives as `load_frozen` does.

    Raises ValueError when those do not have the weights that they had when the checkpoint was saved.
    """
    if (newest := checkpoints.latest_step()) is not None:
        say(f"loading checkpoint {newest if step is None else step}")
    restored = checkpoints.restore(dataclasses.replace(shapes, frozen={}), step)
    if restored is None:
        return None
    (step, checkpoint, extra), loaded = restored, load()
    saved = checkpoint.checksums | {REFERENCE: extra.get("teacher", [])}
    for name, policy in loaded["frozen"].items():
        before, now = np.asarray(saved[name]), np.asarray(loaded["checksums"][name])
        changed = np.flatnonzero(before != now) if before.shape == now.shape else range(len(now))
        if len(changed):
            names = list(parallel.named_leaves(policy.params))
            holds, key = OF_FROZEN[name]
            raise InputError(
                f"checkpoint {step} in {checkpoints.directory} {holds} of other weights than {key} has now: "
                f"{len(changed)} of {len(names)} arrays differ, {names[changed[0]]} among them; restore the folder "
                f"that the run began with"
            )
    return step, dataclasses.replace(checkpoint, **loaded), extra


def restore_state(folder: epath.Path, run: Run, which: str, frozen: dict) -> tuple[int, Checkpoint]:
    """(step, what was saved) of a checkpoint in `folder`/checkpoints: "best" by held-out accuracy, "last", or a step.

    `frozen` is what `load_frozen` gives. Raises ValueError for another `which`, a step that is not there, or a run
    without checkpoints.
    """
    folder = folder / "checkpoints"
    if which not in ("best", "last") and not which.isdigit():
        raise InputError(f"--which={which}: expected best, last, or the number of a step")
    if not folder.exists():
        raise InputError(f"{folder} does not exist: the run has saved no checkpoint there yet")
    shapes = abstract(run, partial(build_state, run))
    while True:
        there = saved_steps(folder)
        try:
            with Checkpoints(folder) as checkpoints:
                step = checkpoints.best_step() if which == "best" else None if which == "last" else int(which)
                restored = restore(checkpoints, shapes, lambda: frozen, step)
            break
        except DamagedCheckpoint:  # or a run that trains was deleting it
            time.sleep(DELETION_SECONDS)
            if saved_steps(folder) == there:
                raise
    if restored is None:
        raise InputError(f"{folder} holds no checkpoint yet; train first")
    return restored[:2]


def load_frozen(config: ConfigDict, run: Run) -> dict:
    """The fields `frozen` and `checksums` of a `Checkpoint`, each in its model's dtype: where adapters are trained, the
    weights of `model.checkpoint`, and the teacher's of `reference.checkpoint`."""
    frozen, sums = {}, {}
    for name, shapes in abstract(run, lambda _, frozen, **more: frozen).items():
        section = config.model if name == BASE else config.reference
        params = load_held(section.checkpoint, shapes)
        of_leaves = np.array(list(checksums(parallel.named_leaves(params)).values()), np.uint32)
        version, sums[name] = parallel.to_global(run.mesh, parallel.REPLICATED, (np.int32(0), of_leaves))
        frozen[name] = Policy(shapes.model, params, version)
    return dict(frozen=frozen, checksums=sums)


def load_held(folder: str, shapes: Policy) -> Params:
    """The weights in a folder, laid out and held as those of `shapes`."""
    model, shardings = shapes.model, jax.tree.map(lambda leaf: leaf.sharding, shapes.params)
    if model.held_in is None:
        return weights.load(folder, shapes.params)
    loaded = weights.load(folder, laid_out(model, jax.tree.leaves(shardings)[0].mesh))
    return jax.jit(partial(in_dtype, model), out_shardings=shardings)(loaded)


def laid_out(model: Model, mesh: Mesh) -> Params:
    """The shapes of a model's weights in its dtype, laid out as for training."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, model.dtype, sharding=sharding),
        model.shapes,
        parallel.shardings(mesh, model.shapes),
    )


def initial_params(config: ConfigDict, run: Run) -> Params:
    """What is trained, float32 and laid out for it: the weights of `model.checkpoint`, or random ones, or adapters."""
    if run.model.lora:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract(run, lambda params, **_: params))
        adapters = partial(run.model.lora.init, run.model.shapes)
        return jax.jit(adapters, out_shardings=shardings)(jax.random.key(config.seed, impl="threefry2x32"))
    if config.model.checkpoint is None:
        return init_params(run.model, run.mesh, config.seed)
    return weights.load(config.model.checkpoint, abstract(run, lambda params, **_: params))


def checkpoint_params(folder, model: Model, mesh: Mesh) -> Params:
    """The weights in a folder, in the model's dtype and laid out for sampling."""
    out_shardings = parallel.shardings(mesh, jax.eval_shape(unstack_layers, model.shapes), parallel.SAMPLING)
    return jax.jit(unstack_layers, out_shardings=out_shardings)(weights.load(folder, laid_out(model, mesh)))
