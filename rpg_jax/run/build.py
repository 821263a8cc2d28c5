"""From a config to a `Run` (data, model, objective, settings), and from that to the functions of an RL step."""

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from rpg_jax import InputError, data, objectives, parallel
from rpg_jax.environments import Environment, Observations
from rpg_jax.models import Model, cudnn
from rpg_jax.models.attention import causal_attention
from rpg_jax.rewards import Scorer, scale_named
from rpg_jax.rewards.scorer import NO_REWARD
from rpg_jax.run.models import build_model, build_teacher, check_teacher, check_vocabulary
from rpg_jax.sampling import make_sampler
from rpg_jax.sampling.turns import matched, stop_table
from rpg_jax.storage.settings import check_values
from rpg_jax.training.collect import make_collect
from rpg_jax.training.evaluation import make_evaluate, problems_of
from rpg_jax.training.experience import make_experience, make_score
from rpg_jax.training.loop import Parts
from rpg_jax.training.optimizer import Optimizer, check_offload, make_optimizer
from rpg_jax.training.phases import say
from rpg_jax.training.policies import make_policies
from rpg_jax.training.reference import ReferenceSchedule
from rpg_jax.training.rollouts import Rollouts, check_overlap
from rpg_jax.training.settings import LoopSettings, RolloutSettings, check_carry_over, steps_to_wait
from rpg_jax.training.update import make_update
from rpg_jax.types import TrainState

MOST_UPDATES = 2**31 - 1  # counters on the device are int32


def set_keys(section: ConfigDict, *without: str) -> dict:
    """The keys of a section that are set, as keyword arguments."""
    return {name: value for name, value in section.to_dict().items() if value is not None and name not in without}


@dataclasses.dataclass(frozen=True)
class Run:
    """What training, evaluation and export need of a config."""

    mesh: jax.sharding.Mesh
    sampler_mesh: jax.sharding.Mesh  # that samples; the same one without mesh.sampler
    data: data.Sets
    model: Model
    sampler_model: Model  # the same on that mesh
    teacher: Model | None  # the reference's, where `reference.checkpoint` names one
    scorer: Scorer
    objective: objectives.Objective
    optimizer: Optimizer
    rollout: RolloutSettings
    reference: ReferenceSchedule
    loop: LoopSettings


def build_settings(config: ConfigDict) -> dict:
    """The fields of a `Run` that need neither devices nor data. Raises ValueError for settings that make no sense."""
    check_values(config)
    if config.log.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise InputError(
            f"log.wandb is {config.log.wandb!r} and wandb is not installed; pip install wandb, or unset it"
        )
    scale_named(config.reward.scale)
    failures = dict(environment_failures=config.environment.failures)
    rollout = RolloutSettings(**set_keys(config.rollout, "delay", "overlap"), **failures)
    longest, learner = rollout.max_prompt + rollout.max_new, dict(scoring_rows=config.learner.microbatch_rows)
    learner |= set_keys(config.learner, "logprob_chunk", "pack", "packed_lengths")
    loop = LoopSettings(
        steps=config.steps, seed=config.seed, prompts=config.rollout.prompts, samples=config.rollout.samples,
        evaluate_every=config.evaluation.every, save_every=config.checkpoint.every,
        most_skipped=config.checkpoint.most_skipped, delay=config.rollout.delay, look_every=config.log.look_every,
        packed_columns=config.learner.packed_lengths * longest if config.learner.pack else None, **learner,
    )  # fmt: skip
    objective = build_objective(config)
    check_behavior(config.behavior.source, objective)
    check_carry_over(rollout, config.behavior.source, loop.updates, loop.delay)
    check_overlap(config.mesh.sampler, config.rollout.overlap, loop.delay, loop.updates)
    total_steps = config.steps * loop.updates
    if total_steps > MOST_UPDATES:
        raise InputError(
            f"steps={config.steps} of {loop.updates} optimizer updates are more updates than a counter holds "
            f"({MOST_UPDATES}); lower steps"
        )
    optimizer = make_optimizer(**set_keys(config.optimizer, "clip_norm"), total_steps=total_steps)
    reference = ReferenceSchedule(**set_keys(config.reference, "checkpoint", "dtype"))
    check_teacher(config)
    if objective.full_kl is not None and reference.mode == "iterative":
        raise InputError(
            "objective.kl=full needs the reference's distributions, and reference.mode=iterative keeps log-probs only; "
            "set reference.mode to every, kl_target, ema or fixed"
        )
    batch, rows = config.warm_start.batch, config.warm_start.microbatch_rows
    if batch % rows:
        raise InputError(f"warm_start.microbatch_rows ({rows}) must divide warm_start.batch ({batch})")
    return dict(objective=objective, optimizer=optimizer, rollout=rollout, reference=reference, loop=loop)


