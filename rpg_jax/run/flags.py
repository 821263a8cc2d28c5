"""Flags that several commands have in common; each command defines them by a call, and its --help lists them."""

from absl import flags

flags.disclaim_key_flags()  # what is defined here belongs to the module that calls


def define_objective() -> None:
    """The flags that name a function of the user's own, and what it is held against."""
    flags.DEFINE_string("objective", None, "FILE.py:NAME of a function to examine instead of the built-in ones")
    flags.DEFINE_string("divergence", None, "with --objective: the divergence of its target; default none")
    flags.DEFINE_float("beta", None, "with --objective: its coefficient; default 0")
    flags.DEFINE_string("level", None, "with --objective: token or sequence; default token")
    flags.DEFINE_string("declares", None, "with --objective: what it claims to be; with a comma, on and off policy")
