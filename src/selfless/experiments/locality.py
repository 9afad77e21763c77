"""Appendix, spatial locality test: first-layer neuron importance after tasks 1, 2 and 3, SNID beside SLNID. Permuted MNIST, 64 units."""

from __future__ import annotations

import dataclasses

from selfless.experiments.base import Claim, Experiment, Profile, at_most, more
from selfless.experiments.protocols import Grid, permuted_mnist

ROWS = ("SNID", "SLNID")
AFTER = {t: f"after task {t}" for t in (1, 2, 3)}
REUSE = "overlap of tasks 1 and 3"


def locality(profile: Profile) -> Experiment:
    """SNID and SLNID after one, two and three tasks."""
    protocol = permuted_mnist(64, profile)
    if profile == "ours":  # the paper's λ for both: if each chose its λ, the comparison would be of λ (docs/lab-notes.md)
        protocol = dataclasses.replace(protocol, grids=dict.fromkeys(ROWS, Grid((0.01,), (1e-3,))))
    cells = [cell for t, column in AFTER.items() for cell in protocol.cells(ROWS, column=column, value="neurons", then={"tasks": t})]
    cells += [dataclasses.replace(cell, column=REUSE, value="reuse") for cell in cells if cell.column == AFTER[3]]
    claims = (
        Claim("Locality tolerates more important neurons after the first task", (more(("SLNID", AFTER[1]), ("SNID", AFTER[1])),)),
        Claim("It lets more neurons become important for later tasks", (more(("SLNID", AFTER[3]), ("SNID", AFTER[3])),)),
        Claim("It makes the third task lean less on the neurons of the first", (at_most(("SLNID", REUSE), ("SNID", REUSE)),)),
    )
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
