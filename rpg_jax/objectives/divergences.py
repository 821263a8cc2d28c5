"""Divergences D(policy, reference), each one function of log u, where u = policy / (Z · reference).

D = E_ref[rho(u)] up to a constant, and a sample from the behavior policy contributes r·rho(u), with
r = Z · reference / behavior and w = policy / behavior = u·r. Both factors can overflow where their product does not, so
a divergence is written as that product:

    rho(log_u, w, r) = r·rho(u)

To add one, multiply its rho(u) by r, write w for every u·r, and put it in `DIVERGENCES`: its gradient follows by
differentiation in log u (under which w moves as w does and r stays), and rho(u) itself is `rho(log_u, exp(log_u), 1)`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG_2 = 0.6931471805599453


class Divergence(NamedTuple):
    """One divergence. Every function is elementwise; arrays in, an array of the same shape out.

    Attributes:
      rho: (log_u, w, r) -> r·rho(u).
      kappa_over_u: log_u -> kappa(u) / u in a closed form that overflows only where the value itself does, with
        kappa = d rho / d log u; the regularized advantage is A' = A − beta·kappa(u)/u (docs/method.md 2 and 3).
        None: computed from `rho`, which is right wherever exp(−log_u) is finite and `rho` does not cancel.
    """

    rho: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    kappa_over_u: Callable[[jax.Array], jax.Array] | None = None


def alpha_divergence(alpha: float) -> Divergence:
    """rho = (u^alpha − alpha·u + alpha − 1) / (alpha (alpha − 1)), which tends to `ufkl` at 0 and to `urkl` at 1.

    At 2 it is `chi2`, and at ½ four times `hellinger`. The limits themselves have no such form.
    """

    def rho(log_u, w, r):  # r·u^alpha = r·exp(alpha·log u) = w·exp((alpha − 1)·log u): the one that overflows less
        power = r * jnp.exp(alpha * log_u) if abs(alpha) < abs(alpha - 1) else w * jnp.exp((alpha - 1) * log_u)
        return (power - alpha * w + (alpha - 1) * r) / (alpha * (alpha - 1))

    return Divergence(rho, lambda log_u: jnp.expm1((alpha - 1) * log_u) / (alpha - 1))


ALPHA = 0.5  # of divergence "alpha" where none is given
DIVERGENCES = {
    # forward KL(ref || policy): rho = −log u
    "fkl": Divergence(lambda log_u, w, r: -r * log_u, lambda log_u: -jnp.exp(-log_u)),
    # reverse KL(policy || ref): rho = u log u
    "rkl": Divergence(lambda log_u, w, r: w * log_u, lambda log_u: log_u + 1),
    # unnormalized forward KL: rho = u − log u − 1
    "ufkl": Divergence(lambda log_u, w, r: w - r * (log_u + 1), lambda log_u: -jnp.expm1(-log_u)),
    # unnormalized reverse KL: rho = u log u − u + 1
    "urkl": Divergence(lambda log_u, w, r: w * (log_u - 1) + r, lambda log_u: log_u),
    # Jensen-Shannon: rho = ½ u log(2u / (1 + u)) + ½ log(2 / (1 + u))
    "js": Divergence(
        lambda log_u, w, r: 0.5 * (w * (LOG_2 - jax.nn.softplus(-log_u)) + r * (LOG_2 - jax.nn.softplus(log_u))),
        lambda log_u: 0.5 * (LOG_2 - jax.nn.softplus(-log_u)),
    ),
    # squared Hellinger, a quarter of Amari's alpha-divergence at alpha = ½: rho = ½ (√u − 1)²
    "hellinger": Divergence(
        lambda log_u, w, r: 0.5 * (w + r) - r * jnp.exp(0.5 * log_u),
        lambda log_u: -0.5 * jnp.expm1(-0.5 * log_u),
    ),
    # Jeffreys, the sum of the two KL divergences: rho = (u − 1) log u
    "jeffreys": Divergence(lambda log_u, w, r: (w - r) * log_u, lambda log_u: log_u - jnp.expm1(-log_u)),
    # half of Pearson's chi squared: rho = ½ (u − 1)²
    "chi2": Divergence(lambda log_u, w, r: 0.5 * (w - r) * jnp.expm1(log_u), lambda log_u: jnp.expm1(log_u)),
    "alpha": alpha_divergence(ALPHA),
}


def named(name: str, alpha: float | None = None) -> Divergence:
    """The divergence of that name in `DIVERGENCES`; `alpha` is the parameter of "alpha" and of no other."""
    return DIVERGENCES[name] if alpha is None else alpha_divergence(alpha)


def full_vocabulary(divergence: Divergence, logits: jax.Array, reference_logits: jax.Array) -> jax.Array:
    """D(policy, reference) of two distributions over the vocabulary, [...] from logits [..., V], without a sample.

    Of a reference with a longer table than the policy's V, it is its distribution over the ids that both have.
    """
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference_logits[..., : logits.shape[-1]])
    return jnp.sum(divergence.rho(log_p - log_q, jnp.exp(log_p), jnp.exp(log_q)), axis=-1)


def weighted_kappa(divergence: Divergence, log_u: jax.Array, w: jax.Array, r: jax.Array) -> jax.Array:
    """r·kappa(u), the derivative of r·rho(u) in log u; arguments and result of one shape."""
    along_log_u = (jnp.ones_like(log_u), w, jnp.zeros_like(r))
    return jax.jvp(divergence.rho, (log_u, w, r), along_log_u)[1]


def rho_over_u(divergence: Divergence, log_u: jax.Array) -> jax.Array:
    """rho(u) / u, whose mean over the policy's own samples is the divergence."""
    return divergence.rho(log_u, jnp.ones_like(log_u), jnp.exp(-log_u))


def kappa_over_u(divergence: Divergence, log_u: jax.Array) -> jax.Array:
    """kappa(u) / u, so that A' = A − beta·kappa_over_u."""
    if divergence.kappa_over_u is not None:
        return divergence.kappa_over_u(log_u)
    return weighted_kappa(divergence, log_u, jnp.ones_like(log_u), jnp.exp(-log_u))
