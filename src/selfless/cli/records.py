"""`selfless results`: pack recorded runs into one file, take one out, join folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfless.cli.errors import reporting_errors
from selfless.cli.flags import App

app = App(help="Pack recorded runs into one file, take one out by its key, join folders.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder of results.")]


@app.command(epilog="Example:  selfless results pack results/mine --remove")
def pack(
    folder: Folder,
    remove: Annotated[bool, typer.Option("--remove", help="Delete the folders of packed runs; those with a checkpoint stay.")] = False,
) -> None:
    """Write all runs of DIR into DIR/runs.jsonl.xz, which every command reads as it reads folders."""
    with reporting_errors():
        from selfless.runner.store import Store

        store = Store(folder)
        if not store.all():
            raise ValueError(f"{folder} holds no results to pack; train something first: selfless run --out {folder}")
        typer.echo(store.pack(remove=remove))


@app.command(epilog="Example:  selfless results extract results/reproduction 08b496c0c85b7cbe --to mine")
def extract(
    folder: Folder,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key of a run, 16 digits; selfless report shows it.")],
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where to write its folder.")] = Path("results"),
) -> None:
    """Write one run of DIR, packed or not, as a folder with metrics.json and spec.json."""
    with reporting_errors():
        from selfless.runner.store import Store

        typer.echo(Store(folder).extract(key, to))


@app.command(epilog="Example:  selfless results merge part-1 part-2 --out results/study")
def merge(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders of results; if two have the same run, the first counts.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the joined runs.jsonl.xz.")],
) -> None:
    """Join the runs of several folders, for example parts of one study that were trained on different machines.

    Each run is written once, with the runs that chose strengths and the checkpoints. If two folders have the same run with other numbers,
    its key is printed and the first is kept. Records of experiments are written again by the same `reproduce` without --part.
    """
    with reporting_errors():
        from selfless.runner.merge import merge_results

        joined = merge_results(folders, out)
        typer.echo(joined.path)
        note = f"; {len(joined.conflicts)} of them with other numbers, of which the first are kept" if joined.conflicts else ""
        typer.echo(f"{joined.runs} runs from {len(folders)} folders; {joined.repeated} were in more than one{note}")
        for conflict in joined.conflicts:
            typer.echo(conflict)
