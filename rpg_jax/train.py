"""Trains a policy with reinforcement learning, after a supervised warm start, and resumes by itself.

    python -m rpg_jax.train --config=configs/quickstart.py --workdir=runs/quickstart [--config.objective.beta=1e-3 ...]

The same command goes on from the newest checkpoint. --checkpoint_dir=gs://BUCKET/FOLDER keeps checkpoints elsewhere
than in the workdir; --profile=START:STOP writes a trace of those RL steps under WORKDIR/profile. Exit statuses: 0 done,
2 a mistake in the input, 75 stopped by SIGTERM or Ctrl-C after saving.

As a job of many processes: the same command on each, with --multihost on a TPU pod or under SLURM, else with
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set. The first one logs; all see the checkpoints' folder.
"""

import sys

from absl import flags
from ml_collections import config_flags

from rpg_jax.run import cli

config_flags.DEFINE_config_file(
    "config", None, "The experiment: FILE.py or FILE.py:VARIANT.", lock_config=False, accept_new_attributes=True
)
flags.DEFINE_string("workdir", None, "Folder of the run: checkpoints, logs, figures.")
flags.DEFINE_string("checkpoint_dir", None, "Folder or bucket of checkpoints; the workdir if unset.")
flags.DEFINE_string("profile", None, "START:STOP, RL steps to write a trace of under WORKDIR/profile.")
flags.DEFINE_bool("accept_config_change", False, "Go on in a workdir whose run had another config.")
flags.DEFINE_bool("multihost", False, "Join the job of all hosts of this TPU pod, SLURM, Kubernetes or MPI allocation.")
flags.DEFINE_float("coordinator_timeout", 300, "Seconds to wait for all processes of a job.", lower_bound=1)
flags.DEFINE_float(
    "watchdog_seconds", 1800, "End a job without progress for so long, compilation aside; 0 is never.", lower_bound=0
)


def main(options):
    cli.need(options, config="FILE.py", workdir="FOLDER")
    from rpg_jax.lab.looking.keep import make_look
    from rpg_jax.lab.reporting.training_curves import training_figure
    from rpg_jax.run import train

    return train.main(options, draw=training_figure, look=make_look)


def leave(status):
    if multihost := sys.modules.get("rpg_jax.parallel.multihost"):  # absent where flags were refused
        multihost.leave(status)
    sys.exit(status)


if __name__ == "__main__":
    cli.run(main, leave=leave)
