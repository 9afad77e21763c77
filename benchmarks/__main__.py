"""Measure, print tables, and write JSON if asked.

python -m benchmarks                          # everything
python -m benchmarks importance --quick       # one part, small: a look, not a result
python -m benchmarks all --threads 2 --json results/bench/core-cpu.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import importance, peer_runs, penalty
from benchmarks.timing import hardware

PARTS = {"importance": importance.run, "penalty": penalty.run, "peers": peer_runs.run}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="The speed ratios of this machine.")
    parser.add_argument("part", nargs="?", default="all", choices=[*PARTS, "all"])
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here too")
    parser.add_argument("--quick", action="store_true", help="fewer samples and repetitions")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 140)
    found: dict[str, Any] = {
        "hardware": hardware(),
        "quick": options.quick,
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
    }
    for name in PARTS if options.part == "all" else [options.part]:
        found[name] = PARTS[name](console, quick=options.quick)
        if options.json:  # after every part: an interrupted run keeps what it has
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
