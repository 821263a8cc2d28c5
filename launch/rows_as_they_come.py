"""Runs a training as a fresh process, and says when each row of its metrics came: `launch/gpu_session.sh` asks.

    python -m launch.rows_as_they_come OUT FLAGS OF TRAINING...

A row is written once its metrics are read, while the next step runs. OUT/metrics.jsonl is what the training wrote,
OUT/rows.json {"rows": [[step, seconds from the start], ...], "end": seconds, "status": the training's,
"means": {"time/rollout": seconds, ...} of steps from the third on}.
"""

import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

FIRST = 3  # step whose time has no compilation in it any more


def rows_of(file: pathlib.Path) -> list[dict]:
    """The whole rows of a file that is being written; none if it is not there yet."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def watch(command: list[str], file: pathlib.Path, say=print) -> dict:
    """Runs the command; {"rows", "end", "means", "status"}, and a line for each row when it comes."""
    begin, came = time.perf_counter(), []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    ended = None
    while ended is None:
        ended = process.poll()  # before the rows are read: none is missed
        for row in rows_of(file)[len(came) :]:
            came.append([row["step"], time.perf_counter() - begin])
            times = "  ".join(f"{name} {value:.2f}" for name, value in row.items() if name.startswith("time/"))
            say(f"  row of step {row['step']} after {came[-1][1]:.1f} s   {times}", flush=True)
        time.sleep(0.1)
    later = [row for row in rows_of(file) if row["step"] >= FIRST]
    names = [name for name in (later[0] if later else {}) if name.startswith(("time/", "throughput/"))]
    means = {name: statistics.mean(row[name] for row in later if name in row) for name in names}
    return dict(rows=came, end=time.perf_counter() - begin, means=means, status=ended)


def main(out, *flags):
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as workdir:  # checkpoints of gigabytes are not what is asked for
        run = pathlib.Path(workdir) / "run"
        file = run / "metrics.jsonl"
        found = watch([sys.executable, "-m", "rpg_jax.train", f"--workdir={run}", *flags], file)
        if file.exists():
            shutil.copy(file, out)
    (out / "rows.json").write_text(json.dumps(found, indent=1) + "\n")
    print("  means from step 3 on: " + "  ".join(f"{name} {value:,.2f}" for name, value in found["means"].items()))
    return found["status"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
