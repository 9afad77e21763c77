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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from selfless.report.claims import PROFILES, ClaimRow, by_experiment, claim_rows, decisive, profiles_of, table
from selfless.report.families import correct
from selfless.report.records import Record, by_place, load, rows_and_columns, tally
from selfless.report.wording import text, value

Profiles = dict[str, dict[str, Record]]  # experiment → profile → record, the leading profile first
VERDICTS = ("holds", "fails", "undecided")
EXPLANATION = (
    "A difference has a 95 % interval by the paired t test. Verdicts are [corrected for the number of claims](experiments.md#verdicts) of "
    "each experiment."
)


PLACES = {  # stream → the experiments that have it, and its column; table 1 has all seeds of figure 3, but not all rows
    "CIFAR-100, 256 units": (("table-1", "fig-3a"), "CIFAR 256"),
    "128 units": (("table-1", "fig-3a-128"), "CIFAR 128"),
    "Tiny ImageNet": (("fig-3b",), "Tiny ImageNet"),
    "permuted MNIST": (("fig-2",), "pMNIST 128"),
}


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
    "all-layers": "SLNID, SNID and DeCov in all layers",
    "augmented": "Every row with crops and flips",
    "rates": "Rate and schedule chosen on held-out data",
}
FIGURE = {
    "table-1-ours": "table-1-ours-3",
    "table-3-ours": "table-3-ours-2",
    "locality-ours": "locality-ours-2",
    "table-1-equal": "table-1-equal-3",
    "table-3-equal": "table-3-equal-2",
    "ewc-equal": "ewc-equal-3",
}  # the panel to show


def results_page(records: Sequence[Record], again: Mapping[str, tuple[str, str]] | None = None) -> str:
    """Return docs/results.md. `again` has for each profile the summary of a second run (`report --against`), and its file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    by_name = by_experiment(records)
    rows = [row for row in claim_rows(correct(records)) if not row.ours and _leading(by_name, row.name)["profile"] in row.claims]
    content = {
        "leading": profiles_of(records)[0],
        "summary": _wrap(_summary(rows, by_name) + _shown(profiles_of(records)[0])),
        "gains": _gains(by_name),
        "counts": _counts(records),
        "explanation": _wrap(" ".join(part for part in (_seeds(records), EXPLANATION, _looks(records), _undecided(rows)) if part)),
        "recorded": {name: next(iter(profiles)) for name, profiles in by_name.items()},
        "claims": _claims(rows, profiles_of(records)),
        "topics": [_topic(topic, by_name) for topic in TOPICS if any(name in by_name for name in topic.names)],
        "others": list(_in_lines([_figure(_leading(by_name, name), title) for name, title in OTHERS.items() if name in by_name])),
        "failed": _failures([row for row in rows if row.verdict == "fails" and not row.leading.get("repeats")]),
        "gap": lambda names, a, b, column: _gap(by_name, names, a, b, column),
        "part": _part_of_table_2(by_name),
        "again": [_wrap(_again(profile, *found)) for profile, found in (again or {}).items()],
        "some_seeds": _some_seeds(by_name),
    }
    return templates.get_template("results.md.jinja").render(content)


def _summary(rows: Sequence[ClaimRow], by_name: Profiles) -> str:
    """Return the answer in two sentences: how many claims hold in the profile shown, and what SLNID gains."""
    verdicts = [row.verdict for row in rows if not row.leading.get("repeats")]
    named = {"holds": "hold", "fails": "fail", "undecided": "are undecided", "not tested": "are not tested"}
    found = [f"{verdicts.count(verdict)} {words}" for verdict, words in named.items() if verdict in verdicts]
    quoted = {row.words for row in rows if row.words and not row.leading.get("repeats")}
    said = f"**In short:** of {len(verdicts)} claims of the paper {', '.join(found)}."
    if 0 < len(quoted) < len(verdicts):
        said += f" They are read from {len(quoted)} quotations; one about several networks, data sets or methods counts several times."
    if not {"fig-2", "fig-3a"} <= by_name.keys():
        return said

    over = {b: [_difference(by_name, names, "SLNID", b, column) for names, column in PLACES.values()] for b in ("No-Reg", "DeCov")}
    gains, differences = ([one for one in found if one is not None] for found in over.values())
    behind = sum(one.high < 0 for one in differences)
    if not behind or any(one.low <= 0 for one in gains):
        return said
    order = f"the order of the methods is not the paper's: DeCov is ahead of it on {behind} of {len(differences)}"
    return f"{said} SLNID is above MAS alone on each of {len(gains)} streams, but {order}."


def _gains(by_name: Profiles) -> str:
    """Return a table of what SLNID gains in points over MAS alone and over DeCov; "" without figure 3."""
    found = {
        where: [_gap(by_name, names, "SLNID", b, column, counts_seeds=True) for b in ("No-Reg", "DeCov")]
        for where, (names, column) in PLACES.items()
    }
    shown = {where: gaps for where, gaps in found.items() if all(gaps)}
    rows = [[f"SLNID over {b}", *(gaps[k] for gaps in shown.values())] for k, b in enumerate(("MAS alone (No-Reg)", "DeCov"))]
    return table(["in points", *shown], rows) if shown else ""


def _shown(leading: str) -> str:
    """Return a sentence on the profile shown; the page itself has more on `ours`."""
    known = "[`equal`](experiments.md#equal-chances-profile-equal) where it is recorded, else `ours`"
    return f" Shown is {known}." if leading == "equal" else ""


def _in_lines(found: Sequence[dict[str, Any]]) -> list[Sequence[dict[str, Any]]]:
    """Return the figures in lines of three."""
    return [found[i : i + 3] for i in range(0, len(found), 3)]


def _counts(records: Sequence[Record]) -> list[list[str]]:
    """Return for each profile how many of the paper's claims hold, fail and are undecided.

    Corrected by experiment; in brackets each claim alone, and all of the profile as one family.
    """
    rows = []
    for profile in PROFILES:
        own = [record for record in records if record["profile"] == profile and not record["quick"]]
        if own:
            ways = [tally(those, ours=False) for those in (correct(own), own, correct(own, as_one_family=True))]
            rows.append([f"`{profile}`", *("{} ({}, {})".format(*(way[verdict] for way in ways)) for verdict in VERDICTS)])
    return rows


def _seeds(records: Sequence[Record]) -> str:
    """Return a sentence on what a value is, with the numbers of seeds that the experiments of each profile report."""
    whole = [record for record in records if not record["quick"]]
    found = {p: sorted({len(r["seeds"]) for r in whole if r["profile"] == p and r["claims"]}) for p in PROFILES}
    said = ", ".join(f"{'/'.join(map(str, counts))} in `{profile}`" for profile, counts in found.items() if counts)
    return f"A value is the average accuracy after the last task in %, mean ± standard deviation over seeds ({said})."


def _looks(records: Sequence[Record]) -> str:
    """Return a sentence on experiments that were judged by several numbers of seeds; "" if there are none."""
    added = any(len(record.get("looks") or ()) > 1 for record in records)
    where = "[Where seeds were added](experiments.md#what-is-recorded-with-equal)"
    return f"{where}, p-values are multiplied by the number of looks." if added else ""


def _some_seeds(by_name: Profiles) -> str:
    """Return a sentence if figure 3 shows only some seeds of table 1's runs; else nothing."""
    counts = [len(_leading(by_name, name)["seeds"]) for name in ("fig-3a", "table-1") if name in by_name]
    profiles = {_leading(by_name, name)["profile"] for name in ("fig-3a", "table-1") if name in by_name}
    if len(counts) < 2 or len(profiles) > 1 or counts[0] >= counts[1]:
        return ""
    return f" Figure 3 has {counts[0]} of table 1's {counts[1]} seeds."


