"""Is the choice of `selfless tune`, which sees three tasks, as good as that of the full grid, which sees all of them?

    python benchmarks/tune_check.py --out tune-check                       # permuted MNIST, on a CPU
    python benchmarks/tune_check.py --case cifar --device cuda --out tune-check    # half a minute on one H200

The full grid is the recorded one of experiment table-1 (row SLNID): every pair of λ_Ω and λ, scored on held-out data after the last task.
`tune` chooses λ among the same values by the rule of thumb on the first task, then λ_Ω among those of its own default grid: the best
one on `--seen` tasks. The gap is the held-out score of the best pair less that of the tuned one; a tuned pair that is not recorded is
trained. It writes OUT/tune.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import selfless
from selfless import Result, Run
from selfless.experiments import experiment
from selfless.experiments.base import Cell, Choice
from selfless.experiments.choosing import choose, trial, trials
from selfless.experiments.decay import choose_decay, decay_runs
from selfless.experiments.grids import axis
from selfless.experiments.rule import tuning
from selfless.experiments.tuning import PRESERVE
from selfless.files import write_json

RECORD = Path(__file__).parent.parent / "results/reproduction/experiments/table-1-ours.json"
CASES = {"pmnist": ("pMNIST 128", 0.5), "cifar": ("CIFAR 256", 1.0)}  # the column, and by how many points the choice may be worse
ROW = "SLNID"


def recorded_grid(cell: Cell) -> dict[Run, float]:
    """Return the mean held-out score of every candidate of a cell, in percent, from the record."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    choice = next(choice for choice in record["choices"] if [cell.row, cell.column] in choice["cells"])
    keys = [[trial(run, seed, cell.choice).key for seed in cell.choice.seeds] for run in cell.candidates]
    if [one["keys"] for one in choice["candidates"]] != keys:
        raise SystemExit(f"{RECORD} has another grid for {cell.row}, {cell.column}; reproduce table-1 again")
    return {run: sum(one["scores"]) / len(one["scores"]) for run, one in zip(cell.candidates, choice["candidates"], strict=True)}


def check(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tune, and compare with the recorded grid."""
    column, allowed = CASES[case]
    cell = next(cell for cell in experiment("table-1").cells if cell.place == (ROW, column))
    grid = recorded_grid(cell)
    seeds = tuple(range(100, 100 + options.seeds))

    def train(runs: Sequence[Run]) -> dict[Run, Result]:
        small = {"stream_options": {"limit": 40}, "epochs": 2, "batch": 40, "precision": "fp32"}
        made = [run.replace(**small) for run in runs] if options.quick else runs
        found = selfless.train(made, out=options.out, device=options.device, workers=options.workers, checkpoints=False)
        return dict(zip(runs, found, strict=True))

    first = tuning(cell.candidates[0], axis(cell.candidates, "λ"), Choice("rule-largest", seeds, tolerance=options.tolerance))
    chosen = choose(first, train(list(dict.fromkeys(trials(first)))))
    if chosen.index is None:
        raise SystemExit("every λ failed")
    base = first.candidates[chosen.index].replace(preserve=cell.candidates[0].preserve)
    tried = decay_runs(base, PRESERVE, options.seen, seeds)
    decay = choose_decay(tried, train([run for runs in tried.values() for run in runs]), options.drop)
    if decay.index is None:
        raise SystemExit("every λ_Ω failed")
    last = decay.candidates[decay.index]
    tuned = cell.candidates[0].replace(preserve=last.preserve, sparsify=last.sparsify)
    best = max(grid, key=lambda run: grid[run])
    if tuned not in grid:  # λ_Ω = 0, or no λ
        scored = train([trial(tuned, seed, cell.choice) for seed in cell.choice.seeds])
        grid[tuned] = 100 * sum(float(r.held_out[-1].mean()) for r in scored.values() if r.held_out is not None) / len(scored)
    gap = grid[best] - grid[tuned]
    return {
        "column": column,
        "seeds": list(seeds),
        "first_task": {str(run.sparsify): scores for run, scores in zip(chosen.candidates, chosen.scores, strict=True)},
        "seen": options.seen,
        "tasks_seen": {str(run.preserve): scores for run, scores in zip(decay.candidates, decay.scores, strict=True)},
        "tuned": tuned.method,
        "tuned_held_out": grid[tuned],
        "best": best.method,
        "best_held_out": grid[best],
        "gap": gap,
        "allowed": allowed,
        "within": gap <= allowed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="default: pmnist")
    parser.add_argument("--seeds", type=int, default=1, help="held-out seeds of tune, from 100 up")
    parser.add_argument("--seen", type=int, default=3, help="tasks that choose λ_Ω, as in selfless tune")
    parser.add_argument("--tolerance", type=float, default=0.5, help="points that λ may cost on the first task, as in selfless tune")
    parser.add_argument(
        "--drop", type=float, default=0.0, help="points that λ_Ω may be below the best one on these tasks, as in selfless tune"
    )
    parser.add_argument("--quick", action="store_true", help="a few images: runs all of the code and proves nothing")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("tune-check"))
    options = parser.parse_args()
    path = options.out / "tune.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for case in options.case or ["pmnist"]:
        found[case] = check(case, options)
        write_json(path, found)
        one = found[case]
        print(
            f"{one['column']}: tuned {one['tuned']} {one['tuned_held_out']:.2f}, best {one['best']} {one['best_held_out']:.2f}, "
            f"gap {one['gap']:.2f} points ({'within' if one['within'] else 'above'} {one['allowed']:g})"
        )
    return 0 if all(found[case]["within"] for case in options.case or ["pmnist"]) else 1


if __name__ == "__main__":
    sys.exit(main())
