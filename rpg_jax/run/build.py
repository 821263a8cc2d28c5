"""From a config to what a run is made of: settings, data, model, objective, and the functions of an RL step."""

import dataclasses
import importlib.util
from functools import partial

import jax
import jax.numpy as jnp

from rpg_jax import data, objectives, parallel
from rpg_jax.models import Model, huggingface, named
from rpg_jax.models.attention_kernels import make_attention
from rpg_jax.rewards import Scorer, scale_named
from rpg_jax.training.evaluation import make_evaluate
from rpg_jax.training.experience import make_experience, make_sampling_params
from rpg_jax.training.loop import LoopSettings, Parts
from rpg_jax.training.optimizer import check_offload, make_optimizer
from rpg_jax.training.reference import ReferenceSchedule, make_refresh
from rpg_jax.training.rollout import RolloutSettings, make_collect
from rpg_jax.training.update import make_update


def given(section, *without) -> dict:
    """The keys of a section that are set, as keyword arguments; a word that is empty, as of a flag KEY=, is not."""
    return {name: value for name, value in section.to_dict().items() if value not in (None, "") and name not in without}


@dataclasses.dataclass(frozen=True)
class Run:
    """What both training and evaluation need of a config."""

    mesh: jax.sharding.Mesh
    data: data.Prepared
    model: Model
    scorer: Scorer
    objective: objectives.Objective
    optimizer: object
    rollout: RolloutSettings
    reference: ReferenceSchedule
    loop: LoopSettings


def build_settings(config) -> dict:
    """The parts of a `Run` that take neither devices nor data; ValueError for settings that make no sense."""
    if config.rollout.top_k or config.rollout.top_p != 1.0:
        raise ValueError(
            "training samples the whole distribution: filters take away the behavior policy's support, and with it the "
            "importance ratio; leave rollout.top_k=0 and rollout.top_p=1.0 (evaluation may filter)"
        )
    if config.log.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"log.wandb is {config.log.wandb!r} and wandb is not installed; pip install wandb, or unset it"
        )
    scale_named(config.reward.scale)
    rollout = RolloutSettings(**given(config.rollout, "top_k", "top_p"))
    loop = LoopSettings(
        steps=config.steps,
        seed=config.seed,
        prompts=config.rollout.prompts,
        samples=config.rollout.samples,
        minibatch_prompts=config.learner.minibatch_prompts,
        microbatch_rows=config.learner.microbatch_rows,
        epochs=config.learner.epochs,
        pack=config.learner.pack,
        evaluate_every=config.evaluation.every,
        save_every=config.checkpoint.every,
        most_skipped=config.checkpoint.most_skipped,
    )
    objective = build_objective(config)
    updates = config.steps * config.learner.epochs * config.rollout.prompts // config.learner.minibatch_prompts
    optimizer = make_optimizer(**given(config.optimizer, "clip_norm"), total_steps=updates)
    reference = ReferenceSchedule(**given(config.reference))
    check_warm_start(config.warm_start)
    return dict(objective=objective, optimizer=optimizer, rollout=rollout, reference=reference, loop=loop)


def build_run(config, log=print, *, devices=None, problems=None) -> Run:
    """Builds and checks everything that costs little; raises ValueError for a config that makes no sense.

    `devices` are all there are, and `problems` are read as the config says, if None.
    """
    settings = build_settings(config)
    mesh, rollout = parallel.make_mesh(**config.mesh, devices=devices), settings["rollout"]
    check_offload(settings["optimizer"], mesh)
    problems = problems or build_data(config, log)
    if not len(problems.problems("heldout")):
        raise ValueError("there are no held-out problems to evaluate on: name at least one set in data.heldout")
    longest = rollout.max_prompt + rollout.max_new
    model = build_model(config.model, problems.tokenizer, longest, mesh, pack=config.learner.pack)
    # A real set may have the name of a generated task: its answers are mathematics all the same.
    by_default = {} if "tasks" in config.data else {"function": "dapo"}
    scorer = Scorer(**by_default | given(config.reward, "scale"))
    return Run(mesh, problems, model, scorer, **settings)


def check_rows(config, run: Run):
    """Raises ValueError for a number of rows that the mesh does not divide: of training, not of who reads its run."""
    rollout, learner, warm = run.rollout, config.learner, config.warm_start
    fresh = "rollout.oversample x rollout.prompts" if rollout.dynamic_sampling else "rollout.prompts"
    counts = {
        fresh: rollout.fresh_prompts,
        "rollout.prompts x rollout.samples": rollout.prompts * rollout.samples,
        "rollout.slots": rollout.slots,
        "learner.microbatch_rows": learner.microbatch_rows,
    }
    parallel.check_rows(run.mesh, counts | ({"warm_start.microbatch_rows": warm.microbatch_rows} if warm.steps else {}))


def check_warm_start(warm):
    """Raises ValueError for settings of a warm start that make no sense."""
    if warm.steps < 0 or warm.batch < 1 or warm.microbatch_rows < 1 or warm.batch % warm.microbatch_rows:
        raise ValueError(
            f"warm_start.microbatch_rows ({warm.microbatch_rows}) must divide warm_start.batch ({warm.batch}), both at "
            f"least 1, and warm_start.steps ({warm.steps}) must not be negative"
        )
    if warm.temperature <= 0:
        raise ValueError(f"warm_start.temperature is {warm.temperature}; it must be above 0")


