"""Tables of the room that one recorded run has left: after each task, and by layer after the last one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from selfless.spec import Result

KINDS = {"importance": "by α", "firing": "by firing"}
CAPTION = (
    "by α: the fewest neurons with 90 % of the task's Σα · by firing: neurons that fire in 5 % of its samples · overlap: share of the "
    "task's neurons that an earlier task uses too, beside chance · docs/capacity.md"
)
Entry = Mapping[str, Any]


def percent(value: float | None, of: float = 1.0) -> str:
    """Return a share as percent, "–" if it was not measured."""
    return "–" if value is None else f"{100 * value / of:.0f}"


def _rows() -> dict[str, Callable[[Entry], str]]:
    """Return the rows of the table over tasks: heading → cell of a room."""
    rows: dict[str, Callable[[Entry], str]] = {}
    for kind, words in KINDS.items():
        for name in ("free", "shared", "now", "new"):
            title = {"now": "of this task", "new": "new in this task"}.get(name, name)
            rows[f"{title} {words}, %"] = lambda room, k=kind, n=name: percent(room[k][n], room[k]["total"]) if k in room else "–"  # type: ignore[misc]
        rows[f"overlap {words} (chance), %"] = lambda room, k=kind: _overlap(room.get(k))  # type: ignore[misc]
    rows["dead, %"] = lambda room: percent(room["dead"], room["neurons"])
    rows["active, %"] = lambda room: percent(room["active"])
    for name in ("lifetime", "population", "correlation"):
        rows[name] = lambda room, n=name: "–" if room[n] is None else f"{room[n]:.2f}"  # type: ignore[misc]
    rows["rank"] = lambda room: "–" if room["rank"] is None else f"{room['rank']:.1f}"
    return rows


def _overlap(use: Entry | None) -> str:
    return "–" if use is None or use["overlap"] is None else f"{percent(use['overlap'])} ({percent(use['chance'])})"


def room_over_tasks(result: Result) -> Table | None:
    """Return a table of the whole network, a column per task; None if the record has no activations."""
    from rich.table import Table

    rooms = [entry.get("network") for entry in result.capacity]
    if not any(rooms):
        return None
    table = Table(title="All layers after each task", title_justify="left", caption=CAPTION, caption_justify="left")
    table.add_column("after task")
    for t in range(1, len(rooms) + 1):
        table.add_column(str(t), justify="right")
    for title, cell in _rows().items():
        table.add_row(title, *("–" if room is None else cell(room) for room in rooms))
    return table


def room_by_layer(result: Result) -> Table | None:
    """Return a table of the layers after the last task, a column per layer; None if the record has no activations."""
    from rich.table import Table

    last = result.capacity[-1] if result.capacity else {}
    if "layers" not in last:
        return None
    table = Table(title=f"Layers after task {last['tasks']}", title_justify="left")
    table.add_column("layer")
    for name in (*last["layers"], "all"):
        table.add_column(name, justify="right")
    for title, cell in _rows().items():
        table.add_row(title, *(cell(room) for room in (*last["layers"].values(), last["network"])))
    table.add_row("neurons", *(str(room["neurons"]) for room in (*last["layers"].values(), last["network"])))
    return table
