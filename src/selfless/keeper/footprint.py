"""The memory of a keeper: what it holds now, and what it needs at the peak of the next `consolidate`.

The peak is predicted, not guessed: the preserver's own `consolidate` runs on the meta device, where tensors have shapes but no memory, and
the bytes that live at a time are counted. To that come Ω while it is measured, and the activations of a batch, which are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfless.functional.shapes import wide
from selfless.keeper import pieces
from selfless.keeper.counting import LiveBytes
from selfless.keeper.part import Part
from selfless.keeper.storage import Storage
from selfless.preserve import State

META = torch.device("meta")


@dataclass(frozen=True)
class Footprint:
    """Bytes by group of the state, now and after the next task, and at the peak of the next `consolidate`. Print it to see a table.

    groups   {group: bytes} that the keeper holds now
    after    {group: bytes} that it will hold after the next `consolidate`
    peak     bytes that the keeper holds at the peak of the next `consolidate`, without the activations of a batch
    model    bytes of the model's parameters: one copy
    """

    groups: dict[str, int]
    after: dict[str, int]
    peak: int
    model: int

    @property
    def bytes(self) -> int:
        """All bytes that the keeper holds now."""
        return sum(self.groups.values())

    @property
    def copies(self) -> float:
        """The same in copies of the model's parameters."""
        return self.bytes / self.model

    @property
    def copies_after(self) -> float:
        """Copies of the model's parameters that the keeper will hold after the next `consolidate`."""
        return sum(self.after.values()) / self.model

    @property
    def peak_copies(self) -> float:
        """Copies of the model's parameters at the peak of the next `consolidate`."""
        return self.peak / self.model

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        width = max(len(name) for name in ("consolidate", *self.groups, *self.after))
        yield f"{'':<{width}}  {'now':>10}  {'copies':>6}  {'next task':>10}  {'copies':>6}"
        for name in dict.fromkeys((*self.groups, *self.after)):
            yield f"{name:<{width}}  {self._cells(self.groups.get(name, 0))}  {self._cells(self.after.get(name, 0))}"
        yield f"{'all':<{width}}  {self._cells(self.bytes)}  {self._cells(sum(self.after.values()))}"
        yield f"{'consolidate':<{width}}  {'':>18}  {self._cells(self.peak)}"

    def _cells(self, count: int) -> str:
        return f"{_readable(count):>10}  {count / self.model:>6.2f}"


def _readable(count: float) -> str:
    """Return bytes with a unit: 1536 → 1.5 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def measure_footprint(parts: Sequence[Part], preserved: Mapping[str, nn.Parameter], trainable: Mapping[str, nn.Parameter]) -> Footprint:
    """Return the footprint of the preservers of a keeper."""
    groups: dict[str, int] = {}
    after: dict[str, int] = {}
    numbers = [""] if len(parts) == 1 else [f"{i}." for i in range(len(parts))]
    needs: list[int] = []
    measured = sum(_nbytes(torch.empty_like(wide(p.to(META)))) for p in preserved.values())
    for number, part in zip(numbers, parts, strict=True):
        groups |= {f"{number}{name}": size for name, size in _by_group(part.state).items()}
        groups |= {f"{number}{name}": size for name, size in part.buffers().items()}
        new, extra = _predict(part, preserved)
        after |= {f"{number}{name}": size for name, size in _by_group(new).items()}
        after |= {f"{number}{name}": size for name, size in part.buffers().items()}
        needs.append(extra)
    now, measures = sum(groups.values()), any(part.term.measures for part in parts)
    largest = max(_nbytes(p) for p in preserved.values())
    # while Ω is measured: Ω and the sum of one batch for one parameter; then the preservers take it over one after another
    while_measuring = now + (measured + largest if measures else 0)
    while_ending = now + (measured if measures else 0) + max(needs)
    return Footprint(groups, after, max(while_measuring, while_ending), sum(_nbytes(p) for p in trainable.values()))


def _predict(part: Part, parameters: Mapping[str, nn.Parameter]) -> tuple[State, int]:
    """Return the state after the next task on the meta device, and the bytes that its computation needs besides state and Ω."""
    term, storage = part.term, Storage(part.storage.dtype, META if part.storage.device is not None else None)
    state: State = {g: {n: t.to(META) for n, t in ts.items()} for g, ts in part.state.items()}
    values = {n: p.detach().to(META) for n, p in parameters.items()}
    omega = {n: torch.empty_like(wide(p)) for n, p in values.items()} if term.measures else {}
    freed = 0
    with LiveBytes() as count:
        count.know(*values.values(), *omega.values(), *(t for ts in state.values() for t in ts.values()))
        if term.splits == "whole":
            new = storage.store(term, term.consolidate(storage.load_state(state, META), values, omega), values)
        else:
            pieces.check_consolidation(term, state, values, omega, storage)
            new = pieces.consolidate(term, state, values, omega, storage)
        extra = count.peak - freed
    return new, extra


def _by_group(state: State) -> dict[str, int]:
    return {name: sum(_nbytes(t) for t in tensors.values()) for name, tensors in state.items() if tensors}


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
