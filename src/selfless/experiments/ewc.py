"""Section 4.3: SLNID with EWC in place of MAS, permuted MNIST."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from selfless.experiments.base import Cell, Claim, Experiment, Profile, at_least, more
from selfless.experiments.protocols import EWC_ANCHORS, EWC_DEMO, EWC_INHIBITION, Grid, with_ewc

GAINS = {128: 3.1, 64: 2.8}


def _at(width: int, anchor: float) -> str:
    return f"pMNIST {width}, λ_Ω = {anchor:g}"


def _curve(width: int) -> tuple[Cell, ...]:
    """Return EWC alone and with SLNID at each λ_Ω, by ten seeds; λ is chosen at each of them."""
    plain = with_ewc(width, "equal")
    return tuple(
        cell
        for anchor in EWC_ANCHORS
        for cell in dataclasses.replace(
            plain, column=_at(width, anchor), grids={"No-Reg": Grid((anchor,)), "SLNID": Grid((anchor,), EWC_INHIBITION)}
        ).cells(("No-Reg", "SLNID"), most_seeds=10)
    )


def _demo(width: int) -> tuple[Cell, ...]:
    """Return EWC alone and with SLNID at the strengths that the released demo had before."""
    plain = with_ewc(width, "paper")
    return tuple(
        cell
        for anchor, inhibition in EWC_DEMO
        for cell in dataclasses.replace(
            plain, column=_at(width, anchor), grids={"No-Reg": Grid((anchor,)), "SLNID": Grid((anchor,), (inhibition,))}
        ).cells(("No-Reg", "SLNID"))
    )


def _gains_at(anchors: Sequence[float]) -> tuple[Claim, ...]:
    return tuple(
        Claim(
            f"Ours: at λ_Ω = {anchor:g} SLNID adds two points or more to EWC, {width} units",
            (at_least(("SLNID", _at(width, anchor)), ("No-Reg", _at(width, anchor)), 2),),
            ours=True,
        )
        for width in GAINS
        for anchor in anchors
    )


def ewc(profile: Profile) -> Experiment:
    """EWC alone and with SLNID, 128 and 64 units."""
    protocols = {width: with_ewc(width, profile) for width in GAINS}
    cells = tuple(cell for p in protocols.values() for cell in p.cells(("No-Reg", "SLNID")))
    at = {(row, width): (row, p.column) for width, p in protocols.items() for row in ("No-Reg", "SLNID")}
    claims = tuple(
        Claim(f"SLNID adds two points or more to EWC, {width} units", (at_least(at["SLNID", width], at["No-Reg", width], 2, gain),))
        for width, gain in GAINS.items()
    )
    claims += tuple(
        Claim(f"SLNID improves on all the learned tasks, {width} units", (more(at["SLNID", width], at["No-Reg", width], every_task=True),))
        for width in GAINS
    )
    claims += (Claim("SLNID with 64 units does better than EWC alone with 128", (more(at["SLNID", 64], at["No-Reg", 128]),)),)
    notes: tuple[str, ...] = ("The paper gives the gains, not the averages",)
    if profile == "equal":
        notes += ("The paper names no λ_Ω for EWC; the released demo has 10, with Ω from batch gradients",)
        cells += tuple(cell for width in GAINS for cell in _curve(width))
        claims += _gains_at(EWC_ANCHORS)
    if profile == "paper":
        earlier = " and ".join(f"{anchor:g} with λ = {inhibition:g}" for anchor, inhibition in EWC_DEMO)
        notes += (
            f"The paper names no λ_Ω for EWC; the released demo, of 64 units, has 10 with λ = 0.002, and before it had {earlier}",
            "The demo trains in batches of 150 after the first task; these runs have 200 throughout",
        )
        cells += tuple(cell for width in GAINS for cell in _demo(width))
        claims += _gains_at([anchor for anchor, _ in EWC_DEMO])
    return Experiment(
        "ewc",
        "SLNID with EWC",
        "section 4.3 and appendix",
        "gain" if profile == "equal" else "bars",
        cells,
        claims,
        notes=notes,
        profile=profile,
    )
