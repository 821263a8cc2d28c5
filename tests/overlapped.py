"""Three runs on two simulated devices, one of which samples: ahead, in turn, and ahead with stops. Prints JSON.

A step's rollout is cut where the counts of `STOPS` are reached, in whichever thread asks.
"""

import contextlib
import io
import json
import pathlib
import sys
import tempfile

from configs import quickstart
from rpg_jax.run import build, train
from rpg_jax.storage import workdir

STOPS = (7, 9)  # questions whether to stop that are answered with yes, of a process each
TIMINGS = ("time/", "throughput/", "compilations")
REWARD = """
import random, time

def sevenths(response):
    time.sleep(random.random() / 20)
    return len(response) % 7 / 6
"""


def trained(folder: pathlib.Path, name: str, overlap: bool, stops=()) -> tuple[dict, int]:
    """What a run leaves behind, and how often it was stopped."""
    config = quickstart.get_config("smoke")
    config.steps, config.model.size, config.warm_start.steps, config.mesh.sampler = 4, "micro", 0, 1
    config.rollout.update(dict(delay=2, overlap=overlap, carry_over=True, oversample=2.0, dynamic_sampling=True))
    config.rollout.update(dict(max_new=12, max_batches=8))
    config.behavior.source, config.data.directory = "sampler", str(folder / "data")
    config.reward.update(dict(function=f"{folder / 'reward.py'}:sevenths", workers=1))
    config.evaluation.update(dict(every=2, k=2))
    run, stopped = build.build_run(config, log=lambda line: None), 0
    path, checkpoints = workdir.open_workdir(folder / name, config, False)
    with run.scorer:
        for stop in (*stops, None):
            asked = 0

            def should_stop(flag=False, stop=stop):
                nonlocal asked
                asked += 1
                return flag or (stop is not None and asked >= stop)

            outcome = train.train(config, run, path, checkpoints, range(0), should_stop)
            stopped += outcome is None
    rows: dict[int, dict] = {}  # by step: an evaluation that was cut short comes in a row of its own
    for line in (path / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    record = checkpoints / "checkpoints" / "4" / "record" / "metadata"
    return {
        "metrics": [{key: value for key, value in row.items() if not key.startswith(TIMINGS)} for row in rows.values()],
        "timings": [key for key in rows[4] if key.startswith(TIMINGS)],
        "leaves": json.loads(record.read_text())["leaves"],
    }, stopped


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        folder = pathlib.Path(folder)
        (folder / "reward.py").write_text(REWARD)
        found = {"ahead": trained(folder, "ahead", True)[0], "apart": trained(folder, "apart", False)[0]}
        found["stopped"], found["stops"] = trained(folder, "stopped", True, STOPS)
    print(json.dumps(found), file=sys.__stdout__)
