"""Measure the parts that were asked for, one after another, and keep what there is after each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from selfless.bench import importance, peers, penalty, scaling, sequence, steps
from selfless.bench.plan import PARTS, USUAL, Plan, Unavailable
from selfless.bench.rig import as_in_a_run
from selfless.bench.rows import Row
from selfless.bench.timing import hardware
from selfless.files import write_text

MEASURE: dict[str, Callable[[Plan], Iterable[Row]]] = {
    "steps": steps.run,
    "importance": importance.run,
    "penalty": penalty.run,
    "fleet": scaling.run,
    "sequence": sequence.run,
    "peers": peers.run,
}


def chosen(only: str | None, with_peers: bool = False) -> list[str]:
    """The parts of --only, else the usual ones; in the order of PARTS."""
    names = [name.strip() for name in only.split(",") if name.strip()] if only is not None else list(USUAL)
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        what = f"no part is called {unknown[0]!r}" if unknown else "it names no part"
        raise ValueError(f"--only {only!r}: {what}; the parts are {', '.join(PARTS)}")
    wanted = {*names, *(["peers"] if with_peers else [])}
    return [name for name in PARTS if name in wanted]


def bench(parts: list[str], plan: Plan, command: str, out: Path | None = None) -> dict[str, Any]:
    """{hardware, command, quick, each part's rows, skipped: {part: why}}; in out/bench.json after every row, with plots at the end."""
    found: dict[str, Any] = {"command": command, "quick": plan.quick, "hardware": hardware(plan.device), "skipped": {}}
    _keep(found, out)  # a folder one cannot write to is known at once
    for part in parts:
        rows: list[Row] = []
        here = dataclasses.replace(plan, say=lambda what, part=part: plan.say(f"{part}: {what}"))  # type: ignore[misc]
        here.say("…")
        try:
            with as_in_a_run():
                for line in MEASURE[part](here):
                    rows.append(line)
                    found[part] = rows
                    _keep(found, out)  # an interrupted run has what it has
        except Unavailable as why:
            found["skipped"][part] = str(why)
            _keep(found, out)
    if out is not None:
        from selfless.bench.plots import save

        save(found, out)
    return found


def _keep(found: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        write_text(out / "bench.json", json.dumps(found, indent=1) + "\n")
