"""Recorded experiments → tables: cells beside published values, claims with verdicts, how strengths were chosen.

A record is the JSON that `selfless reproduce` wrote, used as it is. `marked` adds what its reader must know about each cell: that it
failed, that its runs are missing from the folder, or that the experiment is written differently now (stale).
"""

from __future__ import annotations

import csv as csv_format
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfless.report.tables import line_of, tex

if TYPE_CHECKING:
    from rich.console import RenderableType

Record = dict[str, Any]
FORMAT = 1
ACROSS = 4  # columns of a table in a terminal
VERDICTS = {"holds": "✓", "fails": "✗", "undecided": "?", "missing": "–"}
BY = {
    "held-out": "on held-out data",
    "test": "on the test data",
    "rule-largest": "by the rule of thumb, largest",
    "rule-smallest": "by the rule of thumb, smallest",
}
NOT_THE_PAPERS = "not in the paper"  # the source of an experiment of our own
ON_TEST = "chosen on test data (the epoch, or the strength), so the accuracy is optimistic"


def load(folder: Path) -> list[Record]:
    """Every record below `folder`, by name."""
    return [read(path) for path in sorted(folder.rglob("experiments/*.json"))]


def read(path: Path) -> Record:
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']}, not {FORMAT}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a record of this version ({error}); delete it, or write it again: selfless reproduce") from error
    return record | {"folder": str(path.parent.parent)}


def marked(record: Record, declared: set[str] | None = None, grids: Mapping[tuple[str, str], set[str]] | None = None) -> Record:
    """The record with `marks` in each cell: "failed", "missing", "stale", "other grid", "on test", "not run". `declared`: the keys of
    today's runs; `grids`: those that each cell is chosen by today."""
    tried = {
        tuple(place): {key for c in choice["candidates"] for key in c["keys"]} for choice in record["choices"] for place in choice["cells"]
    }
    chosen_on_test = {tuple(place) for choice in record["choices"] if choice["by"] == "test" for place in choice["cells"]}
    cells = []
    for cell in record["cells"]:
        keys, place = [run["key"] for run in cell["runs"]], (cell["row"], cell["column"])
        marks = []
        if cell["status"] == "pending":
            marks.append("not run")
        if "failed" in cell["status"]:
            marks.append(cell["status"])
        if any(not metrics_file(record, key).is_file() for key in keys):
            marks.append("missing")
        if declared is not None and any(key not in declared for key in keys):
            marks.append("stale")
        elif grids is not None and keys and tried.get(place, set()) != grids.get(place, set()):
            marks.append("other grid")
        if cell["on_test"] or place in chosen_on_test:
            marks.append("on test")
        cells.append(cell | {"marks": marks})
    return record | {"cells": cells}


def metrics_file(record: Record, key: str) -> Path:
    return Path(record["folder"]) / key / "metrics.json" if "folder" in record else Path(key)


MEANING = {
    "not run": "nothing is run yet",
    "failed": "every run failed",
    "partly failed": "some runs failed; the mean is over the others",
    "missing": "the recorded runs are not all in this folder",
    "stale": "the experiment is written differently now; run it again",
    "other grid": "chosen from other candidates than the experiment has now",
    "on test": ON_TEST,
}


def keys(records: Sequence[Record]) -> set[str]:
    """The runs they report."""
    return {run["key"] for record in records for cell in record["cells"] for run in cell["runs"]}


def rows_and_columns(record: Record) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(c["row"] for c in record["cells"])), list(dict.fromkeys(c["column"] for c in record["cells"]))


def at(record: Record) -> dict[tuple[str, str], dict[str, Any]]:
    return {(c["row"], c["column"]): c for c in record["cells"]}


def text(value: float | None, digits: int = 2, signed: bool = False) -> str:
    """12.3 → "12.30"; with a true minus sign; "–" where there is none."""
    if value is None or math.isnan(value):
        return "–"
    shown = f"{round(value, digits) + 0.0:{'+' if signed else ''}.{digits}f}"
    return shown.replace("-", "−")


def value(cell: Mapping[str, Any]) -> str:
    digits = 1 if cell["unit"] == "count" else 2
    spread = f" ± {cell['std']:.{digits}f}" if cell["std"] is not None else ""
    return text(cell["mean"], digits) + spread


def beside(cell: Mapping[str, Any]) -> str:
    """ "published 95.83 (+0.29)", or nothing."""
    if cell["published"] is None:
        return ""
    gap = f" ({text(cell['difference'], 2, signed=True)})" if cell["difference"] is not None else ""
    return f"published {text(cell['published'])}{gap}"


def interval(part: Mapping[str, Any]) -> str:
    """ "+3.12 [+2.80, +3.44]; published +3.10"."""
    if part["mean"] is None:
        return "–"
    signed = part["b"] is not None  # a difference; else a value
    span = f" [{text(part['low'], 2, signed)}, {text(part['high'], 2, signed)}]" if part["low"] is not None else " (one seed: no interval)"
    where = f" on task {part['task']}, the worst" if part.get("task") else ""
    told = f"; published {text(part['published'], 2, True)}" if part["published"] is not None else ""
    return text(part["mean"], 2, signed) + span + where + told


