"""`selfless capacity`: show how much capacity recorded runs have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfless.cli.errors import reporting_errors
from selfless.cli.options import AsJson
from selfless.cli.results import load_results
from selfless.cli.terminal import open_console

if TYPE_CHECKING:
    from rich.table import Table

    from selfless.spec import Result

EXAMPLES = "Examples:  selfless capacity results  ·  selfless capacity results/KEY"
FEW = 12  # up to this number of runs all layers are shown, for more runs a summary


def capacity(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of results, or of one run.")] = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Show how much room each recorded run has left after each task: free parameters and neurons by layer, or a summary of many runs."""
    with reporting_errors(as_json):
        results = load_results(folder)
        if as_json:
            names = ("key", "stream", "model", "method", "seed")
            rows = [{name: getattr(r.run, name) for name in names} | {"capacity": r.capacity} for r in results]
            typer.echo(json.dumps({"runs": rows}))
            return

        if len(results) > FEW:
            from selfless.report import room

            open_console().print(room(results))
            typer.echo(
                f"\n{len(results)} runs, means over seeds. Layers of one run: selfless capacity {folder}/KEY. All keys and layers: --json"
            )
            return
        for result in results:
            open_console().print(_table(result))


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
