"""What the commands that make a folder share: the check of its name before the work, and the table after it."""

import os
import pathlib
import shutil
import sys

from rich.console import Console
from rich.table import Table

from rpg_jax import InputError


def writable(flag: str, value) -> pathlib.Path:
    """The folder that a flag names. Raises ValueError when it cannot be made or written to."""
    folder = pathlib.Path(value).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise InputError(f"--{flag}={value}: {nearest} is no folder that can be written to; name another")
    return pathlib.Path(value)


def new_folder(flag: str, value: str) -> pathlib.Path:
    """The folder to make, which a flag names. Raises ValueError when it holds something, or when it cannot be made."""
    folder = pathlib.Path(value)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"{folder} exists and is no empty folder; remove it or name another --{flag}")
    return writable(flag, value)


def json_file(value: str | None) -> pathlib.Path | None:
    """The file of --json. Raises ValueError when its folder is not there."""
    output = pathlib.Path(value) if value else None
    if output and (output.is_dir() or not output.parent.is_dir()):
        raise InputError(f"--json={output}: expected a file in a folder that is there")
    return output


def width() -> int | None:
    """Columns of the terminal; None in a pipe, which takes lines of any length, whatever a parent's COLUMNS says."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_table(table: Table) -> None:
    """Prints a table whose cells fold where the terminal is too narrow for it, under its title: a path there is whole,
    however narrow the table is."""
    title, table.title = table.title, None
    if title:
        print(title)
    for column in table.columns:
        column.overflow, column.min_width = "fold", max(map(len, str(column.header).split()), default=0)
    sys.stdout.flush()  # rich, which would do it, has a status of its own for a pipe that is closed
    console = Console(width=width() or 10_000)
    console.begin_capture()
    console.print(table)
    print(console.end_capture(), end="")


def print_summary(title: str, rows: dict[str, int | str]) -> None:
    """Prints a table of two columns."""
    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else value)
    print_table(table)
