"""The objectives themselves, summed over every outcome, and the share of one sample in their gradient.

Divergences come from their `generators`, not from `rpg_jax.objectives`: nothing here depends on a surrogate.
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from rpg_jax.exact.enumeration import Problem, Space, row_means, token_logprobs
from rpg_jax.exact.generators import generator
from rpg_jax.objectives.divergences import ALPHA


def integrand(name: str, alpha: float | jax.Array = ALPHA) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(p, q) -> an outcome's contribution to D(p, q), with q = Z · reference a measure of any mass."""
    f = generator(name, alpha)
    return lambda p, q: q * f(p / q)


def sequence_parts(
    space: Space, policy: jax.Array, problem: Problem, z: float, names: Iterable[str], alpha: float | jax.Array = ALPHA
) -> dict[str, jax.Array]:
    """E_policy[A] as "reward", and by name D(policy, Z·reference), over whole sequences; J = reward − beta·D.

    Differentiable in `policy` [H, V].
    """
    p = jnp.exp(jnp.sum(token_logprobs(space, policy), axis=1))
    q = z * jnp.exp(jnp.sum(token_logprobs(space, problem.reference), axis=1))
    divergences = {name: jnp.sum(integrand(name, alpha)(p, q)) for name in names}
    return {"reward": jnp.sum(p * row_means(space, problem.advantage)[:, 0]), **divergences}


def token_parts(
    space: Space, policy: jax.Array, problem: Problem, z: float, names: Iterable[str], alpha: float | jax.Array = ALPHA
) -> dict[str, jax.Array]:
    """The same at token level: sums over histories, weighted by the behavior policy's visits (docs/method.md 5.1).

    reward = Σ_h visits · E_policy(.|h)[Q(h, .)], where Q(h, a) is the expected advantage of token a after h if the
    behavior policy continues; D = Σ_h visits · D(policy(.|h), Z·reference(.|h)).
    """
    p, q = jax.nn.softmax(policy), z * jax.nn.softmax(problem.reference)
    probability = jnp.exp(jnp.sum(token_logprobs(space, problem.behavior), axis=1, keepdims=True)) * space.mask
    at = (space.history, space.token)
    zeros = jnp.zeros((space.histories, space.vocab))
    drawn = zeros.at[at].add(probability)  # [H, V], visits of (h, a)
    quality = zeros.at[at].add(probability * problem.advantage)
    quality = jnp.where(drawn > 0, quality / drawn, 0)  # Q, [H, V]; an observation's history has none
    visits = jnp.sum(drawn, axis=1, keepdims=True)  # [H, 1]
    divergences = {name: jnp.sum(visits * integrand(name, alpha)(p, q)) for name in names}
    return {"reward": jnp.sum(visits * p * quality), **divergences}


def path_parts(
    space: Space, policy: jax.Array, problem: Problem, z: float, names: Iterable[str], alpha: float | jax.Array = ALPHA
) -> dict[str, jax.Array]:
    """As `sequence_parts`, with D = Σ_h visits · D(policy(.|h), Z·reference(.|h)): the tokens' divergences summed along
    the policy's own responses, whose visits move with the policy."""
    p, q = jax.nn.softmax(policy), z * jax.nn.softmax(problem.reference)
    logs = token_logprobs(space, policy)
    before = jnp.pad(jnp.cumsum(logs, axis=1), ((0, 0), (1, 0)))[:, :-1]  # later tokens would leave their rounding
    prefix = jnp.exp(before) * space.mask  # [N, T], of the history
    visits, rows = (jnp.zeros(space.histories).at[space.history].add(x) for x in (prefix, 1.0 * space.mask))
    visits = (visits / jnp.maximum(rows, 1))[:, None]
    divergences = {name: jnp.sum(visits * integrand(name, alpha)(p, q)) for name in names}
    return sequence_parts(space, policy, problem, z, (), alpha) | divergences


PARTS = {"sequence": sequence_parts, "token": token_parts, "path": path_parts}


def sample_parts(
    space: Space, problem: Problem, level: str, z: float, names: Iterable[str], alpha: float | jax.Array = ALPHA
) -> dict[str, jax.Array]:
    """wA as "reward", and by name r·kappa(u), each [N, T]: the gradient is −(wA − beta·r·kappa(u)) ∇log policy.

    "ratios" is w + r, of which parts of a surrogate may be multiples that cancel.
    """
    logs = [token_logprobs(space, x) for x in (problem.policy, problem.behavior, problem.reference)]
    advantage = problem.advantage
    if level == "sequence":
        logs = [jnp.sum(x, axis=1, keepdims=True) for x in logs]
        advantage = row_means(space, advantage)
    p, mu, q = jnp.exp(logs[0]), jnp.exp(logs[1]), z * jnp.exp(logs[2])
    parts = {"reward": p / mu * advantage, "ratios": (p + q) / mu}
    for name in names:
        f = integrand(name, alpha)
        parts[name] = jax.jvp(lambda p, f=f: f(p, q), (p,), (p,))[1] / mu  # d/d log p of D's summand, over mu
    return {name: jnp.where(space.mask, part, 0) for name, part in parts.items()}
