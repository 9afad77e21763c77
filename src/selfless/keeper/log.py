"""The parts of a step as numbers for a logger: one number cannot be debugged.

    inhibition, inhibition/LAYER    λ R of the last step, in all and by layer
    anchor                          λ Σ Ω(θ − θ*)² now; for the implicit anchor, the penalty that it stands for
    distillation, gates, replayed   the other terms of preservers in the last step: outputs of old heads, gates, old samples
    penalty                         any other penalty on θ
    drift, drift/relative           ‖θ − θ*‖ now, and divided by ‖θ*‖
    active, active/LAYER            the share of activations above 0 in the last step, mean over layers and by layer
    free/parameters, free/neurons   the free share by the paper's threshold, as `capacity().free_neurons`
    tasks                           the number of tasks that have ended

The values of a step are tensors. Only `floats` waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfless.capacity.counts import Capacity
from selfless.distributed import Ranks
from selfless.distributed.shards import is_sharded
from selfless.keeper.anchor import distances

if TYPE_CHECKING:
    from selfless.keeper.part import Part

KEPT = 2**22  # activations of a step, of all layers, that the log may keep until the next step


class Log:
    """The values of the last step, by name. A step only keeps its tensors; they are multiplied and summed when someone reads them."""

    def __init__(self) -> None:
        self._terms: list[tuple[str, Tensor | Callable[[], Tensor], Tensor | float, list[str]]] = []
        self._active: list[tuple[list[str], Tensor, int]] = []  # layers, their activations or how many are above 0, and of how many
        self._kept = 0  # activations in this list

    def begin(self) -> None:
        """Start a new step."""
        self._terms, self._active, self._kept = [], [], 0

    def add(self, name: str, value: Tensor, factor: Tensor | float = 1.0, layers: list[str] | None = None) -> None:
        """Add factor · value; several with one name are summed. A value of several `layers` counts in all and as NAME/LAYER."""
        self._terms.append((name, value.detach(), factor, layers or []))

    def add_layer(self, layer: str, h: Tensor, size: Tensor | Callable[[], Tensor]) -> None:
        """Add the activations (samples, neurons) of a layer, and λR of it, or a function that returns it when someone reads it.

        If h is large, the function is called now, because it keeps h.
        """
        self.add_activity([layer], h.unsqueeze(0))
        if not isinstance(size, Tensor) and self._kept > KEPT:
            size = size()
        self._terms.append(("inhibition", size.reshape(1) if isinstance(size, Tensor) else size, 1.0, [layer]))

    def set(self, name: str, value: Tensor) -> None:
        """Set a value, whatever was added before."""
        self._terms = [term for term in self._terms if term[0] != name]
        self.add(name, value)

    def add_activity(self, layers: list[str], h: Tensor) -> None:
        """Add the activations of some layers, (layers, samples, neurons). Small ones are kept and counted when someone reads them."""
        self._kept += h.numel()
        self._active.append((layers, h if self._kept <= KEPT else (h > 0).sum((1, 2)), h.numel() // len(layers)))

    def active(self) -> list[tuple[list[str], Tensor, int]]:
        """Return some layers, how many activations of each are above 0, (layers,), and out of how many."""
        self._active = [(layers, (h > 0).sum((1, 2)) if h.dim() == 3 else h, size) for layers, h, size in self._active]
        return self._active

    @property
    def values(self) -> dict[str, Tensor]:
        """The values of the last step."""
        found: dict[str, Tensor] = {}
        active = [("active", count, 1 / size, layers) for layers, count, size in self.active()]
        self._terms = [(name, v if isinstance(v, Tensor) else v().reshape(1), factor, layers) for name, v, factor, layers in self._terms]
        for name, value, factor, layers in (*self._terms, *active):
            assert isinstance(value, Tensor)
            each = {f"{name}/{layer}": value[i] for i, layer in enumerate(layers)}
            for key, one in {name: value.sum(), **each}.items():
                found[key] = found[key] + factor * one if key in found else factor * one
        return found

    def read(self, parts: Sequence[Part], parameters: Mapping[str, Tensor], capacity: Capacity, ranks: Ranks) -> dict[str, float]:
        """Return all values as floats."""
        values = self.values
        for part in parts:
            found = distances(parameters, *part.star())
            if any(is_sharded(p) for p in parameters.values()):
                ranks.sum_(list(found.values()))
            if "penalty" in found:
                values["anchor"] = values.get("anchor", torch.zeros_like(found["penalty"])) + part.strength * found["penalty"]
            values |= {"drift": found["drift"].sqrt(), "drift/relative": (found["drift"] / found["size"]).sqrt()} if found else {}
        numbers = floats(values) | {"tasks": float(capacity.tasks)}
        active = [share for name, share in numbers.items() if name.startswith("active/")]
        numbers |= {"active": sum(active) / len(active)} if active else {}
        free = {"free/parameters": capacity.free_parameters, "free/neurons": capacity.free_neurons} if capacity.tasks else {}
        return numbers | {name: share for name, share in free.items() if not math.isnan(share)}


def floats(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalar tensors as floats, with one synchronisation for each device."""
    found: dict[str, float] = {}
    for device in dict.fromkeys(value.device for value in values.values()):
        names = [name for name, value in values.items() if value.device == device]
        stacked = torch.stack([values[name].detach().double().reshape(()) for name in names])
        found |= dict(zip(names, stacked.tolist(), strict=True))
    return {name: found[name] for name in values}
