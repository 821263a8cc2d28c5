"""What a user's file defines, named FILE.py:NAME."""

import importlib.machinery
import importlib.util
import pathlib
import sys
from collections.abc import Callable

from rpg_jax import InputError

MODULE = "own_objective"  # the name under which a user's file is imported


def load(spec: str, kind: str = "objective") -> Callable:
    """What FILE.py:NAME names; ValueError, which names the `kind`, if there is none, or nothing to call."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name:
        raise InputError(f"{kind} {spec!r}: expected FILE.py:NAME")
    if not pathlib.Path(path).is_file():
        raise InputError(f"{kind} {spec!r}: there is no file {path}")
    loader = importlib.machinery.SourceFileLoader(MODULE, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    sys.modules[loader.name] = module
    sys.path.insert(0, str(pathlib.Path(path).resolve().parent))
    loader.exec_module(module)
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"{path} has no {name!r}; it has: {', '.join(functions) or 'no function'}")
    function = getattr(module, name)
    if not callable(function):
        raise InputError(f"{kind} {spec} is a {type(function).__name__}; expected a function")
    return function
