"""How active neurons are on some samples: the mean |h| of every neuron, over samples and positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from selfless.network.roles import neuron_axis


class Nodes:
    """Inside `with`: forward passes add Σ|h| of the outputs h of activation modules.

    modules   {layer: its activation module}
    axes      the axis of the neurons of a layer, where it is not that of `neuron_axis`
    """

    def __init__(self, modules: Mapping[str, nn.Module], axes: Mapping[str, int | None] | None = None) -> None:
        self.modules, self.axes = modules, axes or {}
        self.totals: dict[str, Tensor] = {}  # Σ|h| (N,), in float64
        self.counts: dict[str, int] = {}  # samples times positions
        self._handles: list[Any] = []

    def __enter__(self) -> Nodes:
        self._handles = [module.register_forward_hook(self._hook(layer)) for layer, module in self.modules.items()]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, layer: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            h = output.detach().movedim(neuron_axis(output, self.axes.get(layer)), -1).flatten(0, -2)
            total = h.abs().double().sum(0)
            self.totals[layer] = self.totals[layer] + total if layer in self.totals else total
            self.counts[layer] = self.counts.get(layer, 0) + len(h)

        return hook

    def means(self) -> dict[str, Tensor]:
        """Return {layer: mean |h| (N,)}, in float32."""
        return {layer: (total / max(self.counts[layer], 1)).float() for layer, total in self.totals.items()}
