"""A stand-in for torchvision, for tests of the Avalanche plugin alone.

Avalanche imports torchvision for its image data sets and transforms. torchvision pins one version of torch and has no CPU build for the one
that the tests use. The tests need none of it: here every name is an empty class, which can be created but raises an error when it is used.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

__version__ = "0.0.0"


def _make_class(module: str, name: str) -> type:
    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{module}.{name} is a stand-in: torchvision is not installed in this environment")

    return type(name, (), {"__module__": module, "__init__": lambda self, *_, **__: None, "__call__": refuse, "__getitem__": refuse})


class _Module(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _make_class(self.__name__, name)
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find every module inside of torchvision."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _make_class(__name__, name)