def _undecided(rows: Sequence[ClaimRow]) -> str:
    """Return two sentences on how many claims are undecided in the profile shown, and why."""
    causes = [row.reason for row in rows if row.verdict == "undecided" and not row.leading.get("repeats")]
    said = {
        "correction": "decided alone but not after the correction",
        "margin": "within half a point of the margin",
        "noise": "too noisy for these seeds",
    }
    counts = {cause: causes.count(cause) for cause in said if cause in causes}
    found = ", ".join(f"{n} {'is' if n == 1 else 'are'} {said[cause]}" for cause, n in counts.items())
    return f"Of the {len(causes)} undecided claims, {found}." if causes else "In the profile shown every claim is decided."


def _claims(rows: Sequence[ClaimRow], profiles: Sequence[str]) -> str:
    """Return the table of claims; one that is counted elsewhere is left out."""
    profile_heads = [f"`{profile}`" for profile in profiles]
    head = ["claim", "the paper's words", "where", "published", *profile_heads, "verdict", "what would change it"]
    shown = [
        [
            row.text,
            f"“{row.words}”" if row.words else "its numbers" if row.published != "–" else "asked by us",
            row.where,
            row.published,
            *row.shown.values(),
            _verdict(row),
            row.change,
        ]
        for row in rows
        if not row.leading.get("repeats")
    ]
    return table(head, shown)


def _verdict(row: ClaimRow) -> str:
    return f"{row.verdict}: {row.reason}" if row.reason else row.verdict


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


def _failures(rows: Sequence[ClaimRow]) -> str:
    """Return a table of the claims that fail, in the leading profile of each: the difference of the worst comparison."""
    shown: dict[str, list[str]] = {}
    for row in rows:
        part = decisive(row.leading)
        span = f" [{text(part['low'], 2, True)}, {text(part['high'], 2, True)}]" if part["low"] is not None else ""
        found = f"{text(part['mean'], 2, True)}{span}: {part['text']} (`{row.name}`, `{row.leading_profile}`)"
        shown.setdefault(row.text, []).append(found)
    return table(["claim", "what was found, and the comparison that fails"], [[claim, "; ".join(found)] for claim, found in shown.items()])


