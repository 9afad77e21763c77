"""`selfless data`: list, fetch, prepare and verify data sets."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from selfless.cli.errors import print_error, reporting_errors
from selfless.cli.flags import App
from selfless.cli.options import AsJson, DataDir
from selfless.cli.terminal import open_console

app = App(help="List, fetch, check and prepare published data sets.", no_args_is_help=True, rich_markup_mode="rich")
STOPPED = "stopped; the same command goes on where it stopped"


@app.command("list", epilog="Examples:  selfless data list  ·  selfless data list --json")
def list_(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the known data sets, whether they are on this machine, and the streams made from them."""
    with reporting_errors(as_json, STOPPED):
        from selfless import data

        sets, objects = _known_sets(data_dir), _object_sets(data_dir)
        weights, state = _alexnet_weights(data_dir)
        if as_json:
            folders = {"data_dir": str(data.data_dir(data_dir)), "cache_dir": str(data.cache_dir())}
            known = {"sets": sets, "objects": objects, "weights": {"alexnet": weights}, "streams": [*data.stream_names(), "objects"]}
            typer.echo(json.dumps({**folders, **known}))
            return
        places = [Path(s["place"]) for s in (*sets, *objects) if s["place"]]
        first = data.data_dir(data_dir)
        cached = any(not place.is_relative_to(first) for place in places)
        typer.echo(f"data folder: {first}" + f"; in cache: {data.cache_dir() / 'data'}" * cached + "\n")
        rows = [
            (
                s["name"],
                s["title"],
                f"{s['train'] // 1000}k + {s['test'] // 1000}k",
                "×".join(map(str, s["shape"])),
                f"{s['bytes'] / 1e6:.0f} MB",
                _where(s["place"], first),
            )
            for s in sets
        ]
        kinds = f"{', '.join(f'{kind}-' for kind in data.KINDS)} before a name; joint- before that: the upper bound"
        _print_table(("name", "what", "train + test", "shape", "download", "where"), rows, f"Streams: {kinds}.\n")
        rows = [
            (
                o["name"],
                o["title"],
                str(o["classes"]),
                f"{o['bytes'] / 1e6:.0f} MB",
                _where(o["place"], first),
                o["prepared"].replace(", ", "\n"),
            )
            for o in objects
        ]
        _print_table(
            ("object set", "what", "classes", "download", "where", "prepared"),
            rows,
            f"Stream: objects, those that are here, in this order. AlexNet's ImageNet weights: {weights or state}.",
        )


def _known_sets(data_dir: Path | None) -> list[dict[str, Any]]:
    """The sets of the catalogue, and where they are."""
    from selfless.data import CATALOGUE, data_dirs

    sets = []
    for item in CATALOGUE.values():
        found = item.find(data_dirs(data_dir))
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
    return sets


def _object_sets(data_dir: Path | None) -> list[dict[str, Any]]:
    """The eight object sets: where their files are, and whether a prepared copy is in the cache."""
    from selfless import data
    from selfless.data import all_prepared

    found = []
    for item in data.OBJECTS.values():
        places, ready = item.find(data_dir), all_prepared(item.name)
        found.append(
            {
                "name": item.name,
                "title": item.title,
                "classes": item.classes,
                "bytes": item.size,
                "here": bool(places or ready),
                "place": str(places[0]) if places else None,
                "prepared": ", ".join(f"{p.about['train']} + {p.about['test']}" for p in ready) or "no",
            }
        )
    return found


def _alexnet_weights(data_dir: Path | None) -> tuple[str | None, str]:
    """(the name of the file with AlexNet's ImageNet weights or None, what to say without one)."""
    from selfless.data import DataError, find_pretrained

    try:
        return find_pretrained("alexnet", data_dir), "not here"
    except DataError as error:
        warnings.warn(str(error), stacklevel=2)
        return None, "damaged"


def _where(place: str | None, first: Path) -> str:
    """Return one word for a place, because paths are too long for a cell: in the data folder `first`, in the cache, or nowhere."""
    return "not here" if place is None else "here" if Path(place).is_relative_to(first) else "in cache"


