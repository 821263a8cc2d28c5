"""From sampled responses to what an update learns from: log-probs of the fixed policies, rewards, advantages."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from rpg_jax import parallel
from rpg_jax.models import token_logprobs_and_entropy, unstack_layers
from rpg_jax.objectives import metrics as metric
from rpg_jax.training.update import split_rows
from rpg_jax.types import TrainBatch


def make_sampling_params(model, optimizer, mesh, shapes):
    """Builds the jitted `policy(state) -> params to sample from`: x of schedule-free, cast, unstacked, laid out."""

    def policy(state):
        params = optimizer.evaluation_params(state.opt_state, state.params)
        return unstack_layers(jax.tree.map(lambda x: x.astype(model.dtype), params))

    out_shardings = parallel.shardings(mesh, jax.eval_shape(policy, shapes), parallel.SAMPLING)
    return jax.jit(policy, out_shardings=out_shardings)


def make_experience(model, objective, optimizer, mesh, *, rows, temperature, logprob_chunk):
    """Builds the jitted `experience(state, rollout, reward f32[P, G]) -> (TrainBatch, metrics)`.

    The behavior policy is the one that sampled (x under schedule-free), recomputed by the trainer at the sampling
    temperature; the reference is the behavior policy itself unless the state holds another. Advantages and corrections
    are the objective's, over all P·G responses at once.
    """

    def score(params, tokens, mask):
        def one(micro):
            return token_logprobs_and_entropy(model, params, *micro, temperature=temperature, chunk=logprob_chunk)

        return jax.tree.map(lambda x: x.reshape(tokens.shape), jax.lax.map(one, split_rows(mesh, (tokens, mask), rows)))

    def experience(state, rollout, reward):
        tokens, mask = rollout.tokens, rollout.response_mask
        params = optimizer.evaluation_params(state.opt_state, state.params)
        behavior, entropy = score(params, tokens, mask)
        reference = behavior if state.reference.params is None else score(state.reference.params, tokens, mask)[0]
        weight, corrected = objective.corrections(behavior, rollout.sampler_logp, mask)
        batch = TrainBatch(
            tokens=tokens,
            response_mask=mask,
            behavior_logp=behavior,
            reference_logp=reference,
            advantage=objective.advantages(reward, behavior, reference, mask),
            weight=weight,
        )
        batch = jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, parallel.ROWS))
        gap = jnp.abs(behavior - rollout.model_logp)
        metrics = corrected | {
            "entropy": metric.mean_of(entropy, mask),
            "sampler_logp_gap": metric.mean_of(gap, mask),
            "sampler_logp_gap_max": metric.max_of(gap, mask),
            "response_length": metric.mean_of(mask.sum(-1).astype(jnp.float32)),
            "finished": metric.mean_of(rollout.finished.astype(jnp.float32)),
        }
        return batch, metrics

    return jax.jit(experience)


@jax.jit
def take_rows(tree, rows):
    """The given rows of every [B, ...] leaf."""
    return jax.tree.map(lambda x: x[rows], tree)


@jax.jit
def merge_rows(kept, fresh, source):
    """Row i of the result is row `source[i]` of `fresh`, or row i of `kept` where `source[i]` is -1."""

    def merge(old, new):
        taken = new[jnp.maximum(source, 0)]
        return jnp.where((source >= 0).reshape(-1, *(1,) * (new.ndim - 1)), taken, old)

    return jax.tree.map(merge, kept, fresh)
