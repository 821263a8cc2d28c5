"""Bias, variance and mean squared error of the gradient of every objective, by enumeration.

Reading order: moments (the mathematics), measure (a grid of forms as one long table), tables (its medians and their
figures), and command (`python -m rpg_jax.tradeoff`).
"""
