"""Appendix, spatial locality test: first-layer neuron importance after tasks 1, 2 and 3, SNID beside SLNID. Permuted MNIST, 64 units."""

from __future__ import annotations

import dataclasses

from selfless.experiments.base import Claim, Experiment, Profile, at_most, more
from selfless.experiments.protocols import Grid, permuted_mnist

ROWS = ("SNID", "SLNID")
AFTER = {t: f"after task {t}" for t in (1, 2, 3)}
REUSE = "overlap of tasks 1 and 3"
BEYOND = "overlap beyond chance"


def locality(profile: Profile) -> Experiment:
    """SNID and SLNID after one, two and three tasks."""
    protocol = permuted_mnist(64, profile)
    if profile != "paper":  # the paper's λ for both: if each chose its λ, the comparison would be of λ (docs/lab-notes.md)
        protocol = dataclasses.replace(protocol, grids=dict.fromkeys(ROWS, Grid((0.01,), (1e-3,))))
    cells = [cell for t, column in AFTER.items() for cell in protocol.cells(ROWS, column=column, value="neurons", then={"tasks": t})]
    cells += [dataclasses.replace(cell, column=REUSE, value="reuse") for cell in cells if cell.column == AFTER[3]]
    if profile == "equal":
        cells += [dataclasses.replace(cell, column=BEYOND, value="reuse-beyond-chance") for cell in cells if cell.column == REUSE]
        other = [
            dataclasses.replace(
                cell,
                row=f"{cell.row}, discount max",
                candidates=tuple(
                    dataclasses.replace(run, sparsify=dataclasses.replace(run.sparsify, discount="max"))  # type: ignore[call-arg]
                    for run in cell.candidates
                ),
            )
            for cell in cells
        ]
        cells += other
    overlap = BEYOND if profile == "equal" else REUSE  # the overlap that density alone gives is no reuse
    claims: tuple[Claim, ...] = (
        Claim("Locality tolerates more important neurons after the first task", (more(("SLNID", AFTER[1]), ("SNID", AFTER[1])),)),
        Claim(
            "Locality lets more new neurons become important for tasks 2 and 3",
            (more(("SLNID", AFTER[3]), ("SNID", AFTER[3]), since=AFTER[1]),),
        ),
        Claim("Locality makes the third task lean less on the neurons of the first", (at_most(("SLNID", overlap), ("SNID", overlap)),)),
    )
    if profile == "equal":
        pairs = tuple(at_most((f"SLNID{kind}", BEYOND), (f"SNID{kind}", BEYOND)) for kind in ("", ", discount max"))
        text = "Ours: beyond what the density of importances gives by chance, tasks overlap less with locality, with both discounts"
        claims += (Claim(text, pairs, ours=True),)
    return Experiment(
        "locality",
        "Which neurons matter, with and without locality",
        "appendix, spatial locality test",
        "importance",
        tuple(cells),
        claims,
        notes=(
            "Neurons are counted as (Σα)²/Σα², which needs no threshold; overlap is the cosine of task 1's and task 3's own α, in percent",
            "SNID and SLNID have the same λ and λ_Ω",
        ),
        profile=profile,
    )
