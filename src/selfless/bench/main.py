"""Measure the chosen parts one after another and write the result after every row."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from selfless.bench import growth, importance, peers, penalty, scaling, sequence, steps
from selfless.bench.engine import training_settings
from selfless.bench.hardware import describe_hardware
from selfless.bench.plan import DEFAULT_PARTS, PARTS, Plan, Unavailable
from selfless.bench.table import Row
from selfless.files import write_text

MEASURE: dict[str, Callable[[Plan], Iterable[Row]]] = {
    "steps": steps.run,
    "importance": importance.run,
    "penalty": penalty.run,
    "fleet": scaling.run,
    "growth": growth.run,
    "sequence": sequence.run,
    "peers": peers.run,
}


def choose_parts(only: str | None, with_peers: bool = False) -> list[str]:
    """Return the parts named in --only, or the default ones, in the order of PARTS."""
    names = [name.strip() for name in only.split(",") if name.strip()] if only is not None else list(DEFAULT_PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        what = f"no part is called {unknown[0]!r}" if unknown else "it names no part"
        raise ValueError(f"--only {only!r}: {what}; the parts are {', '.join(PARTS)}")
    wanted = {*names, *(["peers"] if with_peers else [])}
    return [name for name in PARTS if name in wanted]


def bench(parts: list[str], plan: Plan, command: str, out: Path | None = None) -> dict[str, Any]:
    """Return {command, quick, hardware, the rows of each part, skipped: {part: reason}}.

    With `out`, write it to out/bench.json after every row, so that an interrupted benchmark keeps its rows, and add plots at the end.
    """
    found: dict[str, Any] = {"command": command, "quick": plan.quick, "hardware": describe_hardware(plan.device), "skipped": {}}
    _write(found, out)  # now, so that a folder without write permission is reported before anything is measured
    for part in parts:
        rows: list[Row] = []
        part_plan = dataclasses.replace(plan, say=lambda what, part=part: plan.say(f"{part}: {what}"))  # type: ignore[misc]
        part_plan.say("…")
        try:
            with training_settings():
                for row in MEASURE[part](part_plan):
                    rows.append(row)
                    found[part] = rows
                    _write(found, out)
        except Unavailable as reason:
            found["skipped"][part] = str(reason)
            _write(found, out)
    if out is not None:
        from selfless.bench.plots import save

        save(found, out)
    return found


def _write(found: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        write_text(out / "bench.json", json.dumps(found, indent=1) + "\n")
