"""Two runs on two simulated devices, one of which samples: in turn, and ahead with a stop. Prints JSON.

A step's rollout is cut where the counts of `STOPS` are reached, in whichever thread asks. Of the first run, until it
saves, the bytes that lie on each device are held against what `plan` says.
"""

import contextlib
import importlib
import io
import json
import math
import pathlib
import sys
import tempfile
from functools import partial

import jax
from processes import CLOCKS

from configs import quickstart
from rpg_jax.lab.looking.keep import make_look
from rpg_jax.lab.planning import chips, decoding, measure, programs, sketch
from rpg_jax.run import build, train
from rpg_jax.storage import workdir
from rpg_jax.storage.checkpoints import Checkpoints
from rpg_jax.training.record import Record

generate = importlib.import_module("rpg_jax.sampling.generate")  # the package's attribute is the function

STOPS = (9,)  # questions whether to stop that are answered with yes, of a process each
REWARD = """
import random, time

def sevenths(response):
    time.sleep(random.random() / 20)
    return len(response) % 7 / 6
"""


def bytes_on(device: jax.Device) -> int:
    """Of all arrays that are alive. Their shards are not asked for: those would stay alive themselves."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.live_arrays()
        if not x.is_deleted() and device in x.sharding.device_set and x.sharding.memory_kind == "device"
    )


def watch() -> dict[str, int]:
    """The most bytes on the second device as it decodes, on the first as it updates, until a checkpoint is saved."""
    most = {"decode": 0, "update": 0}
    learner, sampler = jax.devices()
    decode, update, save = generate.decode_segment, Record.add_update, Checkpoints.save

    def decode_and_measure(*arguments):
        result = jax.block_until_ready(decode(*arguments))
        most["decode"] = max(most["decode"], bytes_on(sampler))
        return result

    def update_and_measure(*arguments):
        most["update"] = max(most["update"], bytes_on(learner))
        update(*arguments)

    def save_and_end(*arguments, **options):
        generate.decode_segment, Record.add_update, Checkpoints.save = decode, update, save
        save(*arguments, **options)

    generate.decode_segment, Record.add_update, Checkpoints.save = decode_and_measure, update_and_measure, save_and_end
    return most


def planned(config) -> dict:
    """What `plan` says: the bytes of a device before each program runs, and the seconds of both sides, by the devices
    that sample."""
    lengths = decoding.parse("uniform", config.rollout.max_new)
    sketched = partial(sketch.sketch, devices=jax.devices(), size=None, lengths=lengths, prompt_length=10.0)
    made, (topology,) = programs.programs(sketched(config)), chips.parse("h100:2")
    held = {phase: programs.device_bytes(one.arguments) + one.beside for phase, one in made.items()}
    return dict(planned=held, splits=measure.splits(topology, config, sketched, 1))


def settings(folder: pathlib.Path, overlap: bool):
    config = quickstart.get_config("smoke")
    config.steps, config.warm_start.steps, config.mesh.sampler = 4, 0, 1
    config.rollout.update(dict(delay=2, overlap=overlap, carry_over=True, oversample=2.0, dynamic_sampling=True))
    config.rollout.update(dict(max_new=12, max_batches=8))
    config.behavior.source, config.data.directory = "sampler", str(folder / "data")
    config.reward.update(dict(function=f"{folder / 'reward.py'}:sevenths", workers=1))
    config.evaluation.update(dict(every=2, k=2))
    return config


def trained(folder: pathlib.Path, name: str, overlap: bool, stops=()) -> tuple[dict, int]:
    """What a run leaves behind, and how often it was stopped."""
    config = settings(folder, overlap)
    run, stopped = build.build_run(config, log=lambda line: None), 0
    path, checkpoints = workdir.open_workdir(folder / name, config, False)
    with run.scorer:
        for stop in (*stops, None):
            asked = 0

            def should_stop(flag=False, stop=stop):
                nonlocal asked
                asked += 1
                return flag or (stop is not None and asked >= stop)

            outcome = train.train(config, run, path, checkpoints, range(0), should_stop, make_look)
            stopped += outcome is None
    rows: dict[int, dict] = {}  # by step: an evaluation that was cut short comes in a row of its own
    for line in (path / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    record = checkpoints / "checkpoints" / "4" / "record" / "metadata"
    return {
        "metrics": [{key: value for key, value in row.items() if not key.startswith(CLOCKS)} for row in rows.values()],
        "timings": [key for key in rows[4] if key.startswith(CLOCKS)],
        "leaves": json.loads(record.read_text())["leaves"],
    }, stopped


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        folder = pathlib.Path(folder)
        (folder / "reward.py").write_text(REWARD)
        found = {"bytes": watch(), "apart": trained(folder, "apart", False)[0]}
        found |= planned(settings(folder, True))
        found["ahead"], found["stops"] = trained(folder, "ahead", True, STOPS)
    print(json.dumps(found), file=sys.__stdout__)
