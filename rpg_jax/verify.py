"""Checks by enumeration that every objective has the gradient it claims, and says how far it is where it does not.

    python -m rpg_jax.verify
    python -m rpg_jax.verify --json=out.json
    python -m rpg_jax.verify --objective=my_file.py:my_objective --divergence=urkl --beta=0.1
    python -m rpg_jax.verify --tradeoff --out=FOLDER
    python -m rpg_jax.verify --figures --out=FOLDER
    python -m rpg_jax.verify --oracle --out=FOLDER

Sums over every outcome of small policies (a softmax, and sequences of fixed and of varying length), in float64, with
the policy equal to the behavior policy or not, and the reference equal to it or not. Two measures: each sample's
gradient against −(wA − beta·r·kappa(u)) ∇log policy, and the expected gradient against the derivative of the exact
objective. Of what is biased off policy, a second table says how far off it is at growing KL from the behavior policy.

A function of your own takes (logp, behavior_logp, advantage, mask, reference_logp=None, weight=None, denominator=None),
all [B, T] but the scalar denominator, and returns (loss, metrics); further keyword-only parameters are its settings.
What it is held against comes from the flags, or from such settings or attributes of the function: `divergence` (None:
reward only), `beta`, `level` ("token" or "sequence"), `z_old`. Its attribute `declares`, or --declares, is what it
claims: "exact per sample", "exact in expectation" or "biased", or a pair of them for on and off policy. Without it
the verdict says that nothing was declared. `train` and sweeps take the same FILE.py:NAME as objective.name.

With --tradeoff: the exact bias, variance and mean squared error of the gradient from N samples for each clip, epsilon,
c, beta, level and estimator, or of --objective, at policies a given KL away. Tables here, CSV and figures in --out.

With --figures: the paper's Figures 2 and 3, the loss of one sample against its importance ratio under the dual clip and
under RPG-Style Clip, computed from the losses of `rpg_jax.objectives` and their gradients.

With --oracle: the same for stale responses of a transformer, of 16 to 256 tokens, at policies up to 256 updates from
the behavior policy, against the gradient of fresh responses. Moments go to OUT/oracle.parquet; the same command goes on
after a kill, and makes tables.md and the figures of what is there.

Exit status: 0; 1 if something is not what it declares itself to be, if a divergence is not what its generator says, or
if a function breaks the contract; 2 for a mistake in the call.
"""

from absl import flags

from rpg_jax.lab.oracle import settings as oracle
from rpg_jax.lab.tradeoff import settings as tradeoff
from rpg_jax.run import cli

flags.DEFINE_string("objective", None, "FILE.py:NAME of a function to examine instead of the built-in ones")
flags.DEFINE_string("divergence", None, "with --objective: the divergence of its target; default none")
flags.DEFINE_float("beta", None, "with --objective: its coefficient; default 0")
flags.DEFINE_string("level", None, "with --objective: token or sequence; default token")
flags.DEFINE_string("declares", None, "with --objective: what it claims to be; with a comma, on and off policy")
flags.DEFINE_string("json", None, "file to write every measurement to")
flags.DEFINE_bool(
    "tradeoff", False, "bias, variance and mean squared error of the gradient instead: tables, CSV and figures"
)
flags.DEFINE_bool("figures", False, "the paper's Figures 2 and 3 instead: the loss against the importance ratio")
flags.DEFINE_bool("oracle", False, "bias and variance of stale gradients in a transformer instead, by sampling")
flags.DEFINE_string("out", "runs/tradeoff", "with --tradeoff, --figures or --oracle: folder of tables and figures")
for name, text in tradeoff.WHOLE.items():
    flags.DEFINE_integer(name, tradeoff.default(name), f"with --tradeoff: {text}")
for name, text in tradeoff.LISTS.items():
    flags.DEFINE_list(name, tradeoff.default(name), f"with --tradeoff: {text}")
for name, text in oracle.WHOLE.items():
    flags.DEFINE_integer(name, oracle.default(name), f"with --oracle: {text}")
for name, text in oracle.LISTS.items():
    flags.DEFINE_list(name, oracle.default(name), f"with --oracle: {text}")


def main(options):
    from rpg_jax.lab import clip_figures, verification
    from rpg_jax.lab.oracle import command as oracle
    from rpg_jax.lab.tradeoff import command as tradeoff

    if oracle.asked(options):
        return oracle.main(options)
    if tradeoff.asked(options):
        return tradeoff.main(options)
    return clip_figures.main(options) if options.figures else verification.main(options)


if __name__ == "__main__":
    cli.run(main)
