"""Bias, variance and mean squared error of the gradient of every objective, by enumeration."""
