"""The models of a config: the one that is trained, and its teacher, a reference of another model."""

import dataclasses

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from rpg_jax import InputError, data, parallel
from rpg_jax.models import LoRA, Model, families, huggingface, named
from rpg_jax.models.attention_kernels import make_attention
from rpg_jax.models.lora import TARGETS
from rpg_jax.models.quantization import LARGEST
from rpg_jax.objectives.controls import OF_TOKEN
from rpg_jax.rewards.scorer import NO_REWARD


def check_base(config: ConfigDict) -> None:
    """Raises ValueError for adapters without a checkpoint to adapt."""
    if config.model.lora.rank and config.model.checkpoint is None:
        raise InputError(
            f"model.lora.rank={config.model.lora.rank} trains adapters of frozen weights, and those of "
            f"model.size={config.model.size!r} would be random: set model.checkpoint, or model.lora.rank=0"
        )


def build_model(config: ConfigDict, tokenizer, longest: int, mesh: jax.sharding.Mesh, pack: bool = False) -> Model:
    """The model of a config's section `model`, without weights, for sequences of at most `longest` tokens.

    With `pack`, a row may hold several sequences, which attention must tell apart.
    """
    size, checkpoint = config.model.size, config.model.checkpoint
    if (size is None) == (checkpoint is None):
        raise InputError(
            f"model.size={size!r} and model.checkpoint={checkpoint!r}: set one of them, a named size to start from "
            f"random weights or the folder of a checkpoint"
        )
    if checkpoint is None:
        shape, where = dataclasses.replace(named(size), vocab_size=tokenizer.vocab_size), size
    else:
        shape, where = huggingface.read_config(checkpoint), checkpoint
        if tokenizer.vocab_size > shape.vocab_size:
            raise InputError(
                f"the tokenizer has ids up to {tokenizer.vocab_size - 1} and the model of {where} a vocabulary of "
                f"{shape.vocab_size}: they do not belong together; name the model's own tokenizer"
            )
    if longest > shape.max_length:
        raise InputError(
            f"max_prompt + max_new = {longest} tokens exceed the {shape.max_length} of model {where!r}; lower them"
        )
    dtype = jnp.dtype(config.model.dtype)
    attention = make_attention(
        config.model.attention, mesh, parallel.sharding.ACTIVATIONS["heads"],
        dtype=dtype, head_dim=shape.head_dim, pack=pack, kinds=families.of(shape).attention_kinds(shape),
    )  # fmt: skip
    lora = config.model.lora
    adapters = LoRA(lora.rank, lora.alpha, tuple(lora.targets.split(","))) if lora.rank else None
    model = Model(
        shape, dtype=dtype, scan=config.model.scan, remat=config.model.remat, attention=attention,
        constrain=parallel.make_constrain(mesh), per_shard=parallel.make_per_shard(mesh),
        per_expert=parallel.make_per_expert(mesh), lora=adapters,
    )  # fmt: skip
    absent = set(adapters.targets) - set(model.shapes["layers"]) if adapters else ()
    if absent:
        there = ",".join(name for name in TARGETS if name in model.shapes["layers"])
        raise InputError(
            f"model.lora.targets names {','.join(sorted(absent))}, which a layer of {shape.model_type} does not have "
            f"(adapters leave experts and routers alone); it may be {there}"
        )
    parallel.check_model(mesh, model)
    if config.model.router_balance and not shape.experts:
        raise InputError(
            f"model.router_balance={config.model.router_balance:g} spreads tokens over experts, and a "
            f"{shape.model_type} has none; set it to 0"
        )
    return model


def check_teacher(config: ConfigDict) -> None:
    """Raises ValueError for settings of a teacher, or of no reward, that make no sense."""
    reference, folder = config.reference, config.reference.checkpoint
    if folder and reference.mode != "fixed":
        raise InputError(
            f"reference.checkpoint={folder} is a teacher, which stays as it is, and reference.mode={reference.mode} "
            f"renews the reference from the policy; set reference.mode=fixed, or unset reference.checkpoint"
        )
    if folder and config.rollout.routes == "record":
        raise InputError(
            "rollout.routes=record and reference.checkpoint: a teacher has routers of its own, or none, and what the "
            "policy's chose says nothing to it; set rollout.routes=recompute"
        )
    if reference.dtype and not folder:
        raise InputError(f"reference.dtype={reference.dtype} is for a teacher: set reference.checkpoint, or unset it")
    if config.objective.get("control") == OF_TOKEN and not (folder and config.behavior.source == "trainer"):
        raise InputError(
            "objective.control=kl is computed where a teacher and the trainer's behavior policy are scored together: "
            "set reference.checkpoint and behavior.source=trainer, or objective.control to a number or optimal"
        )
    if config.reward.function == NO_REWARD and config.rollout.dynamic_sampling:
        raise InputError(
            "rollout.dynamic_sampling leaves out groups of equal rewards, and with reward.function=none that is every "
            "group; set rollout.dynamic_sampling=False"
        )


def check_vocabulary(config: ConfigDict, tokenizer: data.Tokenizer) -> None:
    """Raises ValueError unless each id of the run's tokenizer is the same token in the teacher's, if there is one."""
    folder = config.reference.checkpoint
    if not folder:
        return
    try:
        ours, theirs = tokenizer.tokens(), data.load_tokenizer(folder).tokens()
    except InputError as error:
        raise InputError(f"reference.checkpoint={folder} is no teacher: {error}") from error
    theirs = theirs[: len(ours)] + ["(no token)"] * (len(ours) - len(theirs))
    others = [(id, *pair) for id, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
    if others:
        first = ", ".join(f"{id} is {theirs!r} and not {ours!r}" for id, ours, theirs in others[:3])
        raise InputError(
            f"reference.checkpoint={folder} has another vocabulary than the run's tokenizer: {len(others)} of "
            f"{len(ours)} ids differ, there {first}; a teacher must know each token by the same id"
        )


def build_teacher(config: ConfigDict, model: Model, tokenizer, longest: int, mesh: jax.sharding.Mesh) -> Model | None:
    """The model of `reference.checkpoint`, the teacher of `model`; None if it is unset.

    Its distribution is over the ids of the policy, renormalized, wherever it is read: the policy can draw no others.
    """
    folder = config.reference.checkpoint
    if not folder:
        return None
    dtype = config.reference.dtype or config.model.dtype
    held_in = dtype if dtype in LARGEST else None  # and then computed with as the policy is
    own = dict(size=None, checkpoint=folder, dtype=config.model.dtype if held_in else dtype)
    section = config.model.to_dict() | own | dict(lora=dict(rank=0), router_balance=0.0)
    try:
        teacher = build_model(ConfigDict(dict(model=section)), tokenizer, longest, mesh, config.learner.pack)
    except InputError as error:
        raise InputError(f"reference.checkpoint={folder}: {error}") from error
    rows, least = teacher.config.vocab_size, model.config.vocab_size
    if rows < least:
        raise InputError(
            f"reference.checkpoint={folder} has a table of {rows} tokens, and the policy one of {least}: it may draw "
            f"ids that this teacher has no row for; name a teacher whose table is padded to as many"
        )
    return dataclasses.replace(teacher, held_in=held_in, ids=least if rows > least else None)
