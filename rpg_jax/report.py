"""Compares runs: a page in Markdown, with its figures beside it.

    python -m rpg_jax.report runs/objectives [MORE_FOLDERS...] [--out=report.md]
    python -m rpg_jax.report runs/equivalence --margin=0.01

Each folder is that of a run, or of a sweep or anything else with runs beneath it. Runs that differ only in their seed
are one variant. The page has every two variants with their difference and a permutation test, training curves as means
over runs with 95 % t intervals, last and best scores, what runs cost and how their configs differ. Unfinished runs
are shown as such.

--margin tests whether variants are equal to within so much, over runs of the same seeds.
"""

from absl import flags

from rpg_jax.run import cli

flags.DEFINE_string("out", None, "The page, which ends in .md; report.md in the first folder if unset.")
flags.DEFINE_float("margin", None, "Difference of scores within which variants count as equal.", lower_bound=1e-9)


def main(options):
    from rpg_jax.lab.reporting import compose

    compose.main(options)


if __name__ == "__main__":
    cli.run(main, arguments=True)
