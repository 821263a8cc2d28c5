"""What `python -m rpg_jax.train` does: it joins the job, builds the run, and does the warm start and RL."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from rpg_jax.data import ProblemStream
from rpg_jax.parallel import multihost
from rpg_jax.run import build, cli, job, models, profile, states, warm_start
from rpg_jax.run.summary import write_summary
from rpg_jax.storage import weights, workdir
from rpg_jax.storage.checkpoints import Checkpoints
from rpg_jax.storage.logs import RunLog
from rpg_jax.training import loop
from rpg_jax.training.ahead import compiled_ahead
from rpg_jax.training.phases import phase, say
from rpg_jax.training.skipped import MEND, NothingLearned


def main(options, draw: Callable[[list[dict], pathlib.Path], None], look: Callable[..., Any]) -> int:
    """Trains as the flags of `rpg_jax.train` say. Returns the exit status: 0, 75 when the run was told to stop, 1 when
    none of its updates was applied.

    `draw(rows, file)` draws a finished run's `metrics.jsonl`; `look(run, stream, chunk)` makes its `loop.Parts.look`.
    """
    build.check_values(options.config)  # first: a config cannot be locked, or compared, while a key lacks its value
    config = options.config.lock()
    joined = job.joined(options.multihost, options.coordinator_timeout, options.watchdog_seconds)
    with joined as should_stop, contextlib.ExitStack() as locks:
        job.check_same(config)
        with multihost.together():
            models.check_base(config)
            run = build.build_run(config, log=job.say)
            build.check_rows(config, run)
            for split in ("train", "heldout"):  # the environment, and each user's function on what it is to score
                run.scorer.try_out(run.data.problems(split)[0], rewards=split == "train")
            if run.teacher is not None:  # whose weights are read after the warm start, which would be for nothing
                weights.with_stored_dtypes(config.reference.checkpoint, run.teacher.shapes)
            window = profile.window(options.profile, config.steps)
        job.check_same_data(run.data)
        path, folder = open_workdir(options, config, locks)
        try:
            with run.scorer:
                trained = train(config, run, path, folder, window, should_stop, look)
                if trained is None:
                    return cli.PREEMPTED
                totals, updates = trained
                if multihost.is_first():
                    finish(path, folder, totals, draw)
                if not updates and (count := config.steps * run.loop.updates):
                    raise NothingLearned(f"no update of this run was applied, {count} were not finite; {MEND}")
        except NothingLearned as error:
            say(f"error: {error}")
            return 1
    return 0


def open_workdir(options, config: ConfigDict, locks: contextlib.ExitStack) -> tuple[pathlib.Path, epath.Path]:
    """(The folder of logs, that of checkpoints), opened by the first process, locked until `locks` closes."""
    folders = None
    with multihost.together():
        if multihost.is_first():
            places = options.workdir, workdir.checkpoint_dir(options.workdir, options.checkpoint_dir)
            locks.enter_context(workdir.alone(*places))
            opened = workdir.open_workdir(options.workdir, config, options.accept_config_change, options.checkpoint_dir)
            folders = *map(str, opened), (opened[1] / "config.json").read_text()
    path, folder, text = multihost.gather(folders)[0]
    with multihost.together():
        workdir.check_shared(folder, text)
    return pathlib.Path(path), epath.Path(folder)


def train(
    config: ConfigDict, run: build.Run, path: pathlib.Path, folder: epath.Path, window: range,
    should_stop: Callable[[], bool], look: Callable[..., Any],
) -> tuple[dict, int] | None:  # fmt: skip
    """Warm start and RL. Returns the run's totals (`loop.new_totals`) and the number of updates that were applied; None
    when it was told to stop before the end.

    Logs go into `path`, checkpoints into `folder`. The RL steps in `window` are profiled.
    """
    shapes = states.abstract(run, partial(states.build_state, run))
    stream = ProblemStream(run.data.problems("train"), config.seed)
    kept = Checkpoints(folder / "checkpoints", keep_last=config.checkpoint.keep_last)
    with kept as checkpoints, contextlib.ExitStack() as opened:
        with phase("state"):
            restored = states.restore(checkpoints, shapes, partial(states.load_frozen, config, run))
        with multihost.together():
            if multihost.is_first():
                workdir.record(path, folder, config)
        parts = build.build_parts(
            config, run, shapes.state, stream=stream, checkpoints=checkpoints, log=None, should_stop=should_stop,
            traced=partial(profile.traced, window=window, folder=path / "profile"),
            look=look(run, stream, config.learner.logprob_chunk) if run.loop.look_every != 0 else None,
        )  # fmt: skip
        opened.enter_context(parts.rollouts)
        if config.steps > (restored[0] if restored else 0):
            parts = opened.enter_context(compiled_ahead(parts, run.loop, run.rollout, shapes))
        if restored is None:
            with phase("warm start"):
                params, seconds = warm_start.warm_started(config, run, folder / "warm_start", should_stop)
            if params is None:
                return None
            with phase("state"):
                frozen, extra = states.load_frozen(config, run), {"cursor": 0, "totals": loop.new_totals(seconds)}
                restored = 0, jax.block_until_ready(states.build_state(run, params, **frozen)), extra
        start, *begins, extra = restored
        del restored  # the loop alone holds what it begins with, of which an update donates a part
        if start >= config.steps and extra["totals"]["evaluated"] == start:
            say("finished before; nothing to do")
        elif start:
            say(f"goes on at step {start}")
        stream.cursor = extra["cursor"]
        sinks = dict(tensorboard=config.log.tensorboard, wandb=config.log.wandb)
        with RunLog(path, start, config=config.to_dict(), rows=extra.get("rows"), **sinks) as log:
            parts = dataclasses.replace(parts, log=log)
            checkpoint, _, finished = loop.run(parts, run.loop, begins.pop(), start, extra["totals"])
    return (extra["totals"], int(checkpoint.state.step)) if finished else None


def finish(path, folder, totals, draw) -> None:
    """Writes the summary and the figure of a finished run."""
    summary = write_summary(path, totals, draw)
    workdir.write(folder, "summary.json", (path / "summary.json").read_text())
    print(
        f"held-out accuracy {summary['accuracy_before']:.1%} -> {summary['accuracy_after']:.1%} "
        f"in {summary['wall_seconds']:.0f} s; see {path}/summary.json and {path}/figures/training.png"
    )
