"""`selfless check`: test a method against the laws that every method keeps."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from selfless.cli.errors import reporting_errors
from selfless.cli.options import AsJson

EXAMPLES = "Examples:  selfless check mine:LayerMAS:100  ·  selfless check slnid:1e-3 mas:0.1+lwf:1"


def check(
    methods: Annotated[list[str], typer.Argument(metavar="METHOD...", help="Preservers or sparsifiers, as for selfless run.")],
    as_json: AsJson = False,
) -> None:
    """Test a method of your own in seconds: the same results in a loop, a run and a fleet, a state that can be saved, …

    Every law that holds for such a method is tested on small networks, on the CPU, without data files. The exit status is 1 if one is
    broken. In Python: selfless.testing.check(LayerMAS(100)).
    """
    with reporting_errors(as_json, stopped="stopped"):
        from selfless.preserve import PRESERVERS
        from selfless.sparsify import SPARSIFIERS
        from selfless.terms import Term, parse
        from selfless.testing import find

        kinds: dict[str, type[Term]] = {**SPARSIFIERS, **PRESERVERS}
        found: list[dict[str, Any]] = []
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():  # a custom method may print
            terms = [parse(text, kinds, "method") for text in methods]
            for text, term in zip(methods, terms, strict=True):
                laws = {one.law: one.broken for one in find(term)}
                found.append({"method": text, "laws": laws})
                if not as_json:
                    typer.echo("\n".join(_lines(text, laws)))
        if as_json:
            typer.echo(json.dumps({"methods": found}))
        if any(broken is not None for one in found for broken in one["laws"].values()):
            raise typer.Exit(1)


def _lines(text: str, laws: Mapping[str, str | None]) -> Iterator[str]:
    """Yield the method, its laws, and how many hold; a cause that breaks several laws is told once."""
    yield text
    told = set[str]()
    for law, broken in laws.items():
        again = broken in told
        yield f"  ✓ {law}" if broken is None else f"  ✗ {law}: {'the same' if again else broken}"
        told |= {broken} if broken is not None else set()
    count = sum(broken is not None for broken in laws.values())
    yield f"{count} of {len(laws)} laws broken" if count else f"all {len(laws)} laws hold"
