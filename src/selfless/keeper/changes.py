"""Find changes of a model that no call reports: frozen parameters that train later, replaced layers, a copy that trains instead.

Each leaves old tasks without protection, so the keeper warns of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfless.distributed.shards import local
from selfless.keeper.hook import Hook
from selfless.network.roles import within

if TYPE_CHECKING:
    from selfless.keeper.part import Part

FAR = 0.9  # a new parameter is so far from θ* of the old one, as a share of ‖θ*‖; two random ones are at about 1.4


class Changes:
    """The parameters of a model as they were when the last task ended.

    frozen   the parameters that a task used although they did not train when it ended: name → the number of the first such task
    """

    def __init__(self, model: nn.Module) -> None:
        self.frozen: dict[str, int] = {}
        self._seen: dict[str, tuple[weakref.ref[nn.Parameter], Tensor | None]] = {}  # each parameter, and its sum as it was
        self._used: set[str] = set()
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Remember the parameters as they are now."""
        self._seen = {name: (weakref.ref(p), _sum(p)) for name, p in model.named_parameters()}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside `with` the data of a task are run: note which of the parameters that do not train they need."""
        owners = {f"{n}." if n else "": m for n, m in model.named_modules() if _is_frozen(m)}
        handles = [module.register_forward_hook(Hook(self._use(prefix))) for prefix, module in owners.items()]
        self._used = set()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _use(self, prefix: str) -> Any:
        def hook(module: nn.Module, *_: Any) -> None:
            self._used |= {prefix + name for name, p in module.named_parameters(recurse=False) if not p.requires_grad}

        return hook

    def end_task(self, model: nn.Module, task: int) -> None:
        """Remember the parameters at the end of a task; `task` counts from 1."""
        for name in sorted(self._used):
            self.frozen.setdefault(name, task)
        self.follow(model)

    def thawed(self, trainable: Iterable[str], heads: Sequence[str]) -> list[str]:
        """Return the frozen parameters that train now."""
        return [name for name in trainable if name in self.frozen and not any(within(name, head) for head in heads)]

    def replaced(self, model: nn.Module, parts: Iterable[Part], later_heads: Sequence[str]) -> str:
        """Return the name of a weight that is held at θ* of another one that had its name; "" if there is none."""
        stars = [part.star() for part in parts if part.is_on]
        for name, p in model.named_parameters():
            is_same = name not in self._seen or self._seen[name][0]() is p
            if is_same or p.dim() < 2 or any(within(name, head) for head in later_heads):
                continue
            for star, omega in stars:
                if name in star and (omega is None or bool(local(omega[name]).any())) and is_far(p, star[name]):
                    return name
        return ""

    def rewritten(self, model: nn.Module, parts: Iterable[Part], later_heads: Sequence[str]) -> str:
        """Return the name of a weight that was written since the last task ended and now differs from θ*; "" if there is none."""
        stars = [part.star() for part in parts if part.is_on]
        for name, p in model.named_parameters():
            same, before = self._seen.get(name, (None, None))
            after = _sum(p)
            if same is None or same() is not p or before is None or after is None or not p.requires_grad:
                continue
            if before.device != after.device or bool(before == after) or any(within(name, head) for head in later_heads):
                continue
            for star, omega in stars:
                held = star.get(name)
                is_held = held is not None and held.dtype == p.dtype and (omega is None or bool(local(omega[name]).any()))
                if is_held and star[name].shape == p.shape and not torch.equal(local(star[name]).to(p.device), local(p.detach())):
                    return name
        return ""

    def is_new(self, name: str, parameter: nn.Parameter) -> bool:
        """Return True if a parameter was added or replaced since the last task ended."""
        return name not in self._seen or self._seen[name][0]() is not parameter

    def note_written(self, parameters: Mapping[str, nn.Parameter], names: Iterable[str]) -> None:
        """Remember some parameters as they are now: a method has written them."""
        for name in names:
            if name in self._seen:
                self._seen[name] = (self._seen[name][0], _sum(parameters[name]))

    def is_untouched(self, model: nn.Module) -> bool:
        """Return True if all parameters of the model are as they were when the last task ended, or at `attach`."""
        now = dict(model.named_parameters())
        if now.keys() != self._seen.keys():
            return False
        sums = ((_sum(now[name]), before) for name, (_, before) in self._seen.items())
        return all(after is not None and before is not None and bool(after == before.to(after.device)) for after, before in sums)


def _sum(parameter: Tensor) -> Tensor | None:
    """Return Σθ, by which a changed parameter is known; None if it has no values yet."""
    if parameter.is_meta or isinstance(parameter, nn.parameter.UninitializedParameter):
        return None
    dtype = torch.float32 if parameter.device.type == "mps" else torch.float64
    return local(parameter.detach()).sum(dtype=dtype) if parameter.is_floating_point() else None


def _is_frozen(module: nn.Module) -> bool:
    """Return True if own parameters of a module are frozen. In a class of the user's all must be: it may have some for each task."""
    trains = [p.requires_grad for p in module.parameters(recurse=False)]
    return not all(trains) and (not any(trains) or type(module).__module__.startswith("torch."))


def is_far(parameter: Tensor, star: Tensor) -> bool:
    """Return True if a parameter has the shape of θ* and is far from it, as another one would be."""
    near, far = local(parameter.detach()).float(), local(star).to(parameter.device).float()
    return near.shape == far.shape and bool((near - far).norm() > FAR * far.norm())
