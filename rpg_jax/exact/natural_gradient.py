"""Appendix B of the paper by enumeration: small regularized steps are natural policy gradient steps.

The maximizer of E_theta[A] − beta·D(policy, policy_k) tends to theta_k + F⁻¹∇J / (beta·f''(1)) as beta grows, where F
is the Fisher information of the policy and f the generator of the divergence: D has the second derivative f''(1)·F at
theta_k. For both KL divergences f''(1) = 1, as in the paper, whose statement is of KL(policy_k || policy).
"""

import functools

import jax
import jax.numpy as jnp

from rpg_jax.exact.enumeration import CONDITIONS, SPACES, Problem, Space, random_problems, token_logprobs
from rpg_jax.exact.generators import generator
from rpg_jax.exact.targets import sequence_parts

BETAS = (10.0, 100.0)
NEWTON_STEPS = 30  # quadratic convergence needs far fewer


def natural_gradient_gaps(divergence: str) -> list[float]:
    """|exact step − F⁺∇J / (beta·f''(1))| / |natural step| for each of BETAS, of a random softmax policy, in float64.

    The first omitted term is of second order in the step, so that a gap falls in proportion to 1 / beta. For the
    reverse KL and a table of logits there is none: the maximizer is policy ∝ policy_k·exp(A / beta).
    """
    with jax.enable_x64():
        problem = jax.tree.map(lambda x: x[0], random_problems(SPACES[0], CONDITIONS[0], 1))
        return [float(gap) for gap in _gaps(SPACES[0], divergence, problem, jnp.asarray(BETAS))]


def natural_gradient_holds(gaps: list[float]) -> bool:
    """Whether gaps vanish, or fall at least half as fast as 1 / beta."""
    return max(gaps) < 1e-9 or (gaps[-1] < 0.02 and gaps[0] > 5 * gaps[-1])


def fisher_information(space: Space, policy: jax.Array) -> jax.Array:
    """F = E_policy[∇log policy ∇log policyᵀ] over whole sequences, [HV, HV], of logits [H, V]."""
    log_probability = lambda x: jnp.sum(token_logprobs(space, x), axis=1)  # noqa: E731
    score = jax.jacrev(log_probability)(policy).reshape(len(space.mask), -1)  # [N, HV]
    return jnp.einsum("n,ni,nj->ij", jnp.exp(log_probability(policy)), score, score)


@functools.partial(jax.jit, static_argnames=("space", "divergence"))
def _gaps(space: Space, divergence: str, problem: Problem, betas: jax.Array) -> jax.Array:
    start = problem.policy.reshape(-1)
    problem = problem._replace(reference=problem.policy)

    def objective(logits, beta):
        parts = sequence_parts(space, logits.reshape(problem.policy.shape), problem, 1.0, (divergence,))
        return parts["reward"] - beta * parts[divergence]

    curvature = jax.grad(jax.grad(generator(divergence)))(jnp.ones(()))  # f''(1)
    inverse = jnp.linalg.pinv(fisher_information(space, problem.policy), rtol=1e-10)  # logits have a gauge: row sums

    def gap(beta):
        natural = inverse @ jax.grad(objective)(start, 0.0) / (beta * curvature)

        def newton(_, logits):
            slope, hessian = jax.grad(objective)(logits, beta), jax.hessian(objective)(logits, beta)
            return logits - jnp.linalg.pinv(hessian, rtol=1e-10) @ slope

        step = jax.lax.fori_loop(0, NEWTON_STEPS, newton, start) - start
        return jnp.linalg.norm(step - natural) / jnp.linalg.norm(natural)

    return jax.lax.map(gap, betas)
