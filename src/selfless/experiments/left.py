"""What a folder of results lacks of some cells, in estimated seconds on one H200: who resumes a study sees what is still to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from selfless.experiments.base import Cell
from selfless.experiments.choosing import RecordedScore, choose, trials
from selfless.experiments.parts import later_seconds, reported_seconds, seconds
from selfless.experiments.reproduce import CHOOSING, choose_all, finals
from selfless.runner import Store
from selfless.spec import Result, Run


def left(cells: Sequence[Cell], seeds: range, out: Path, recorded: Mapping[str, RecordedScore], data_dir: Path | None = None) -> float:
    """Return the estimated seconds of the runs that are not recorded in `out`. Nothing is trained.

    Where strengths are not chosen yet, the rounds that will follow and the reported runs are estimated as in `parts`.
    """
    stores = {place: Store(place, data_dir) for place in (out, out / CHOOSING)}
    missing: dict[Run, None] = {}

    def look_up(runs: Sequence[Run], place: Path) -> dict[Run, Result]:
        found = {run: result for run in runs if (result := stores[place].load(run)) is not None}
        missing.update(dict.fromkeys(run for run in runs if run not in found))
        return found

    scored, ready = choose_all(cells, out, look_up, recorded, data_dir)
    chosen = {id(cell) for cell in ready}
    look_up([run for cell in ready for run in finals(cell, choose(cell, scored), seeds)], out)
    waiting = [cell for cell in cells if id(cell) not in chosen]
    first = [cell for cell in waiting if not scored.keys() >= set(trials(cell))]
    return math.fsum(map(seconds, missing)) + later_seconds(first) + reported_seconds(waiting, len(seeds))
