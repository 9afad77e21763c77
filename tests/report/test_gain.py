"""The curve of a gain over λ_Ω: its values are the recorded ones, beside the published gain."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from selfless.experiments import experiment
from selfless.experiments.reproduce import reproduce
from selfless.report.experiment_plots import figures
from selfless.report.records import by_place
from tests.fabricated import trainer


@pytest.mark.slow
def test_the_curve_shows_the_recorded_gains(tmp_path: Path) -> None:
    made = experiment("ewc", "equal")
    anchors = ("1", "10", "100")
    cells = tuple(
        dataclasses.replace(cell, candidates=cell.candidates[:1])
        for cell in made.cells
        if cell.column in ("pMNIST 128", *(f"pMNIST 128, λ_Ω = {a}" for a in anchors))
    )
    claims = tuple(claim for claim in made.claims if {part.a for part in claim.parts} <= {cell.place for cell in cells})
    claims = tuple(claim for claim in claims if all(part.b in {cell.place for cell in cells} for part in claim.parts))
    small = dataclasses.replace(made, cells=cells, claims=claims)
    record = reproduce(small, seeds=3, out=tmp_path, train=trainer(lambda run: 0.9 + 0.01 * (run.sparsify.strength > 0)))
    found = by_place(record)
    *_, curve = figures(record).values()
    _, below = curve.axes
    assert [text.get_text() for text in below.get_xticklabels()] == list(anchors)
    gains = [found["SLNID", f"pMNIST 128, λ_Ω = {a}"]["mean"] - found["No-Reg", f"pMNIST 128, λ_Ω = {a}"]["mean"] for a in anchors]
    assert list(below.lines[0].get_ydata()) == pytest.approx(gains)
    assert [3.1, 3.1] in [list(line.get_ydata()) for line in below.lines]
