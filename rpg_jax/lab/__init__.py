"""The laboratory: it reads the core, and no file of the core imports it.

`verification` prints what enumeration says of every objective, `tradeoff` computes bias and variance, `planning` says
what a config takes on hardware that is not here, `sweeping` trains variants by seeds, `reporting` compares runs.
"""
