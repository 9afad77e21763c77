"""`selfless capacity`: show how much capacity recorded runs have left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfless.cli.errors import reporting_errors
from selfless.cli.options import AsJson
from selfless.cli.results import load_results
from selfless.cli.terminal import open_console

if TYPE_CHECKING:
    from rich.table import Table

    from selfless.capacity.trend import Forecast
    from selfless.spec import Result

EXAMPLES = "Examples:  selfless capacity results  ·  selfless capacity results/KEY  ·  selfless capacity results --margin 5"
FEW = 3  # up to this number of runs all layers are shown, some seventy lines a run; for more runs a summary


def capacity(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of results, or of one run.")] = Path("results"),
    margin: Annotated[
        float, typer.Option(min=0.01, max=100, help="For the forecast: how many points of accuracy a new task may lose.")
    ] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Show how much room each recorded run has left after each task, and forecast how many more tasks fit.

    Free, used and shared neurons, their overlap between tasks beside chance, sparsity, correlation, effective rank and dead neurons. With
    many runs a summary is shown. Runs that differ in the seed alone share a forecast, from the accuracy on each task just after learning
    it.
    """
    with reporting_errors(as_json):
        results = load_results(folder)
        if as_json:
            names = ("key", "stream", "model", "method", "seed")
            rows = [{name: getattr(r.run, name) for name in names} | {"capacity": r.capacity} for r in results]
            typer.echo(json.dumps({"runs": rows, "forecasts": [{"method": g} | f.as_dict() for g, f in _forecasts(results, margin / 100)]}))
            return

        if len(results) > FEW:
            from selfless.report import room

            open_console().print(room(results))
            _print_forecasts(results, margin / 100)
            typer.echo(
                f"\n{len(results)} runs, means over seeds. Layers of one run: selfless capacity {folder}/KEY. All keys and layers: --json"
            )
            return
        from selfless.report.rooms import room_by_layer, room_over_tasks

        for result in results:
            for table in (_table(result), room_over_tasks(result), room_by_layer(result)):
                if table is not None:
                    open_console().print(table)
        _print_forecasts(results, margin / 100)


def _forecasts(results: Sequence[Result], margin: float) -> list[tuple[str, Forecast]]:
    """Return the forecast of each group of runs that differ in the seed alone, if they have learned enough tasks one by one."""
    import numpy as np

    from selfless.capacity.trend import LEAST, forecast
    from selfless.report import groups

    found = []
    for group in groups(results):
        rows = [r.accuracy.diagonal() for r in group.done if len(r.accuracy) == len(r.baseline) >= LEAST]
        if rows and len({len(row) for row in rows}) == 1 and np.isfinite(rows).all():
            found.append((group.label, forecast(np.array(rows), margin)))
    return found


def _print_forecasts(results: Sequence[Result], margin: float) -> None:
    for label, found in _forecasts(results, margin):
        typer.echo(f"Forecast, {label}, after {found.tasks} tasks: {found}")


def _table(result: Result) -> Table:
    """Free shares in percent: a row per layer, a column per task."""
    from rich.table import Table

    from selfless.capacity import REASONS

    table = Table(title=f"{result.run.method}, seed {result.run.seed}: free, in %", title_justify="left")
    table.add_column("after task")
    for t in range(1, len(result.capacity) + 1):
        table.add_column(str(t), justify="right")
    for kind in ("neurons", "parameters"):
        layers: list[str] = list(result.capacity[-1][kind]) if result.capacity else []
        shown = {name: [free[kind][name] for free in result.capacity] for name in layers}
        shown["all"] = [free[f"free_{kind}"] for free in result.capacity]
        for name, shares in shown.items():
            cells = ["–" if share is None else f"{100 * share:.1f}" for share in shares]
            table.add_row(f"{kind}: {name}", *cells, style="bold" if name == "all" else None, end_section=name == "all")
            if None in shares:
                table.caption = f"–: not measured; {REASONS[kind]}"
    return table