def build_run(config: ConfigDict, log: Callable[[str], None] = print, *, devices=None, problems=None) -> Run:
    """Builds and checks everything that costs little. Raises ValueError for a config that makes no sense.

    Unless they are given, `devices` are all of this job, and `problems` are read as the config says.
    """
    settings = build_settings(config)
    (mesh, sampler), rollout = parallel.make_meshes(**config.mesh, devices=devices), settings["rollout"]
    check_offload(settings["optimizer"], mesh, settings["loop"].delay)
    if problems is None:
        say("reading problems")
        problems = build_data(config, log)
        check_vocabulary(config, problems.tokenizer)
        if not len(problems.problems("heldout")):
            raise InputError("there are no held-out problems to evaluate on: name at least one set in data.heldout")
    longest = rollout.max_prompt + rollout.max_new
    model = build_model(config, problems.tokenizer, longest, mesh, pack=config.learner.pack)
    samples = model if sampler is mesh else build_model(config, problems.tokenizer, longest, sampler)
    teacher = build_teacher(config, model, problems.tokenizer, longest, mesh)
    kernels = {scored.attention for scored in (model, teacher) if scored} - {causal_attention}
    if kernels and mesh.devices.flat[0].platform == "gpu":
        settings["loop"] = dataclasses.replace(settings["loop"], packed_sequences=cudnn.SEQUENCES)
    check_pages(samples, sampler, rollout)
    rollout.recorded(model.config)  # refuses routes of a model without experts
    known = dict(generated="tasks" in config.data, tasks=problems.tasks)
    environment = build_environment(config, problems.tokenizer, model)
    judge = dict(evaluation=config.evaluation.function, environment=environment)
    scorer = Scorer(**set_keys(config.reward, "scale"), **known, **judge)
    return Run(mesh, sampler, problems, model, samples, teacher, scorer, **settings)


def build_environment(config: ConfigDict, tokenizer: data.Tokenizer, model: Model) -> Environment | None:
    """The environment of a config, with its workers; None if it has none. Raises InputError for one that cannot be."""
    section = config.environment
    if not section.name:
        return None
    options = {} if "tasks" in config.data else set_keys(config.data.template_options)
    try:
        observations = Observations(tokenizer, section.role, options)
        if observations.forgets:
            say(
                f"environment.name={section.name}: the chat template leaves earlier thinking out where it renders a "
                f"conversation; here every turn stays as it was drawn, in sampling and in training"
            )
        strings = (section.stop,) if isinstance(section.stop, str) else tuple(section.stop or ())
        unused = [""] * (model.config.vocab_size - tokenizer.vocab_size)
        stops = stop_table(strings, [*tokenizer.token_texts(), *unused]) if strings else None
        for string in strings:
            if matched(stops, tokenizer.encode_rendered(string)) != len(stops):
                raise InputError(
                    f"stop strings {list(strings)}: the tokenizer makes {string!r} of special tokens or of parts of "
                    f"characters, which add nothing to a text, so that it would never be found; choose another"
                )
    except InputError as error:
        raise InputError(f"environment.name={section.name}: {error}") from error
    made = dict(observations=observations, stops=stops, seed=config.seed)
    return Environment(**made, **set_keys(config.environment, "role", "stop", "failures"))


