"""selfless: continual learning that leaves free capacity for later tasks.

Importing it is fast: torch is loaded when a name that needs it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "attach": "keeper",
    "Keeper": "keeper",
    "Capacity": "capacity",
    **dict.fromkeys(
        ["MAS", "LocalMAS", "EWC", "OnlineEWC", "SI", "RWalk", "LwF", "EBLL", "IMM", "HAT", "PackNet", "NoPreserver"], "preserve"
    ),
    **dict.fromkeys(["Replay", "DERpp"], "preserve"),  # they keep samples of old tasks
    **dict.fromkeys(["SNI", "SNID", "SLNI", "SLNID", "L1Rep", "DeCov", "L1Param", "L2Param", "OrthReg", "NoSparsifier"], "sparsify"),
    **dict.fromkeys(["Run", "Result"], "spec"),
    "train": "runner",
    "stream": "data",
    **dict.fromkeys(["Maxout", "LWTA"], "activations"),
}
_MODULES = ("functional", "importance", "sparsify", "preserve", "models", "data", "metrics", "capacity")

__all__ = ["__version__", *_HOMES, *_MODULES]

if TYPE_CHECKING:
    from selfless import capacity, data, functional, importance, metrics, models, preserve, sparsify
    from selfless.activations import LWTA, Maxout
    from selfless.capacity import Capacity
    from selfless.data import stream
    from selfless.keeper import Keeper, attach
    from selfless.preserve import EBLL, EWC, HAT, IMM, MAS, SI, DERpp, LocalMAS, LwF, NoPreserver, OnlineEWC, PackNet, Replay, RWalk
    from selfless.runner import train
    from selfless.sparsify import SLNI, SLNID, SNI, SNID, DeCov, L1Param, L1Rep, L2Param, NoSparsifier, OrthReg
    from selfless.spec import Result, Run


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"selfless.{_HOMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"selfless.{name}")
    raise AttributeError(f"module 'selfless' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
