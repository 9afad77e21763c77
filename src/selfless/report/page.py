"""All of it as one HTML page: no network, no scripts; for a screen, a phone, paper, by day and by night."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from selfless.report import experiments as recorded
from selfless.report.groups import Group, best, differences, footnotes, groups, settings
from selfless.report.headline import headline
from selfless.report.tables import MEASURES

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

    from selfless.spec import Result

CAPTIONS = {
    "per-task": "Accuracy on each task after the last one; averages in the legend.",
    "over-time": "Average accuracy over the tasks seen so far, after each task.",
    "first-task": "What is left of the first task: accuracy on it after each task.",
    "capacity": "Room for the tasks to come: parameters whose importance is still below the threshold{}.",
}


MOST = 24  # groups that a figure can tell apart; of more there are tables only


def write(
    results: Sequence[Result],
    path: Path | str,
    title: str = "selfless",
    *,
    out: Path | str | None = None,
    date: str | None = None,
    experiments: Sequence[recorded.Record] = (),
) -> Path:
    """Write the page at `path`. `out` is the results folder its links lead to (where the page is, unless said); returns `path`.

    `experiments` are records of `selfless reproduce` (report.experiments.load, marked): they come first, and `results` that they report
    are not listed again.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from selfless.files import write_text

    path = Path(path)
    rooms = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    today = date or datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    reported = recorded.keys(experiments)
    loose = [r for r in results if r.run.key not in reported]
    content = _content(loose, path.parent, Path(out) if out is not None else path.parent)
    content |= {"experiments": [_experiment(record, path.parent) for record in experiments]}
    if experiments:
        content |= {"headline": _verdicts(experiments), "support": _made(experiments), "facts": []}
    write_text(path, rooms.get_template("page.html.jinja").render(content, title=title, date=today))
    return path


def _content(results: Sequence[Result], here: Path, out: Path) -> dict[str, Any]:
    from selfless.report import plots

    found = groups(results)
    marks, notes = footnotes(found)
    drawn = results if len(found) <= MOST else []
    flat = [settings(g.results[0]) for g in found]
    apart = differences(flat)
    said = headline(results)
    rows = [
        {
            "group": group,
            "mark": mark,
            "look": look,
            "best": group is best(found),
            "values": [(group.value(name), digits) for name, (_, digits) in MEASURES.items()],
            "own": {key: _plain(values[key]) for key in apart if key in values},
            "runs": [_run(result, group, here, out) for result in group.results],
        }
        for group, mark, look, values in zip(found, marks, plots.looks(found), flat, strict=True)
    ]
    return {
        "headline": _unbroken(said.sentence),
        "support": _unbroken(said.support),
        "facts": _facts(found),
        "headings": [heading for heading, _ in MEASURES.values()],
        "rows": rows,
        "tasks": max((g.tasks for g in found), default=0),
        "names": _task_names(found),
        "notes": notes,
        "figures": [(_inline(f), CAPTIONS[n].format(_threshold(found)), _inches(f)) for n, f in plots.figures(drawn).items()],
        "matrices": [(_inline(f), _inches(f)) for f in plots.matrices(drawn)],
        "shared": {key: _plain(value) for key, value in (flat[0] if flat else {}).items() if key not in apart},
    }


def _verdicts(experiments: Sequence[recorded.Record]) -> str:
    """The point of a reproduction in a sentence."""
    whole = [record for record in experiments if not record["quick"]]
    if not whole:
        return "Quick versions only: they show that everything runs, and prove nothing."
    profiles = {profile: [r for r in whole if r["profile"] == profile] for profile in dict.fromkeys(r["profile"] for r in whole)}
    counted = {name: _counted(recorded.tally(records, ours=False)) for name, records in profiles.items()}
    said = {name: text for name, text in counted.items() if text}
    if said:
        return f"Of the paper's claims {'; '.join(f'in profile {name} {text}' if len(said) > 1 else text for name, text in said.items())}."
    own = _counted(recorded.tally(whole, ours=True))
    return f"Of our own claims {own}." if own else "Nothing is claimed."


def _counted(found: dict[str, int]) -> str:
    """ "26 of 54 hold, 13 fail, 13 undecided"; nothing of no claims."""
    tails = [f"{found['fails']} fail{'s' * (found['fails'] == 1)}"] + [f"{found[v]} {t}" for v, t in UNKNOWN.items() if found[v]]
    return f"{found['holds']} of {sum(found.values())} hold, {', '.join(tails)}" if any(found.values()) else ""


UNKNOWN = {"undecided": "undecided", "missing": "not tested yet"}


def _made(experiments: Sequence[recorded.Record]) -> str:
    said = f"{_count(len(experiments), 'experiment')}, {_count(len(recorded.keys(experiments)), 'reported run')}."
    if all(record["quick"] for record in experiments):
        return said
    own = _counted(recorded.tally(experiments, ours=True))
    if own and any(recorded.tally(experiments, ours=False).values()):
        said += f" Of our own claims {own}."
    return (
        f"{said} A claim holds when the 95 % bootstrap interval of "
        "the paired difference over seeds lies wholly on the claimed side; with few seeds such an interval is narrow: "
        "over three it is the smallest and the largest difference."
    )