def judged(record: Record) -> list[dict[str, Any]]:
    """The claims whose verdicts are shown: none of a quick version, which proves nothing."""
    return [] if record["quick"] else record["claims"]


def unjudged(record: Record) -> list[str]:
    """What is said of a quick version's claims instead, a line each."""
    texts = [claim["text"] for claim in record["claims"]] if record["quick"] else []
    return ["a quick version judges no claims:", *texts] if texts else []


def tally(records: Sequence[Record], ours: bool | None = None) -> dict[str, int]:
    """How many claims hold, fail, are undecided, missing: of all of them, of `ours`, or of the paper's (ours=False)."""
    found = [claim["verdict"] for record in records for claim in judged(record) if ours is None or is_ours(record, claim) is ours]
    return {verdict: found.count(verdict) for verdict in VERDICTS}


def is_ours(record: Record, claim: Mapping[str, Any]) -> bool:
    """Whether a claim is not the paper's."""
    return record["source"] == NOT_THE_PAPERS or bool(claim.get("ours"))


def heading(record: Record) -> str:
    small = ", quick version: its numbers mean nothing" if record["quick"] else ""
    return f"{record['name']} ({record['source']}), profile {record['profile']}{small}"


def chosen(record: Record) -> list[str]:
    """How strengths were chosen, a line a set of candidates."""
    lines = []
    for choice in record["choices"]:
        rows = ", ".join(dict.fromkeys(row for row, _ in choice["cells"]))
        columns = ", ".join(dict.fromkeys(column for _, column in choice["cells"] if column))
        seeds = f"seed{'s' * (len(choice['seeds']) > 1)} {', '.join(map(str, choice['seeds']))}"
        picked = "none of them finished" if choice["chosen"] is None else choice["candidates"][choice["chosen"]]["method"]
        first = f" of the first {choice['tasks']} tasks" if choice.get("tasks") else ""
        best = f"{rows} ({columns}): {picked}, of {len(choice['candidates'])} candidates {BY[choice['by']]}{first}, {seeds}"
        lines.append("; ".join([best, *choice["edges"]]))
    return lines


def settings(record: Record) -> tuple[list[str], dict[tuple[str, str], list[str]]]:
    """How its runs are trained, beside the method: what all cells have in common, and cell by cell what they have not."""
    told = {place: _told(cell["run"]) for place, cell in at(record).items() if cell["run"] is not None}
    names = list(dict.fromkeys(name for some in told.values() for name in some))
    common = [name for name in names if len({some.get(name) for some in told.values()}) == 1]
    apart = {place: [said for name, said in some.items() if name not in common and said] for place, some in told.items()}
    return [said for name in common if (said := next(iter(told.values()))[name])], apart


def _told(run: Mapping[str, Any]) -> dict[str, str]:
    """Field → words; none for what most runs leave as it is."""
    words = {
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
        "ramp": f"λ grows over {run['ramp']} epochs" if run.get("ramp") else "",
    }
    given = {**run["stream_options"], **run["model_options"]}
    return words | {key: f"{key} {value}" for key, value in given.items()}


def made(record: Record) -> str:
    """ "515 runs, 109 s of training, NVIDIA H200, commit b66d191"."""
    about = record["about"]
    runs = f"{about['runs']} runs" + f", {about['failed']} of them failed" * bool(about["failed"])
    return f"{runs}, {about['seconds']:.0f} s of training, {', '.join(about['hardware'])}, commit {', '.join(about['commit'])}"


def remarks(record: Record) -> list[str]:
    """Footnotes: what its marks mean, and its notes."""
    marks = dict.fromkeys(mark for cell in record["cells"] for mark in cell.get("marks", ()))
    return [*(f"{mark}: {MEANING[mark]}" for mark in marks), *record["notes"], *([record["pending"]] if record["pending"] else [])]


