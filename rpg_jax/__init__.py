"""RPG-JAX: Regularized Policy Gradient (Zhang et al., arXiv 2505.17508) in JAX."""
