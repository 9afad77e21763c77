"""From an experiment to its record: choose, train, measure, judge, write `<out>/experiments/<name>-<profile>[-quick].json`.

Choosing and training are one call of the runner each, so that their runs form fleets. The folder of results is the cache: an interrupted
experiment continues where it stopped. Runs on held-out data are kept in `<out>/choosing`, apart from the reported ones; where that folder
is not kept, the scores in the record of an earlier call count (`recorded`). For several experiments, `train_together` first trains what all
of them need, in fewer and larger fleets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfless.data import DataError
from selfless.experiments.base import Cell, Experiment, Place
from selfless.experiments.choosing import RecordedScore, Scored, Selection, choose, later_trials, next_trials, trials
from selfless.experiments.grids import reachable
from selfless.experiments.record import describe_runs, fill_cell, judge_claims, list_choices, list_notes
from selfless.experiments.recorded import take
from selfless.files import write_json
from selfless.metrics import spread
from selfless.runner import Store, TrainOptions
from selfless.runner.checks import problems, refuse
from selfless.runner.machine import resolve_device
from selfless.spec import Result, Run

FORMAT = 1
CHOOSING = "choosing"
CHOOSE = "choosing strengths"
Train = Callable[[Sequence[Run], Path, str], list[Result]]  # runs, where to record them, and words for the progress line


def record_file(out: Path, experiment: Experiment) -> Path:
    """Return the file that holds the record of an experiment."""
    return out / "experiments" / f"{experiment.name}-{experiment.profile}{'-quick' * experiment.quick}.json"


def final(cell: Cell, run: Run, seed: int) -> Run:
    """Return a run to report: the chosen candidate with one of the seeds."""
    return dataclasses.replace(run, **{"seed": seed, **cell.then})


def report_seeds(cell: Cell, seeds: int) -> int:
    """Return how many of the seeds that were asked for a cell is reported with."""
    return seeds if cell.most_seeds is None else min(seeds, cell.most_seeds)


def declared(experiment: Experiment, seeds: Iterable[int]) -> set[str]:
    """Return the keys of all runs that the experiment may report as it is written now; a record with others is stale."""
    seeds = list(seeds)
    runs = {final(cell, run, seed) for cell in experiment.cells for run in reachable(cell.candidates, cell.choice) for seed in seeds}
    return {run.key for run in runs}


def grids(experiment: Experiment) -> dict[Place, set[str]]:
    """Return for each cell the keys of the runs of its first round of choosing, as the experiment is written now."""
    return {cell.place: {run.key for run in trials(cell)} for cell in experiment.cells if len(cell.candidates) > 1}


def count(experiments: Sequence[Experiment], seeds: int) -> int:
    """Return how many runs the experiments train if the best are in the middle of their grids; shared runs count once."""
    tried = {(run, cell.choice.on_test) for e in experiments for cell in e.cells for run in trials(cell)}
    again = sum({(cell.candidates, cell.choice): later_trials(cell) for e in experiments for cell in e.cells}.values())
    slots: dict[Any, int] = {}  # a set of candidates, of which one is trained → how many of its seeds are not trained while choosing
    for cell in (cell for e in experiments for cell in e.cells if cell.candidates):
        at = (tuple(final(cell, run, 0) for run in cell.candidates), cell.choice if len(cell.candidates) > 1 else None)
        reported = report_seeds(cell, seeds)
        known = sum(s < reported for s in cell.choice.seeds) if len(cell.candidates) > 1 and cell.choice.on_test and not cell.then else 0
        slots[at] = reported - known
    alone = {runs[0] for runs, choice in slots if choice is None}
    return len(tried) + again + sum(left for (runs, choice), left in slots.items() if choice is None or not alone.issuperset(runs))


def reproduce(
    experiment: Experiment,
    *,
    seeds: int,
    out: Path,
    train: Train,
    data_dir: Path | None = None,
    first_seed: int = 0,
    recorded: Mapping[str, RecordedScore] | None = None,
) -> dict[str, Any]:
    """Train what is missing, judge the claims, write the record, and return it.

    recorded   scores of earlier records, by key (`recorded_scores`): these runs are not trained again to choose
    """
    cells, reported = experiment.cells, range(first_seed, first_seed + seeds)

    def train_all(runs: Sequence[Run], place: Path) -> dict[Run, Result]:
        return dict(_train(runs, place, f"{experiment.name}: {CHOOSE}", train))

    scored, _ = choose_all(cells, out, train_all, recorded or {}, data_dir)
    chosen = {cell.place: choose(cell, scored) for cell in cells}
    runs = {cell.place: finals(cell, chosen[cell.place], reported) for cell in cells}
    wanted = list(dict.fromkeys(run for found in runs.values() for run in found))
    results = dict(_train(wanted, out, f"{experiment.name}: training", train))
    path = record_file(out, experiment)
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    filled = [fill_cell(cell, chosen[cell.place], runs[cell.place], results, out, data_dir, before) for cell in cells]
    if experiment.quick:  # its numbers mean nothing beside published ones
        filled = [cell | {"difference": None} for cell in filled]
    wanted_seeds = list(reported[: max((report_seeds(cell, seeds) for cell in cells), default=seeds)])
    record = {
        "format": FORMAT,
        "name": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "profile": experiment.profile,
        "quick": experiment.quick,
        "figure": experiment.figure,
        "pending": experiment.pending,
        "seeds": wanted_seeds,
        "looks": count_looks(before, wanted_seeds),
        "cells": filled,
        "choices": list_choices(experiment, chosen, scored),
        "claims": judge_claims(experiment, filled),
        "notes": [*experiment.notes, *list_notes(results.values())],
        "about": describe_runs(scored | results, before if recorded and _continues(before, wanted_seeds) else None),
    }
    write_json(path, record)
    return record


def _continues(before: Mapping[str, Any] | None, seeds: Sequence[int]) -> bool:
    """Return whether a record begins with the same seed; with others it is another experiment, of which the scores alone are used."""
    return before is not None and before.get("seeds", [])[:1] == list(seeds[:1])


def count_looks(before: Mapping[str, Any] | None, seeds: Sequence[int]) -> list[int]:
    """Return the numbers of seeds by which the claims of a record were judged, this time included.

    Who adds seeds until a claim is decided looks at it several times; the correction of verdicts divides the level by the number of looks.
    """
    if before is None or not _continues(before, seeds):  # other seeds: another experiment, judged for the first time
        return [len(seeds)]
    return list(dict.fromkeys([*before.get("looks", [len(before["seeds"])]), len(seeds)]))


def check_together(experiments: Sequence[Experiment], options: TrainOptions) -> None:
    """Check every run that these experiments may train, before the first one. Missing data only leaves out its experiment."""
    assert options.out is not None
    cells = [cell for experiment in experiments for cell in experiment.cells]
    places = [(options.out if cell.choice.on_test else options.out / CHOOSING, trials(cell)) for cell in cells]
    places += [(options.out, [final(cell, run, 0) for run in cell.candidates]) for cell in cells]
    missing = [run for place, runs in places for run in dict.fromkeys(runs) if not Store(place).has(run.key)]
    found = problems(missing, dataclasses.replace(options, device=resolve_device(options.device)))
    refuse([problem for problem in found if not isinstance(problem.error, DataError)], len(missing))


def judge_again(record: dict[str, Any], experiment: Experiment) -> dict[str, Any]:
    """Return the record with the claims that the experiment makes now, judged by the recorded values."""
    return record | {"claims": judge_claims(experiment, record["cells"])}


def of_seeds(record: dict[str, Any], experiment: Experiment, seeds: range) -> dict[str, Any]:
    """Return the record as if these seeds alone had been reported; without the claims about cells that have none of them."""
    cells = []
    for cell in record["cells"]:
        runs = [run for run in cell["runs"] if run["seed"] in seeds]
        values = [run["value"] for run in runs if run["value"] is not None]
        mean, std = spread(values) if values else (None, None)
        apart = None if mean is None or cell["published"] is None else mean - cell["published"]
        cells.append(cell | {"runs": runs, "mean": mean, "std": std if len(values) > 1 else None, "difference": apart})
    claims = [claim for claim in judge_claims(experiment, cells) if claim["verdict"] != "missing"]
    return record | {"seeds": list(seeds), "looks": [len(seeds)], "cells": cells, "claims": claims}


def train_together(
    cells: Sequence[Cell],
    *,
    seeds: int,
    out: Path,
    train: Train,
    first_seed: int = 0,
    data_dir: Path | None = None,
    recorded: Mapping[str, RecordedScore] | None = None,
) -> None:
    """Train what these cells, of one or several experiments, need: all rounds of choosing, then the reported runs; one stream at a time.

    A stream whose data is missing is skipped; the experiment that needs it reports that later.
    """

    def train_all(runs: Sequence[Run], place: Path) -> dict[Run, Result]:
        return _by_stream(runs, place, f"all: {CHOOSE}", train)

    scored, ready = choose_all(cells, out, train_all, recorded or {}, data_dir)
    reported = range(first_seed, first_seed + seeds)
    _by_stream([run for cell in ready for run in finals(cell, choose(cell, scored), reported)], out, "all: training", train)


def _by_stream(runs: Iterable[Run], place: Path, what: str, train: Train) -> dict[Run, Result]:
    """Train these runs, one stream at a time; return the results of the streams that are here."""
    streams: dict[str, list[Run]] = {}
    for run in dict.fromkeys(runs):
        streams.setdefault(run.stream, []).append(run)
    found: dict[Run, Result] = {}
    for name, some in streams.items():
        with contextlib.suppress(DataError):
            found |= dict(_train(some, place, f"{what}, {name}", train))
    return found


def choose_all(
    cells: Sequence[Cell],
    out: Path,
    train: Callable[[Sequence[Run], Path], dict[Run, Result]],
    recorded: Mapping[str, RecordedScore],
    data_dir: Path | None,
) -> tuple[dict[Run, Scored], list[Cell]]:
    """Train the rounds of choosing of all cells together; return the results, and the cells whose choice is made.

    A cell is left out if `train` does not return a run that it needs. Runs on test data are recorded with the reported ones.
    """
    scored: dict[Run, Scored] = {}
    ready: list[Cell] = []
    for on_test, place in ((False, out / CHOOSING), (True, out)):
        waiting = [cell for cell in cells if cell.choice.on_test is on_test]
        while needs := [(cell, runs) for cell in waiting if (runs := next_trials(cell, scored))]:
            wanted = list(dict.fromkeys(run for _, runs in needs for run in runs))
            scored |= take(wanted, recorded, Store(place, data_dir))
            scored |= train([run for run in wanted if run not in scored], place)
            waiting = [cell for cell in waiting if all(run in scored for other, runs in needs if other is cell for run in runs)]
        ready += waiting
    return scored, ready


def _train(runs: Sequence[Run], place: Path, what: str, train: Train) -> Iterator[tuple[Run, Result]]:
    return zip(runs, train(runs, place, what), strict=True) if runs else iter(())


def finals(cell: Cell, chosen: Selection, seeds: Sequence[int]) -> list[Run]:
    """Return the runs that a cell reports with these seeds; none if all of its candidates failed."""
    some = seeds[: report_seeds(cell, len(seeds))]
    return [] if chosen.index is None else [final(cell, chosen.candidates[chosen.index], seed) for seed in some]
