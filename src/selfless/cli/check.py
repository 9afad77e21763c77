"""`selfless check`: test a method against the laws that every method keeps."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from selfless.cli.errors import reporting_errors
from selfless.cli.options import AsJson

EXAMPLES = "Examples:  selfless check mine:LayerMAS:100  ·  selfless check slnid:1e-3 mas:0.1+lwf:1"


def check(
    methods: Annotated[list[str], typer.Argument(metavar="METHOD...", help="Preservers or sparsifiers, as for selfless run.")],
    as_json: AsJson = False,
) -> None:
    """Test a method of your own in seconds: in your loop, in runs and in fleets it must do the same, and keep its state.

    Every law that holds for such a method is tested on small networks, on the CPU, without data files. The exit status is 1 if one is
    broken. In Python: selfless.testing.check(LayerMAS(100)).
    """
    with reporting_errors(as_json, stopped="stopped"):
        from selfless.preserve import PRESERVERS
        from selfless.sparsify import SPARSIFIERS
        from selfless.terms import Term, parse
        from selfless.testing import find

        kinds: dict[str, type[Term]] = {**SPARSIFIERS, **PRESERVERS}
        found = {str(term): find(term) for term in [parse(text, kinds, "method") for text in methods]}
        if as_json:
            typer.echo(json.dumps({name: {one.law: one.broken for one in findings} for name, findings in found.items()}))
        else:
            for name, findings in found.items():
                broken = sum(one.broken is not None for one in findings)
                end = f"{broken} of {len(findings)} laws broken" if broken else f"all {len(findings)} laws hold"
                typer.echo("\n".join([name, *(f"  {one}" for one in findings), end]))
        if any(one.broken is not None for findings in found.values() for one in findings):
            raise typer.Exit(1)