def check_pages(model: Model, mesh: Mesh, rollout: RolloutSettings) -> None:
    """Raises ValueError for a KV cache that the sampler refuses."""
    try:
        rows = rollout.fresh_prompts * rollout.samples
        make_sampler(model, mesh, rollout.decoding, rollout.max_prompt, rollout.max_new, rows)
    except InputError as error:
        raise InputError(f"rollout.{error}") from error


def check_rows(config: ConfigDict, run: Run) -> None:
    """Raises ValueError when the mesh does not divide the rows of a batch. Only training has such batches: evaluation
    and export may use another mesh than the run."""
    rollout, warm = run.rollout, config.warm_start
    fresh = "rollout.prompts" if rollout.fresh_prompts == rollout.prompts else "rollout.oversample x rollout.prompts"
    both = {"rollout.prompts x rollout.samples": rollout.prompts * rollout.samples}
    parallel.check_rows(run.sampler_mesh, {fresh: rollout.fresh_prompts, **both, "rollout.slots": rollout.slots})
    counts = both | {f"learner.{name}": getattr(run.loop, name) for name in ("microbatch_rows", "scoring_rows")}
    parallel.check_rows(run.mesh, counts | ({"warm_start.microbatch_rows": warm.microbatch_rows} if warm.steps else {}))


def check_behavior(source: str, objective: objectives.Objective) -> None:
    """Raises ValueError for a `behavior.source` that lacks what the objective's correction needs."""
    if source == "sampler" and objective.sampler_correction is not None:
        raise InputError(
            f"objective.sampler_correction={objective.sampler_correction} caps the trainer's probabilities over the "
            f"sampler's, and behavior.source=sampler takes the sampler's for both: the importance ratio is the "
            f"correction; unset objective.sampler_correction, or set behavior.source=trainer"
        )
    if source == "proximal" and objective.sampler_correction is None:
        raise InputError(
            "behavior.source=proximal takes the policy that a step begins with for the one that drew, and a token's "
            "weight, the ratio of the two, is at most objective.sampler_correction: set it, such as 10.0"
        )


def build_objective(config: ConfigDict) -> objectives.Objective:
    """The objective. It is tried on abstract arrays, so that a mistake is found now and not after the warm start."""
    groups, samples = config.rollout.prompts, config.rollout.samples
    settings = set_keys(config.objective, "name", "denominator")
    if config.reward.function == NO_REWARD and samples == 1:
        settings = dict(advantage="batch_mean") | settings  # of zeros, for which no group is needed
    objective = objectives.make(config.objective.name, **settings)
    shapes = (groups, samples), (groups * samples, config.rollout.max_prompt + config.rollout.max_new)
    rewards, tokens = (jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    try:
        jax.eval_shape(objective.advantages, rewards, tokens, tokens, tokens, step, kl=tokens)
    except InputError as error:
        if objective.own_advantage is not None:
            raise
        name = objective.advantage
        raise InputError(f"rollout.samples={samples} with objective.advantage={name}: {error}") from error
    alone = config.learner.microbatch_rows == 1 and not config.learner.pack
    if objective.settings.get("control") == "optimal" and alone:
        raise InputError(
            "objective.control=optimal is estimated from the other responses of a microbatch, and "
            "learner.microbatch_rows=1 has no others; raise it, or set objective.control to a number"
        )
    if ":" in objective.name:
        objective.try_out((config.learner.microbatch_rows, config.rollout.max_prompt + config.rollout.max_new))
    return objective


def build_data(config: ConfigDict, log: Callable[[str], None]) -> data.Sets:
    """Generated problems if the config has `data.tasks`, else prepared sets, read with the checkpoint's tokenizer."""
    if "tasks" in config.data:
        return data.prepare(**set_keys(config.data), log=log)
    tokenizer = read_tokenizer(config, config.data.template)
    return data.load(
        **set_keys(config.data, "tokenizer", "template", "template_options"), tokenizer=tokenizer, log=log,
        max_prompt=config.rollout.max_prompt, template_options=set_keys(config.data.template_options),
    )  # fmt: skip


def read_tokenizer(config: ConfigDict, template: str | None = None) -> data.Tokenizer:
    """The tokenizer of prepared sets, with the chat template of its own folder or of the file `template`."""
    folder = config.data.tokenizer or config.model.checkpoint
    if folder is None:
        raise InputError("data.tokenizer is unset and so is model.checkpoint: name the folder of a tokenizer")
    return data.load_tokenizer(folder, template)


ROLLOUT, EVALUATION = range(2)


def noise_key(seed: int, purpose: int) -> jax.Array:
    """The PRNG key of rollouts or evaluations. Its threefry noise does not depend on the size of a batch."""
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), purpose)


