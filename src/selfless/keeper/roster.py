"""The parameters of a model by name. A training step reads them several times, and walking over the modules each time costs as much as a
kernel; so the model is walked again only if its modules or parameters have changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from selfless.distributed.shards import fsdp_modules


class Roster:
    """The trainable parameters of a model, after `follow`. Read the dictionaries only: they are shared.

    trainable    name → parameter
    names        parameter → name
    is_sharded   True if FSDP2 shards the model
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: list[tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]] = []
        self._walk()

    def follow(self) -> Roster:
        """Return this roster, of the model as it is now."""
        if not self._is_current():
            self._walk()
        return self

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; the CPU if there is none."""
        return torch.device("cpu") if self._first is None else self._first.device

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the optimizer has a trainable parameter of the model."""
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    def _is_current(self) -> bool:
        for module, children, parameters in self._seen:
            if tuple(module._modules.items()) != children or len(module._parameters) != len(parameters):
                return False
            for (name, p), (old_name, old, trains) in zip(module._parameters.items(), parameters, strict=True):
                if p is not old or name != old_name or (p is not None and p.requires_grad is not trains):
                    return False
        return True

    def _walk(self) -> None:
        self._seen = [
            (m, tuple(m._modules.items()), tuple((n, p, p is not None and p.requires_grad) for n, p in m._parameters.items()))
            for m in self._model.modules()
        ]
        self._first = next(self._model.parameters(), None)
        self.trainable = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        self.names: dict[Tensor, str] = {p: n for n, p in self.trainable.items()}
        self._ids = {id(p) for p in self.trainable.values()}
        self.is_sharded = bool(fsdp_modules(self._model))
