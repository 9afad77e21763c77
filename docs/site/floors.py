"""The rooms of the package as a drawing for the site, which loads no Mermaid: a row or two for each layer, an arrow for each import."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
WIDTH, GAP, BOX, ROW, MOST = 760, 14, 30, 78, 5  # the picture, between boxes, height of a box, from row to row, boxes in a row


def draw(imports: dict[str, set[str]] | None = None) -> str:
    """Return the drawing as SVG in HTML. `imports`: the rooms that each room imports; read from the files unless given."""
    rooms = _rooms()
    files = rooms.rooms_of(rooms.SOURCE)
    drawn = rooms.reduce_arrows(rooms.arrows_of(rooms.SOURCE) if imports is None else imports)
    layers = [[name for name in layer if name in files] for layer in reversed(rooms.LAYERS)]
    rows = [layer[i : i + MOST] for layer in layers for i in range(0, len(layer), MOST)]
    places: dict[str, tuple[float, float, float]] = {}
    for number, row in enumerate(rows):
        widths = [8.8 * len(_label(rooms, name)) + 20 for name in row]
        left = (WIDTH - sum(widths) - GAP * (len(row) - 1)) / 2
        for name, width in zip(row, widths, strict=True):
            places[name] = (left, 10 + ROW * number, width)
            left += width + GAP
    arrows = [_arrow(places[name], places[other]) for name in sorted(drawn) for other in sorted(drawn[name])]
    boxes = [_box(_label(rooms, name), *place) for name, place in places.items()]
    height = 10 + ROW * (len(rows) - 1) + BOX + 30
    head = f'<svg class="rooms" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="The rooms of the package and their imports">'
    return "\n".join(['<div class="rooms-frame" tabindex="0">', head, *arrows, *boxes, "</svg>", "</div>"])


def _rooms() -> ModuleType:
    """Return docs/rooms.py, which reads the imports."""
    spec = importlib.util.spec_from_file_location("rooms", HERE.parent / "rooms.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["rooms"] = module
    spec.loader.exec_module(module)
    return module


def _label(rooms: ModuleType, name: str) -> str:
    return f"{name}/" if (rooms.SOURCE / name).is_dir() else name


def _box(label: str, left: float, top: float, width: float) -> str:
    text = f'<text x="{left + width / 2:.1f}" y="{top + BOX / 2 + 5:.1f}">{label}</text>'
    return f'<g><rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{BOX}" rx="6"/>{text}</g>'


def _arrow(start: tuple[float, float, float], end: tuple[float, float, float]) -> str:
    """Return a curve from the bottom of one box to the top of another; within a row, an arc below it."""
    x1, y1 = start[0] + start[2] / 2, start[1] + BOX
    x2, y2 = end[0] + end[2] / 2, end[1]
    if start[1] == end[1]:
        low = y1 + 24
        return f'<path d="M{x1:.1f} {y1:.1f} C{x1:.1f} {low:.1f} {x2:.1f} {low:.1f} {x2:.1f} {y2 + BOX:.1f}"/>'
    bend = 0.5 * (y2 - y1)
    return f'<path d="M{x1:.1f} {y1:.1f} C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:.1f}"/>'
