"""`selfless bench`: measure time and memory on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from selfless.cli.errors import reporting_errors
from selfless.cli.options import AsJson, DataDir, Device

EXAMPLES = """[bold]Examples[/bold]

  selfless bench                                       [dim]# steps, importance, penalty, growth: one table[/dim]
  selfless bench --quick                               [dim]# a minute: a quick look, not a result[/dim]
  selfless bench --only penalty --device cpu --threads 2
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
    device: Device = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of PyTorch on the CPU.", show_default="PyTorch's choice")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Measure time and memory on this machine, as ratios to plain PyTorch in the same rounds; a time is the minimum over rounds.

    Images are random tensors in memory; only sequence and peers need real data. If a part cannot be measured, the reason is printed.
    """
    with reporting_errors(as_json, "stopped; with --out, what was measured so far is in bench.json"):
        import shlex

        import torch
        from rich.console import Console

        from selfless.bench.main import bench as measure
        from selfless.bench.main import choose_parts
        from selfless.bench.plan import plan
        from selfless.bench.table import table
        from selfless.runner.machine import resolve_device

        parts, place = choose_parts(only, peers), torch.device(resolve_device(device or "auto"))
        if threads is not None:
            torch.set_num_threads(threads)
        console = Console(stderr=True, quiet=as_json)
        with console.status("") as status:
            tell = status.update if console.is_terminal else console.print
            sizes = plan(place, quick, data_dir, say=lambda what: tell(f"measuring {what}"))
            found = measure(parts, sizes, shlex.join(["selfless", *sys.argv[1:]]), out)
        if set(parts) == set(found["skipped"]):
            raise ValueError("nothing could be measured: " + "; ".join(f"{part}: {why}" for part, why in found["skipped"].items()))
        if as_json:
            typer.echo(json.dumps(found))
            return
        shown = Console(width=None if sys.stdout.isatty() else 180)
        shown.print(table(found))
        for part, why in found["skipped"].items():
            shown.print(f"{part}: skipped: {why}", soft_wrap=True, highlight=False)
        if out is not None:
            shown.print(f"written: {out / 'bench.json'}, and plots beside it", soft_wrap=True, highlight=False)
