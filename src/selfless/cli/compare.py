"""`selfless compare`: several methods, the same settings and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfless.cli.errors import reporting_errors
from selfless.cli.options import with_limit, with_run_options
from selfless.cli.results import show_results
from selfless.cli.training import train_with_progress

if TYPE_CHECKING:
    from selfless.spec import Run
    from selfless.terms import Term

SEEDS = 5  # unless the flags or the file say how many
EXAMPLES = """[bold]Examples[/bold]

  selfless compare mas:0.1 mas:0.1+slnid:1e-3                      [dim]# MAS alone and with SLNID, five seeds[/dim]
  selfless compare slnid:1e-3 decov:1e-3 --preserve mas:0.1        [dim]# what a METHOD does not name comes from the flags[/dim]
  selfless compare mas:0.1 mine:LayerMAS:0.1 --epochs 5 --limit 500  [dim]# a method of your own beside MAS[/dim]
  selfless compare packnet:0.75+decov:1e-3 lwf:1+decov:1e-3 none --stream split-mnist --seeds 3 --out compared
  selfless report compared                                         [dim]# the same as a page, with pictures[/dim]"""


@with_run_options
def compare(
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD", help="A preserver, a sparsifier or both, joined by +, as in mas:0.1+slnid:1e-3; none is no preserver."
        ),
    ],
    *,
    seeds: Annotated[int | None, typer.Option(help="How many seeds, from --seed up.", show_default="5", rich_help_panel="Training")] = None,
    config: Path | None,
    log: str | None,
    force: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Train several methods with the same settings and seeds, and show how far each is from the best one.

    Runs that can train together form one fleet. The strengths are yours: selfless tune chooses them on held-out data.
    A recorded run is not trained again, so a method can be added later with the same command.
    """
    with reporting_errors(as_json):
        from selfless.runner.plan import parse_method, plan

        flags, named = with_limit({**flags, "seeds": seeds}), [parse_method(text) for text in methods]
        _check(methods, named, flags)
        plans = [plan(config, {**flags, **fields}, force=force, seeds=SEEDS) for fields in named]
        if any(planned.recommended is not None for planned in plans):
            raise ValueError(
                "recommended brings settings of its own; name its methods instead, which selfless run --preserve recommended shows"
            )
        first: dict[Run, str] = {}
        for text, fields, planned in zip(methods, named, plans, strict=True):
            run = planned.runs[0]
            if run in first:
                hint = "; +none names no sparsifier where a flag or the file has one" if "sparsify" in fields else ""
                raise ValueError(f"{first[run]} and {text} are both {run.method} here{hint}")
            first[run] = text
        runs = [run for planned in plans for run in planned.runs]
        options = plans[0].options
        results = train_with_progress(runs, options, as_json=as_json, log=log)
        assert options.out is not None  # `plan` gives every command a folder
        if not as_json and len(plans[0].runs) == 1:
            typer.echo("differences need two seeds or more: --seeds 5", err=True)
        show_results(results, options.out, as_json)


def _check(methods: list[str], named: list[dict[str, Term]], flags: dict[str, Any]) -> None:
    """Raise ValueError if there is nothing to compare, or if a flag would not be used."""
    if len(methods) < 2:
        raise ValueError("compare takes two methods or more, as in: selfless compare mas:0.1 mas:0.1+slnid:1e-3")
    for field, role in (("preserve", "preserver"), ("sparsify", "sparsifier")):
        if flags[field] is not None and all(field in fields for fields in named):
            raise ValueError(f"every METHOD names a {role}, so --{field} {flags[field]} would not be used; remove it")
    if flags["preserve"] is not None and "none" in methods:
        raise ValueError(f"none means no preserver, so it does not use --preserve {flags['preserve']}; name the preserver alone: mas:0.1")
