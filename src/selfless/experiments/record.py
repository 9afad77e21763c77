"""The record of an experiment as JSON: filled cells, how they were chosen, claims with verdicts, hardware and commits of the runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfless.experiments.base import Cell, Choice, Claim, Experiment, Place
from selfless.experiments.choosing import RecordedScore, Scored, Selection, first_tasks, trial
from selfless.experiments.claims import JudgedClaim, judge_claim
from selfless.experiments.measures import MEASURES, FinishedRun, MissingCheckpoint
from selfless.metrics import spread
from selfless.runner.machine import machine
from selfless.spec import Result, Run


def fill_cell(
    cell: Cell,
    chosen: Selection,
    runs: list[Run],
    results: Mapping[Run, Result],
    out: Path,
    data_dir: Path | None,
    before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a cell of the record: the chosen run, its value for each seed, mean and spread.

    before   the record that this one replaces: it has the values of runs whose checkpoints were not kept
    """
    measure = MEASURES[cell.value]
    known = [
        old["runs"] for old in (before or {}).get("cells", ()) if (old["row"], old["column"], old["value"]) == (*cell.place, cell.value)
    ]
    recorded = {row["key"]: row for rows in known for row in rows if row["value"] is not None}
    rows = []
    for run in runs:
        result = results[run]
        finished = FinishedRun(result, out, data_dir)
        measured: tuple[Any, Any] = (None, None)
        if result.status == "done":
            try:
                measured = _plain(measure.value(finished)), measure.detail(finished)
            except MissingCheckpoint:
                if run.key not in recorded:
                    raise
                measured = recorded[run.key]["value"], recorded[run.key]["detail"]
        value, detail = measured
        rows.append({"seed": run.seed, "key": run.key, "status": result.status, "error": result.error, "value": value, "detail": detail})
    values = [row["value"] for row in rows if row["value"] is not None]
    mean, std = spread(values) if values else (math.nan, math.nan)
    status = "pending" if not cell.candidates else "failed" if not values else "partly failed" if len(values) < len(rows) else "done"
    error = ""
    if chosen.index is None and cell.candidates:
        error = f"all {len(chosen.candidates)} candidates failed while choosing"
    picked = chosen.candidates[chosen.index] if chosen.index is not None else None
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
        "method": describe(picked, chosen.candidates) if picked else "",
        "strength": picked.sparsify.strength if picked else None,
        "run": dataclasses.replace(picked, **cell.then).as_dict() if picked else None,
        "on_test": picked is not None and picked.select == "best-on-test",
        "runs": rows,
    }


def describe(run: Run, candidates: Sequence[Run]) -> str:
    """Return the method, with all other settings in which the candidates differ."""
    differing = [name for name in ("model", "lr", "schedule", "augment", "anchor") if len({getattr(c, name) for c in candidates}) > 1]
    values = [f"{name} {getattr(run, name):g}" if name == "lr" else str(getattr(run, name)) for name in differing]
    return ", ".join([run.method, *values])


def list_choices(experiment: Experiment, chosen: Mapping[Place, Selection], scored: Mapping[Run, Scored]) -> list[dict[str, Any]]:
    """Return how each set of candidates was chosen from, once for all cells that share the set.

    scored   the runs that chose; their seconds and custom files are recorded, so that a later call can use the scores (`recorded`)
    """
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
                **_rounds(cell.choice, len(cell.candidates)),
                "tasks": first_tasks(cell),
                "chosen": pick.index,
                "edges": list(pick.edges),
                "candidates": [
                    {
                        "method": describe(run, pick.candidates),
                        "scores": [_plain(score) for score in scores],
                        **_trained([trial(run, seed, cell.choice) for seed in cell.choice.all_seeds[: len(scores)]], scored),
                    }
                    for run, scores in zip(pick.candidates, pick.scores, strict=True)
                ],
            }
        found[key]["cells"].append([cell.row, cell.column])
    return list(found.values())


def _trained(runs: Sequence[Run], scored: Mapping[Run, Scored]) -> dict[str, Any]:
    """Return the keys and seconds of the runs that scored a candidate, and the digest of its custom files if there are some."""
    files = next((digest for run in runs if (digest := _files(scored[run]))), "")
    times = [_seconds(scored[run]) for run in runs]
    return {"keys": [run.key for run in runs], "seconds": times} | ({"made_from": files} if files else {})


