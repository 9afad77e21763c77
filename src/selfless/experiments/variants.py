"""Not in the paper, profile `equal` alone: the rows of table 1 and figure 3 in all layers, with augmentation, and at rates of their own.

    all-layers      CIFAR-100: SLNID, SNID and DeCov also between the channels of convolutions, which the paper leaves to future work
    augmented       CIFAR-100: every row of table 1 and figure 3a with shifted and mirrored images
    tiny-variants   both on Tiny ImageNet
    rates           learning rate and schedule chosen on held-out data with the strengths, by No-Reg and SLNID alike

The rows that they are compared with are those of table 1 and figure 3: the same runs, trained once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from selfless.experiments.base import EQUAL, Cell, Claim, Experiment, Profile, at_least, more
from selfless.experiments.fig_3 import ROWS
from selfless.experiments.protocols import (
    CIFAR_ANCHORS,
    CIFAR_INHIBITION,
    EWC_INHIBITION,
    INHIBITION,
    PMNIST_ANCHORS,
    TINY_ANCHORS,
    TINY_INHIBITION,
    Grid,
    Protocol,
    cifar,
    over,
    permuted_mnist,
    tiny_imagenet,
)

EVERYWHERE = ("SLNID", "SNID", "DeCov")
RATES, SCHEDULES = (0.01, 0.03, 0.1), ("constant", "cosine")
PENDING = "Defined in profile equal alone: use --profile equal"
BOUND = "Joint training sees all tasks at once: an upper bound, not a method"


def all_layers(profile: Profile) -> Experiment:
    """SLNID, SNID and DeCov between channels too, beside No-Reg and SLNID in the paper's layers; CIFAR-100, both widths."""
    protocols = (cifar(256, "equal"), cifar(128, "equal"))
    grid = Grid(CIFAR_ANCHORS, CIFAR_INHIBITION)
    cells = [cell for p in protocols for cell in (*p.cells(("No-Reg", "SLNID")), *_everywhere(p, grid))]
    claims = _claims_everywhere([p.column for p in protocols], 7)
    return _variant("all-layers", "CIFAR-100: inhibition between channels too", cells, claims, (), profile)


def augmented(profile: Profile) -> Experiment:
    """Every row of table 1 and figure 3a with crops and flips; CIFAR-100, 256 units."""
    protocol = cifar(256, "equal")
    cells = [*protocol.augmented((*ROWS, *(row for row in INHIBITION if row not in ROWS)))]
    cells.append(dataclasses.replace(protocol.joint(augment=["crop-flip"]), row="joint, augmented"))
    claims = _claims_augmented(protocol.column)
    return _variant("augmented", "CIFAR-100 with crops and flips", cells, claims, (BOUND,), profile)


def tiny_variants(profile: Profile) -> Experiment:
    """The rows of figure 3b in all layers, and with crops and flips; five seeds."""
    protocol = tiny_imagenet("equal")
    cells = (*protocol.cells(("No-Reg", "SLNID")), *_everywhere(protocol, Grid(TINY_ANCHORS, TINY_INHIBITION)), *protocol.augmented(ROWS))
    few = [dataclasses.replace(cell, most_seeds=5) for cell in cells]
    claims = (*_claims_everywhere((protocol.column,), 3), *_claims_augmented(protocol.column))
    return _variant("tiny-variants", "Tiny ImageNet: in all layers, and with crops and flips", few, claims, (), profile)


def rates(profile: Profile) -> Experiment:
    """Each row chooses one of three rates and two schedules with its strengths, on held-out data; the grids do not grow."""
    grids = {128: Grid(PMNIST_ANCHORS[::2], EWC_INHIBITION), 256: Grid(CIFAR_ANCHORS, CIFAR_INHIBITION)}
    cells, claims = [], []
    for protocol, grid, margin in ((permuted_mnist(128, "equal"), grids[128], 2), (cifar(256, "equal"), grids[256], 4)):
        free = dataclasses.replace(
            protocol, grids={"No-Reg": Grid(grid.anchors), "SLNID": grid}, choice=dataclasses.replace(EQUAL, extend=0)
        )
        cells += [_at_every_rate(cell) for cell in free.cells(("No-Reg", "SLNID"))]
        column = protocol.column
        text = f"Ours: {column}: SLNID is {margin} points or more above No-Reg if both choose rate and schedule too"
        claims.append(Claim(text, (at_least(("SLNID", column), ("No-Reg", column), margin),), ours=True))
    notes = ("Elsewhere the rate and the schedule are fixed: 0.01, constant on permuted MNIST; 0.03, cosine on CIFAR-100",)
    return _variant("rates", "Learning rate and schedule chosen on held-out data", cells, claims, notes, profile)


def _at_every_rate(cell: Cell) -> Cell:
    runs = tuple(run for one in cell.candidates for run in over(one, lr=RATES, schedule=SCHEDULES))
    return dataclasses.replace(cell, candidates=runs)


def _everywhere(protocol: Protocol, grid: Grid) -> tuple[Cell, ...]:
    return tuple(protocol.everywhere(grid, row) for row in EVERYWHERE)


def _claims_everywhere(columns: Sequence[str], margin: float) -> tuple[Claim, ...]:
    """Return our claims on inhibition between channels: for SLNID, and whether it needs SLNID."""
    wide = "SLNID, all layers"
    gain = tuple(at_least((wide, column), ("No-Reg", column), margin) for column in columns)
    added = tuple(at_least((wide, column), ("SLNID", column), 2) for column in columns)
    ahead = tuple(more((wide, column), ("DeCov, all layers", column)) for column in columns)
    local = tuple(more((wide, column), ("SNID, all layers", column)) for column in columns)
    return (
        Claim(f"Ours: in all layers SLNID is {margin:g} points or more above No-Reg", gain, ours=True),
        Claim("Ours: in all layers SLNID is two points or more above SLNID in the paper's layers", added, ours=True),
        Claim("Ours: in all layers SLNID is ahead of DeCov", ahead, ours=True),
        Claim("Ours: in all layers SLNID is ahead of SNID", local, ours=True),
    )


def _claims_augmented(column: str) -> tuple[Claim, ...]:
    def ahead(other: str) -> Claim:
        text = f"Ours: with crops and flips SLNID is ahead of {other}"
        return Claim(text, (more(("SLNID, augmented", column), (f"{other}, augmented", column)),), ours=True)

    return ahead("No-Reg"), ahead("DeCov")


def _variant(name: str, title: str, cells: Sequence[Cell], claims: Sequence[Claim], notes: tuple[str, ...], profile: Profile) -> Experiment:
    """Return the experiment; profiles other than `equal` have its cells but nothing to run."""
    if profile != "equal":
        cells = [dataclasses.replace(cell, candidates=()) for cell in cells]
    pending = "" if profile == "equal" else PENDING
    return Experiment(name, title, "not in the paper", "dots", tuple(cells), tuple(claims), notes=notes, pending=pending, profile=profile)
