"""`selfless reproduce --part i/n` and `--plan`: experiments in parts that are trained one by one, on different machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from selfless.cli.terminal import open_console

if TYPE_CHECKING:
    from selfless.experiments import Experiment
    from selfless.experiments.choosing import RecordedScore
    from selfless.experiments.reproduce import Train


def show_plan(
    experiments: Sequence[Experiment],
    seeds: range,
    part: str | None,
    most: float,
    as_json: bool,
    out: Path,
    recorded: Mapping[str, RecordedScore],
    data_dir: Path | None = None,
) -> None:
    """Print the parts with their estimated seconds on one H200: as many as --part says, or as few as fit into `most` seconds each.

    The parts are the same whatever is recorded; the seconds that are left of each are those of the runs that `out` lacks.
    """
    from selfless.experiments.left import left
    from selfless.experiments.parts import completed, partition, plan, read_part

    parts = partition(experiments, len(seeds), read_part(part)[1]) if part else plan(experiments, len(seeds), most)
    rows = [
        {
            "part": f"{p.number}/{p.of}",
            "seconds": round(p.seconds),
            "left": round(left(p.cells, seeds, out, recorded, data_dir)),
            "completes": names,
            "cells": [row for u in p.units for row in u.rows],
        }
        for p, names in zip(parts, completed(experiments, parts), strict=True)
    ]
    if as_json:
        typer.echo(json.dumps({"seeds": len(seeds), "parts": rows, "seconds": round(sum(p.seconds for p in parts))}))
        return
    from rich.table import Table

    title = f"{len(rows)} part{'s' * (len(rows) != 1)}, {len(seeds)} seeds; estimated seconds on one H200; left: of what {out} lacks"
    table = Table(title=title, title_justify="left")
    table.add_column("--part", no_wrap=True)
    table.add_column("seconds", justify="right")
    table.add_column("left", justify="right")
    table.add_column("completes")
    table.add_column("cells")
    for row in rows:
        names, cells = (", ".join(row[key]) for key in ("completes", "cells"))  # type: ignore[arg-type]
        table.add_row(str(row["part"]), str(row["seconds"]), str(row["left"]), names, cells)
    open_console().print(table)


def train_part(
    experiments: Sequence[Experiment],
    part: str,
    seeds: int,
    first_seed: int,
    out: Path,
    train: Train,
    recorded: Mapping[str, RecordedScore],
    data_dir: Path | None = None,
) -> str:
    """Train all rounds of choosing and all reported runs of one part; return what to do next."""
    from selfless.experiments.parts import partition, read_part
    from selfless.experiments.reproduce import train_together

    number, of = read_part(part)
    chosen = partition(experiments, seeds, of)[number - 1]
    if not chosen.cells:
        return f"part {part} is empty: there are fewer sets of runs than parts"
    train_together(chosen.cells, seeds=seeds, out=out, train=train, first_seed=first_seed, data_dir=data_dir, recorded=recorded)
    return (
        f"part {part} is trained in {out}. When every part is: selfless results merge PART… --out DIR, "
        "then the same reproduce command with --out DIR and without --part writes the records"
    )
