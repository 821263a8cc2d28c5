"""What the commands that make a folder share: the check of its name before the work, and the table after it."""

import os
import pathlib

from rich.console import Console
from rich.table import Table


def new_folder(flag: str, value: str) -> pathlib.Path:
    """The folder to make, which a flag names. Raises OSError when it holds something, or when it cannot be made."""
    folder = pathlib.Path(value)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is no empty folder; remove it or name another --{flag}")
    parent = next(parent for parent in folder.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise PermissionError(f"--{flag}={folder}: {parent} is no folder that can be written to; name another")
    return folder


def print_summary(title: str, rows: dict[str, int | str]) -> None:
    """Prints a table of two columns."""
    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else value)
    Console(width=100).print(table)
