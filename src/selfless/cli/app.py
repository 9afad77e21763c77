"""The typer application: every command, and the options before them."""

from __future__ import annotations

from typing import Annotated

import typer

from selfless import __version__
from selfless.cli import bench, capacity, data, demo, records, report, reproduce, run, trained, tune, watch
from selfless.cli.flags import App

app = App(
    help="Continual learning that leaves room for later tasks: MAS, EWC, SI, … with SLNID (Selfless Sequential Learning, ICLR 2019).",
    epilog="Examples:  selfless run --sparsify slnid:1e-3  ·  selfless run --help  ·  selfless report results",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=run.EXAMPLES)(run.run)
app.command(epilog=demo.EXAMPLES)(demo.demo)
app.command(epilog=reproduce.EXAMPLES)(reproduce.reproduce)
app.command(epilog=tune.EXAMPLES)(tune.tune)
app.command(epilog=watch.EXAMPLES)(watch.watch)
app.command(epilog=report.EXAMPLES)(report.report)
app.command(epilog=capacity.EXAMPLES)(capacity.capacity)
app.command(epilog=trained.PREDICT_EXAMPLES)(trained.predict)
app.command(epilog=trained.EXPORT_EXAMPLES)(trained.export)
app.command(epilog=bench.EXAMPLES)(bench.bench)
app.add_typer(data.app, name="data")
app.add_typer(records.app, name="results")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"selfless {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None: ...


def main() -> None:
    """The entry point `selfless`."""
    app()
