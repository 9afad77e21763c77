"""A user's own code: import `module:attribute`, and say in one sentence what went wrong in it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from operator import attrgetter
from typing import Any

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder of this package
STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep  # the folder of Python's own modules


class NotHere(ValueError):
    """The module of a custom class or network cannot be imported here."""


_TRUSTED: set[str] = set()  # module:attribute that the user's own command or program named


def trust(name: str) -> None:
    """Note that the user named `module:attribute`, so that a record may name it, too."""
    _TRUSTED.add(name)


def check_recorded(name: str) -> None:
    """Raise ValueError for a `module:attribute` that only a record names, unless the module is the user's own.

    A record can come from a stranger. It may name a module of the working directory or of PYTHONPATH, but not call, with arguments of its
    choice, whatever is installed: `torch.hub:load` would run code from the network.
    """
    module_name = name.partition(":")[0]
    if name in _TRUSTED or os.environ.get("SELFLESS_TRUST") == module_name.partition(".")[0]:
        return
    try:
        place = importlib.util.find_spec(module_name.partition(".")[0])  # importing a package to find a module in it would run it
    except (ImportError, ValueError, AttributeError):
        place = None
    origin = None if place is None else place.origin or next(iter(place.submodule_search_locations or ()), None)
    parts = set(os.path.normpath(origin or "").split(os.sep))
    is_installed = origin is None or not os.path.isabs(origin) or origin.startswith(STANDARD) or parts & {"site-packages", "dist-packages"}
    if place is not None and is_installed:
        package = module_name.partition(".")[0]
        raise ValueError(
            f"a record names {name}, which is an installed module; if you trust this record, allow it: SELFLESS_TRUST={package}"
        )


def import_custom(name: str) -> Any:
    """Import the object `module:attribute`. The working directory is searched first, as with `python -m`."""
    trust(name)
    module_name, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            hint = f"; write {name.replace('.py:', ':', 1)!r}, without .py" if ".py:" in name else ""
            raise NotHere(f"{name}: there is no module {error.name!r} in {here} or among the installed packages{hint}") from error
        raise ValueError(f"{name} cannot be imported: {describe_error(error)}") from error
    try:
        return attrgetter(attribute)(module)
    except (AttributeError, ValueError):
        own = {key: value for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
        names = [key for key, value in own.items() if getattr(value, "__module__", module_name) == module_name] or list(own)
        raise ValueError(f"{name}: {module_name} has no {attribute!r}; it has {', '.join(names) or 'no functions'}") from None


def describe_error(error: BaseException) -> str:
    """Return an error of a user's own code in one sentence: its file and line, its type and its message."""
    message = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    place = own_place(error)
    return message if place is None else f"{place}: {message}"


def is_own_file(file: str) -> bool:
    """Return True for a file of the user: one that is neither of this package nor of Python or an installed package."""
    return not file.startswith((PACKAGE, sys.prefix, sys.base_prefix, "<"))


def own_place(error: BaseException) -> str | None:
    """Return "FILE, line N" of the last line outside of this package and the installed ones, if this package called it; else None."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    calls = [i for i, (file, _) in enumerate(places) if file.startswith(PACKAGE) and os.path.basename(file) != "errors.py"]
    own = [place for i, place in enumerate(places) if calls and i > calls[0] and is_own_file(place[0])]
    return f"{own[-1][0]}, line {own[-1][1]}" if own else None
