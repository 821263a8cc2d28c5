"""The objectives themselves, summed over every outcome, and what one sample owes their gradient.

Written from the textbook definitions of the divergences between masses p and q, not from `rpg_jax.objectives`:
nothing here knows of surrogates.
"""

import jax
import jax.numpy as jnp

from rpg_jax.exact.enumeration import Problem, Space, row_means, token_logprobs
from rpg_jax.objectives import DIVERGENCES

# D(p, q) = Σ of these over outcomes, with q = Z · reference a measure of any mass.
INTEGRANDS = {
    "fkl": lambda p, q: q * jnp.log(q / p),
    "rkl": lambda p, q: p * jnp.log(p / q),
    "ufkl": lambda p, q: q * jnp.log(q / p) - q + p,
    "urkl": lambda p, q: p * jnp.log(p / q) - p + q,
    "js": lambda p, q: 0.5 * (p * jnp.log(2 * p / (p + q)) + q * jnp.log(2 * q / (p + q))),
    "hellinger": lambda p, q: 0.5 * (jnp.sqrt(p) - jnp.sqrt(q)) ** 2,
}


def integrand(divergence: str | None):
    """(p, q) -> an outcome's contribution; None: none. One that only `DIVERGENCES` knows is read off its rho."""
    if divergence is None:
        return lambda p, q: jnp.zeros_like(p)
    if divergence in INTEGRANDS:
        return INTEGRANDS[divergence]
    return lambda p, q: DIVERGENCES[divergence].rho(jnp.log(p / q), p, q)


def sequence_objective(space: Space, policy, problem: Problem, divergence, beta, z):
    """J = E_policy[A] − beta·D(policy, Z·reference) over whole sequences, to be differentiated in `policy` [H, V]."""
    p = jnp.exp(jnp.sum(token_logprobs(space, policy), axis=1))
    q = z * jnp.exp(jnp.sum(token_logprobs(space, problem.reference), axis=1))
    advantage = row_means(space, problem.advantage)[:, 0]
    return jnp.sum(p * advantage) - beta * jnp.sum(integrand(divergence)(p, q))


def token_objective(space: Space, policy, problem: Problem, divergence, beta, z):
    """J = Σ_h visits of h under the behavior policy · (E_policy(.|h)[Q(h, .)] − beta·D(policy(.|h), Z·reference(.|h))).

    Q(h, a) is the advantage expected of token a after history h when the behavior policy goes on (method.md 3).
    """
    p, q = jax.nn.softmax(policy), z * jax.nn.softmax(problem.reference)
    probability = jnp.exp(jnp.sum(token_logprobs(space, problem.behavior), axis=1, keepdims=True)) * space.mask
    at = (space.history, space.token)
    zeros = jnp.zeros((space.histories, space.vocab))
    drawn = zeros.at[at].add(probability)  # of (h, a)
    quality = zeros.at[at].add(probability * problem.advantage) / drawn
    value = jnp.sum(p * quality, axis=1) - beta * jnp.sum(integrand(divergence)(p, q), axis=1)
    return jnp.sum(jnp.sum(drawn, axis=1) * value)


OBJECTIVES = {"sequence": sequence_objective, "token": token_objective}


def sample_coefficient(space: Space, problem: Problem, level, divergence, beta, z):
    """−(wA − beta·r·kappa(u)), [N, T]: what multiplies ∇log policy(token | history) in one sample's loss gradient."""
    logs = [token_logprobs(space, x) for x in (problem.policy, problem.behavior, problem.reference)]
    advantage = problem.advantage
    if level == "sequence":
        logs = [jnp.sum(x, axis=1, keepdims=True) for x in logs]
        advantage = row_means(space, advantage)
    p, mu, q = jnp.exp(logs[0]), jnp.exp(logs[1]), z * jnp.exp(logs[2])
    pull = jax.jvp(lambda p: integrand(divergence)(p, q), (p,), (p,))[1] / mu  # d/d log p, as r·kappa(u)
    return jnp.where(space.mask, beta * pull - p / mu * advantage, 0)
