"""Table 1: the gains of inhibition, locality and the discount, one by one, on permuted MNIST and CIFAR-100; joint training as the bound."""

from __future__ import annotations

import dataclasses

from selfless.experiments.base import Cell, Claim, Comparison, Experiment, Profile, at_least, at_most, more
from selfless.experiments.protocols import (
    ALL_LAYERS,
    CIFAR_128,
    CIFAR_EVERYWHERE,
    CIFAR_IMPLICIT,
    INHIBITION,
    Grid,
    Protocol,
    cifar,
    cifar_best,
    permuted_mnist,
    permuted_mnist_best,
)

ROWS = ("No-Reg", *INHIBITION)
EQUAL_ANCHOR, EQUAL_STRENGTHS = 10.0, (1e-3, 3e-3)  # of the ablation at equal strengths
PUBLISHED = {
    "pMNIST 128": {"No-Reg": 92.67, "SNI": 95.79, "SNID": 95.90, "SLNI": 95.95, "SLNID": 95.83, "joint": 97.30},
    "pMNIST 64": {"No-Reg": 90.72, "SNI": 94.89, "SNID": 93.82, "SLNI": 94.87, "SLNID": 93.89, "joint": 96.80},
    "CIFAR 256": {"No-Reg": 55.06, "SNI": 55.30, "SNID": 61.00, "SLNI": 56.06, "SLNID": 63.30, "joint": 70.99},
    "CIFAR 128": {"No-Reg": 55.3, "SNI": 55.75, "SNID": 60.90, "SLNI": 55.79, "SLNID": 61.16, "joint": 71.95},
}
MNIST, CIFAR = ("pMNIST 128", "pMNIST 64"), ("CIFAR 256", "CIFAR 128")


def table_1(profile: Profile) -> Experiment:
    """Table 1, in profile `ours` also with our best settings."""
    protocols = [permuted_mnist(128, profile), permuted_mnist(64, profile), cifar(256, profile), cifar(128, profile)]
    cells = [cell for p in protocols for cell in p.cells(ROWS, PUBLISHED[p.column])]
    cells += [p.joint(PUBLISHED[p.column]["joint"]) for p in protocols]
    if profile == "ours":
        cells += [*permuted_mnist_best(128), *permuted_mnist_best(64)]
        cells += [*(p.everywhere(CIFAR_EVERYWHERE) for p in protocols[2:]), *cifar_best(256)]
    if profile == "equal":
        cells += _same_strengths(protocols[2])
    notes = ["Joint training sees all tasks at once: an upper bound, not a method"]
    notes += [CIFAR_IMPLICIT, CIFAR_128] if profile == "paper" else []
    return Experiment(
        "table-1",
        "Inhibition, locality and the discount, one by one",
        "table 1",
        "dots",
        tuple(cells),
        _claims() + {"paper": (), "ours": _everywhere(), "equal": _ablation()}[profile],
        notes=tuple(notes),
        profile=profile,
    )


def _same(column: str, strength: float) -> str:
    return f"{column}, λ = {strength:g} for all"


def _same_strengths(protocol: Protocol) -> tuple[Cell, ...]:
    """Return the ablation at equal strengths, by five seeds: each variant with the same λ_Ω and λ; nothing is chosen."""
    return tuple(
        cell
        for strength in EQUAL_STRENGTHS
        for cell in dataclasses.replace(protocol, grids=dict.fromkeys(INHIBITION, Grid((EQUAL_ANCHOR,), (strength,)))).cells(
            INHIBITION, column=_same(protocol.column, strength), most_seeds=5
        )
    )


def _ablation() -> tuple[Claim, ...]:
    """Return our claims at equal strengths, where the paper's are at those of each row."""
    columns = [_same(CIFAR[0], strength) for strength in EQUAL_STRENGTHS]
    discount = tuple(more((a, column), (b, column)) for column in columns for a, b in (("SNID", "SNI"), ("SLNID", "SLNI")))
    local = tuple(more((a, column), (b, column)) for column in columns for a, b in (("SLNI", "SNI"), ("SLNID", "SNID")))
    return (
        Claim("Ours: on CIFAR, 256 units, the discount helps at equal λ and λ_Ω", discount, ours=True),
        Claim("Ours: on CIFAR, 256 units, locality helps at equal λ and λ_Ω", local, ours=True),
    )


def _everywhere() -> tuple[Claim, ...]:
    two = [at_least((ALL_LAYERS, column), ("SLNID", column), 2) for column in CIFAR]
    seven = [at_least((ALL_LAYERS, column), ("No-Reg", column), 7) for column in CIFAR]
    text = "Ours: inhibition between the channels of convolutions too adds two points to SLNID on CIFAR, and is seven above No-Reg"
    return (Claim(text, (*two, *seven), ours=True),)


def _claims() -> tuple[Claim, ...]:
    def gap(a: str, b: str, column: str) -> float:
        return round(PUBLISHED[column][a] - PUBLISHED[column][b], 2)

    def above(a: str, b: str, column: str, margin: float = 0.0) -> Comparison:
        return at_least((a, column), (b, column), margin, gap(a, b, column))

    return (
        Claim(
            "On permuted MNIST every other variant works alone too: SNI, SNID and SLNI are two points or more above No-Reg",
            tuple(above(row, "No-Reg", column, 2) for column in MNIST for row in INHIBITION if row != "SLNID"),
        ),
        Claim(
            "On CIFAR SLNID is four points or more above No-Reg",
            tuple(above("SLNID", "No-Reg", column, 4) for column in CIFAR),
            repeats="fig-3a and fig-3a-128",
        ),
        Claim(
            "On CIFAR inhibition without the discount does not help: SNI and SLNI at most two points above No-Reg",
            tuple(at_most((row, column), ("No-Reg", column), 2, gap(row, "No-Reg", column)) for column in CIFAR for row in ("SNI", "SLNI")),
        ),
        Claim(
            "On CIFAR the discount adds two points or more",
            tuple(above(a, b, column, 2) for column in CIFAR for a, b in (("SNID", "SNI"), ("SLNID", "SLNI"))),
        ),
        Claim("On CIFAR locality helps further: SLNID ≥ SNID", tuple(above("SLNID", "SNID", column) for column in CIFAR)),
        Claim(
            "SLNID with 64 units does better than No-Reg with 128",
            (more(("SLNID", "pMNIST 64"), ("No-Reg", "pMNIST 128"), 0, 1.22),),
            repeats="fig-2-64",
        ),
        Claim("Joint training is the upper bound", tuple(above("joint", "SLNID", column) for column in (*MNIST, *CIFAR))),
    )
