"""What a run writes while it trains: JSON lines, TensorBoard, optionally wandb, and progress on stderr.

Only the first process of a job writes. After a resume every log continues from the restored step.
"""

import contextlib
import json
import math
import os
import pathlib
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from rpg_jax import InputError

QUEUE = 1 << 12  # events; if a full disk has ended TensorBoard's thread, its queue must take a row, or the run hangs
LOOK = "look.parquet"  # of the workdir
LINE_SECONDS = 2.0  # the least time between two progress lines where stderr is no terminal


def jsonable(value: Any) -> Any:
    """`value` as plain JSON: NumPy and JAX scalars and arrays become numbers and lists, non-finite numbers null."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return jsonable(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json_atomic(path, value: Any) -> None:
    """Writes `value` as indented JSON, with `write_text_atomic`."""
    write_text_atomic(path, json.dumps(jsonable(value), indent=2, allow_nan=False) + "\n")


def read_json(path) -> dict | None:
    """The JSON object in a file; None when there is no file, or no whole object in it."""
    try:
        value = json.loads(pathlib.Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_jsonl(path, needs: Mapping[str, type | tuple[type, ...]] | None = None) -> tuple[list[dict], int]:
    """(rows, number of lines dropped): 1 when a kill cut the last line short, else 0. A missing file has no rows.

    Raises ValueError, with file and line, for another line that is no JSON object, or lacks a key of `needs`, which has
    the types of their values.
    """
    try:
        lines = pathlib.Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], 0
    rows, unfinished = [], lines.pop()  # empty when the last line is whole
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # not JSON, or nested too deeply for its reader
            row = None
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}, is not a JSON object; delete that line and start again")
        for key, kind in (needs or {}).items():
            if not isinstance(row.get(key), kind):
                found = repr(row[key]) if key in row else "absent"
                raise InputError(f"{path}, line {number}: {key!r} is {found}; delete that line and start again")
        rows.append(row)
    return rows, int(bool(unfinished))


class RunLog(contextlib.ExitStack):
    """The logs of one run: `metrics.jsonl`, `samples.jsonl`, `heldout.jsonl`, `look.parquet`, TensorBoard, wandb.

    Opening it cuts each log back to the rows that it had when the restored checkpoint was saved, because what came
    later will be computed again. A run without one starts with empty logs.

    Args:
      resume_step: the restored step, 0 for a new run.
      rows: {log: count}, what `rows()` returned when the restored checkpoint was saved, which stay; a log that has lost
        some since is reported in one line on stderr. None: no rows stay.
      config: settings that wandb records.
      wandb: project name, or None for no wandb. The id in `workdir/wandb_id` makes a resumed run the same wandb run.

    Raises ValueError for a log that holds a broken line.
    """

    def __init__(self, workdir, resume_step: int, config: dict, tensorboard=True, wandb=None, rows=None):
        super().__init__()
        self._process = jax.process_index()
        self._files, self._rows, self._events, self._wandb = {}, {}, None, None
        if self._process:
            return
        workdir = pathlib.Path(workdir)
        if wandb is not None:
            self._wandb = self.enter_context(_wandb_run(workdir, wandb, config))
        for name in ("metrics", "samples", "heldout"):
            path = workdir / f"{name}.jsonl"
            self._rows[name] = _cut_back(path, resume_step, (rows or {}).get(name, 0))
            self._files[name] = self.enter_context(path.open("a"))
        self._look = workdir / LOOK
        self._rows["look"] = _cut_table_back(self._look, resume_step, (rows or {}).get("look", 0))
        if tensorboard:
            from tensorboardX import SummaryWriter

            folder, purge = workdir / "tensorboard", resume_step + 1 if resume_step or rows else 0
            self._events = self.enter_context(SummaryWriter(str(folder), purge_step=purge, max_queue=QUEUE))

    def write(self, row: dict, samples=(), heldout=(), look=()) -> None:
        """Appends one row, a dict with an integer `step`, and the step's responses, and flushes the files.

        `samples` are dicts of training responses, `heldout` of held-out ones, `look` of some with arrays of tokens.
        """
        if self._process:
            return
        row = jsonable(row)
        for name, examples in (("samples", samples), ("heldout", heldout)):
            self._append(name, [{"step": row["step"], **jsonable(example)} for example in examples])
        if look:
            self._append_table([{"step": row["step"], **example} for example in look])
        self._append("metrics", [row])
        numbers = {key: v for key, v in row.items() if key != "step" and isinstance(v, (int, float))}
        if self._events:
            for key, number in numbers.items():
                self._events.add_scalar(key, number, row["step"])
            self._events.flush()
        if self._wandb:
            self._wandb.log({"step": row["step"], **numbers})

    def rows(self) -> dict[str, int]:
        """{log: number of its rows now}, for a checkpoint's record; empty on processes that do not log."""
        return dict(self._rows)

    def progress(self, label: str, start: int, total: int) -> "Progress":
        return Progress(label, start, total)

    def _append(self, name, rows):
        self._files[name].writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        self._files[name].flush()
        self._rows[name] += len(rows)

    def _append_table(self, rows):
        import pyarrow as pa

        tables = [*([read_table(self._look)] if self._rows["look"] else []), pa.Table.from_pylist(rows)]
        _write_table(self._look, pa.concat_tables(tables, promote_options="permissive"))
        self._rows["look"] += len(rows)


