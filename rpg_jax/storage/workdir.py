"""A run's folders: the workdir with its logs, and the folder of its checkpoints, which may be a bucket.

Checkpoints lie in the workdir unless `--checkpoint_dir` names another folder. That folder then holds all that is needed
to resume without the workdir, or to evaluate the run from another machine: `config.json`, `warm_start/`, `checkpoints/`
and, at the end, `summary.json`. The workdir keeps copies of the files, and a file `checkpoint_dir` names the folder.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import pathlib
import platform
from collections.abc import Iterator

from etils import epath
from ml_collections import ConfigDict

from rpg_jax import InputError
from rpg_jax.storage.logs import write_text_atomic
from rpg_jax.storage.settings import as_json, changes, check_values, completed, edited, flatten

RECORD = "checkpoint_dir"
LOCK = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of file systems that cannot lock
BUCKETS = ("gs://", "s3://")

logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs pages of tracebacks for errors that it also raises


def lock(file: pathlib.Path) -> tuple[contextlib.ExitStack, int] | tuple[None, None]:
    """Locks a file: (the stack that holds the lock, its descriptor), or (None, None) when another process holds it.

    The kernel ends the lock with the process, however it ends; a child process that inherits the descriptor holds it as
    well. The file names its last holder. A file system that cannot lock lets everybody in.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(file.open("a"))
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None, None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        opened.truncate(0)
        opened.write(f"process {os.getpid()} on {platform.node()}\n")
        opened.flush()
        return stack.pop_all(), opened.fileno()


@contextlib.contextmanager
def alone(*folders) -> Iterator[None]:
    """Locks folders, of which buckets cannot be locked, for one training. Raises ValueError that names who is there."""
    with contextlib.ExitStack() as stack:
        for folder in dict.fromkeys(_resolved(folder) for folder in folders if "://" not in str(folder)):
            file = pathlib.Path(folder) / LOCK
            with _reachable(folder, "written"):
                held, _ = lock(file)
            if held is None:
                holder = file.read_text().strip()
                raise InputError(
                    f"{folder} is in use: {holder} trains there; wait for it, stop it, or give another --workdir"
                )
            stack.enter_context(held)
        yield


def open_workdir(path, config: ConfigDict, accept_change: bool, flag=None) -> tuple[pathlib.Path, epath.Path]:
    """Makes the workdir and the folder of its checkpoints, and returns both. A new run is `record`ed there.

    Args:
      accept_change: whether a run that is there already may go on with another config.
      flag: the value of --checkpoint_dir, if any.

    Raises ValueError for a run of another config, or a folder that cannot be written.
    """
    path, folder = pathlib.Path(path), checkpoint_dir(path, flag)
    with _reachable(folder, "written"):
        begun = has_begun(folder) and (folder / "config.json").exists()
    if begun and not accept_change:
        _refuse_other(folder, read_config(folder).to_dict(), completed(as_json(config)))
    if not begun:
        record(path, folder, config)
    if str(folder) != _resolved(path):
        write(path, RECORD, f"{folder}\n")
    return path, folder


def record(path, folder, config: ConfigDict) -> None:
    """Writes `config.json` into both folders of a run: for one that goes on, once its checkpoint fits the config."""
    text = json.dumps(as_json(config), indent=2) + "\n"
    with _reachable(folder, "written"):
        write(folder, "config.json", text)
    write(path, "config.json", text)


def check_shared(folder, text: str) -> None:
    """Raises ValueError on a process that does not see the folder's config as process 0 does, whose `text` it has."""
    file = epath.Path(folder) / "config.json"
    if not file.exists() or file.read_text() != text:
        raise InputError(
            f"{platform.node()} does not see {file} as process 0 does: all processes need one folder of "
            f"checkpoints; give a --checkpoint_dir or --workdir that they share"
        )


def checkpoint_dir(path, flag=None) -> epath.Path:
    """The folder of the checkpoints of the run in a workdir: of --checkpoint_dir, else as recorded, else the workdir.

    Raises ValueError when the flag names another folder than the one in which the run saves already.
    """
    record, workdir = pathlib.Path(path) / RECORD, _resolved(path)
    with _reachable(path, "read"):
        current = record.read_text().strip() if record.exists() else workdir if has_begun(path) else None
    if flag and current and _resolved(flag) != current:
        raise InputError(
            f"the checkpoints of {path} are in {current}, not in --checkpoint_dir={flag}; leave the flag out, or give "
            f"another --workdir"
        )
    return epath.Path(_resolved(flag) if flag else current or workdir)


def has_begun(folder) -> bool:
    """Whether a run has saved something in a folder."""
    parts = [epath.Path(folder) / part for part in ("warm_start", "checkpoints")]
    return any(any(part.iterdir()) for part in parts if part.exists())


def write(folder, name: str, text: str) -> None:
    """Writes a file and makes its folder; readers see the whole file or none."""
    folder = epath.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if "://" in str(folder):  # a bucket shows an object only when it is complete
        (folder / name).write_text(text)
    else:
        write_text_atomic(folder / name, text)


def read_config(path) -> ConfigDict:
    """The config of the run in a folder, complete as `settings.completed` makes it; ValueError when there is none."""
    file = epath.Path(path) / "config.json"
    with _reachable(path, "read"):
        text = file.read_text() if file.exists() else None
    if text is None:
        raise InputError(f"{file} does not exist: no run has begun in {path}; name the folder of a run, or train one")
    mend = "restore it from the run's command, or train in another --workdir"
    try:
        settings = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{file} is not JSON ({error}); {mend}") from None
    if not isinstance(settings, dict) or "steps" not in settings:
        raise InputError(f"{file} is not the config of a run; {mend}")
    if "digest" in settings or "behavior" not in settings:
        raise InputError(
            f"{path} holds a run of version 0.2 or before, whose checkpoints are laid out otherwise; go on with that "
            f"version, or train anew in another folder"
        )
    config = ConfigDict(completed(settings))
    try:
        check_values(config)
    except InputError as error:
        raise InputError(f"{file}: {error}; {mend}") from None
    return config


@contextlib.contextmanager
def _reachable(folder, action: str):
    """Any error of a storage library as one ValueError; for the first access to a folder that may be a bucket."""
    try:
        yield
    except ImportError as error:
        raise InputError(f"{folder} needs a package that is not there: {' '.join(str(error).split())}") from error
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{folder} cannot be {action} ({reason}); name a place that this machine may use") from error


def _resolved(folder) -> str:
    """A folder's absolute path, or a bucket's URL without a slash at its end."""
    folder = str(folder)
    if "://" not in folder:
        return os.path.abspath(folder)
    if not folder.startswith(BUCKETS):
        raise InputError(f"{folder} is neither a folder nor a bucket; buckets begin with {' or '.join(BUCKETS)}")
    return folder.rstrip("/")


def _refuse_other(folder, old: dict, new: dict):
    old, new = flatten(old), flatten(new)
    if changed := changes(old, new) + edited(old, new):
        raise InputError(
            f"{folder} holds a run of another config ({'; '.join(changed)}); give another --workdir, "
            f"or --accept_config_change to go on from its checkpoint with the new values"
        )
