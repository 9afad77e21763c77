"""The memory of a keeper: what it holds now, and what it needs at the peak of the next `consolidate`.

The peak is predicted, not guessed: the preserver's own `consolidate` runs on the meta device, where tensors have shapes but no memory, and
the bytes that live at a time are counted. To that come Ω while it is measured, and the activations of a batch, which are not counted.
For a preserver that projects steps it is an upper bound: how many directions a task adds is known only when it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfless.distributed.shards import is_sharded, local, local_values
from selfless.functional.shapes import wide
from selfless.keeper import pieces
from selfless.keeper.counting import LiveBytes
from selfless.keeper.inputs import moments_like
from selfless.keeper.part import Part
from selfless.keeper.storage import Storage
from selfless.preserve import State
from selfless.preserve.base import measurements
from selfless.preserve.capabilities import ProjectsSteps, WeighsNodes

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


def measure_footprint(model: nn.Module, parts: Sequence[Part], parameters: Mapping[str, Tensor], activity: int = 0) -> Footprint:
    """Return the footprint of the preservers of a keeper; if FSDP2 shards the `parameters`, that of this rank.

    activity   bytes of the sums over activations that `consolidate` holds
    """
    preserved = local_values(parameters)
    groups: dict[str, int] = {}
    after: dict[str, int] = {}
    numbers = [""] if len(parts) == 1 else [f"{i}." for i in range(len(parts))]
    omega = sum(_nbytes(wide(p.detach().to(META))) for p in preserved.values())
    omegas = omega * sum(bool(one.users) for one in measurements([part.term for part in parts]))
    predicted = [_predict(part, preserved) for part in parts]
    for number, part, (new, _) in zip(numbers, parts, predicted, strict=True):
        for found, state in ((groups, part.rows), (after, new)):
            sizes = _by_group(state) | part.buffers()
            found |= {f"{number}{name}": size for name, size in sizes.items()}
    # Ω is measured: all of it, and the sum of one batch for one parameter, which is sparse for an embedding
    sparse = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    whole = [p for p in parameters.values() if is_sharded(p)]  # its sum is whole until it is reduced, and padded to equal shards
    largest = max((_nbytes(p) for p in preserved.values() if id(p) not in sparse), default=0)
    largest = max((2 * p.numel() * wide(local(p)).element_size() for p in whole), default=largest)
    level = sum(groups.values()) + omegas
    peak = level + (largest if omegas else 0)
    for part, (new, need) in zip(parts, predicted, strict=True):  # then the preservers take it over, one after another
        own = omega if part.term.measures else 0
        peak = max(peak, level - own + need)
        level += sum(_by_group(new).values()) - sum(_by_group(part.rows).values()) - own
    return Footprint(groups, after, peak + activity, sum(_nbytes(local(p)) for p in model.parameters() if p.requires_grad))


def _predict(part: Part, parameters: Mapping[str, Tensor]) -> tuple[State, int]:
    """Return the state after the next task on the meta device, and the bytes that Ω and the computation need at a time."""
    term, storage = part.term, Storage(part.storage.dtype, META if part.storage.device is not None else None)
    state: State = {g: {n: t.to(META) for n, t in ts.items()} for g, ts in part.rows.items()}
    values = {n: p.detach().to(META) for n, p in parameters.items()}
    size = pieces.piece_size(next(iter(parameters.values())))
    with LiveBytes() as count:
        count.know(*values.values(), *(t for ts in state.values() for t in ts.values()))
        if isinstance(term, ProjectsSteps) and term.is_on:
            state = term.add_inputs(state, moments_like(part.model, term, part.state, values), (), values)
        if isinstance(term, WeighsNodes) and term.is_on:
            state = term.add_activity(state, {layer: torch.empty(place.shape, device=META) for layer, place in term.places(state).items()})
        omega = {n: torch.empty_like(wide(p)) for n, p in values.items()} if term.measures else {}
        if term.splits == "whole":
            new = storage.store(term, term.consolidate(storage.load_state(state, META), values, omega), values)
        else:
            pieces.check_consolidation(term, state, values, omega, storage, size)
            new = pieces.consolidate(term, state, values, omega, storage, size)
    return new, count.peak


def _by_group(state: State) -> dict[str, int]:
    return {name: sum(_nbytes(t) for t in tensors.values()) for name, tensors in state.items() if tensors}


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
