"""How much room a network has left, after each task: free, used and shared neurons, what its activations are like, and a forecast.

counts      free parameters and neurons: Ω or α below a threshold
sets        the neurons that a task uses, by α and by firing; tasks' sets compared with chance
activity    sparsity, correlation, effective rank and dead neurons, from sums over samples
rooms       all of this for one layer and for the network, as plain values
measuring   the same for any model and data
trend       a forecast: how many more tasks of this kind fit

The maths are pure functions of tensors or numbers. `keeper` and `engine` measure after each task, `cli` shows it.
Imports importance, metrics and network. Imported by cli, engine and keeper.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    **dict.fromkeys(["REASONS", "THRESHOLD", "Capacity", "Free", "count_free"], "counts"),
    **dict.fromkeys(["Activity", "observe"], "activity"),
    **dict.fromkeys(["Use", "by_firing", "by_share", "by_threshold", "compare"], "sets"),
    **dict.fromkeys(["LayerRoom", "overlaps"], "rooms"),
    "measure": "measuring",
    **dict.fromkeys(["Forecast", "forecast"], "trend"),
}

__all__ = [
    "REASONS", "THRESHOLD", "Activity", "Capacity", "Forecast", "Free", "LayerRoom", "Use", "by_firing", "by_share", "by_threshold",
    "compare", "count_free", "forecast", "measure", "observe", "overlaps",
]  # fmt: skip

if TYPE_CHECKING:
    from selfless.capacity.activity import Activity, observe
    from selfless.capacity.counts import REASONS, THRESHOLD, Capacity, Free, count_free
    from selfless.capacity.measuring import measure
    from selfless.capacity.rooms import LayerRoom, overlaps
    from selfless.capacity.sets import Use, by_firing, by_share, by_threshold, compare
    from selfless.capacity.trend import Forecast, forecast


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"selfless.capacity.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'selfless.capacity' has no attribute {name!r}")
