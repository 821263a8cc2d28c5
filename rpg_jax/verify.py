"""Checks by enumeration that every objective has the gradient it claims, and says how far it is where it does not.

    python -m rpg_jax.verify
    python -m rpg_jax.verify --json=out.json
    python -m rpg_jax.verify --objective=my_file.py:my_objective --divergence=urkl --beta=0.1

Sums over every outcome of small policies (a softmax, and sequences of fixed and of varying length), in float64, with
the policy equal to the behavior policy or not, and the reference equal to it or not. Two measures: each sample's
gradient against −(wA − beta·r·kappa(u)) ∇log policy, and the expected gradient against the derivative of the exact
objective. Of what is biased off policy, a second table says how far off it is at growing KL from the behavior policy.

A function of your own names what it takes of log_ratio, advantage, logp, behavior_logp and reference_logp, arrays of
one shape, and returns the loss of every entry, or (losses, dict of arrays to log). What else it takes are its settings.
What it is held against comes from the flags, or from such settings or attributes of the function: `divergence` (None:
reward only), `beta`, `level` ("token" or "sequence"), `z_old`. Its attribute `declares`, or --declares, is what it
claims: "exact per sample", "exact in expectation" or "biased", or a pair of them for on and off policy. Without it
the verdict says that nothing was declared. `train` and sweeps take the same FILE.py:NAME as objective.name.

`python -m rpg_jax.tradeoff` goes further: bias, variance and error by the number of samples.

Exit status: 0; 1 if something is not what it declares itself to be, if a divergence is not what its generator says, or
if a gradient is not finite; 2 for a mistake in the call.
"""

from absl import flags

from rpg_jax.run import cli

cli.define_objective()
flags.DEFINE_string("json", None, "file to write every measurement to")


def main(options):
    from rpg_jax.lab import verification

    return verification.main(options)


if __name__ == "__main__":
    cli.run(main)
