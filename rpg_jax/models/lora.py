"""Low-rank adapters (LoRA, Hu et al. 2021): a kernel W acts as W + (alpha / rank) A B, and only A and B are trained.

The trained tree is `{"layers": {target: {"lora_a", "lora_b"}}}`, stacked over layers like the kernels that it adapts.
Training takes the tree of `join`, in which adapters lie beside their kernels and no W + A B is formed; sampling and
export take that of `merge`. A is random and B zero at first, so the first policy is the base model.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rpg_jax import InputError

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # the kernels of a layer


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Which kernels are adapted, and how."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self):
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets or len(set(self.targets)) < len(self.targets):
            raise InputError(
                f"model.lora.targets is {','.join(self.targets)}; expected some of {','.join(TARGETS)}, each one once"
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def init(self, params: dict, key: jax.Array) -> dict:
        """Fresh float32 adapters, A [layers, I, rank] and B [layers, rank, O], for the kernels [layers, I, O] of a
        training tree or its shapes. A is uniform within 1 / sqrt(I), as in Hugging Face's peft; B is zero."""

        def adapter(target, key):
            layers, inputs, outputs = params["layers"][target]["kernel"].shape
            bound = inputs**-0.5
            return {
                "lora_a": jax.random.uniform(key, (layers, inputs, self.rank), minval=-bound, maxval=bound),
                "lora_b": jnp.zeros((layers, self.rank, outputs)),
            }

        keys = jax.random.split(key, len(TARGETS))  # a target's adapter does not depend on the others
        return {"layers": {target: adapter(target, keys[TARGETS.index(target)]) for target in self.targets}}


def join(lora: LoRA | None, params: dict | None, adapters: dict) -> dict:
    """The tree that `Model.hidden` takes: `params` with adapters beside their kernels, B times alpha / rank.

    Both trees are stacked or both unstacked. Without `lora` nothing is frozen, and `adapters` is the whole tree.
    """

    def beside(module, adapter):
        return {**module, **adapter, "lora_b": lora.scale * adapter["lora_b"]}

    return _adapted(beside, params, adapters) if lora else adapters


def merge(lora: LoRA | None, params: dict | None, adapters: dict) -> dict:
    """The tree of an ordinary model, with kernels W + (alpha / rank) A B in float32; the arguments are as in `join`."""

    def merged(module, adapter):
        product = jnp.matmul(adapter["lora_a"], adapter["lora_b"], precision="highest")
        return {**module, "kernel": module["kernel"] + lora.scale * product}

    return _adapted(merged, params, adapters) if lora else adapters


def _adapted(function: Callable, params: dict, adapters: dict) -> dict:
    """`params` with `function(module, adapter)` in place of each adapted module of its layers, stacked or listed."""

    def layer(modules, adapters):
        return {**modules, **{name: function(modules[name], adapter) for name, adapter in adapters.items()}}

    layers, adapters = params["layers"], adapters["layers"]
    listed = isinstance(layers, list)
    return {**params, "layers": list(map(layer, layers, adapters)) if listed else layer(layers, adapters)}
