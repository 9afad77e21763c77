"""What a protocol is: a stream, a network and its training in one profile, with a grid of strengths for each method."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfless.experiments.base import Cell, Choice
from selfless.preserve import NoPreserver
from selfless.sparsify import SLNI, SLNID, SNI, SNID, DeCov, L1Param, L1Rep, L2Param, NoSparsifier, OrthReg, Sparsifier
from selfless.spec import Run

KINDS: dict[str, type[Sparsifier]] = {
    "No-Reg": NoSparsifier,
    "SNI": SNI,
    "SNID": SNID,
    "SLNI": SLNI,
    "SLNID": SLNID,
    "DeCov": DeCov,
    "L1-Rep": L1Rep,
    "OrthReg": OrthReg,
    "L2-WD": L2Param,
    "L1-Param": L1Param,
}
INHIBITION = ("SNI", "SNID", "SLNI", "SLNID")
COMPETITORS = ("DeCov", "L1-Rep", "OrthReg", "L2-WD", "L1-Param")
ACTIVATIONS = {"Maxout": "maxout", "LWTA": "lwta"}  # replace ReLU; they have no penalty
ALL_LAYERS = "SLNID, all layers"
DECADES = tuple(float(f"1e-{k}") for k in range(2, 10))  # the paper's grid for the competitors


@dataclass(frozen=True)
class Grid:
    """λ_Ω and λ to choose from, as a product; `strengths` is empty for a method without a penalty."""

    anchors: tuple[float, ...]
    strengths: tuple[float, ...] = ()


@dataclass(frozen=True)
class Protocol:
    """A stream, a network and its training in one profile; a grid for each method; how to choose from it."""

    column: str
    base: Run
    grids: Mapping[str, Grid]
    choice: Choice

    def candidates(self, row: str, **changes: Any) -> tuple[Run, ...]:
        """Return every run of a method's grid."""
        base, grid = dataclasses.replace(self.base, **changes), self.grids[row]
        if row in ACTIVATIONS:
            base = dataclasses.replace(base, model=f"{base.model}-{ACTIVATIONS[row]}")
        kind = KINDS.get(row, NoSparsifier)
        penalties = [kind(strength) for strength in grid.strengths] or [NoSparsifier()]
        return tuple(
            dataclasses.replace(base, preserve=base.preserve.with_strength(anchor), sparsify=penalty)
            for anchor, penalty in itertools.product(grid.anchors, penalties)
        )

    def cells(self, rows: Sequence[str], published: Mapping[str, float] | None = None, **fields: Any) -> tuple[Cell, ...]:
        """Return one cell per method, in this protocol's column."""
        return tuple(
            dataclasses.replace(
                Cell(row, self.column, self.candidates(row), (published or {}).get(row), choice=self.choice),
                **fields,
            )
            for row in rows
        )

    def everywhere(self, grid: Grid, row: str = "SLNID") -> Cell:
        """Return the cell of a method that also acts between the channels of convolutions, which the paper leaves to future work."""
        ours = dataclasses.replace(self, grids={row: grid})
        return Cell(f"{row}, all layers", self.column, ours.candidates(row, layers="all"), choice=self.choice)

    def augmented(self, rows: Sequence[str], **changes: Any) -> tuple[Cell, ...]:
        """Return the cells of these methods with shifted and mirrored images, named as augmented."""
        ours = dataclasses.replace(self, base=dataclasses.replace(self.base, augment="crop-flip", **changes))
        return tuple(dataclasses.replace(cell, row=f"{cell.row}, augmented") for cell in ours.cells(rows))

    def joint(self, published: float | None = None, row: str = "joint", **grid: Sequence[Any]) -> Cell:
        """Return the cell of joint training: all tasks at once, the upper bound. `grid` names fields to choose from."""
        base = dataclasses.replace(self.base, stream=f"joint-{self.base.stream}", preserve=NoPreserver(), sparsify=NoSparsifier())
        return Cell(row, self.column, over(base, **grid), published, choice=self.choice)


def equal_grids(anchors: tuple[float, ...], strengths: tuple[float, ...]) -> dict[str, Grid]:
    """Return the same grid for every method: the same anchors times the same λ; the anchors alone for those without a penalty."""
    return {row: Grid(anchors, strengths if row in KINDS and row != "No-Reg" else ()) for row in (*KINDS, *ACTIVATIONS)}


def over(base: Run, **grid: Sequence[Any]) -> tuple[Run, ...]:
    """Return one run for every combination of the named fields."""
    return tuple(dataclasses.replace(base, **dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values()))
