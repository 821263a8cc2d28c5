"""Trains a policy with reinforcement learning, after a supervised warm start, and resumes by itself.

    python -m rpg_jax.train --config=configs/quickstart.py --workdir=runs/quickstart [--config.objective.beta=1e-3 ...]

The same command goes on from the newest checkpoint. --checkpoint_dir=gs://BUCKET/FOLDER keeps checkpoints elsewhere
than in the workdir; --profile=START:STOP writes a trace of those RL steps under WORKDIR/profile. Exit statuses: 0 done,
2 a mistake in the input, 75 stopped by SIGTERM after saving.

As a job of many processes: the same command on each, with --multihost on a TPU pod or under SLURM, else with
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set. The first one logs; all see the checkpoints' folder.
"""

import pathlib
import time
from functools import partial

import jax
from absl import flags
from etils import epath
from ml_collections import config_flags

from rpg_jax import build, cli, job, parallel, workdir
from rpg_jax.data import ProblemStream
from rpg_jax.parallel import multihost
from rpg_jax.training import loop, profile, warm_start
from rpg_jax.training.checkpoints import Checkpoints
from rpg_jax.training.logs import Progress, RunLog
from rpg_jax.training.phases import phase
from rpg_jax.training.summary import write_summary

_CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment: FILE.py or FILE.py:VARIANT.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: checkpoints, logs, figures.")
_CHECKPOINT_DIR = flags.DEFINE_string("checkpoint_dir", None, "Folder or bucket of checkpoints; the workdir if unset.")
_PROFILE = flags.DEFINE_string("profile", None, "START:STOP, RL steps to write a trace of under WORKDIR/profile.")
_ACCEPT = flags.DEFINE_bool("accept_config_change", False, "Go on in a workdir whose run had another config.")


def main(_):
    with cli.door():
        if _CONFIG.value is None or _WORKDIR.value is None:
            raise ValueError("--config=FILE.py and --workdir=FOLDER are needed; see --help")
        config = _CONFIG.value.lock()
    with job.joined() as should_stop:
        with cli.door():
            job.check_same(config)
            with multihost.together():
                run = build.build_run(config, log=job.say)
                build.check_rows(config, run)
                window = profile.window(_PROFILE.value, config.steps)
            job.check_same_data(run.data)
            path, folder = open_workdir(config)
        with cli.in_words(), run.scorer:
            finished = train(config, run, path, folder, window, should_stop)
    return 0 if finished else cli.PREEMPTED


def open_workdir(config):
    """The first process opens the workdir for all: (the folder of logs, that of checkpoints)."""
    opened = None
    with multihost.together():
        if multihost.is_first():
            opened = workdir.open_workdir(_WORKDIR.value, config, _ACCEPT.value, _CHECKPOINT_DIR.value)
    path, folder = multihost.gather(opened and list(map(str, opened)))[0]
    with multihost.together():
        workdir.check_shared(folder, config)
    return pathlib.Path(path), epath.Path(folder)


def train(config, run, path, folder, window, should_stop) -> bool:
    """Warm start, RL, figure and summary; returns False when it was told to stop before the end.

    Logs go into `path`, checkpoints into `folder`; RL steps in `window` are traced.
    """
    shapes = build.abstract(run, partial(build.build_state, run))
    stream = ProblemStream(run.data.problems("train"), config.seed)
    with Checkpoints(folder / "checkpoints", keep_last=config.checkpoint.keep_last) as checkpoints:
        with phase("state"):
            restored = checkpoints.restore(shapes)
        if restored is None:
            with phase("warm start"):
                params, seconds = warm_started(config, run, folder / "warm_start", should_stop)
            if params is None:
                return False
            with phase("state"):
                state = jax.block_until_ready(build.build_state(run, params))
            restored = 0, state, {"cursor": 0, "totals": loop.new_totals(seconds)}
        start, state, extra = restored
        stream.set_state(extra["cursor"])
        with RunLog(path, start, config=config.to_dict(), **config.log) as log:
            parts = build.build_parts(
                config, run, shapes, stream=stream, checkpoints=checkpoints, log=log, should_stop=should_stop,
                traced=partial(profile.traced, window=window, folder=path / "profile"),
            )  # fmt: skip
            state, _, finished = loop.run(parts, run.loop, state, start, extra["totals"])
    if finished and multihost.is_first():
        summary = write_summary(path, extra["totals"])
        workdir.write(folder, "summary.json", (path / "summary.json").read_text())  # ends `evaluate --watch`
        print(
            f"held-out accuracy {summary['accuracy_before']:.1%} -> {summary['accuracy_after']:.1%} "
            f"in {summary['wall_seconds']:.0f} s; see {path}/summary.json and {path}/figures/training.png"
        )
    return finished


def warm_started(config, run, path, should_stop):
    """Parameters after learning from worked solutions, and the seconds it took; None and seconds if told to stop."""
    begin, settings = time.perf_counter(), config.warm_start
    if not settings.steps:
        return build.initial_params(config, run), time.perf_counter() - begin
    warm = build.build_warm_start(config, run)
    length = run.rollout.max_prompt + run.rollout.max_new
    with Checkpoints(path, keep_last=config.checkpoint.keep_last) as checkpoints:
        start, state, extra = checkpoints.restore(warm.shapes) or (0, warm.fresh(), {"cursor": 0, "seconds": 0.0})
        warm.stream.set_state(extra["cursor"])

        def seconds():
            return extra["seconds"] + time.perf_counter() - begin

        def save(step, state, wait):
            checkpoints.save(step, state, {"cursor": warm.stream.get_state(), "seconds": seconds()}, wait=wait)

        def next_batch():
            problems = warm.stream.next(settings.batch, multihost.row_indices(run.mesh, settings.batch))
            return warm_start.supervised_batch(run.mesh, problems, run.data.tokenizer, length)

        with Progress("warm start", start, settings.steps) as progress:
            state, finished = warm_start.run(
                state, start, settings.steps, update=warm.update, next_batch=next_batch, save=save, progress=progress,
                microbatches=settings.batch // settings.microbatch_rows, save_every=settings.save_every,
                should_stop=should_stop,
            )  # fmt: skip
    if not finished:
        return None, seconds()
    policy = jax.jit(
        warm.optimizer.evaluation_params, donate_argnums=1, out_shardings=parallel.shardings(run.mesh, state.params)
    )
    return policy(state.opt_state, state.params), seconds()


if __name__ == "__main__":
    cli.run(main)
