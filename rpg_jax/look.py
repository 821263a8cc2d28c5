"""Shows every token of kept responses under the objective that trained them: one HTML page.

    python -m rpg_jax.look --workdir=runs/quickstart
    python -m rpg_jax.look --workdir=runs/quickstart --step=20 --objectives=rpg,rpg+clip=none,grpo,mine.py:loss

A run keeps two groups at each evaluation, and every log.look_every RL steps. The page colours tokens by the coefficient
of grad log p, log ratios, entropy or KL, and strikes what a clip cut. An objective named as the run's has its settings.
"""

from absl import flags

from rpg_jax.run import cli

flags.DEFINE_string("workdir", None, "Folder of the run.")
flags.DEFINE_integer("step", None, "The RL step to show; all that are kept if unset.", lower_bound=1)
flags.DEFINE_list("objectives", None, "NAME or FILE.py:NAME, perhaps +KEY=VALUE that differ; unset: the run's own.")
flags.DEFINE_string("out", None, "The page, which ends in .html; look.html in the workdir if unset.")


def main(options):
    cli.need(options, workdir="FOLDER")
    from rpg_jax.lab.looking import page

    page.main(options)


if __name__ == "__main__":
    cli.run(main)