# ------------------------------------------------------------------------------------------------------------------ tables
def terminal(record: Record) -> RenderableType:
    """For `rich.print`: the cells, the claims, and how strengths were chosen."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if any("marks" not in cell for cell in record["cells"]):
        record = record | {"cells": [cell | {"marks": []} for cell in record["cells"]]}
    rows, columns = rows_and_columns(record)
    cells = at(record)
    tables: list[RenderableType] = []
    for some in [columns[k : k + ACROSS] for k in range(0, len(columns), ACROSS)]:  # what is wider than a terminal is broken in words
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("")
        for column in some:
            table.add_column(column or record["title"], justify="right")
        for row in rows:
            found = [cells.get((row, column)) for column in some]
            if any(cell is not None for cell in found):
                table.add_row(row, *("" if cell is None else _lines(cell) for cell in found))
        tables += [Text(), table] if tables else [table]
    claims = Table(box=None, pad_edge=False, show_header=False)
    for number, line in enumerate(unjudged(record)):
        claims.add_row(Text(f"  {line}" if number else line))
    for claim in judged(record):
        style = {"holds": "green", "fails": "red", "undecided": "yellow"}.get(claim["verdict"], "dim")
        claims.add_row(Text(f"{VERDICTS[claim['verdict']]} {claim['verdict']}", style=style), Text(claim["text"]))
        for part in claim["parts"]:
            claims.add_row("", Text(f"{part['text']}: {interval(part)}", style="dim"))
    below = [Text(f"– {line}", style="dim") for line in (*chosen(record), *remarks(record))]
    title = Text(f"\n{heading(record)}: {record['title']}", style="bold")
    return Group(title, *tables, Text(), claims, *below, Text(made(record), style="dim"), Text())


def _lines(cell: Mapping[str, Any]) -> str:
    """A cell of `terminal`: its value, the published one, its marks or what went wrong."""
    return "\n".join(filter(None, [value(cell), beside(cell), " ".join(cell["marks"] or ([cell["error"]] if cell["error"] else []))]))


def _matrix(record: Record) -> list[list[str]]:
    """Head and rows as text, published values and differences in columns of their own where there are any."""
    rows, columns = rows_and_columns(record)
    cells = at(record)
    known = {column for (_, column), cell in cells.items() if cell["published"] is not None}
    lines = [["", *(t for c in columns for t in ([c or "accuracy", "published", "difference"] if c in known else [c or "accuracy"]))]]
    for row in rows:
        line = [row]
        for column in columns:
            cell = cells.get((row, column))
            marks = f" ({', '.join(cell['marks'])})" if cell is not None and cell.get("marks") else ""
            line.append("" if cell is None else value(cell) + marks)
            if column in known:
                line += ["", ""] if cell is None else [text(cell["published"]), text(cell["difference"], 2, True)]
        lines.append(line)
    return lines


def markdown(records: Sequence[Record]) -> str:
    parts = []
    for record in records:
        head, *rows = _matrix(record)
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        parts += [f"## {heading(record)}", record["title"] + ".", "\n".join(map(line_of, lines))]
        if told := unjudged(record):
            parts += [told[0].capitalize(), "\n".join(f"* {line}" for line in told[1:])]  # another bullet, another list than the one below
        if found := judged(record):
            claims = [["verdict", "claim", "difference, 95 % interval"], ["---"] * 3]
            claims += [[c["verdict"], c["text"], "<br>".join(f"{p['text']}: {interval(p)}" for p in c["parts"])] for c in found]
            parts.append("\n".join(map(line_of, claims)))
        common, _ = settings(record)
        trained = [f"Trained with: {', '.join(common)}"] if common else []
        parts.append("\n".join(f"- {line}" for line in (*trained, *chosen(record), *remarks(record), made(record))))
    return "\n\n".join(filter(None, parts)) + "\n"


def latex(records: Sequence[Record]) -> str:
    """A booktabs tabular an experiment; claims as comments above it."""
    parts = [r"% \usepackage{booktabs}"]
    for record in records:
        head, *rows = [[tex(t) for t in line] for line in _matrix(record)]
        lines = [f"% {heading(record)}: {record['title']}"]
        lines += [f"% {line}" for line in (*unjudged(record), *(f"{claim['verdict']}: {claim['text']}" for claim in judged(record)))]
        lines += [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule", " & ".join(head) + r" \\", r"\midrule"]
        lines += [" & ".join(row) + r" \\" for row in rows]
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}", *(rf"\par {tex(line)}." for line in remarks(record))]))
    return "\n\n".join(parts) + "\n"


def csv(records: Sequence[Record]) -> str:
    """A row a cell and a row a comparison, at full precision, in percent (or counts)."""
    file = io.StringIO()
    rows = csv_format.writer(file, lineterminator="\n")
    rows.writerow("experiment profile quick kind row column mean std low high seeds published difference status method".split())
    for record in records:
        start = [record["name"], record["profile"], record["quick"]]
        for cell in record["cells"]:
            seeds = sum(run["value"] is not None for run in cell["runs"])
            numbers = [_full(cell["mean"]), _full(cell["std"]), "", "", seeds, _full(cell["published"]), _full(cell["difference"])]
            status = "; ".join(cell.get("marks") or [cell["status"]])
            rows.writerow([*start, "cell", cell["row"], cell["column"], *numbers, status, cell["method"]])
        for claim in record["claims"]:
            for part in claim["parts"]:
                numbers = [_full(part["mean"]), "", _full(part["low"]), _full(part["high"]), part["seeds"], _full(part["published"]), ""]
                status = "not judged" if record["quick"] else part["verdict"]
                rows.writerow([*start, "claim", part["text"], claim["text"], *numbers, status, ""])
    return file.getvalue()


def _full(number: float | None) -> str:
    return "" if number is None else repr(float(number))