def build_objective(config):
    """The objective; what else its section gets wrong is refused here, not after the warm start."""
    objective = objectives.make(config.objective.name, **given(config.objective, "name", "denominator"))
    denominator, samples = config.objective.denominator, config.rollout.samples
    if denominator is not None and not 0 < denominator < float("inf"):
        raise ValueError(f"objective.denominator is {denominator}; expected a positive number")
    tokens = jax.ShapeDtypeStruct((samples, 1), jnp.float32)
    try:
        jax.eval_shape(objective.advantages, jax.ShapeDtypeStruct((1, samples), jnp.float32), tokens, tokens, tokens)
    except ValueError as error:
        name = objective.settings["advantage"]
        raise ValueError(f"rollout.samples={samples} with objective.advantage={name}: {error}") from error
    if isinstance(objective, objectives.own.OwnObjective):
        objective.try_out((config.learner.microbatch_rows, config.rollout.max_prompt + config.rollout.max_new))
    return objective


def build_data(config, log):
    """Generated tasks where `data.tasks` is set, else prepared sets read with the checkpoint's tokenizer."""
    if "tasks" in config.data:
        return data.prepare(**given(config.data), log=log)
    folder = config.data.tokenizer or config.model.checkpoint
    if folder is None:
        raise ValueError("data.tokenizer is unset and so is model.checkpoint: name the folder of a tokenizer")
    tokenizer = data.load_tokenizer(folder, config.data.template)
    return data.load(
        config.data.train,
        config.data.heldout,
        tokenizer=tokenizer,
        max_prompt=config.rollout.max_prompt,
        overlong=config.data.overlong,
        template_options=given(config.data.template_options),
        log=log,
    )


def build_model(section, tokenizer, longest: int, mesh, pack=False) -> Model:
    """The model of a config's `model` section on a mesh, for sequences of at most `longest` tokens; no weights yet.

    With `pack`, its attention is to tell apart several sequences in a row.
    """
    if (section.size is None) == (section.checkpoint is None):
        raise ValueError(
            f"model.size={section.size!r} and model.checkpoint={section.checkpoint!r}: set one of them, a named size "
            f"to start from random weights or the folder of a checkpoint"
        )
    if section.checkpoint is None:
        shape, where = dataclasses.replace(named(section.size), vocab_size=tokenizer.vocab_size), section.size
    else:
        shape, where = huggingface.read_config(section.checkpoint), section.checkpoint
        if tokenizer.vocab_size > shape.vocab_size:
            raise ValueError(
                f"the tokenizer has ids up to {tokenizer.vocab_size - 1} and the model of {where} a vocabulary of "
                f"{shape.vocab_size}: they do not belong together; name the model's own tokenizer"
            )
    if longest > shape.max_length:
        raise ValueError(
            f"max_prompt + max_new = {longest} tokens exceed the {shape.max_length} of model {where!r}; lower them"
        )
    dtype = jnp.dtype(section.dtype)
    heads = parallel.sharding.ACTIVATIONS["heads"]
    attention = make_attention(section.attention, mesh, heads, dtype=dtype, head_dim=shape.head_dim, pack=pack)
    model = Model(
        shape,
        dtype=dtype,
        scan=section.scan,
        remat=section.remat,
        attention=attention,
        constrain=parallel.make_constrain(mesh),
        per_shard=parallel.make_per_shard(mesh),
    )
    parallel.check_model(mesh, model)
    return model


ROLLOUT, EVALUATION = range(2)


def noise_key(seed: int, purpose: int):
    """The key of rollouts or evaluations; threefry, so that noise does not depend on the batch."""
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), purpose)


def loss_denominator(config, objective):
    """objective.denominator; unset, and with reduction=constant, all that a minibatch can hold (Dr. GRPO)."""
    if objective.reduction != "constant" or config.objective.denominator is not None:
        return config.objective.denominator
    rows = config.learner.minibatch_prompts * config.rollout.samples
    return float(rows * config.rollout.max_new if objective.level == "token" else rows)


def build_parts(config, run: Run, shapes, *, stream, checkpoints, log, should_stop, traced) -> Parts:
    """The functions of an RL step; `shapes` is the abstract state."""
    scoring = dict(
        rows=config.learner.microbatch_rows,
        temperature=config.rollout.temperature,
        logprob_chunk=config.learner.logprob_chunk,
    )
    update = dict(clip_norm=config.optimizer.clip_norm, denominator=loss_denominator(config, run.objective))
    key = noise_key(config.seed, ROLLOUT)
    return Parts(
        sampling_params=make_sampling_params(run.model, run.optimizer, run.mesh, shapes),
        collect=make_collect(
            run.model,
            run.data.tokenizer,
            run.scorer,
            run.mesh,
            run.rollout,
            key,
            should_stop,
            scale=scale_named(config.reward.scale),
        ),  # fmt: skip
        experience=make_experience(run.model, run.objective, run.optimizer, run.mesh, **scoring),
        update=make_update(run.model, run.objective, run.optimizer, run.mesh, shapes, **scoring, **update),
        refresh=make_refresh(run.optimizer, run.mesh, shapes),
        evaluate=partial(build_evaluate(config, run), problems=run.data.problems("heldout")),
        reference=run.reference,
        stream=stream,
        checkpoints=checkpoints,
        log=log,
        should_stop=should_stop,
        traced=traced,
    )


def build_evaluate(config, run: Run, k=None, **sampling):
    """Evaluation in the batches that rollouts have, so that both share one compilation when k is the same."""
    settings = dict(temperature=config.evaluation.temperature, **sampling)
    return make_evaluate(
        run.model,
        run.data.tokenizer,
        run.scorer,
        run.mesh,
        k=k or config.evaluation.k,
        rows=run.rollout.fresh_prompts,
        max_prompt=run.rollout.max_prompt,
        max_new=run.rollout.max_new,
        slots=run.rollout.slots,
        key=noise_key(config.seed, EVALUATION),
        **settings,
    )
