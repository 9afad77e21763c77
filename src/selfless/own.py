"""One's own networks and methods by name: `module:attribute`, the working directory first on the path, as with `python -m`."""

from __future__ import annotations

import importlib
import os
import sys
from operator import attrgetter
from typing import Any


class NotHere(ValueError):
    """There is no such module where this runs."""


def imported(name: str) -> Any:
    """What `module:attribute` leads to."""
    module_name, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module was found; something that it imports was not
        raise NotHere(f"{name}: there is no module {error.name!r} in {here} or among those installed") from error
    try:
        return attrgetter(attribute)(module)
    except AttributeError:
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{name}: {module_name} has no {attribute!r}; it has {', '.join(there) or 'no functions'}") from None
