"""What a config with a teacher, a reference of another model, must say; `build.build_teacher` makes the model."""

from ml_collections import ConfigDict

from rpg_jax import InputError, data
from rpg_jax.rewards.scorer import NO_REWARD


def check_teacher(config: ConfigDict) -> None:
    """Raises ValueError for settings of a teacher, or of no reward, that make no sense."""
    reference, folder = config.reference, config.reference.get("checkpoint")
    if folder and reference.mode != "fixed":
        raise InputError(
            f"reference.checkpoint={folder} is a teacher, which stays as it is, and reference.mode={reference.mode} "
            f"renews the reference from the policy; set reference.mode=fixed, or unset reference.checkpoint"
        )
    if reference.get("dtype") and not folder:
        raise InputError(f"reference.dtype={reference.dtype} is for a teacher: set reference.checkpoint, or unset it")
    if config.reward.function == NO_REWARD and config.rollout.dynamic_sampling:
        raise InputError(
            "rollout.dynamic_sampling leaves out groups of equal rewards, and with reward.function=none that is every "
            "group; set rollout.dynamic_sampling=False"
        )


def check_vocabulary(config: ConfigDict, tokenizer: data.Tokenizer) -> None:
    """Raises ValueError unless each id of the run's tokenizer is the same token in the teacher's, if there is one."""
    folder = config.reference.get("checkpoint")
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
