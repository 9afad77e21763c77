"""One self-contained HTML page of everything recorded: no network, no scripts; for a screen, a phone and paper, light and dark."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfless.report.claims import claim_rows, profiles_of
from selfless.report.gaps import HEADINGS, SHOWN, gaps
from selfless.report.groups import Group, best, differences, footnotes, groups, settings, why_not_compared
from selfless.report.headline import headline
from selfless.report.markup import breakable, counted, inches, inline, link
from selfless.report.places import Place, class_names, divide, is_numbered, task_names, trial_rows
from selfless.report.records import Record, keys, result_file
from selfless.report.sections import section, support_sentence, verdicts_sentence
from selfless.report.tables import BESIDE, MEASURES

if TYPE_CHECKING:
    from selfless.spec import Result

CAPTIONS = {
    "per-task": "Accuracy on each task after the last one; averages in the legend.",
    "over-time": "Average accuracy over the tasks seen so far, after each task.",
    "first-task": "What is left of the first task: accuracy on it after each task.",
    "capacity": "Room for the tasks to come: parameters whose importance is still below the threshold{}.",
}
MOST = 14  # groups that a figure can tell apart; of more, those with the highest averages are drawn
Content = dict[str, Any]


def write(
    results: Sequence[Result],
    path: Path | str,
    title: str = "selfless",
    *,
    out: Path | str | None = None,
    date: str | None = None,
    experiments: Sequence[Record] = (),
) -> Path:
    """Write the page at `path`; return `path`.

    out           the folder of results for links; by default the folder of the page
    experiments   records of `selfless reproduce` (`report.experiments.load`, `marked`): they come first, and the results that they report
                  are not listed again
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from selfless.files import write_text

    path = Path(path)
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    today = date or datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    reported = keys(experiments)
    places, trials = divide([r for r in results if r.run.key not in reported])
    folder = Path(out) if out is not None else path.parent
    parts = [_content(place, path.parent, folder) | {"id": f"place-{i + 1}"} for i, place in enumerate(places)]
    content: dict[str, Any] = {"experiments": [section(record, path.parent) for record in experiments], "places": parts}
    paper = [row for row in claim_rows(experiments) if not row.ours and not row.leading.get("repeats")]
    content |= {"claims": paper, "profiles": profiles_of(experiments)}
    content |= {"trials": trial_rows(trials), "headings": [heading for heading, _ in MEASURES.values()]}
    content |= _opening(experiments, parts, places, trials)
    write_text(path, templates.get_template("page.html.jinja").render(content, title=title, date=today, breakable=breakable))
    return path


def _opening(experiments: Sequence[Record], parts: Sequence[dict[str, Any]], places: Sequence[Place], trials: Sequence[Result]) -> Content:
    """Return the sentences at the top of the page: of the experiments, or of the only place, or how much there is."""
    if experiments:
        return {"headline": verdicts_sentence(experiments), "support": support_sentence(experiments), "facts": []}
    if len(parts) == 1:
        return {name: parts[0][name] for name in ("headline", "support", "facts")}
    if not parts:
        said = f"{counted(len(trials), 'trial')} of strengths." if trials else headline([]).sentence
        return {"headline": said, "support": "", "facts": []}
    streams, models = ({getattr(place.results[0].run, name) for place in places} for name in ("stream", "model"))
    runs = sum(len(place.results) for place in places)
    return {
        "headline": f"{counted(runs, 'run')}: {counted(len(streams), 'stream')}, {counted(len(models), 'network')}.",
        "support": "Results of different streams or networks are not compared; each has its own section."
        + (f" {counted(len(trials), 'trial')} of strengths come last." if trials else ""),
        "facts": [],
    }


def _content(place: Place, here: Path, out: Path) -> Content:
    """Return the template's values for results of one stream and network that belong to no experiment."""
    from selfless.report import plots

    results = place.results
    found = groups(results)
    marks, notes = footnotes(found)
    drawn = results
    if len(found) > MOST:
        best_first = sorted((g for g in found if g.done), key=lambda g: -g.average.mean)
        drawn = tuple(r for g in best_first[:MOST] for r in g.results)
    flat = [settings(g.results[0]) for g in found]
    apart = differences(flat)
    point, nearest = headline(results), gaps(found)[:SHOWN]
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
        "title": place.title,
        "headline": _unbroken(point.sentence),
        "support": _unbroken(point.support),
        "facts": _facts(found),
        "rows": rows,
        "tasks": max((g.tasks for g in found), default=0),
        "names": ["" if is_numbered(u, name) else name for u, name in enumerate(task_names(found))],
        "classes": class_names(found),
        "undrawn": max(0, len([g for g in found if g.done]) - MOST),
        "notes": notes,
        "beside": {"best": top.label, "headings": HEADINGS, "gaps": nearest, "says": BESIDE} if (top := best(found)) and nearest else None,
        "why_not": why_not_compared(found),
        "figures": [(inline(f), CAPTIONS[n].format(_threshold(found)), inches(f)) for n, f in plots.figures(drawn).items()],
        "matrices": [(inline(f), inches(f)) for f in plots.matrices(drawn)],
        "shared": {key: _plain(value) for key, value in (flat[0] if flat else {}).items() if key not in apart},
    }


def _facts(found: Sequence[Group]) -> list[str]:
    """Return the settings that all runs share: data, network, tasks, epochs, seeds."""

    def same(values: Iterable[Any], unit: str = "", tail: str = "") -> str:
        value, *others = set(values) or {""}
        return "" if others else f"{counted(value, unit)}{tail}" if unit else str(value)

    facts = [same(g.run.stream for g in found), same(g.run.model for g in found), same((g.tasks for g in found), "task")]
    facts += [same((g.run.epochs for g in found), "epoch", " a task"), same((len(g.results) for g in found), "seed")]
    return [*filter(None, facts), counted(sum(len(g.results) for g in found), "run")] if found else []


def _run(result: Result, group: Group, here: Path, out: Path) -> dict[str, Any]:
    """Return one row of the table of runs."""
    about, key = result.about, result.run.key
    seconds = about.get("seconds")
    together = f" (fleet of {about['fleet']})" if about.get("fleet", 1) != 1 else ""
    return {
        "seed": result.run.seed,
        "key": key,
        "href": link(result_file(out, key), here),
        "failure": group.failures.get(result.run.seed, ""),
        "average": "" if result.run.seed in group.failures else f"{100 * result.average:.2f}" if result.is_evaluated else "unknown",
        "seconds": f"{seconds:.1f}{together}" if isinstance(seconds, (int, float)) else "–",
        "about": [str(about.get(name) or "–") for name in ("hardware", "device", "torch", "selfless", "commit")],
    }


def _threshold(found: Sequence[Group]) -> str:
    values = {after["threshold"] for g in found for r in g.done for after in r.capacity if "threshold" in after}
    return f", {values.pop():g}" if len(values) == 1 else ""


def _plain(value: Any) -> str:
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _unbroken(sentence: str) -> str:
    return sentence.replace(" %", "\u00a0%").replace(" points", "\u00a0points")
