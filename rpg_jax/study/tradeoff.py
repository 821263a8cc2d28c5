"""Computes bias, variance and mean squared error of the gradient from N samples, exactly.

    python -m rpg_jax.study tradeoff --out=FOLDER
    python -m rpg_jax.study tradeoff --objective=my_file.py:my_objective --out=FOLDER

For each clip, epsilon, c, beta, level and estimator, or for --objective, at policies a given KL away. A table here, CSV
and figures in --out. The flags of a function of your own are those of `python -m rpg_jax.verify`.
"""

from absl import flags

from rpg_jax.lab.tradeoff import settings

flags.DEFINE_string("out", "runs/tradeoff", "folder of CSV files and figures")
flags.DEFINE_string("objective", None, "FILE.py:NAME of a function to examine instead of the built-in ones")
flags.DEFINE_string("divergence", None, "with --objective: the divergence of its target; default none")
flags.DEFINE_float("beta", None, "with --objective: its coefficient; default 0")
flags.DEFINE_string("level", None, "with --objective: token or sequence; default token")
flags.DEFINE_string("declares", None, "with --objective: what it claims to be; with a comma, on and off policy")
flags.DEFINE_string("json", None, "file to write every table to")
for name, text in settings.WHOLE.items():
    flags.DEFINE_integer(name, settings.default(name), text)
for name, text in settings.LISTS.items():
    flags.DEFINE_list(name, settings.default(name), text)


def main(options):
    from rpg_jax.lab.tradeoff import command

    return command.main(options)
