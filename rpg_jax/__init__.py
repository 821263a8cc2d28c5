"""RPG-JAX: Regularized Policy Gradient (Zhang et al., arXiv 2505.17508) in JAX."""

__version__ = "0.2.0"
