"""What a user's file defines, named FILE.py:NAME; and one line, with the file's own line, about an error in it."""

import importlib.machinery
import importlib.util
import inspect
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

MODULE = "own_objective"  # the name under which a user's file is imported


def load(spec: str, kind: str = "objective") -> Callable:
    """What FILE.py:NAME names; ValueError, which names the `kind`, if that cannot be loaded or called."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name:
        raise ValueError(f"{kind} {spec!r}: expected FILE.py:NAME")
    if not pathlib.Path(path).is_file():
        raise ValueError(f"{kind} {spec!r}: there is no file {path}")
    loader = importlib.machinery.SourceFileLoader(MODULE, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    sys.modules[loader.name] = module
    sys.path.insert(0, str(pathlib.Path(path).resolve().parent))
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} does not import: {in_a_line(error)}") from error
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{path} has no {name!r}; it has: {', '.join(functions) or 'no function'}")
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(f"{kind} {spec} is a {type(function).__name__}; expected a function")
    return function


def in_a_line(error: BaseException, function: Any = None) -> str:
    """One line: FILE.py:LINE, the type of the error, and its text.

    The line is the innermost one of the user's file or of one beside it; that of the `function`'s definition where the
    error was not raised in there, such as one about what it returned.
    """
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    mine = [frame.f_code.co_filename for frame, _ in frames if frame.f_globals.get("__name__") == MODULE]
    folders = {os.path.dirname(os.path.abspath(file)) for file in mine}
    lines = [
        f"{frame.f_code.co_filename}:{line}: "
        for frame, line in frames
        if os.path.dirname(os.path.abspath(frame.f_code.co_filename)) in folders
    ]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f"{error.filename}:{error.lineno}: ")
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    defined = [f"{code.co_filename}:{code.co_firstlineno}: "] if code is not None else []
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{[*defined, *lines][-1] if defined or lines else ''}{type(error).__name__}: {' '.join(text.split())[:300]}"
