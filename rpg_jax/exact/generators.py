"""What a divergence is, stated apart from `rpg_jax.objectives`, and whether its implementation agrees.

D(p, q) = Σ q f(p / q) for masses p and q, with a convex generator f of u = p / q and f(1) = 0. A generator here is
written in u from the textbook. `objectives.divergences` writes the same divergence as a product in log u, with a closed
form of its derivative, and every clip decides by that closed form. `divergence_faults` compares the two.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.objectives.divergences import ALPHA, DIVERGENCES, Divergence, kappa_over_u, named, weighted_kappa

Generator = Callable[[jax.Array], jax.Array]

GENERATORS: dict[str, Generator] = {
    "fkl": lambda u: -jnp.log(u),
    "rkl": lambda u: u * jnp.log(u),
    "ufkl": lambda u: u - 1 - jnp.log(u),
    "urkl": lambda u: u * jnp.log(u) - u + 1,
    "js": lambda u: 0.5 * (u * jnp.log(2 * u / (u + 1)) - jnp.log((u + 1) / 2)),
    "hellinger": lambda u: 0.5 * (jnp.sqrt(u) - 1) ** 2,
    "jeffreys": lambda u: u * jnp.log(u) - jnp.log(u),
    "chi2": lambda u: 0.5 * (u - 1) ** 2,
}


def generator(name: str, alpha: float | jax.Array = ALPHA) -> Generator:
    """The generator of a divergence by name; of one that is not in `GENERATORS`, rho(u) of its own `Divergence`.

    `alpha` is the parameter of divergence "alpha".
    """
    if name == "alpha":
        return lambda u: (u**alpha - alpha * u + alpha - 1) / (alpha * (alpha - 1))
    if name in GENERATORS:
        return GENERATORS[name]
    return lambda u: DIVERGENCES[name].rho(jnp.log(u), u, jnp.ones_like(u))


def divergence_faults(name: str, alpha: float = ALPHA) -> list[str]:
    """The ways in which a `Divergence` disagrees with its generator, in a few words each.

    * Product form: r·rho(u) is r·f(u), for any mass r of the reference.
    * Derivative: r·kappa(u), which autodiff takes from the product form, is r·u·f'(u).
    * Closed form: kappa(u)/u, which clips and regularized advantages use, is f'(u).
    * Convexity: f'(u) increases, and f(1) = 0, so that the divergence is never negative and 0 for equal masses.
    * Extreme u: in float32, up to |log u| = 60, the product form and kappa(u)/u are finite and right wherever the
      value itself is a float32.
    """
    divergence, f = named(name, None if alpha == ALPHA else alpha), generator(name, alpha)

    @jax.jit
    def forms(log_u, w, r):  # what is implemented and what it should be
        u = jnp.exp(log_u)
        slope = jax.vmap(jax.grad(f))(u)
        product = divergence.rho(log_u, w, r), r * f(u)
        derivative = weighted_kappa(divergence, log_u, w, r), r * u * slope
        return product, derivative, (kappa_over_u(divergence, log_u), slope)

    faults = []
    with jax.enable_x64():
        log_u = np.linspace(-8.0, 8.0, 65)  # 0 is one of them
        r = np.resize([1.0, 0.3, 4.0], log_u.shape)
        product, derivative, closed = jax.device_get(forms(log_u, np.exp(log_u) * r, r))
        at_one = float(f(jnp.ones(())))
    if not _same(*product):
        faults.append("its product form rho(log u, w, r) is not r·f(u)")
    if not _same(*derivative):
        faults.append("the derivative of its product form in log u is not r·u·f'(u)")
    if not _same(*closed):
        faults.append("kappa_over_u is not f'(u)")
    if np.any(np.diff(closed[1]) < -1e-12):
        faults.append("its generator f(u) is not convex")
    if abs(at_one) > 1e-12:
        faults.append("its generator is not 0 at u = 1")
    return faults + _extreme_faults(divergence)


def _extreme_faults(divergence: Divergence) -> list[str]:
    """Where float32 loses what a float32 can hold, far from u = 1; by comparison with float64."""
    far = np.concatenate([np.linspace(-60, -15, 10), np.linspace(15, 60, 10)])

    def forms(log_u):
        w, r = jnp.exp(0.5 * log_u), jnp.exp(-0.5 * log_u)  # neither factor overflows, their quotient may
        return divergence.rho(log_u, w, r), kappa_over_u(divergence, log_u)

    with jax.enable_x64():
        exact = jax.device_get(jax.jit(forms)(far))
        rounded = jax.device_get(jax.jit(forms)(far.astype(np.float32)))
    faults = []
    for form, narrow, wide in zip(("its product form", "kappa_over_u"), rounded, exact, strict=True):
        fits = np.abs(wide) < 1e37
        if not np.allclose(narrow[fits], wide[fits], rtol=1e-3, atol=1e-30):
            derived = form == "kappa_over_u" and divergence.kappa_over_u is None
            mend = "; give it in closed form, the second field of Divergence" if derived else ""
            faults.append(f"{form} is lost in float32 at extreme u, where its value is not{mend}")
    return faults


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=1e-9, atol=1e-11)
