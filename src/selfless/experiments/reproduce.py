"""From an experiment to its record: choose, train, measure, judge, write `<out>/experiments/<name>-<profile>[-quick].json`.

Two stages, each one call of the runner, so that its runs form fleets; the folder of results is the cache, so an interrupted experiment goes
on where it stopped. Runs on held-out data are kept in `<out>/choosing`, apart from those that are reported. Of several experiments,
`pooled` first trains what all of them need, in fewer and larger fleets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from selfless.data import DataError
from selfless.experiments.base import Cell, Claim, Experiment, Place
from selfless.experiments.choosing import Chosen, choose, first_tasks, trial, trials
from selfless.experiments.claims import Judged, judged
from selfless.experiments.measures import MEASURES, Made
from selfless.files import write_json
from selfless.metrics import spread
from selfless.runner.machine import machine
from selfless.spec import Result, Run

FORMAT = 1
CHOOSING = "choosing"
CHOOSE = "choosing strengths"
Train = Callable[[Sequence[Run], Path, str], list[Result]]  # runs, where, and a word for the progress line


def record_file(out: Path, experiment: Experiment) -> Path:
    return out / "experiments" / f"{experiment.name}-{experiment.profile}{'-quick' * experiment.quick}.json"


def final(cell: Cell, run: Run, seed: int) -> Run:
    """A run that is reported: the chosen candidate with one of the seeds."""
    return dataclasses.replace(run, **{"seed": seed, **cell.then})


def declared(experiment: Experiment, seeds: Iterable[int]) -> set[str]:
    """The keys of every run a cell may report as the experiment is written now; a record with others is stale."""
    seeds = list(seeds)
    return {final(cell, run, seed).key for cell in experiment.cells for run in cell.candidates for seed in seeds}


def grids(experiment: Experiment) -> dict[Place, set[str]]:
    """The keys of the runs that each cell is chosen by as the experiment is written now."""
    return {cell.place: {run.key for run in trials(cell)} for cell in experiment.cells if len(cell.candidates) > 1}


def count(experiments: Sequence[Experiment], seeds: int) -> int:
    """How many runs they train, what they share counted once."""
    tried = {(run, cell.choice.on_test) for e in experiments for cell in e.cells for run in trials(cell)}
    slots: dict[Any, int] = {}  # a set of candidates of which one is trained → how many of its seeds are trained while choosing
    for cell in (cell for e in experiments for cell in e.cells if cell.candidates):
        at = (tuple(final(cell, run, 0) for run in cell.candidates), cell.choice if len(cell.candidates) > 1 else None)
        slots[at] = len([s for s in cell.choice.seeds if s < seeds]) if trials(cell) and cell.choice.on_test and not cell.then else 0
    alone = {runs[0] for runs, choice in slots if choice is None}
    return len(tried) + sum(seeds - known for (runs, choice), known in slots.items() if choice is None or not alone.issuperset(runs))


def reproduce(experiment: Experiment, *, seeds: int, out: Path, train: Train, data_dir: Path | None = None) -> dict[str, Any]:
    """Run it (or what is missing of it), judge it, write its record, and return the record."""
    cells = experiment.cells
    scored = {
        run: result for place, runs in _trials(cells, out) for run, result in _trained(runs, place, f"{experiment.name}: {CHOOSE}", train)
    }
    chosen = {cell.place: choose(cell, scored) for cell in cells}
    runs = {cell.place: _finals(cell, chosen[cell.place], seeds) for cell in cells}
    wanted = list(dict.fromkeys(run for found in runs.values() for run in found))
    results = dict(_trained(wanted, out, f"{experiment.name}: training", train))
    filled = [_cell(cell, chosen[cell.place], runs[cell.place], results, out, data_dir) for cell in cells]
    if experiment.quick:  # its numbers mean nothing beside published ones
        filled = [cell | {"difference": None} for cell in filled]
    record = {
        "format": FORMAT,
        "name": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "profile": experiment.profile,
        "quick": experiment.quick,
        "figure": experiment.figure,
        "pending": experiment.pending,
        "seeds": list(range(seeds)),
        "cells": filled,
        "choices": _choices(experiment, chosen),
        "claims": _claims(experiment, filled),
        "notes": [*experiment.notes, *_notes(results.values())],
        "about": _about([*scored.values(), *results.values()]),
    }
    write_json(record_file(out, experiment), record)
    return record


def judged_again(record: dict[str, Any], experiment: Experiment) -> dict[str, Any]:
    """The record with the claims that the experiment makes now, judged by the recorded values."""
    return record | {"claims": _claims(experiment, record["cells"])}


def pooled(experiments: Sequence[Experiment], *, seeds: int, out: Path, train: Train) -> None:
    """Train what these experiments need: first everything that strengths are chosen by, then everything that is reported, a stream at a
    time. A stream whose data is missing is left to its own experiment, which says so."""
    cells = [cell for experiment in experiments for cell in experiment.cells]
    scored: dict[Run, Result] = {}
    for place, runs in _trials(cells, out):
        scored |= _by_stream(runs, place, f"all: {CHOOSE}", train)
    ready = [cell for cell in cells if all(run in scored for run in trials(cell))]
    _by_stream([run for cell in ready for run in _finals(cell, choose(cell, scored), seeds)], out, "all: training", train)


def _by_stream(runs: Iterable[Run], place: Path, what: str, train: Train) -> dict[Run, Result]:
    streams: dict[str, list[Run]] = {}
    for run in dict.fromkeys(runs):
        streams.setdefault(run.stream, []).append(run)
    found: dict[Run, Result] = {}
    for name, some in streams.items():
        with contextlib.suppress(DataError):
            found |= dict(_trained(some, place, f"{what}, {name}", train))
    return found


def _trials(cells: Sequence[Cell], out: Path) -> Iterator[tuple[Path, list[Run]]]:
    """The runs that candidates are scored by, and where they are kept."""
    for on_test, place in ((False, out / CHOOSING), (True, out)):
        yield place, list(dict.fromkeys(run for cell in cells if cell.choice.on_test is on_test for run in trials(cell)))


def _trained(runs: Sequence[Run], place: Path, what: str, train: Train) -> Iterator[tuple[Run, Result]]:
    return zip(runs, train(runs, place, what), strict=True) if runs else iter(())


def _finals(cell: Cell, chosen: Chosen, seeds: int) -> list[Run]:
    return [] if chosen.index is None else [final(cell, cell.candidates[chosen.index], seed) for seed in range(seeds)]


# -------------------------------------------------------------------------------------------------------------- the record
def _cell(cell: Cell, chosen: Chosen, runs: list[Run], results: dict[Run, Result], out: Path, data_dir: Path | None) -> dict[str, Any]:
    measure = MEASURES[cell.value]
    rows = []
    for run in runs:
        result = results[run]
        made = Made(result, out, data_dir)
        done = result.status == "done"
        rows.append(
            {
                "seed": run.seed,
                "key": run.key,
                "status": result.status,
                "error": result.error,
                "value": _plain(measure.value(made)) if done else None,
                "detail": measure.detail(made) if done else None,
            }
        )
    values = [row["value"] for row in rows if row["value"] is not None]
    mean, std = spread(values) if values else (math.nan, math.nan)
    status = "pending" if not cell.candidates else "failed" if not values else "partly failed" if len(values) < len(rows) else "done"
    error = ""
    if chosen.index is None and cell.candidates:
        error = f"all {len(cell.candidates)} candidates failed while choosing"
    picked = cell.candidates[chosen.index] if chosen.index is not None else None
    return {
        "row": cell.row,
        "column": cell.column,
        "value": cell.value,
        "heading": measure.heading,
        "unit": measure.unit,
        "published": cell.published,
        "mean": _plain(mean),
        "std": _plain(std),
        "difference": _plain(mean - cell.published) if cell.published is not None else None,
        "status": status,
        "error": error,
        "method": described(picked, cell.candidates) if picked else "",
        "strength": picked.sparsify.strength if picked else None,
        "run": dataclasses.replace(picked, **cell.then).as_dict() if picked else None,
        "on_test": picked is not None and picked.select == "best-on-test",
        "runs": rows,
    }


def described(run: Run, candidates: Sequence[Run]) -> str:
    """The method, with whatever else the candidates differ in."""
    others = [name for name in ("model", "lr", "schedule", "augment", "anchor") if len({getattr(c, name) for c in candidates}) > 1]
    said = [f"{name} {getattr(run, name):g}" if name == "lr" else str(getattr(run, name)) for name in others]
    return ", ".join([run.method, *said])


def _choices(experiment: Experiment, chosen: dict[Place, Chosen]) -> list[dict[str, Any]]:
    """How each set of candidates was decided, once for all cells that share it."""
    found: dict[Any, dict[str, Any]] = {}
    for cell in experiment.cells:
        if len(cell.candidates) < 2:
            continue
        pick = chosen[cell.place]
        key = (cell.candidates, cell.choice)
        if key not in found:
            found[key] = {
                "cells": [],
                "by": cell.choice.by,
                "seeds": list(cell.choice.seeds),
                "tasks": first_tasks(cell),
                "chosen": pick.index,
                "edges": list(pick.edges),
                "candidates": [
                    {
                        "method": described(run, cell.candidates),
                        "scores": [_plain(score) for score in scores],
                        "keys": [trial(run, seed, cell.choice).key for seed in cell.choice.seeds],
                    }
                    for run, scores in zip(cell.candidates, pick.scores, strict=True)
                ],
            }
        found[key]["cells"].append([cell.row, cell.column])
    return list(found.values())


def _claims(experiment: Experiment, cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    done = {(c["row"], c["column"]): [run for run in c["runs"] if run["value"] is not None] for c in cells}
    values = {place: {run["seed"]: run["value"] for run in runs} for place, runs in done.items()}
    averages = [(place, done[place]) for c in cells if c["value"] == "average" and done[place := (c["row"], c["column"])]]
    tasks = max((len(runs[0]["detail"]) for _, runs in averages), default=0)
    by_task = [
        {place: {run["seed"]: run["detail"][t] for run in runs} for place, runs in averages if t < len(runs[0]["detail"])}
        for t in range(tasks)
    ]
    return [_claim(claim, *judged(claim, values, by_task)) for claim in experiment.claims]


def _claim(claim: Claim, verdict: str, parts: Sequence[Judged]) -> dict[str, Any]:
    return {
        "text": claim.text,
        "ours": claim.ours,
        "verdict": verdict,
        "parts": [
            {
                "text": str(p.part),
                "a": list(p.part.a),
                "b": None if p.part.b is None else list(p.part.b),
                "relation": p.part.relation,
                "margin": p.part.margin,
                "published": p.part.published,
                "mean": _plain(p.mean),
                "low": _plain(p.low),
                "high": _plain(p.high),
                "seeds": p.seeds,
                "task": p.task,
                "verdict": p.verdict,
            }
            for p in parts
        ],
    }


def _notes(results: Iterable[Result]) -> list[str]:
    return list(dict.fromkeys(str(note) for result in results for note in result.about.get("notes") or ()))


def _about(results: Sequence[Result]) -> dict[str, Any]:
    """What it was made with: all machines and commits that took part, and the time its runs took, each its share of its fleet's."""

    def every(name: str) -> list[str]:
        return list(dict.fromkeys(str(r.about[name]) for r in results if r.about.get(name)))

    unique = {r.run.key: r for r in results}.values()
    seconds = sum(float(r.about.get("seconds", 0)) / float(r.about.get("fleet", 1)) for r in unique)
    here = machine()
    return {
        "runs": len(unique),
        "failed": sum(r.status != "done" for r in unique),
        "seconds": round(seconds, 3),
        "hardware": every("hardware") or [here["hardware"]],
        "torch": every("torch"),
        "commit": every("commit") or [here["commit"]],
    }


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
