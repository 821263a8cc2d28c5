"""Studies objectives further: bias and variance of gradients, exactly or by sampling, and the paper's figures.

    python -m rpg_jax.study tradeoff --out=FOLDER   bias, variance and error of the gradient of N samples, exactly
    python -m rpg_jax.study oracle --out=FOLDER     bias and variance of stale gradients in a transformer, by sampling
    python -m rpg_jax.study figures --out=FOLDER    the paper's Figures 2 and 3: losses against the importance ratio

Each has --help and flags of its own.
"""