def _print_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], caption: str, wraps: tuple[str, ...] = ("what",)) -> None:
    """Print a table. On a narrow terminal only the columns in `wraps` are wrapped; names and numbers stay whole."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in wraps)
    for row in rows:
        table.add_row(*row)
    open_console().print(table)


def _expand(names: list[str]) -> list[str]:
    """Replace `objects` by the names of the eight object sets."""
    from selfless.data import OBJECTS

    return list(dict.fromkeys(one for name in names for one in (OBJECTS if name == "objects" else (name,))))


@app.command(epilog="Examples:  selfless data fetch mnist  ·  selfless data fetch objects --data-dir ~/data")
def fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Data sets; see: selfless data list.")],
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Fetch data sets from their public mirrors and check their checksums; sets that are already on this machine are not changed.

    `objects` means the eight object sets: each is tried. Sets that cannot be downloaded are named, with the folder they belong in.
    """
    with reporting_errors(as_json, STOPPED):
        from selfless import data

        places, missing = {}, {}
        for name in _expand(names):
            try:
                places[name] = str((data.fetch_objects if name in data.OBJECTS else data.fetch)(name, data_dir=data_dir))
            except data.DataError as error:
                if "objects" not in names or name not in data.OBJECTS:
                    raise
                missing[name] = str(error)
            if not as_json:
                typer.echo(missing.get(name) or f"{name}: {places[name]}")
        if as_json:
            typer.echo(json.dumps({"fetched": places} | ({"by_hand": missing} if missing else {})))
        if missing:
            raise typer.Exit(1)


@app.command(epilog="Examples:  selfless data prepare objects  ·  selfless data prepare birds cars --boxes")
def prepare(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Object sets, or `objects` for those that are here.")],
    boxes: Annotated[bool, typer.Option("--boxes", help="Crop birds, cars and aircraft to their bounding boxes.")] = False,
    aircraft: Annotated[str, typer.Option(help="Aircraft by variant (100 classes) or family (70).")] = "variant",
    workers: Annotated[int | None, typer.Option(help="Processes.", show_default="one per core")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Resize object sets to 224×224 once, into a memory map in the cache.

    If the command was stopped, it continues there; a set is not prepared twice. A set that cannot be prepared does not stop the others: it
    is named at the end, and the exit status is 1.
    """
    with reporting_errors(as_json, STOPPED):
        from selfless import data

        every = data.present_objects(data_dir) if "objects" in names else ()
        if "objects" in names and not every:
            raise data.MissingData("none of the eight object sets is on this machine; see: selfless data fetch objects")
        wanted = list(dict.fromkeys([n for n in names if n != "objects"] + list(every)))
        done, failed = [], {}
        for name in wanted:
            try:
                made = data.prepare_objects(name, data_dir=data_dir, workers=workers, boxes=boxes, aircraft=aircraft)
            except (data.DataError, OSError) as error:
                if len(wanted) == 1:
                    raise
                failed[name] = str(error)
                continue
            images, seconds = made.fresh
            row = {"name": name, "train": made.about["train"], "test": made.about["test"], "split": made.about["split"]}
            done.append({**row, "place": str(made.folder), "images": images, "seconds": seconds})
            if not as_json:
                how = f"{images} images in {seconds:.1f} s, {images / seconds:.0f} images/s" if images else "prepared already"
                typer.echo(f"{name}: {row['train']} + {row['test']} ({row['split']}); {how}; {made.folder}")
        if as_json:
            typer.echo(json.dumps({"prepared": done} | ({"failed": failed} if failed else {})))
        elif failed:
            reasons = "\n".join(f"{name}: {why}" for name, why in failed.items())
            print_error(f"error: not prepared: {', '.join(failed)}\n{reasons}")
        if failed:
            raise typer.Exit(1)


@app.command(epilog="Examples:  selfless data verify  ·  selfless data verify mnist --json")
def verify(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One data set; all of them if left out.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Read every file and compare it with the published one. The exit status is 1 if a file is altered or the data set NAME is absent."""
    with reporting_errors(as_json, STOPPED):
        checks = _verify(name, data_dir)
        failed = any(c.status == "altered" or (name and not c.usable) for c in checks)
        if as_json:
            found = [{"name": c.name, "status": c.status, "place": str(c.place) if c.place else None, "detail": c.detail} for c in checks]
            typer.echo(json.dumps({"ok": not failed, "sets": found}))
        else:
            _print_table(
                ("name", "status", "where", "detail"),
                [(c.name, c.status, str(c.place or "–"), c.detail) for c in checks],
                "ok and reduced sets are used; altered ones never are.",
                wraps=("where", "detail"),
            )
        if failed:
            raise typer.Exit(1)


def _verify(name: str | None, data_dir: Path | None) -> tuple[Any, ...]:
    """Check one set; without a name, all of the catalogue and the object sets that are here."""
    from selfless import data

    if name is not None and (name in data.OBJECTS or name == "objects"):
        return tuple(data.verify_objects(one, data_dir=data_dir) for one in _expand([name]))
    some = tuple(data.verify_objects(one, data_dir=data_dir) for one in data.present_objects(data_dir)) if name is None else ()
    return (*data.verify(name, data_dir=data_dir), *some)
