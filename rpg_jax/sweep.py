"""Trains every variant of a sweep with every seed, as many at once as the machine carries.

    python -m rpg_jax.sweep configs/sweeps/objectives.py [--out=runs/objectives] [--seeds=0,1] [--parallel=2]
    python -m rpg_jax.sweep configs/sweeps/objectives.py --dry_run   # prints the runs that are left
    python -m rpg_jax.sweep configs/sweeps/objectives.py --slurm     # or --tpu: writes a script of them instead

`rpg_jax/lab/sweeping/variants.py` says what a sweep's file holds; FILE.py:smoke takes that variant of its base config.
A run is `rpg_jax.train` in OUT/VARIANT/seedN, with its output in log.txt there; a run that has a summary.json is done.
All runs start from one warm start, trained once with the base config's seed and kept beside OUT, in warm_starts/, for
other sweeps of the same settings.

Without --parallel each run gets one core, or more where there are more cores than runs, and a GiB of memory. On a GPU
or TPU one runs at a time. The same command goes on after a kill at any time, leaves out what is done and tries again
what failed. On SIGTERM and Ctrl-C the runs save first.

Exit statuses: 0 all is done, 1 a run failed, 2 a mistake in the input, 75 stopped after saving.
"""

from absl import flags

from rpg_jax.run import cli

flags.DEFINE_string("out", None, "Folder of the sweep; runs/NAME if unset.")
flags.DEFINE_list("seeds", None, "Seeds instead of the sweep's own, comma separated.")
flags.DEFINE_integer("parallel", None, "Runs at once; as many as the machine carries if unset.", lower_bound=1)
flags.DEFINE_bool("dry_run", False, "Print what would be run, or written, and change nothing.")
flags.DEFINE_bool("slurm", False, "Write OUT/slurm.sh, a job array of the runs that are left, instead.")
flags.DEFINE_bool("tpu", False, "Write OUT/tpu.sh, a TPU pod for each of the runs that are left, instead.")
flags.DEFINE_string("prepare", None, "VARIANT/seedN: only give this run its warm start.")


def main(options):
    from rpg_jax.lab.sweeping import command

    return command.main(options)


if __name__ == "__main__":
    cli.run(main, arguments=True)
