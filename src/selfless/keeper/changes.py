"""Changes of a model between tasks that no call tells: frozen parameters that train later, replaced layers, a copy that trains instead.

Each of them leaves old tasks without protection, so each is found and said.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
        self._seen: dict[str, tuple[weakref.ref[nn.Parameter], int]] = {}
        self._used: set[str] = set()
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Remember the parameters as they are now."""
        self._seen = {name: (weakref.ref(p), p._version) for name, p in model.named_parameters()}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside `with` the data of a task are run: note which of the parameters that do not train they need."""
        owners = {f"{n}." if n else "": m for n, m in model.named_modules() if any(not p.requires_grad for p in m.parameters(False))}
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

    def replaced(self, model: nn.Module, parts: Iterable[Part]) -> str:
        """Return the name of a weight with the θ* of another one that had its name; "" if there is none."""
        stars: list[Any] = [part.star()[0] for part in parts if part.is_on]
        others = ((n, p) for n, p in model.named_parameters() if n in self._seen and self._seen[n][0]() is not p and p.dim() > 1)
        return next((name for name, p in others if any(name in star and _is_far(p, star[name]) for star in stars)), "")

    def is_untouched(self, model: nn.Module) -> bool:
        """Return True if no parameter of the model was written since the last task ended, or since `attach`."""
        now = dict(model.named_parameters())
        return all(name in now and ref() is now[name] and now[name]._version == version for name, (ref, version) in self._seen.items())


def _is_far(parameter: Tensor, star: Tensor) -> bool:
    near, far = local(parameter.detach()).float(), local(star).to(parameter.device).float()
    return near.shape == far.shape and bool((near - far).norm() > FAR * far.norm())
