"""Draw the rooms of the package and their imports in docs/architecture.md, and write into every folder what imports it.

    python docs/rooms.py            # rewrite the picture between <!-- rooms --> and <!-- /rooms -->, print a table
    python docs/rooms.py --check    # change nothing; exit status 1 if the picture or a folder is out of date

In the docstring of a folder's `__init__.py` the sentences "Imports …. Imported by …." are rewritten, if it has them.

A room is a folder of src/selfless, or a file in its root. An arrow means that some file of the first room imports the second, also inside a
function. `__init__` and `__main__` of the root are no rooms: one only passes on names, the other only calls the command line. LAYERS says
which room may import which; tests/test_architecture.py reads it from here.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE, PAGE = ROOT / "src" / "selfless", ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms -->", "<!-- /rooms -->"
SENTENCES = re.compile(r"\bImports [^.]*\.\s+Imported by [^.]*\.")

# The lowest layer first. A room imports rooms of lower layers, and of its own layer if no circle arises.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("files", "inputs", "fields", "terms", "functional", "metrics", "activations", "workers", "network", "distributed"),
    ("importance", "sparsify", "models", "data", "capacity"),
    ("preserve",),
    ("trained", "recommendation"),
    ("spec",),
    ("keeper", "engine"),
    ("runner",),
    ("report", "experiments", "bench", "integrations", "testing"),
    ("cli",),
)
APART = (("report", "experiments"),)  # rooms of one layer that must not import each other in either direction
ENTRIES = ("__init__", "__main__")

Arrows = dict[str, set[str]]


# ---- reading the imports -----------------------------------------------------------------------------------------------------
def rooms_of(source: Path) -> dict[str, list[Path]]:
    """Return the files of every room of the package folder `source`."""
    rooms: dict[str, list[Path]] = {}
    for path in sorted(source.rglob("*.py")):
        room = path.relative_to(source).parts[0].removesuffix(".py")
        if room not in ENTRIES:
            rooms.setdefault(room, []).append(path)
    return rooms


def imports_of(path: Path, source: Path) -> set[str]:
    """Return the rooms that one file imports, its own room not included."""
    found = {name.split(".")[1] for name in _imported_names(path, source) if "." in name}
    rooms = {name for name in found if (source / name).is_dir() or (source / f"{name}.py").is_file()}
    return rooms - {path.relative_to(source).parts[0].removesuffix(".py"), *ENTRIES}


def arrows_of(source: Path) -> Arrows:
    """Return the rooms that every room imports."""
    return {room: set().union(*(imports_of(path, source) for path in files)) for room, files in rooms_of(source).items()}


def _imported_names(path: Path, source: Path) -> Iterator[str]:
    """Yield the full names of modules of this package that the file imports: `package.room.module`."""
    package, here = source.name, (source.name, *path.relative_to(source).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == package)
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) + 1 - node.level] if node.level else ()  # `from . import x` has level 1
            module = ".".join([*above, *([node.module] if node.module else [])])
            if module == package:
                yield from (f"{package}.{alias.name}" for alias in node.names)
            elif module.startswith(f"{package}."):
                yield module


# ---- checking the layers -----------------------------------------------------------------------------------------------------
def violations(source: Path, layers: Sequence[Sequence[str]] = LAYERS, apart: Sequence[tuple[str, str]] = APART) -> list[str]:
    """Return what breaks the order of the layers, one sentence for each; an empty list if nothing does."""
    level = {room: i for i, layer in enumerate(layers) for room in layer}
    rooms = rooms_of(source)
    arrows: Arrows = {room: set() for room in rooms}
    found = [f"{room} is in no layer" for room in rooms if room not in level]
    for room, files in rooms.items():
        for path in files:
            for other in sorted(imports_of(path, source)):
                arrows[room].add(other)
                here = f"{path.relative_to(source).as_posix()} imports {other}"
                if level.get(other, -1) > level.get(room, len(layers)):
                    found.append(f"{here}, which is in a higher layer than {room}")
                if (room, other) in apart or (other, room) in apart:
                    found.append(f"{here}; {room} and {other} must not import each other")
    return found + [f"the imports go in a circle: {' -> '.join(circle)}" for circle in circles(arrows)]


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Return one circle of imports for every room that imports itself through others, each circle once."""
    found: dict[frozenset[str], list[str]] = {}
    for room in sorted(arrows):
        path = _path(arrows, room, room)
        if path:
            found.setdefault(frozenset(path), path)
    return list(found.values())


