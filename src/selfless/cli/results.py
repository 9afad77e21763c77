"""Show results in the terminal or as JSON, and load those that are recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from selfless.cli.errors import print_error
from selfless.cli.terminal import open_console

if TYPE_CHECKING:
    from selfless.spec import Result


MOST = 10  # runs whose folders are listed; more only if their strengths were measured


def show_results(results: Sequence[Result], out: Path, as_json: bool) -> None:
    """Print the results and where their files are. Exit with status 1 if a run failed."""
    if as_json:
        _print_json(results, out)
    else:
        _print_table(results, out)
    failed = [r for r in results if r.status != "done"]
    for result in failed:
        print_error(f"failed: {result.run.method}, seed {result.run.seed}: {result.error}")
    if failed:
        raise typer.Exit(1)


def _print_json(results: Sequence[Result], out: Path) -> None:
    from selfless.metrics import spread
    from selfless.report.gaps import gaps
    from selfless.report.groups import best, groups, uses_old_data, why_not_compared

    methods: dict[str, list[float]] = {}
    for r in results:
        methods.setdefault(r.run.method, []).extend([r.average] if r.status == "done" else [])
    spreads = {name: spread(values) if values else (float("nan"), float("nan")) for name, values in methods.items()}
    averages = {name: {"mean": _nan_to_none(mean), "std": _nan_to_none(std)} for name, (mean, std) in spreads.items()}
    payload: dict[str, Any] = {"out": str(out), "averages": averages, "runs": [r.as_dict() for r in results]}
    found = groups(results)
    if len(found) > 1:
        few = "one seed of each has no interval" if len([g for g in found if g.done]) > 1 else "fewer than two methods have finished"
        payload |= {"best": None, "beside": {}, "not_compared": why_not_compared(found) or few}
    if (top := best(found)) is not None and (others := gaps(found)):
        del payload["not_compared"]
        payload["best"] = top.run.method
        payload["uses_old_data"] = [group.run.method for group in found if uses_old_data(group.run)]
        payload["beside"] = {g.group.run.method: {"difference": g.mean, "low": g.low, "high": g.high, "seeds": g.seeds} for g in others}
    if len(averages) == 1:
        payload["average"] = next(iter(averages.values()))
    typer.echo(json.dumps(payload))


def _nan_to_none(value: float) -> float | None:
    return value if value == value else None


def _print_table(results: Sequence[Result], out: Path) -> None:

    from rich.text import Text

    from selfless import report

    console = open_console()
    console.print(report.terminal(results))
    others = report.beside(results)
    console.print(str(report.headline(results)) if others is None else others)
    if len(results) > MOST and not any(result.about.get("strengths") for result in results):
        console.print(Text.assemble((f"{len(results)} runs:", "dim"), f" {out}"), soft_wrap=True)
        return
    for result in results:
        strengths = ", ".join(f"{name}:{value:.3g}" for name, value in result.about.get("strengths", {}).items())
        measured = f" (measured: {strengths})" if strengths else ""
        what = f"{result.run.method}, seed {result.run.seed}{measured}:"
        console.print(Text.assemble((what, "dim"), f" {out / result.run.key}"), soft_wrap=True)


def load_results(folder: Path) -> list[Result]:
    """Every result recorded in a folder; an error if there is none."""
    from selfless.runner.store import Store

    results = Store(folder).all(skip=True)
    if not results:
        begun = sum(1 for _ in folder.glob("*/log.jsonl"))
        if begun:
            raise ValueError(f"{folder} holds no results, but {begun} unfinished; give the command that began them again")
        near = Store(folder.parent).keys() if not folder.exists() else ()
        if near:
            raise ValueError(f"{folder.parent} has no run {folder.name!r}; its newest runs: {', '.join(near[-3:])}")
        raise ValueError(f"{folder} holds no results; train something first: selfless run --out {folder}")
    return results
