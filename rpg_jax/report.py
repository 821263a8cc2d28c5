"""Compares runs: one HTML page that needs nothing else, and the same in Markdown.

    python -m rpg_jax.report runs/objectives [MORE_FOLDERS...] [--out=report.html]
    python -m rpg_jax.report runs/equivalence --margin=0.01 --keep=docs/study/equivalence.parquet
    python -m rpg_jax.report docs/study/equivalence.parquet --margin=0.01

Each folder is that of a run, or of a sweep or anything else with runs beneath it. Runs that differ only in their seed
are one variant. The page has every two variants with a permutation test and the probability that one improves on
the other, training curves as interquartile means with 95 % bootstrap bands over runs, last and best scores, responses
to held-out problems, what runs cost, how their configs differ and, for experiments of the paper, its scores. Beside
--out (report.html in the first folder if unset) go the Markdown with the same name and its figures. Unfinished runs and
lines that a crash cut short are shown as such.

--margin tests whether variants are equal to within so much, over runs of the same seeds. --keep writes the runs to one
file, without their responses, which may be named in place of folders.
"""

from absl import flags

from rpg_jax.run import cli

flags.DEFINE_string("out", None, "The page, NAME.html; report.html in the first folder if unset.")
flags.DEFINE_float("margin", None, "Difference of scores within which variants count as equal.", lower_bound=0.0)
flags.DEFINE_string("keep", None, "File NAME.parquet to which the runs are written.")


def main(options):
    from rpg_jax.lab.reporting import compose

    try:
        from configs import paper
    except ModuleNotFoundError:  # an installed package comes without the repository's configs and published scores
        return compose.main(options, ())
    return compose.main(options, paper.experiments())


if __name__ == "__main__":
    cli.run(main, arguments=True)
