"""The settings of `python -m rpg_jax.study oracle`, with the flags of them. It imports nothing that is slow."""

from typing import NamedTuple

WHOLE = {  # flags of a whole number each, and what they mean
    "fresh": "responses of the current policy, for the reference gradient",
    "stale": "responses of the behavior policy",
    "blocks": "independent parts of either, from which errors are estimated",
    "prompts": "distinct prompts",
    "seed": "of parameters, prompts and responses",
    "parallel": "lengths and ages that are measured at a time",
}
LISTS = {  # flags of whole numbers with commas between them
    "lengths": "tokens of a response",
    "ages": "optimizer updates since the behavior policy",
    "groups": "G, responses to a prompt that share a baseline",
}


class Settings(NamedTuple):
    """What is measured. Responses are counted over all blocks; each block has as many of every prompt."""

    lengths: tuple[int, ...] = (16, 64, 256)  # tokens of a response
    ages: tuple[int, ...] = (4, 16, 64, 256)  # updates since the behavior policy; at 0 all estimators are the same
    groups: tuple[int, ...] = (2, 4, 8)  # G, responses to a prompt
    fresh: int = 16384  # responses of the current policy for the reference gradient
    stale: int = 4096  # responses of the behavior policy
    blocks: int = 8  # independent parts of either
    prompts: int = 64  # distinct prompts
    seed: int = 0
    parallel: int = 2  # points measured at a time

    def samples(self, responses: int) -> int:
        """Responses to each prompt in a block."""
        return responses // (self.blocks * self.prompts)


def default(name: str) -> int | str:
    """The default of the flag of that name, as it is written on a command line."""
    value = getattr(Settings(), name)
    return value if name in WHOLE else ",".join(map(str, value))
