"""docs/results.md, made from records: the claims first, then a figure and a small table for each experiment, then what we changed and
what does not hold.

    python -m selfless.report.results results/reproduction results/equal > docs/results.md     # folders that are not there are skipped

An experiment is shown in its leading profile, the first of `equal`, `ours`, `paper` that is recorded; a sentence or a table row is of one
profile. The prose is `results.md.jinja`, and every number in it is taken from a record.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from selfless.report.claims import PROFILES, ClaimRow, by_experiment, claim_rows, decisive, profiles_of, table
from selfless.report.families import correct
from selfless.report.records import Record, by_place, load, rows_and_columns, tally
from selfless.report.wording import text, value

Profiles = dict[str, dict[str, Record]]  # experiment → profile → record, the leading profile first
VERDICTS = ("holds", "fails", "undecided")


class Topic(NamedTuple):
    """A paragraph of the page with a figure of the first of `names`, and a table of all of them.

    columns   the columns of these records that are the lines of the table
    rows      the rows of these records that are its columns; empty: all that have a value
    """

    title: str
    names: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[str, ...] = ()


LEADING_FOUR = ("No-Reg", "L1-Rep", "DeCov", "SLNID")
TOPICS = (
    Topic("Figure 2: nine ways to leave room, permuted MNIST", ("fig-2", "fig-2-64"), ("pMNIST 128", "pMNIST 64")),
    Topic("Figure 3: ten tasks", ("fig-3a", "fig-3a-128", "fig-3b"), ("CIFAR 256", "CIFAR 128", "Tiny ImageNet"), LEADING_FOUR),
    Topic(
        "Table 1: inhibition, locality and the discount",
        ("table-1",),
        ("pMNIST 128", "pMNIST 64", "CIFAR 256", "CIFAR 128"),
        ("No-Reg", "SNI", "SNID", "SLNI", "SLNID", "joint"),
    ),
)
OTHERS = {  # shown by a figure and a link to their values
    "table-3": "Table 3, no hard task boundaries",
    "ewc": "SLNID with EWC",
    "fig-4-top": "Figure 4, free weights by λ",
    "fig-4-bottom": "Figure 4, mean activations",
    "table-2": "Table 2 on four of its eight sets",
    "locality": "Locality",
    "rule-of-thumb": "The rule of thumb for λ",
    "rivals": "Every preserver with and without SLNID",
}
FIGURE = {
    "table-1-ours": "table-1-ours-3",
    "table-3-ours": "table-3-ours-2",
    "locality-ours": "locality-ours-2",
    "ewc-equal": "ewc-equal-3",
}  # the panel to show


def results_page(records: Sequence[Record], again: str = "") -> str:
    """Return docs/results.md. `again` is the summary of a second run (`report --against`)."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    by_name = by_experiment(records)
    rows = [row for row in claim_rows(correct(records)) if not row.ours and _leading(by_name, row.name)["profile"] in row.claims]
    content = {
        "leading": profiles_of(records)[0],
        "counts": _counts(records),
        "claims": _claims(rows, profiles_of(records)),
        "topics": [_topic(topic, by_name) for topic in TOPICS if any(name in by_name for name in topic.names)],
        "others": [_figure(_leading(by_name, name), title) for name, title in OTHERS.items() if name in by_name],
        "failed": [_failure(row) for row in rows if row.verdict == "fails"],
        "alone": _alone([row for row in rows if row.verdict == "undecided" and row.leading.get("alone") == "fails"]),
        "gap": lambda name, a, b, column: _gap(by_name, name, a, b, column),
        "again": again,
    }
    return templates.get_template("results.md.jinja").render(content)


def _counts(records: Sequence[Record]) -> list[list[str]]:
    """Return for each profile how many of the paper's claims hold, fail and are undecided: corrected, and each claim alone."""
    rows = []
    for profile in PROFILES:
        own = [record for record in records if record["profile"] == profile and not record["quick"]]
        if own:
            ways = {"": correct(own), ", each alone": own}
            for way, those in ways.items():
                found = tally(those, ours=False)
                rows.append([f"`{profile}`{way}", *(str(found[verdict]) for verdict in VERDICTS)])
    return rows


def _claims(rows: Sequence[ClaimRow], profiles: Sequence[str]) -> str:
    """Return the table of claims; one that is counted elsewhere is left out."""
    head = ["claim", "the paper's words", "where", "published", *(f"`{profile}`" for profile in profiles), "verdict"]
    shown = [
        [row.text, f"“{row.words}”" if row.words else "its numbers", row.where, row.published, *row.shown.values(), row.verdict]
        for row in rows
        if not row.leading.get("repeats")
    ]
    return table(head, shown)


