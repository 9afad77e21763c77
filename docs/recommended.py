"""Make the table of measured rows and two pages from the records: src/selfless/recommendation/measured.json, choosing.md, recipe.md.

    python docs/recommended.py            # write all of them
    python docs/recommended.py --check    # change nothing; exit status 1 if one of them is out of date

Rows come from the cells of every record results/*/experiments/*-ours.json whose run belongs to a case of `selfless.recommendation.cases`,
and from the runs of TRIALS. For each case and preserver the row with the highest average is kept; a trial only where no record has that
preserver in that case. A row that had more candidates than the others of its case is not counted. Time and forgetting are those of the
recorded runs, memory is that of a keeper.

The page of the recipe has every pair of three preservers and two sparsifiers, from the experiment PAIRS.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import selfless
from selfless import Result, Run
from selfless.metrics import backward_transfer, spread
from selfless.preserve import PRESERVERS
from selfless.recommendation import CASES, Case, Measured
from selfless.recommendation.table import FILE, HELD_OUT, TRIAL
from selfless.runner import Store
from selfless.terms import parse

ROOT = Path(__file__).resolve().parent.parent
PAGE, RECIPE = ROOT / "docs" / "choosing.md", ROOT / "docs" / "recipe.md"
TRIALS = ("results/trials/sums", "results/trials/distillation")  # single runs with held-out data
PAIRS = "beyond"  # the experiment with every pair of the recipe's tables
RECORDS = ("wide", "rivals-projection")  # experiments whose averages the recipe's page shows
KEPT, LEFT = {"lwf": "LwF", "packnet": "PackNet", "mas": "MAS"}, {"none": "alone", "slnid": "with SLNID", "decov": "with DeCov"}
MORE_CANDIDATES = "rate chosen"  # columns where a few rows of a case choose their rate and the others cannot: chances are not equal
AGAIN = "again"  # results/again repeats results/reproduction; its records are not counted twice


# ---- reading the records -----------------------------------------------------------------------------------------------------
def case_of(run: dict[str, Any]) -> Case | None:
    """Return the case that a recorded run belongs to."""
    return next((case for case in CASES if case.holds(run)), None)


def recorded_cells(root: Path = ROOT) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (record, cell) of every finished cell of accuracy that belongs to a case and was chosen on held-out data."""
    for path in sorted(root.glob("results/*/experiments/*-ours.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        on_test = {tuple(place) for choice in record["choices"] if choice["by"] != "held-out" for place in choice["cells"]}
        for cell in record["cells"] if AGAIN not in path.parts else ():
            counts = cell["value"] == "average" and cell["status"] == "done" and not cell["on_test"]
            counts &= not cell["column"].endswith(MORE_CANDIDATES)
            if counts and (cell["row"], cell["column"]) not in on_test and case_of(cell["run"]) is not None:
                yield path.relative_to(root).as_posix(), cell


def record_rows(root: Path = ROOT) -> list[Measured]:
    """Return the row with the highest average for each case and preserver, and for joint training with and without each sparsifier."""
    best: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    for path, cell in recorded_cells(root):
        case, run = case_of(cell["run"]), Run.from_dict(cell["run"])
        assert case is not None
        place = (case.name, f"joint, {run.sparsify.name}" if run.stream.startswith("joint-") else run.preserve.name)
        if place not in best or _is_better(cell, best[place][1]):
            best[place] = path, cell
    return [load_row(root, path, cell) for path, cell in best.values()]


def _is_better(cell: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether the average is higher; of two records of the same settings, whether there are more seeds."""
    if cell["run"] == other["run"]:
        return len(cell["runs"]) > len(other["runs"])
    return float(cell["mean"]) > float(other["mean"])


def load_row(root: Path, path: str, cell: dict[str, Any]) -> Measured:
    """Return the row of a cell, from its recorded runs."""
    store = Store(root / path.rpartition("/experiments/")[0])
    results = [result for run in cell["runs"] if (result := store.get(run["key"])) is not None]
    if len(results) < len(cell["runs"]):
        raise SystemExit(f"{store.out} lacks runs of {cell['row']}, {cell['column']} of {path}; put their runs.jsonl.xz there")
    return measured_row(results, HELD_OUT, path)


def trial_rows(known: set[tuple[str, str]], root: Path = ROOT) -> list[Measured]:
    """Return the best trial of each case and preserver that is not `known`; accuracies are those on held-out images."""
    best: dict[tuple[str, str], tuple[float, str, Result]] = {}
    found = [(folder, result) for folder in TRIALS for result in Store(root / folder).all()]
    for folder, result in found:
        case = case_of(result.run.as_dict())
        if case is None or result.status != "done" or result.held_out is None or (case.name, result.run.preserve.name) in known:
            continue
        place, score = (case.name, result.run.preserve.name), float(result.held_out[-1].mean())
        if place not in best or score > best[place][0]:
            best[place] = score, f"{folder}/runs.jsonl.xz", result
    return [measured_row([result], TRIAL, record) for _, record, result in best.values()]


def measured_row(results: Sequence[Result], chosen_on: str, record: str) -> Measured:
    """Return the row of some seeds of one run."""
    run = results[0].run
    case = case_of(run.as_dict())
    assert case is not None
    matrices = [result.held_out if chosen_on == TRIAL else result.accuracy for result in results]
    mean, std = spread([100 * float(matrix[-1].mean()) for matrix in matrices if matrix is not None])
    lost = [0.0 - 100 * backward_transfer(matrix) for matrix in matrices if matrix is not None and len(matrix) > 1]
    times = [float(r.about["seconds"]) / float(r.about.get("fleet", 1)) for r in results]
    return Measured(
        case=case.name,
        preserve=str(run.preserve),
        sparsify=str(run.sparsify),
        layers=run.layers,
        average=mean,
        std=None if len(results) < 2 else round(std, 6),
        forgetting=round(float(np.mean(lost)), 6) + 0.0 if lost else 0.0,
        seconds=round(float(np.mean(times)), 2),
        hardware=str(results[0].about.get("hardware", "")),
        memory=copies(str(run.preserve)),
        seeds=len(results),
        chosen_on=chosen_on,
        record=record,
        command=command(run, len(results)),
    )


@functools.cache
def copies(preserve: str) -> float:
    """Return what a keeper holds for this preserver after a task, in copies of the parameters of an MLP with two hidden layers.

    SI and RWalk hold one copy more from the first step on, so a step is taken.
    """
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    keeper = selfless.attach(model, preserve)
    keeper.anchor_with(optimizer)
    keeper.begin_epoch(0, 1, batches=1)
    x, y = torch.zeros(2, 784), torch.zeros(2, dtype=torch.int64)
    (nn.functional.cross_entropy(model(x), y) + keeper.penalty((x, y))).backward()
    optimizer.step()
    held = round(keeper.footprint().copies_after, 1)
    keeper.detach()
    return held


def command(run: Run, seeds: int) -> str:
    """Return the command that trains these seeds of a run."""
    words, default = ["selfless", "run"], Run()
    for field in dataclasses.fields(Run):
        value, option = getattr(run, field.name), field.metadata["option"]
        flag = option.flag or f"--{field.name.replace('_', '-')}"
        if value is None or (value == getattr(default, field.name) and field.name != "preserve"):
            continue
        if option.kind is dict:
            words += [word for key, item in value.items() for word in (flag, f"{key}={item}")]
        else:
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join([*words, *(["--seeds", str(seeds)] if seeds > 1 else [])])


# ---- the table ---------------------------------------------------------------------------------------------------------------
def name_of(row: Measured) -> str:
    """Return the name of the preserver of a row, without strengths: "lwf" or "lwf+mas"."""
    return str(parse(row.preserve, PRESERVERS, "preserver").name)


def table(root: Path = ROOT) -> dict[str, Any]:
    """Return the content of measured.json."""
    records = record_rows(root)
    joint = [row for row in records if " --stream joint-" in row.command]
    methods = [row for row in records if row not in joint]
    methods += trial_rows({(row.case, name_of(row)) for row in methods}, root)
    order = {case.name: number for number, case in enumerate(CASES)}
    rows, bounds = (sorted(some, key=lambda row: (order[row.case], -row.average)) for some in (methods, joint))
    return {
        "made_by": "python docs/recommended.py",
        "rows": list(map(dataclasses.asdict, rows)),
        "joint": list(map(dataclasses.asdict, bounds)),
    }


# ---- the page ----------------------------------------------------------------------------------------------------------------
def page_table(case: str, values: dict[str, Any]) -> str:
    """Return the table of a case as Markdown."""
    lines = ["| method | average, % | lost | s a run | memory | chosen on |", "| --- | ---: | ---: | ---: | ---: | --- |"]
    for row in (Measured(**one) for one in [*values["rows"], *values["joint"]] if one["case"] == case):
        bound, where = "joint-" in row.command, ", all layers" * (row.layers == "all")
        method = "joint training" if bound else f"`{row.preserve}`"
        method += "" if row.sparsify == "none" else f" + `{row.sparsify}`{where}"
        average = f"{row.average:.2f}" + ("" if row.std is None else f" ± {row.std:.2f}")
        seeds = f"{row.chosen_on}, {row.seeds} seeds" if row.seeds > 1 else row.chosen_on
        cells = [method, average, "" if bound else _number(row.forgetting), f"{row.seconds:.1f}"]
        lines.append(f"| {' | '.join([*cells, 'all old data' if bound else f'{row.memory:g}', seeds])} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def with_tables(page: str, values: dict[str, Any]) -> str:
    """Return the page with the table of each case between <!-- recommended-CASE --> and <!-- /recommended-CASE -->."""
    for case in CASES:
        pattern = rf"(<!-- recommended-{case.name} -->\n).*?(<!-- /recommended-{case.name} -->)"
        page, count = re.subn(pattern, lambda m: f"{m.group(1)}{page_table(case.name, values)}\n{m.group(2)}", page, flags=re.S)  # noqa: B023
        assert count == 1, f"docs/choosing.md has no block recommended-{case.name}"
    return page


def pairs(root: Path = ROOT) -> dict[tuple[str, str, str], str]:
    """Return {(case, preserver, sparsifier): the average} of the experiment whose rows had the same training and the same budget."""
    found: dict[tuple[str, str, str], str] = {}
    for path, cell in recorded_cells(root):
        case, run = case_of(cell["run"]), Run.from_dict(cell["run"])
        of_pairs = path.endswith(f"/{PAIRS}-ours.json") and "rate chosen" not in cell["column"]
        if case is not None and of_pairs and not run.stream.startswith("joint-"):
            found.setdefault((case.name, str(run.preserve.name), str(run.sparsify.name)), _entry(cell))
    return found


def with_pairs(page: str, found: dict[tuple[str, str, str], str]) -> str:
    """Return the page of the recipe with its tables between <!-- pairs-CASE --> and <!-- /pairs-CASE -->."""
    for case in ("cifar-aug", "cifar"):
        lines = [f"| | {' | '.join(LEFT.values())} |", "| --- |" + " ---: |" * len(LEFT)]
        lines += [f"| {title} | {' | '.join(found.get((case, name, other), '–') for other in LEFT)} |" for name, title in KEPT.items()]
        block = "\n".join(lines)
        page, count = re.subn(rf"(<!-- pairs-{case} -->\n).*?(<!-- /pairs-{case} -->)", rf"\g<1>{block}\n\g<2>", page, flags=re.S)
        assert count == 1, f"docs/recipe.md has no block pairs-{case}"
    return page


def with_records(page: str, root: Path = ROOT) -> str:
    """Return the page of the recipe with the averages of RECORDS between <!-- record-NAME --> and <!-- /record-NAME -->."""
    for name in RECORDS:
        block = record_table(name, root)
        page, count = re.subn(rf"(<!-- record-{name} -->\n).*?(<!-- /record-{name} -->)", rf"\g<1>{block}\n\g<2>", page, flags=re.S)
        assert count == 1, f"docs/recipe.md has no block record-{name}"
    return page


def record_table(name: str, root: Path = ROOT) -> str:
    """Return the averages of an experiment as Markdown, with published ones in brackets; a sentence if it is not recorded."""
    found = [path for path in sorted(root.glob(f"results/*/experiments/{name}-ours.json")) if AGAIN not in path.parts]
    if not found:
        return f"Not run yet: `python benchmarks/beyond.py --experiment {name}`."
    cells = [cell for cell in json.loads(found[0].read_text(encoding="utf-8"))["cells"] if cell["value"] == "average"]
    rows, columns = (list(dict.fromkeys(cell[axis] for cell in cells)) for axis in ("row", "column"))
    shown = {(cell["row"], cell["column"]): _entry(cell) for cell in cells}
    lines = [f"| | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    lines += [f"| {row} | {' | '.join(shown.get((row, column), '–') for column in columns)} |" for row in rows]
    return "\n".join(lines)


def _entry(cell: dict[str, Any]) -> str:
    if cell["mean"] is None:
        return "failed"
    std = "" if cell["std"] is None else f" ± {cell['std']:.2f}"
    return f"{cell['mean']:.2f}{std}" + ("" if cell["published"] is None else f" ({cell['published']:.2f})")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if the table or the page is out of date")
    options = parser.parse_args(arguments)
    values = table()
    wanted = {FILE: json.dumps(values, indent=1, ensure_ascii=False) + "\n", PAGE: with_tables(PAGE.read_text(encoding="utf-8"), values)}
    wanted[RECIPE] = with_records(with_pairs(RECIPE.read_text(encoding="utf-8"), pairs()))
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'out of date' if options.check else 'written'}: {path.relative_to(ROOT)}")
        if not options.check:
            path.write_text(wanted[path], encoding="utf-8")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