def _wrap(line: str, indent: str = "") -> str:
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


class Difference(NamedTuple):
    """The mean of a − b, its 95 % t interval, the number of seeds and the profile."""

    mean: float
    low: float
    high: float
    seeds: int
    profile: str


def _difference(by_name: Profiles, names: Sequence[str], a: str, b: str, column: str) -> Difference | None:
    """Return a − b by the paired t interval, in the first experiment that has both rows; None if none has."""
    from selfless.metrics import paired_t_interval, spread

    found = [record for name in names for record in by_name.get(name, {}).values()]
    record = next((record for record in found if {(a, column), (b, column)} <= by_place(record).keys()), None)
    if record is None:
        return None
    cells = by_place(record)
    x, y = ({run["seed"]: run["value"] for run in cells[row, column]["runs"]} for row in (a, b))
    seeds = sorted(x.keys() & y.keys())
    pairs = [x[s] for s in seeds], [y[s] for s in seeds]
    mean, _ = spread([u - v for u, v in zip(*pairs, strict=True)])
    return Difference(mean, *paired_t_interval(*pairs), len(seeds), record["profile"])


def _gap(by_name: Profiles, names: Sequence[str], a: str, b: str, column: str, counts_seeds: bool = False) -> str:
    """Return "+5.00 [+4.08, +5.91] (`ours`)"; "" if no experiment has both rows.

    counts_seeds   in brackets is the number of seeds, not the profile
    """
    one = _difference(by_name, names, a, b, column)
    if one is None:
        return ""
    source = f"{one.seeds} seeds" if counts_seeds else f"`{one.profile}`"
    return f"{text(one.mean, 2, True)} [{text(one.low, 2, True)}, {text(one.high, 2, True)}] ({source})"


def _part_of_table_2(by_name: Profiles) -> dict[str, str]:
    """Return row → mean and spread on the sets of table 2 that were here; nothing if it is not recorded."""
    found = by_name.get("table-2", {}).get("ours")
    cells = [] if found is None else found["cells"]
    return {cell["row"]: value(cell) for cell in cells if cell["column"].startswith("4 of 8") and cell["mean"] is not None}


def second_runs(given: Sequence[str], root: Path) -> dict[str, tuple[str, str]]:
    """Return profile → ("39 of 46 verdicts are the same, 10 experiments", file), from "PROFILE=FILE"; without files that are not there.

    A file is made by `selfless report DIR --against OTHER`.
    """
    files = {profile: file for profile, _, file in (one.partition("=") for one in given) if (root / file).is_file()}
    texts = {profile: (root / file).read_text(encoding="utf-8") for profile, file in files.items()}
    return {profile: (_same_verdicts(said), files[profile]) for profile, said in texts.items()}


def _again(profile: str, said: str, file: str) -> str:
    """Return a line on the second run of a profile: what is the same, and the file that says more."""
    return f"**[{'Other seeds' if profile == 'equal' else 'Repeated'}](../{file})**, `{profile}`: {said}."


def _same_verdicts(said: str) -> str:
    """Return what the comparisons in a file say of verdicts, each after its halves of the seeds or its number of experiments if given."""
    patterns = (
        r"^The first .* against .*|\d+ experiments(?= in both)",
        r"\d+ of \d+ verdicts are the same(?: \([^)]*\))?(?:, \d+ opposite)?",
    )
    parts = re.split(r"^# ", said, flags=re.MULTILINE)
    told = [", ".join(found.group() for pattern in patterns if (found := re.search(pattern, part))) for part in parts]
    return "; ".join(one[0].lower() + one[1:] for one in told if one)


def relative_to(records: Sequence[Record], root: Path) -> list[Record]:
    """Return the records with their folders relative to the root of the repository, for links."""
    return [record | {"folder": Path(record["folder"]).resolve().relative_to(root.resolve()).as_posix()} for record in records]


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(prog="python -m selfless.report.results", description="Print docs/results.md.")
    parser.add_argument("folders", type=Path, nargs="+", help="folders of results; those that do not exist are skipped")
    parser.add_argument("--again", nargs="*", default=[], metavar="PROFILE=FILE", help="files made by selfless report DIR --against OTHER")
    given = parser.parse_args()
    if any("=" not in one for one in given.again):
        parser.error("--again takes PROFILE=FILE, for example ours=results/again/against.md")
    records = [record for folder in given.folders if folder.is_dir() for record in load(folder)]
    if not records:
        sys.exit(f"{given.folders[0]} holds no record of an experiment. Make one: selfless reproduce fig-2 --out {given.folders[0]}")
    sys.stdout.write(results_page(relative_to(records, Path.cwd()), second_runs(given.again, Path.cwd())))


if __name__ == "__main__":
    main()
