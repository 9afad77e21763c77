"""`selfless bench`: measure time and memory on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from selfless.cli.errors import reporting_errors
from selfless.cli.options import AsJson, DataDir, Device

EXAMPLES = """[bold]Examples[/bold]

  selfless bench                                       [dim]# steps, importance, penalty, fleet: one table[/dim]
  selfless bench --quick                               [dim]# a minute: a quick look, not a result[/dim]
  selfless bench --only penalty --device cpu --threads 2
  selfless bench --quick --history benchmarks/history.jsonl --check  [dim]# fail if a ratio fell by a third[/dim]
  selfless bench --out results/bench/here              [dim]# bench.json and the plots, PNG and SVG[/dim]
  selfless bench --only sequence --out results/bench/gpu [dim]# whole sequences: needs a GPU, MNIST and CIFAR-100[/dim]
  selfless bench --only growth --out results/bench/growth [dim]# cost by width, layers, tasks, runs and samples: minutes[/dim]
  selfless bench --peers                               [dim]# beside Avalanche: needs a checkout and benchmarks/peers/setup.sh[/dim]"""


def bench(
    only: Annotated[
        str | None,
        typer.Option(
            help="Parts, comma-separated: steps, importance, penalty, fleet, growth, sequence, peers.", show_default="the first four"
        ),
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Measure other libraries too, each in its own environment.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, two rounds: only to see that it works.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write bench.json and plots there.", metavar="DIR", show_default="nothing")] = None,
    history: Annotated[
        Path | None,
        typer.Option(help="Add a line of ratios to this file, or compare with it (--check).", metavar="FILE", show_default="none"),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Fail if a ratio is a third below its median in --history.")] = False,
    device: Device = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of PyTorch on the CPU.", show_default="PyTorch's choice")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Measure time and memory on this machine, as ratios to plain PyTorch in the same rounds; a time is the minimum over rounds.

    Images are random tensors in memory; only sequence and peers need real data. If a part cannot be measured, the reason is printed.
    """
    with reporting_errors(as_json, "stopped; with --out, what was measured so far is in bench.json"):
        import dataclasses
        import shlex

        import torch
        from rich.console import Console

        from selfless.bench.main import bench as measure
        from selfless.bench.main import choose_parts
        from selfless.bench.plan import plan
        from selfless.bench.table import table
        from selfless.runner.machine import resolve_device

        if check and history is None:
            raise ValueError("--check compares with a history: give its file with --history benchmarks/history.jsonl")
        parts, place = choose_parts(only, peers), torch.device(resolve_device(device or "auto"))
        if threads is not None:
            torch.set_num_threads(threads)
        console = Console(stderr=True, quiet=as_json)
        with console.status("") as status:
            tell = status.update if console.is_terminal else console.print
            sizes = plan(place, quick, data_dir, say=lambda what: tell(f"measuring {what}"))
            if history is not None:  # a line of the history needs more than the two rounds of --quick
                sizes = dataclasses.replace(sizes, rounds=max(sizes.rounds, 5))
            command = shlex.join(["selfless", *sys.argv[1:]])
            found = measure(parts, sizes, command, out)
            fell = _follow(history, check, found, lambda: measure(parts, sizes, command)) if history is not None else {}
        if set(parts) == set(found["skipped"]):
            raise ValueError("nothing could be measured: " + "; ".join(f"{part}: {why}" for part, why in found["skipped"].items()))
        if as_json:
            typer.echo(json.dumps(found | ({"fell": fell} if check else {})))
            if fell:
                raise typer.Exit(1)
            return
        shown = Console(width=None if sys.stdout.isatty() else 180)
        shown.print(table(found))
        for part, why in found["skipped"].items():
            shown.print(f"{part}: skipped: {why}", soft_wrap=True, highlight=False)
        for name, (value, median) in fell.items():
            shown.print(f"fell: {name} is {value:.3g}, its median is {median:.3g}", soft_wrap=True, highlight=False)
        if out is not None:
            shown.print(f"written: {out / 'bench.json'}, and plots beside it", soft_wrap=True, highlight=False)
        if fell:
            raise typer.Exit(1)


def _follow(path: Path, check: bool, found: dict[str, Any], again: Callable[[], dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Add a line to the history; or, with `check`, return the ratios that fell in two measurements."""
    from selfless.bench.history import append, best, fallen, make_line, read
    from selfless.bench.plan import PARTS

    line, lines = make_line(found, PARTS), read(path)
    if not check:
        append(path, line)
        return {}
    if fallen(line, lines):
        line = best(line, make_line(again(), PARTS))
    return fallen(line, lines)