def loss_denominator(config: ConfigDict, objective: objectives.Objective) -> float | None:
    """What divides the summed loss of a minibatch with reduction=constant: `objective.denominator`, or if that is unset
    all tokens (or sequences) that a minibatch can hold, as in Dr. GRPO. None for other reductions."""
    if objective.reduction != "constant" or config.objective.denominator is not None:
        return config.objective.denominator
    rows = config.learner.minibatch_prompts * config.rollout.samples
    return float(rows * config.rollout.max_new if objective.level == "token" else rows)


def build_parts(config: ConfigDict, run: Run, shapes: TrainState, *, stream, should_stop, **services) -> Parts:
    """The functions of an RL step.

    Args:
      shapes: the abstract state.
      services: other fields of `Parts`: checkpoints, log, traced.
    """
    logprobs = dict(temperature=run.rollout.temperature, logprob_chunk=config.learner.logprob_chunk)
    logprobs |= dict(packed_columns=run.loop.packed_columns)
    denominator = loss_denominator(config, run.objective)
    sampling = run.sampler_model, run.data.tokenizer, run.scorer
    evaluate = make_evaluate(
        *sampling, run.sampler_mesh,
        k=config.evaluation.k, temperature=config.evaluation.temperature, key=noise_key(config.seed, EVALUATION),
        max_prompt=run.rollout.max_prompt, max_new=run.rollout.max_new,
        rows=problems_of(run.sampler_mesh, run.rollout.fresh_prompts * run.rollout.samples, config.evaluation.k),
        routes=run.rollout.recorded(run.model.config),
        decoding=dataclasses.replace(run.rollout.decoding, cache_dtype=None),
    )  # fmt: skip
    collect = partial(
        make_collect, *sampling, stream, run.sampler_mesh, run.rollout,
        key=noise_key(config.seed, ROLLOUT), scale=scale_named(config.reward.scale),
        weights=run.scorer.weights, wait=steps_to_wait(run.rollout.max_age, run.loop.updates, run.loop.delay),
    )  # fmt: skip
    policies = make_policies(run.model, run.optimizer, run.mesh, shapes, run.reference.decay, run.sampler_mesh)
    schedule = dict(steps=config.steps, overlap=config.rollout.overlap, should_stop=should_stop)
    return Parts(
        policies=policies,
        rollouts=Rollouts(collect, policies, run.mesh, run.sampler_mesh, **schedule),
        score=make_score(run.mesh, rows=run.loop.scoring_rows, teacher=run.teacher is not None, **logprobs),
        source=config.behavior.source,
        experience=make_experience(run.objective, run.mesh, config.behavior.source),
        update=make_update(
            run.model, run.objective, run.optimizer, run.mesh, shapes, rows=run.loop.microbatch_rows,
            clip_norm=config.optimizer.clip_norm, denominator=denominator, **logprobs,
            router_balance=config.model.router_balance,
        ),
        evaluate=partial(evaluate, problems=run.data.problems("heldout")),
        heldout=config.evaluation.k * len(run.data.problems("heldout")),
        vote=run.scorer.vote,
        reference=run.reference,
        stream=stream,
        should_stop=should_stop,
        **services,
    )  # fmt: skip
