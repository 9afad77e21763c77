"""`selfless data`: what there is, fetching it, checking it. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Published data sets: what is here, fetch it, check it.", no_args_is_help=True, rich_markup_mode="rich")

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Where data lies (default: $SELFLESS_DATA, else the user's cache)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@contextmanager
def _told(as_json: bool) -> Iterator[None]:
    """An error the user can do something about is one message and exit code 1, never a traceback."""
    from selfless.data import DataError

    try:
        yield
    except typer.Exit:
        raise
    except (DataError, ValueError, OSError) as error:
        if as_json:
            typer.echo(json.dumps({"error": str(error)}))
        else:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], caption: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(caption=caption, caption_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@app.command("list", epilog="Examples:  selfless data list  ·  selfless data list --json")
def list_(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """The data sets that are known by name, whether they are here, and the streams made of them."""
    with _told(as_json):
        from selfless import data
        from selfless.data.places import roots
        from selfless.data.verifying import located

        sets: list[dict[str, Any]] = []
        for item in data.CATALOGUE.values():
            found = located(item, roots(data_dir))
            sets.append(
                {
                    "name": item.name,
                    "title": item.title,
                    "here": bool(found),
                    "place": str(found[0]) if found else None,
                    "bytes": item.size,
                    "train": item.train,
                    "test": item.test,
                    "classes": item.classes,
                    "shape": list(item.shape),
                }
            )
        if as_json:
            folders = {"data_dir": str(data.data_dir(data_dir)), "cache_dir": str(data.cache_dir())}
            typer.echo(json.dumps({**folders, "sets": sets, "streams": list(data.stream_names())}))
            return
        rows = [
            (
                s["name"],
                s["title"],
                f"{s['train'] // 1000}k + {s['test'] // 1000}k",
                "×".join(map(str, s["shape"])),
                f"{s['bytes'] / 1e6:.0f} MB",
                s["place"] or "not here",
            )
            for s in sets
        ]
        kinds = "permuted-, rotated-, split-, blurred- before a name; joint- before that: the upper bound"
        _table(("name", "what", "train + test", "shape", "download", "where"), rows, f"Streams: {kinds}.")


@app.command(epilog="Examples:  selfless data fetch mnist  ·  selfless data fetch cifar-100 --data-dir ~/data")
def fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Data sets; see: selfless data list.")],
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Fetch data sets from their public mirrors, checked by SHA-256; what is here already is left alone."""
    with _told(as_json):
        from selfless import data

        places = {}
        for name in names:
            places[name] = str(data.fetch(name, data_dir=data_dir))
            if not as_json:
                typer.echo(f"{name}: {places[name]}")
        if as_json:
            typer.echo(json.dumps({"fetched": places}))


@app.command(epilog="Examples:  selfless data verify  ·  selfless data verify mnist --json")
def verify(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One data set; all of them if left out.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Read every file and compare it with what was published. Exit code 1 if one is altered, or NAME is absent."""
    with _told(as_json):
        from selfless import data

        checks = data.verify(name, data_dir=data_dir)
    failed = any(c.status == "altered" or (name and not c.usable) for c in checks)
    if as_json:
        found = [{"name": c.name, "status": c.status, "place": str(c.place) if c.place else None, "detail": c.detail} for c in checks]
        typer.echo(json.dumps({"ok": not failed, "sets": found}))
    else:
        _table(
            ("name", "status", "where", "detail"),
            [(c.name, c.status, str(c.place or "–"), c.detail) for c in checks],
            "ok and reduced sets are used; altered ones never are.",
        )
    if failed:
        raise typer.Exit(1)
