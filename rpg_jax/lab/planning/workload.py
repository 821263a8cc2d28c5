"""What determines the least time of a run: a model's shape, a mesh, rows, and the lengths of responses."""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.lab.planning import decoding
from rpg_jax.models import Model, ModelConfig, parameter_count
from rpg_jax.parallel import ROW_AXES
from rpg_jax.sampling.generate import PREFILL_TOKENS
from rpg_jax.training.settings import LoopSettings, RolloutSettings

PHASES = ("prefill", "decode", "experience", "update")  # in the order in which an RL step runs them
SAMPLED = PHASES[:2]  # with mesh.sampler on devices of their own


@dataclasses.dataclass(frozen=True)
class Workload:
    """Rows are counted over all devices, lengths in tokens. A row of an update may hold several sequences."""

    model: Model
    mesh: Mapping[str, int]  # devices along each axis
    rollout: RolloutSettings
    loop: LoopSettings
    lengths: np.ndarray  # f64[max_new + 1], the probability of each length of a response (`decoding.parse`)
    prompt_length: float  # mean tokens of a prompt
    moments: int  # arrays of the optimizer as large as the parameters
    reference_passes: float  # forward passes of the model that one of the reference is worth; 0 without parameters

    @property
    def shape(self) -> ModelConfig:
        return self.model.config

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the compute dtype."""
        return jnp.dtype(self.model.dtype).itemsize

    @functools.cached_property
    def trained(self) -> int:
        """Parameters that the optimizer changes: those of the adapters, if there are any, or all."""
        if self.model.lora is None:
            return parameter_count(self.shape)
        key = jax.random.key(0)
        adapters = jax.eval_shape(lambda: self.model.lora.init(self.model.init(key), key))
        return sum(leaf.size for leaf in jax.tree.leaves(adapters))

    @property
    def length(self) -> int:
        """Tokens of the longest sequence: prompt and response."""
        return self.rollout.max_prompt + self.rollout.max_new

    @property
    def step_rows(self) -> int:
        """Responses that an RL step learns from."""
        return self.loop.prompts * self.loop.samples

    @property
    def minibatch_rows(self) -> int:
        return self.loop.minibatch_prompts * self.loop.samples

    @property
    def generated_rows(self) -> int:
        """Responses of one generation batch."""
        return self.rollout.fresh_prompts * self.rollout.samples

    @property
    def row_shards(self) -> int:
        return math.prod(self.mesh.get(axis, 1) for axis in ROW_AXES)

    @property
    def parameter_shards(self) -> int:
        """Devices that share one copy of the parameters that are trained."""
        return self.row_shards // self.mesh["data"] * self.tensor

    @property
    def tensor(self) -> int:
        return self.mesh["tensor"]

    @property
    def expert(self) -> int:
        return self.mesh.get("expert", 1)

    def microbatches(self, sequences: int, rows: int) -> float:
        """Microbatches of so many rows that hold sequences of full length."""
        return sequences * self.length / (rows * (self.loop.packed_columns or self.length))

    def prefill_passes(self) -> float:
        """Passes over the model in which a shard prefills the prompts of one generation batch."""
        return max(self.rollout.fresh_prompts * self.prompt_length / self.row_shards / PREFILL_TOKENS, 1.0)

    def times(self) -> dict[str, float]:
        """How often each phase runs in an RL step, if one generation batch is enough and packed rows are full."""
        mean = decoding.mean(self.lengths)
        full = (self.prompt_length + mean) / self.length if self.loop.packed_columns else 1.0
        requests, slots = self.generated_rows // self.row_shards, self.rollout.slots // self.row_shards
        steps = decoding.steps(self.lengths, requests, slots, self.row_shards)
        if self.rollout.carry_over:  # slots are busy to the end, and in the long run a step draws as much as it trains
            steps = self.step_rows * mean / self.rollout.slots
        updates = full * self.loop.epochs * self.step_rows / self.minibatch_rows
        return dict(zip(PHASES, (1.0, steps, full, updates), strict=True))
