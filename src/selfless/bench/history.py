"""The history of a benchmark: one line of ratios for each commit, and the ratios that fell.

A line holds only ratios that were taken within one run; larger is better. They are compared with the median of the recorded lines of the
same kind of machine: a ratio fell if it is below two thirds of that median. Times are not compared, because machines differ.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfless.files import write_text

LARGER = ("of_limit", "times_eager", "times_dense", "times_loop", "times_its_permuted_mnist", "times_from_memory")  # larger is better
SMALLER = ("of_forward_backward", "of_an_epoch")  # smaller is better: their inverse is kept
FALLS = 2 / 3  # of the median: below it, a ratio fell
LEAST = 3  # lines of the same machine before anything is compared

Line = dict[str, Any]


def ratios(found: Mapping[str, Any], parts: Iterable[str]) -> dict[str, float]:
    """Return {what, name of the ratio: value} of all rows, larger is better."""
    kept: dict[str, float] = {}
    for row in (row for part in parts for row in found.get(part, [])):
        for name in LARGER:
            if row.get(name):
                kept[f"{row['what']}: {name}"] = float(row[name])
        for name in SMALLER:
            if row.get(name) and row[name] != 1.0:  # 1: the base itself
                kept[f"{row['what']}: 1 / {name}"] = 1 / float(row[name])
    return kept


def make_line(found: Mapping[str, Any], parts: Iterable[str]) -> Line:
    """Return the line of one benchmark."""
    about = found["hardware"]
    machine = {name: about[name] for name in ("hardware", "cores", "threads", "torch")} | {"quick": found["quick"]}
    return {"commit": about["commit"], "time": about["time"], "machine": machine, "ratios": ratios(found, parts)}


def read(path: Path) -> list[Line]:
    """Return the recorded lines; a file that does not exist has none."""
    if not path.exists():
        return []
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line: Line = json.loads(text)
            lines.append(dict(line, ratios=dict(line["ratios"]), machine=dict(line["machine"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is not a line of `selfless bench --history`; remove it") from error
    return lines


def append(path: Path, line: Line) -> None:
    """Add a line, unless it has no ratios. The line of the same commit and machine is replaced."""
    if not line["ratios"]:
        return
    others = [old for old in read(path) if (old["commit"], old["machine"]) != (line["commit"], line["machine"])]
    write_text(path, "".join(json.dumps(one) + "\n" for one in [*others, line]))


def fallen(line: Line, history: Sequence[Line]) -> dict[str, tuple[float, float]]:
    """Return {ratio: (value, median)} of the ratios below two thirds of their median over the history of the same kind of machine."""
    same = [old for old in history if old["machine"] == line["machine"]]
    found = {}
    for name, value in line["ratios"].items():
        old = [one["ratios"][name] for one in same if name in one["ratios"]]
        if len(old) >= LEAST and value < FALLS * statistics.median(old):
            found[name] = (value, statistics.median(old))
    return found


def best(first: Line, second: Line) -> Line:
    """Return the first line with the better ratio of both: a disturbed measurement is repeated, and a slow program stays slow."""
    return first | {"ratios": {name: max(value, second["ratios"].get(name, value)) for name, value in first["ratios"].items()}}