def _experiment(record: recorded.Record, here: Path) -> dict[str, Any]:
    """What the page shows of one experiment."""
    from selfless.report import experiment_plots

    rows, columns = recorded.rows_and_columns(record)
    common_settings, apart = recorded.settings(record)
    every = [set(cell.get("marks", ())) for cell in record["cells"]]
    common = set.intersection(*every) if every else set()  # said once, above the table
    cells = {place: cell | {"marks": [m for m in cell.get("marks", ()) if m not in common]} for place, cell in recorded.at(record).items()}

    def link(key: str) -> str:
        file = recorded.metrics_file(record, key)
        return quote(Path(os.path.relpath(file, here)).as_posix()) if file.is_file() else ""

    return {
        "record": record,
        "id": f"{record['name']}-{record['profile']}{'-quick' * record['quick']}",
        "rows": rows,
        "columns": columns,
        "cells": {place: cell | {"text": recorded.value(cell), "beside": recorded.beside(cell)} for place, cell in cells.items()},
        "tally": recorded.tally([record], ours=record["source"] == recorded.NOT_THE_PAPERS),
        "published": any(cell["published"] is not None for cell in record["cells"]),
        "common": sorted(common),
        "marks": dict.fromkeys(mark for cell in cells.values() for mark in cell["marks"]),
        "claims": [c | {"parts": [p | {"shown": recorded.interval(p)} for p in c["parts"]]} for c in record["claims"]],
        "unjudged": recorded.unjudged(record),
        "figures": [(_inline(f), caption, _inches(f)) for caption, f in experiment_plots.figures(record).items()],
        "remarks": recorded.remarks(record),
        "settings": ", ".join(common_settings),
        "chosen": list(zip(recorded.chosen(record), record["choices"], strict=True)),
        "runs": [
            (
                cell["row"],
                cell["column"],
                ", ".join(dict.fromkeys([*cell["method"].split(", "), *apart.get((cell["row"], cell["column"]), ())])),
                [run | {"href": link(run["key"]), "shown": recorded.text(run["value"])} for run in cell["runs"]],
            )
            for cell in record["cells"]
            if cell["runs"]
        ],
    }


def _inline(figure: Figure) -> Markup:
    from markupsafe import Markup

    from selfless.report import plots

    return Markup(plots.svg(figure).replace(' xmlns="http://www.w3.org/2000/svg"', ""))  # its labels are escaped by matplotlib


def _inches(figure: Figure) -> float:
    return float(figure.get_figwidth())


def _facts(found: Sequence[Group]) -> list[str]:
    """What holds for every run, in a line: data, network, tasks, epochs, seeds."""

    def same(values: Iterable[Any], unit: str = "", tail: str = "") -> str:
        value, *others = set(values) or {""}
        return "" if others else f"{_count(value, unit)}{tail}" if unit else str(value)

    facts = [same(g.run.stream for g in found), same(g.run.model for g in found), same((g.tasks for g in found), "task")]
    facts += [same((g.run.epochs for g in found), "epoch", " a task"), same((len(g.results) for g in found), "seed")]
    return [*filter(None, facts), _count(sum(len(g.results) for g in found), "run")] if found else []


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _run(result: Result, group: Group, here: Path, out: Path) -> dict[str, Any]:
    about, key = result.about, result.run.key
    file = out / key / "metrics.json"
    seconds = about.get("seconds")
    together = f" (fleet of {about['fleet']})" if about.get("fleet", 1) != 1 else ""
    return {
        "seed": result.run.seed,
        "key": key,
        "href": quote(Path(os.path.relpath(file, here)).as_posix()) if file.exists() else "",
        "failure": group.failures.get(result.run.seed, ""),
        "average": "" if result.run.seed in group.failures else f"{100 * result.average:.2f}",
        "seconds": f"{seconds:.1f}{together}" if isinstance(seconds, (int, float)) else "–",
        "about": [str(about.get(name) or "–") for name in ("hardware", "device", "torch", "selfless", "commit")],
    }


def _task_names(found: Sequence[Group]) -> list[str]:
    """The names of the tasks, where all groups have the same."""
    names = {tuple(map(str, r.about.get("tasks") or ())) for g in found for r in g.results}
    return list(names.pop()) if len(names) == 1 else []


def _threshold(found: Sequence[Group]) -> str:
    values = {after["threshold"] for g in found for r in g.done for after in r.capacity if "threshold" in after}
    return f", {values.pop():g}" if len(values) == 1 else ""


def _plain(value: Any) -> str:
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _unbroken(sentence: str) -> str:
    return sentence.replace(" %", "\u00a0%").replace(" points", "\u00a0points")
