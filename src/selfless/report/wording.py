"""Records as text: values beside published ones, intervals, how strengths were chosen, with which settings the runs were trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from selfless.report.records import Cell, Place, Record, by_place

BY = {
    "held-out": "on held-out data",
    "test": "on the test data",
    "rule-largest": "by the rule of thumb, largest",
    "rule-smallest": "by the rule of thumb, smallest",
}
MEANING = {  # of the marks of `records.marked`
    "not run": "nothing is run yet",
    "failed": "every run failed",
    "partly failed": "some runs failed; the mean is over the others",
    "missing": "the recorded runs are not all in this folder",
    "stale": "the experiment is written differently now; run it again",
    "other grid": "chosen from other candidates than the experiment has now",
    "on test": "chosen on test data (the epoch, or the strength), so the accuracy is optimistic",
}


def text(value: float | None, digits: int = 2, signed: bool = False) -> str:
    """Return a number as "12.30", with a true minus sign; "–" where there is none."""
    if value is None or math.isnan(value):
        return "–"
    shown = f"{round(value, digits) + 0.0:{'+' if signed else ''}.{digits}f}"
    return shown.replace("-", "−")


def value(cell: Cell) -> str:
    """Return a cell's mean and spread: "95.99 ± 0.19"."""
    digits = 1 if cell["unit"] == "count" else 2
    spread = f" ± {cell['std']:.{digits}f}" if cell["std"] is not None else ""
    return text(cell["mean"], digits) + spread


def beside(cell: Cell) -> str:
    """Return "published 95.83 (+0.29)"; an empty string if no value was published."""
    if cell["published"] is None:
        return ""
    gap = f" ({text(cell['difference'], 2, signed=True)})" if cell["difference"] is not None else ""
    return f"published {text(cell['published'])}{gap}"


def interval(part: Mapping[str, Any]) -> str:
    """Return a comparison's difference: "+3.12 [+2.80, +3.44] (bootstrap +2.91 … +3.30); published +3.10"."""
    if part["mean"] is None:
        return "–"
    signed = part["b"] is not None  # a difference, not a value
    span = f" [{text(part['low'], 2, signed)}, {text(part['high'], 2, signed)}]" if part["low"] is not None else " (one seed: no interval)"
    if part["low"] is not None and "bootstrap" in part:
        span += f" (bootstrap {text(part['bootstrap'][0], 2, signed)} … {text(part['bootstrap'][1], 2, signed)})"
    where = f" on task {part['task']}, the worst" if part.get("task") else ""
    published = f"; published {text(part['published'], 2, True)}" if part["published"] is not None else ""
    return text(part["mean"], 2, signed) + span + where + published


def heading(record: Record) -> str:
    """Return name, source and profile in one line."""
    small = ", quick version: its numbers mean nothing" if record["quick"] else ""
    return f"{record['name']} ({record['source']}), profile {record['profile']}{small}"


def choices(record: Record) -> list[str]:
    """Return how strengths were chosen, one line per set of candidates."""
    lines = []
    for choice in record["choices"]:
        rows = ", ".join(dict.fromkeys(row for row, _ in choice["cells"]))
        columns = ", ".join(dict.fromkeys(column for _, column in choice["cells"] if column))
        seeds = f"seed{'s' * (len(choice['seeds']) > 1)} {', '.join(map(str, choice['seeds']))}"
        picked = "none of them finished" if choice["chosen"] is None else choice["candidates"][choice["chosen"]]["method"]
        first = f" of the first {choice['tasks']} tasks" if choice.get("tasks") else ""
        best = f"{rows} ({columns}): {picked}, of {len(choice['candidates'])} candidates {BY[choice['by']]}{first}, {seeds}"
        ends = [] if record["quick"] else choice["edges"]  # a quick version has two candidates, and each is an end
        lines.append("; ".join([best, *_rounds(choice), *ends]))
    return lines


def _rounds(choice: Mapping[str, Any]) -> list[str]:
    """Return the phrases of a choice in several rounds: who went on, and how many candidates were added to its grid."""
    if "rounds" not in choice:
        return []
    added = len(choice["candidates"]) - choice["declared"]
    went_on = [f"the best {count} by seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))} too" for count, seeds in choice["rounds"]]
    return [*went_on, *([f"{added} candidates were added to the grid"] if added else [])]


def settings(record: Record) -> tuple[list[str], dict[Place, list[str]]]:
    """Return the training settings besides the method: (those that all cells share, those that differ by cell)."""
    phrases = {place: _phrases(cell["run"]) for place, cell in by_place(record).items() if cell["run"] is not None}
    names = list(dict.fromkeys(name for some in phrases.values() for name in some))
    common = [name for name in names if len({some.get(name) for some in phrases.values()}) == 1]
    apart = {place: [phrase for name, phrase in some.items() if name not in common and phrase] for place, some in phrases.items()}
    return [phrase for name in common if (phrase := next(iter(phrases.values()))[name])], apart


def _phrases(run: Mapping[str, Any]) -> dict[str, str]:
    """Return field → phrase; an empty phrase for a field at its usual value."""
    phrases = {
        "stream": run["stream"],
        "model": run["model"],
        "tasks": f"{run['tasks']} task{'s' * (run['tasks'] != 1)}" if run["tasks"] else "",
        "epochs": f"{run['epochs']} epoch{'s' * (run['epochs'] != 1)}",
        "batch": f"batches of {run['batch']}",
        "lr": f"lr {run['lr']:g}",
        "momentum": f"momentum {run['momentum']:g}",
        "schedule": f"{run['schedule']} schedule",
        "anchor": f"{run['anchor']} anchor",
        "select": {"last": "last epoch", "best-on-test": "best epoch on test data"}.get(run["select"], f"epoch by {run['select']}"),
        "precision": run["precision"],
        "weight_decay": f"weight decay {run['weight_decay']:g}" if run["weight_decay"] else "",
        "augment": f"augmented: {run['augment']}" if run["augment"] != "none" else "",
        "layers": f"layers {run['layers']}" if run["layers"] != "hidden" else "",
        "alpha": f"α {run['alpha']}" if run["alpha"] != "sum" else "",
        "held_out": f"{100 * run['held_out']:g} % held out" if run["held_out"] else "",
        "optimizer": f"by {run['optimizer']}" if run.get("optimizer", "sgd") != "sgd" else "",
        "ramp": f"λ grows over {run['ramp']} epochs" if run.get("ramp") else "",
    }
    given = {**run["stream_options"], **run["model_options"]}
    return phrases | {name: f"{name} {option}" for name, option in given.items()}


def provenance(record: Record) -> str:
    """Return "515 runs, 109 s of training, NVIDIA H200, commit b66d191"."""
    about = record["about"]
    runs = f"{about['runs']} runs" + f", {about['failed']} of them failed" * bool(about["failed"])
    commits = ", ".join(filter(None, about["commit"]))  # none if the package was not in a checkout
    time = f"{about['seconds']:.0f} s of training" + f" without {about.get('untimed')} runs whose time is unknown" * bool(
        about.get("untimed")
    )
    return f"{runs}, {time}, {', '.join(about['hardware'])}" + f", commit {commits}" * bool(commits)


def remarks(record: Record) -> list[str]:
    """Return the footnotes: the meaning of the marks, the notes, and the cells that are not run yet."""
    marks = dict.fromkeys(mark for cell in record["cells"] for mark in cell.get("marks", ()))
    return [*(f"{mark}: {MEANING[mark]}" for mark in marks), *record["notes"], *([record["pending"]] if record["pending"] else [])]
