"""A user's own code: import `module:attribute`, and say in one sentence what went wrong in it."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from operator import attrgetter
from typing import Any


class NotHere(ValueError):
    """The module of a custom class or network cannot be imported here."""


def import_custom(name: str) -> Any:
    """Import the object `module:attribute`. The working directory is searched first, as with `python -m`."""
    module_name, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise NotHere(f"{name}: there is no module {error.name!r} in {here} or among the installed packages") from error
        raise ValueError(f"{name} cannot be imported: {describe_error(error)}") from error
    try:
        return attrgetter(attribute)(module)
    except (AttributeError, ValueError):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{name}: {module_name} has no {attribute!r}; it has {', '.join(names) or 'no functions'}") from None


def describe_error(error: BaseException) -> str:
    """Return an error of a user's own code in one sentence: its file and line, its type and its message."""
    message = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    place = own_place(error)
    return message if place is None else f"{place}: {message}"


def own_place(error: BaseException) -> str | None:
    """Return "FILE, line N" of the last line outside of this package and the installed ones, if this package called it; else None."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    others = (package, sys.prefix, sys.base_prefix, "<")
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    calls = [i for i, (file, _) in enumerate(places) if file.startswith(package) and os.path.basename(file) != "errors.py"]
    own = [place for i, place in enumerate(places) if calls and i > calls[0] and not place[0].startswith(others)]
    return f"{own[-1][0]}, line {own[-1][1]}" if own else None
