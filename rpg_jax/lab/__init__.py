"""The laboratory: it reads the core, and no file of the core imports it.

`planning` says what a config takes on hardware that is not here, `tradeoff` computes bias and variance of every
objective by enumeration, `sweeping` trains variants by seeds, `reporting` holds runs against each other.
"""