def _topic(topic: Topic, by_name: Profiles) -> dict[str, Any]:
    """Return a paragraph: its title, its profile, a figure, and its table."""
    shown = [_leading(by_name, name) for name in topic.names if name in by_name]
    profiles = dict.fromkeys(record["profile"] for record in shown)
    return _figure(shown[0], topic.title) | {"profile": " and ".join(f"`{p}`" for p in profiles), "table": _small_table(topic, shown)}


def _figure(record: Record, title: str) -> dict[str, Any]:
    """Return the title and the figure of an experiment, with the place of its values."""
    name = f"{record['name']}-{record['profile']}"
    folder = Path(record["folder"]).as_posix()
    return {"title": title, "profile": f"`{record['profile']}`", "caption": record["title"], "folder": folder} | {
        "figure": FIGURE.get(name, name),
        "anchor": name,
    }


def _leading(by_name: Profiles, name: str) -> Record:
    """Return the record of an experiment in the first profile that is recorded."""
    return next(iter(by_name[name].values()))


def _small_table(topic: Topic, shown: Sequence[Record]) -> str:
    """Return methods as columns and data as lines; published values in brackets."""
    cells = {place: cell for record in shown for place, cell in by_place(record).items()}
    rows = topic.rows or tuple(
        dict.fromkeys(row for record in shown for row in rows_and_columns(record)[0] if any((row, c) in cells for c in topic.columns))
    )
    lines = [[column, *(_brief(cells.get((row, column))) for row in rows)] for column in topic.columns]
    return table(["", *rows], lines)


def _brief(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    return value(cell) + (f" ({text(cell['published'])})" if cell["published"] is not None else "")


def _alone(rows: Sequence[ClaimRow]) -> str:
    """Return one paragraph on the claims that fail only if each is taken alone; "" if there are none."""
    names = dict.fromkeys(row.name for row in rows)
    counts = ", ".join(f"`{name}` ({sum(row.name == name for row in rows)})" for name in names)
    return _wrap(f"{len(rows)} more fail only if each is taken alone: {counts}; above, “alone: fails”.") if rows else ""


def _failure(row: ClaimRow) -> str:
    """Return "- claim (`fig-2`): −1.04 [−1.45, −0.64]" in the leading profile, with its worst comparison."""
    part = decisive(row.leading)
    span = f" [{text(part['low'], 2, True)}, {text(part['high'], 2, True)}]" if part["low"] is not None else ""
    what = f", {part['text']}" if len(row.leading["parts"]) > 1 else ""
    return _wrap(f"- {row.text} (`{row.name}`): {text(part['mean'], 2, True)}{span}{what}", "  ")


def _wrap(line: str, indent: str = "") -> str:
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _gap(by_name: Profiles, name: str, a: str, b: str, column: str) -> str:
    """Return "+5.00 [+4.08, +5.91]", a − b in the leading profile, by the paired t interval."""
    from selfless.metrics import paired_t_interval, spread

    cells = by_place(_leading(by_name, name))
    x, y = ({run["seed"]: run["value"] for run in cells[row, column]["runs"]} for row in (a, b))
    seeds = sorted(x.keys() & y.keys())
    pairs = [x[s] for s in seeds], [y[s] for s in seeds]
    low, high = paired_t_interval(*pairs)
    mean, _ = spread([u - v for u, v in zip(*pairs, strict=True)])
    return f"{text(mean, 2, True)} [{text(low, 2, True)}, {text(high, 2, True)}]"


def same_verdicts(against: Path) -> str:
    """Return "39 of 46 verdicts are the same", from a file made by `selfless report DIR --against OTHER`."""
    return str(re.findall(r"\d+ of \d+ verdicts are the same", against.read_text(encoding="utf-8"))[0])


def relative_to(records: Sequence[Record], root: Path) -> list[Record]:
    """Return the records with their folders relative to the root of the repository, for links."""
    return [record | {"folder": Path(record["folder"]).resolve().relative_to(root.resolve()).as_posix()} for record in records]


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(prog="python -m selfless.report.results", description="Print docs/results.md.")
    parser.add_argument("folders", type=Path, nargs="+", help="folders of results; those that do not exist are skipped")
    parser.add_argument("--again", type=Path, help="a file made by selfless report DIR --against OTHER")
    given = parser.parse_args()
    records = [record for folder in given.folders if folder.is_dir() for record in load(folder)]
    if not records:
        sys.exit(f"{given.folders[0]} holds no record of an experiment. Make one: selfless reproduce fig-2 --out {given.folders[0]}")
    sys.stdout.write(results_page(relative_to(records, Path.cwd()), same_verdicts(given.again) if given.again else ""))


if __name__ == "__main__":
    main()