def _files(result: Scored) -> str:
    return result.made_from if isinstance(result, RecordedScore) else str(result.about.get("made_from", ""))


def _seconds(result: Scored) -> float | None:
    """Return the training time of a run; the time of a fleet is divided among its members. None if it is not known."""
    if isinstance(result, RecordedScore):
        return result.seconds
    return round(float(result.about.get("seconds", 0)) / float(result.about.get("fleet", 1)), 3)


def _rounds(choice: Choice, declared: int) -> dict[str, Any]:
    """Return what a choice of several rounds adds: who goes on, by which seeds, and how many candidates the grid had at first."""
    if not choice.rounds:
        return {}
    return {"rounds": [[count, list(seeds)] for count, seeds in choice.rounds], "extend": choice.extend, "declared": declared}


def judge_claims(experiment: Experiment, cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every claim of the experiment with its verdict, by the values of filled cells."""
    done = {(c["row"], c["column"]): [run for run in c["runs"] if run["value"] is not None] for c in cells}
    values = {place: {run["seed"]: run["value"] for run in runs} for place, runs in done.items()}
    averages = [(place, done[place]) for c in cells if c["value"] == "average" and done[place := (c["row"], c["column"])]]
    tasks = max((len(runs[0]["detail"]) for _, runs in averages), default=0)
    by_task = [
        {place: {run["seed"]: run["detail"][t] for run in runs} for place, runs in averages if t < len(runs[0]["detail"])}
        for t in range(tasks)
    ]
    most = {cell.place: cell.most_seeds for cell in experiment.cells if cell.most_seeds is not None}
    return [_claim(claim, judge_claim(claim, values, by_task), most) for claim in experiment.claims]


def _claim(claim: Claim, judged: JudgedClaim, most_seeds: Mapping[Place, int]) -> dict[str, Any]:
    limits = [most_seeds[place] for p in claim.parts for place in (p.a, p.b) if place is not None and place in most_seeds]
    return {
        "text": claim.text,
        "ours": claim.ours,
        "repeats": claim.repeats,
        "verdict": judged.verdict,
        "p": _plain(judged.p),
        **({"most_seeds": min(limits)} if limits else {}),
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
                "std": _plain(p.std),
                "bootstrap": [_plain(end) for end in p.bootstrap],
                "seeds": p.seeds,
                "task": p.task,
                "of": p.of,
                "verdict": p.verdict,
            }
            for p in judged.parts
        ],
    }


def list_notes(results: Iterable[Result]) -> list[str]:
    """Return the notes of the runs on their data, such as that a set is reduced; each note once."""
    return list(dict.fromkeys(str(note) for result in results for note in result.about.get("notes") or ()))


def describe_runs(results: Mapping[Run, Scored], before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the machines, the commits and the training time of the runs.

    before   the record that this one continues: its time counts for the runs that it has. For others that have no time, "untimed" says
             how many these are.
    """
    keys = {key for choice in before["choices"] for one in choice["candidates"] for key in one["keys"]} if before is not None else set()
    keys |= {run["key"] for cell in before["cells"] for run in cell["runs"]} if before is not None else set()

    def every(name: str) -> list[str]:
        some = [r.about.get(name) or () if isinstance(r, RecordedScore) else (r.about.get(name),) for r in results.values()]
        return list(dict.fromkeys(str(value) for values in some for value in values if value))

    failed = sum(not isinstance(r, RecordedScore) and r.status != "done" for r in results.values())
    times = [_seconds(r) for run, r in results.items() if run.key not in keys]
    spent = float(before["about"]["seconds"]) if before is not None else 0.0
    here = machine()
    return {
        "runs": len(results),
        "failed": failed,
        "seconds": round(spent + sum(seconds for seconds in times if seconds is not None), 3),
        **({"untimed": times.count(None)} if None in times else {}),
        "hardware": every("hardware") or [here["hardware"]],
        "torch": every("torch"),
        "commit": every("commit") or [here["commit"]],
    }


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
