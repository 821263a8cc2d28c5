"""Tries to break trainings for some minutes, and tells what became of each fault.

    python -m rpg_jax.faults --minutes=60 --seed=0 --out=runs/faults [--kinds=signals,damage]

Small trainings are killed in every phase, their files are damaged, their disks fill up, and their reward functions
hang, lie and fork. After each fault the training must end with the bits of one that nothing disturbed, or one line must
say what was lost and how to go on. Progress goes to stderr. OUT holds trials.jsonl (one line a fault), report.md,
campaign.json, and under lane-*/runs/ the folders of what was lost. It needs the repository (configs/, launch/); disks
are filled where they may be mounted. docs/reliability.md has the table of a campaign, and what is promised.

Exit statuses: 0 nothing was lost, 1 something was, 2 a mistake in the input.
"""

from absl import flags

from rpg_jax.run import cli

KINDS = "signals, damage, verifiers, commands, disks, data, clock, jobs, workers"

flags.DEFINE_float("minutes", 60, "Minutes until the last fault begins.", lower_bound=0)
flags.DEFINE_integer("seed", 0, "Which files, moments and bits the faults choose.", lower_bound=0)
flags.DEFINE_string("out", "runs/faults", "Folder of the campaign; it must not exist, or be empty.")
flags.DEFINE_integer("lanes", 2, "Trainings that run side by side, each in a folder of its own.", 1, 64)
flags.DEFINE_list("kinds", None, f"Families of faults, comma separated; unset: {KINDS}.")


def main(options):
    from rpg_jax.lab.faults import command

    return command.main(options)


if __name__ == "__main__":
    cli.run(main)
