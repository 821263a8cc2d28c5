"""Bias and variance of stale gradients in a transformer, by sampling: what docs/study/oracle.md says.

Reading order: task, policies, estimators (the mathematics), gradients, measure, tables, figures, and `__main__`.
"""
