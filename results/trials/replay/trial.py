"""Train the runs of this folder: replay baselines, which use old data, beside MAS with SLNID and LwF. Prints a Markdown table.

    python results/trials/replay/trial.py [OUT]

Each method has three strengths. The one with the best average on held-out data (a tenth of the training images, one seed) is trained with
three other seeds on all training images. A memory has 200 samples.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

import selfless
from selfless import MAS, SLNID, DERpp, LwF, NoPreserver, NoSparsifier, Replay, Result, Run
from selfless.metrics import forgetting
from selfless.preserve import Preserver
from selfless.terms import Term

METHODS: dict[str, tuple[list[Preserver], Term]] = {  # strengths to choose from, and the sparsifier
    "Finetune": ([NoPreserver()], NoSparsifier()),
    "MAS + SLNID": ([MAS(s) for s in (0.01, 0.1, 1.0)], SLNID(1e-3)),
    "LwF": ([LwF(s) for s in (0.3, 1.0, 3.0)], NoSparsifier()),
    "Replay, uses old data": ([Replay(s, samples=200) for s in (0.3, 1.0, 3.0)], NoSparsifier()),
    "DER++, uses old data": ([DERpp(s, samples=200) for s in (0.1, 0.3, 1.0)], NoSparsifier()),
}
SETTINGS = {
    "split MNIST, class": Run(stream="split-mnist", epochs=2, scenario="class"),
    "permuted MNIST": Run(stream="permuted-mnist", tasks=3, epochs=2, lr=0.05, stream_options={"limit": 10_000}),
}
HELD_OUT, SEEDS = 100, (0, 1, 2)


def candidates(base: Run, method: tuple[list[Preserver], Term]) -> list[Run]:
    """Return the runs from which the strength of a method is chosen."""
    terms, sparsify = method
    return [replace(base, preserve=term, sparsify=sparsify, held_out=0.1, seed=HELD_OUT) for term in terms]


def main(out: Path) -> None:
    """Train everything that is not recorded in `out`, and print the table; also write it to table.md."""

    def train(runs: list[Run]) -> list[Result]:
        return selfless.train(runs, out=out, device="cpu", workers=1, checkpoints=False)

    def score(result: Result) -> float:
        return float(result.held_out[-1].mean()) if result.held_out is not None and result.status == "done" else -1.0

    lines = ["| setting | method | chosen | average, % | lost |", "| --- | --- | --- | ---: | ---: |"]
    for setting, base in SETTINGS.items():
        grids = {name: candidates(base, method) for name, method in METHODS.items()}
        tried = {r.run: score(r) for r in train([run for grid in grids.values() if len(grid) > 1 for run in grid])}
        chosen = {name: max(grid, key=lambda run: tried.get(run, 0.0)) for name, grid in grids.items()}
        done = {r.run: r for r in train([replace(run, held_out=0.0, seed=s) for run in chosen.values() for s in SEEDS])}
        for method, best in chosen.items():
            results = [done[replace(best, held_out=0.0, seed=s)] for s in SEEDS]
            average = np.array([100 * r.average for r in results])
            lost = np.array([100 * forgetting(np.where(np.tri(len(r.accuracy)) > 0, r.accuracy, np.nan)) for r in results])
            cells = [f"{a.mean():.2f} ± {a.std(ddof=1):.2f}".replace("-", "−") for a in (average, lost)]
            lines.append(f"| {setting} | {method} | `{best.preserve}` | {cells[0]} | {cells[1]} |")
    print("\n".join(lines))
    (out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
