"""The table of measured rows, `measured.json`: for each case the best recorded row of each preserver, and joint training."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields
from pathlib import Path

FILE = Path(__file__).with_name("measured.json")
HELD_OUT, TRIAL = "held-out data", "one held-out seed"  # what strengths were chosen on


@dataclass(frozen=True)
class Measured:
    """What was measured of one row.

    average, std   average accuracy over all tasks after the last one, in %; mean and standard deviation over seeds
    forgetting     by how many points the accuracy on a task has fallen since it was learned, mean over the old tasks
    seconds        training time of one run, in a fleet on `hardware`
    memory         what the preserver holds beside the model, in copies of the parameters
    seeds          how many seeds were reported
    chosen_on      "held-out data": strengths were chosen on it, and the average is that of test images and other seeds. "one held-out
                   seed": a trial, whose average is that of the held-out images that chose the strengths too, so it is optimistic
    record         the file with the result
    command        trains the same runs again
    """

    case: str
    preserve: str
    sparsify: str
    layers: str
    average: float
    std: float | None
    forgetting: float
    seconds: float
    hardware: str
    memory: float
    seeds: int
    chosen_on: str
    record: str
    command: str

    def __str__(self) -> str:
        spread = "" if self.std is None else f" ± {self.std:.2f}"
        seeds = f"{self.seeds} seeds" if self.seeds > 1 else "one seed"
        return (
            f"average {self.average:.2f}{spread} %, {self.forgetting:.2f} points lost, {self.seconds:.1f} s a run ({self.hardware}), "
            f"{self.memory:.1f} copies of the parameters; {seeds}, chosen on {self.chosen_on}; {self.record}"
        )


@functools.cache
def load() -> tuple[tuple[Measured, ...], dict[str, Measured]]:
    """Return the rows of all cases, and joint training by case: the higher one, if it was trained with and without a sparsifier."""
    values = json.loads(FILE.read_text(encoding="utf-8"))
    known = {field.name for field in fields(Measured)}
    rows = [Measured(**{name: value for name, value in row.items() if name in known}) for row in values["rows"] + values["joint"]]
    methods, bounds = rows[: len(values["rows"])], rows[len(values["rows"]) :]
    return tuple(methods), {row.case: row for row in sorted(bounds, key=lambda row: row.average)}
