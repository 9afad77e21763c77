"""Table 2: eight object-recognition tasks from a pretrained AlexNet. Its published values are kept; its methods and data come later."""

from __future__ import annotations

from selfless.experiments.base import Cell, Claim, Experiment, Profile, at_least

PUBLISHED = {
    "Finetune": 32.67,
    "LwF": 49.49,
    "EBLL": 50.29,
    "IMM": 43.4,
    "SI": 50.49,
    "EWC": 50.00,
    "MAS": 52.69,
    "SLNID, fc pretrained": 53.77,
    "SLNID, fc random": 54.50,
}
COLUMN = "8 objects"


def table_2(profile: Profile) -> Experiment:
    def ahead(row: str) -> Claim:
        gain = round(PUBLISHED[row] - PUBLISHED["MAS"], 2)
        return Claim(f"{row} is ahead of MAS", (at_least((row, COLUMN), ("MAS", COLUMN), 0, gain),))

    return Experiment(
        "table-2",
        "Eight object-recognition tasks",
        "table 2",
        "dots",
        tuple(Cell(row, COLUMN, published=value) for row, value in PUBLISHED.items()),
        (ahead("SLNID, fc pretrained"), ahead("SLNID, fc random")),
        pending="LwF, EBLL and IMM are not built yet, and the eight data sets have no loaders: nothing is run",
        profile=profile,
    )