def heights(arrows: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the floor of every room: 0 if it imports no room, else one above the highest floor that it imports."""
    known: dict[str, int] = {}

    def height(room: str, open_rooms: frozenset[str]) -> int:
        if room not in known:
            below = [height(other, open_rooms | {room}) for other in sorted(arrows[room]) if other not in open_rooms | {room}]
            known[room] = 1 + max(below, default=-1)
        return known[room]

    for room in sorted(arrows):
        height(room, frozenset())
    return known


def _path(arrows: Mapping[str, set[str]], start: str, goal: str, without: tuple[str, str] | None = None) -> list[str]:
    """Return a shortest path from `start` to `goal` over at least one arrow, not using the arrow `without`; [] if there is none."""
    paths, seen = [[start]], {start}
    for path in paths:  # grows while it is read: breadth first
        for other in sorted(arrows.get(path[-1], ())):
            if (path[-1], other) == without:
                continue
            if other == goal:
                return [*path, other]
            if other not in seen:
                seen.add(other)
                paths.append([*path, other])
    return []


# ---- drawing -----------------------------------------------------------------------------------------------------------------
def reduce_arrows(arrows: Mapping[str, set[str]]) -> Arrows:
    """Leave out every arrow that a longer path implies; what can be reached from where stays the same."""
    kept = {room: set(others) for room, others in arrows.items()}
    for room in sorted(kept):
        for other in sorted(kept[room]):
            if _path(kept, room, other, without=(room, other)):
                kept[room].discard(other)
    return kept


def picture(source: Path, layers: Sequence[Sequence[str]] = LAYERS) -> str:
    """Return a sentence and a Mermaid flowchart: the highest layer on top, folders with a double edge, only arrows that no path implies."""
    rooms, arrows = rooms_of(source), arrows_of(source)
    drawn = reduce_arrows(arrows)
    order = [room for layer in reversed(layers) for room in layer if room in rooms]
    order += sorted(room for room in rooms if room not in order)
    total, shown = (sum(map(len, some.values())) for some in (arrows, drawn))
    lines = [
        f"{len(rooms)} rooms, {total} imports between them on {1 + max(heights(arrows).values(), default=-1)} levels. "
        f"The picture leaves out the {total - shown} imports that others imply.",
        "",
        "```mermaid",
        "flowchart TD",
    ]
    for room in order:
        lines.append(f'    {room}[["{room}/"]]' if (source / room).is_dir() else f'    {room}["{room}"]')
    for room in order:
        lines += [f"    {room} --> {other}" for other in order if other in drawn[room]]
    return "\n".join([*lines, "```"])


def with_picture(text: str, drawing: str) -> str:
    """Return the page with `drawing` between its two markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the page needs the lines {BEGIN} and {END}, once each and in this order")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    return f"{before}{BEGIN}\n\n{drawing}\n\n{after}"


def sentences(room: str, arrows: Arrows) -> str:
    """Return "Imports …. Imported by …." of one room."""
    importers = {other for other in arrows if room in arrows[other]}
    lines = [f"{verb} {_enumerate(sorted(names))}." for verb, names in (("Imports", arrows[room]), ("Imported by", importers))]
    return "\n".join(textwrap.fill(line, 140) for line in (lines if sum(map(len, lines)) >= 120 else [" ".join(lines)]))


def _enumerate(names: Sequence[str]) -> str:
    return " and ".join([*([", ".join(names[:-1])] if len(names) > 1 else []), *names[-1:]]) or "nothing"


def folders_with_sentences(source: Path) -> dict[Path, str]:
    """Return the text of every folder's `__init__.py` in which the sentences about its imports are true."""
    arrows = arrows_of(source)
    found = {path: path.read_text(encoding="utf-8") for room in arrows if (path := source / room / "__init__.py").is_file()}
    return {path: SENTENCES.sub(sentences(path.parent.name, arrows), text, count=1) for path, text in found.items()}


def table(source: Path) -> str:
    """Return the size of the package in numbers, one line each."""
    arrows = arrows_of(source)
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in source.rglob("*.py")}
    over = {limit: [f"{p.relative_to(source).as_posix()} ({n})" for p, n in sorted(lengths.items()) if n > limit] for limit in (250, 400)}
    rows = {
        "rooms": len(arrows),
        "arrows": sum(map(len, arrows.values())),
        "arrows drawn": sum(map(len, reduce_arrows(arrows).values())),
        "floors": 1 + max(heights(arrows).values(), default=-1),
        "root files": len(list(source.glob("*.py"))),
        "files": len(lengths),
        "files over 250 lines": len(over[250]),
        "files over 400 lines": len(over[400]),
    }
    return "\n".join([*(f"{name:<20} {value:>4}" for name, value in rows.items()), *(f"  {name}" for name in over[250])])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if the picture is out of date")
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder of the package (src/selfless)")
    parser.add_argument("--page", type=Path, default=PAGE, help="page with the two markers (docs/architecture.md)")
    options = parser.parse_args(arguments)
    text = options.page.read_text(encoding="utf-8")
    try:
        wanted = with_picture(text, picture(options.source))
    except ValueError as error:
        print(f"error: {options.page}: {error}", file=sys.stderr)
        return 1
    files = {options.page: wanted} | folders_with_sentences(options.source)
    old = [path for path, content in files.items() if path.read_text(encoding="utf-8") != content]
    if options.check:
        for path in old:
            print(f"{path} is out of date; run: python docs/rooms.py", file=sys.stderr)
        return int(bool(old))
    for path in old:
        path.write_text(files[path], encoding="utf-8")
    print(table(options.source))
    for sentence in violations(options.source):
        print(f"  {sentence}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