class Progress:
    """Progress on stderr, as a context manager: a bar on a terminal, else a plain line at most every two seconds.

    Call it with the number of steps done and the numbers to show: `progress(done, reward=0.3)`. Only the first process
    of a job says anything; a command that must not look for devices gives its `process_index`, 0.
    """

    def __init__(self, label: str, start: int, total: int, process_index=None):
        self._label, self._start, self._total = label, start, total
        self._process = jax.process_index() if process_index is None else process_index
        self._begin, self._last, self._bar = time.monotonic(), -math.inf, None

    def __enter__(self):
        if not self._process and sys.stderr.isatty():
            # One that runs within another's time is wiped away at its end.
            sizes = dict(initial=self._start, total=self._total, dynamic_ncols=True, leave=None)
            self._bar = tqdm(desc=self._label, **sizes)
        return self

    def __call__(self, done: int, **numbers) -> None:
        shown = {name: f"{value:.3g}" for name, value in numbers.items()}
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(done - self._bar.n)
            return
        now = time.monotonic()
        if self._process or (now - self._last < LINE_SECONDS and done < self._total):
            return
        self._last, elapsed = now, now - self._begin
        text = "".join(f" | {name} {value}" for name, value in shown.items())
        times = f"{tqdm.format_interval(elapsed)} gone"
        if done > self._start:
            remaining = elapsed * (self._total - done) / (done - self._start)
            times += f", about {tqdm.format_interval(remaining)} left"
        print(f"{self._label} {done}/{self._total}{text} | {times}", file=sys.stderr, flush=True)

    def __exit__(self, *_):
        if self._bar is not None:
            self._bar.close()


def write_text_atomic(path, text: str) -> None:
    """Replaces a file's contents durably; readers, and a kill, see the old file or the new one, never a part."""
    with replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replacing(path):
    """A file to write, which takes the place of the one at `path` once it is whole and on the disk."""
    path = pathlib.Path(path)
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def read_table(path):
    """The pyarrow table of a parquet file; None where there is no file. Raises InputError for another one."""
    if not pathlib.Path(path).exists():
        return None
    import pyarrow as pa
    import pyarrow.parquet

    try:
        return pa.parquet.read_table(path, memory_map=False)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is no parquet file, or cut short ({error}); delete it and start again") from error


def _write_table(path, table):
    import pyarrow.parquet as parquet

    with replacing(path) as file:
        parquet.write_table(table, file, compression="zstd")


def _cut_back(path, step: int, count: int) -> int:
    """Cuts a log back to the first `count` rows, those of `step`'s checkpoint; returns how many there are then."""
    rows, dropped = read_jsonl(path, {"step": int})
    if dropped or count < len(rows):
        write_text_atomic(path, "".join(json.dumps(row) + "\n" for row in rows[:count]))
    _warn_of_lost(path, count - len(rows), step)
    return min(count, len(rows))


def _cut_table_back(path, step: int, count: int) -> int:
    """The same of a table."""
    table = read_table(path)
    rows = 0 if table is None else len(table)
    if count < rows:
        _write_table(path, table.slice(0, count))
    _warn_of_lost(path, count - rows, step)
    return min(count, rows)


def _warn_of_lost(path, count: int, step: int) -> None:
    if count > 0:
        print(f"warning: {path} has lost {count} rows since step {step} was saved", file=sys.stderr)


def _wandb_run(workdir, project, config):
    import wandb  # `build_settings` has found it

    file = workdir / "wandb_id"
    if not file.exists():
        write_text_atomic(file, uuid.uuid4().hex[:8])
    run = wandb.init(project=project, id=file.read_text(), resume="allow", config=config, dir=str(workdir))
    run.define_metric("*", step_metric="step")  # wandb's own count cannot go back to a restored step
    return run
