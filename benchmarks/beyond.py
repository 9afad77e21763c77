"""Train an experiment outside of the paper within a limit of time, the most promising rows first: `beyond`, `wide`, `rivals-projection`.

    python benchmarks/beyond.py --plan                                   # runs and estimated seconds of rows that are not recorded
    python benchmarks/beyond.py --seconds 540 --out build/beyond         # call it again to go on
    python benchmarks/beyond.py --only pmnist --only "cifar-aug:LwF + DeCov" --seconds 540 --out build/beyond
    python benchmarks/beyond.py --experiment wide --only ViT --seeds 5 --out build/wide
    python benchmarks/beyond.py --experiment rivals-projection --only CIFAR-100 --seeds 5 --out build/projection

Each row chooses its strengths on held-out data, and the choice is then trained on `--seeds` other seeds. The runs of a round are one call
of `selfless.train`, so that they form fleets; all rows of permuted MNIST are trained together. Nothing is started that is not expected to
end within `--seconds`; what has ended is recorded and never trained again. The exit status is 3 if something is left.
OUT/experiments/NAME-ours.json has the rows that are complete, OUT/runs.jsonl.xz their runs, OUT/choosing those that chose; their scores
are in the record too, so that a later call does not need that folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import selfless
from selfless import Result, Run
from selfless.data import holding
from selfless.experiments import Experiment, experiment
from selfless.experiments.base import Cell
from selfless.experiments.beyond import CASES, select
from selfless.experiments.choosing import Scored, choose, later_trials, next_trials, trials
from selfless.experiments.recorded import recorded_scores, take
from selfless.experiments.reproduce import CHOOSING, final, reproduce
from selfless.runner import Store
from selfless.runner.plan import fleets

# Seconds of a run in a fleet of eight on one H200, 50 epochs: results/bench/h200/fleet-speed.json and a fifth; until a run is recorded.
SECONDS = {"permuted-mnist": 0.2, "joint-permuted-mnist": 0.2, "joint-split-cifar-100": 5.0, "none": 5.0, "mas": 3.5, "packnet": 4.5}
SECONDS |= {"lwf": 5.5}
SLOWER = {"alexnet-cifar": 1.5, "vgg-slim": 20.0, "resnet18": 2.5, "vit": 2.0, "lora_vit": 2.5}  # a step beside one of cnn-256, guessed
PASSES = 50 * 10  # epochs times tasks of the table
START = 3.0  # seconds of a fleet before its first step
EXPERIMENTS = ("beyond", "wide", "rivals-projection")


def estimate(run: Run, known: Sequence[Result]) -> float:
    """Return the seconds of a run in a fleet: those of recorded runs of the same row, else those of the table."""
    times = [r.about["seconds"] / r.about["fleet"] / (r.run.tasks or 1) for r in known if r.about.get("seconds")]
    if times:
        return (run.tasks or 1) * sum(times) / len(times)
    if "permuted" in run.stream:
        return SECONDS[run.stream] * run.epochs * (run.tasks or 5) / 50 * 200 / run.batch
    classes = run.stream_options.get("classes_per_task", 10)
    passes = run.epochs * (run.tasks or 10) * classes / 10
    share = SLOWER.get(run.model.rpartition(":")[2], 1.0) * passes / PASSES
    return share * SECONDS.get(run.stream, SECONDS.get(run.preserve.name, 10.0))


class Study:
    """Train batches of rows within a limit of time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.started = options, time.monotonic()
        self.recorded = recorded_scores(options.out)
        self.choosing, self.reported = Store(options.out / CHOOSING, options.data), Store(options.out, options.data)

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def train(self, runs: Sequence[Run], store: Store, known: Sequence[Result], what: str) -> list[Result] | None:
        """Return the results; None if some are not recorded yet and would not be trained in time."""
        if not runs:
            return []
        missing = [run for run in runs if store.load(run) is None]
        cost = START * len(fleets(missing)) + sum(estimate(run, known) for run in missing)
        used = self.used
        if missing and used + cost > self.options.seconds:
            print(f"{used:5.0f} s  {what}: {len(missing)} runs would take {cost:.0f} s; left for the next call", flush=True)
            return None
        found = selfless.train(runs, out=store.out, device=self.options.device, data_dir=self.options.data, checkpoints=False)
        if missing:
            took = self.used - used
            print(f"{used:5.0f} s  {what}: {len(missing)} runs, {took:.0f} s (expected {cost:.0f})", flush=True)
        return found

    def rows(self, cells: Sequence[Cell]) -> bool:
        """Train all rounds of these rows and their reported seeds, round by round; return whether they are complete."""
        scored: dict[Run, Scored] = {}
        results: list[Result] = []
        name = f"{cells[0].column}, {', '.join(cell.row for cell in cells)}"
        while runs := list(dict.fromkeys(run for cell in cells for run in next_trials(cell, scored))):
            scored |= take(runs, self.recorded, self.choosing)
            missing = [run for run in runs if run not in scored]
            found = self.train(missing, self.choosing, results, f"{name}: choosing")
            if found is None:
                return False
            scored |= zip(missing, found, strict=True)
            results += found
        runs = [run for cell in cells for run in chosen_runs(cell, scored, self.options.seeds)]
        return not runs or self.train(runs, self.reported, results, f"{name}: seeds") is not None

    def is_recorded(self, cell: Cell) -> bool:
        """Return whether every run of a row is recorded, maybe by an earlier call."""
        scored: dict[Run, Scored] = {}
        while runs := next_trials(cell, scored):
            scored |= take(runs, self.recorded, self.choosing)
            scored |= {run: result for run in runs if run not in scored and (result := self.choosing.load(run)) is not None}
            if not scored.keys() >= set(runs):
                return False
        return all(self.reported.load(run) is not None for run in chosen_runs(cell, scored, self.options.seeds))


def chosen_runs(cell: Cell, scored: Mapping[Run, Scored], seeds: int) -> list[Run]:
    """Return the runs to report; none if all candidates failed, which is a result too."""
    chosen = choose(cell, scored)
    return [] if chosen.index is None else [final(cell, chosen.candidates[chosen.index], seed) for seed in range(seeds)]


def batches(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Return the rows that are trained together: all of permuted MNIST, whose runs are shorter than the start of a fleet; others alone."""
    small = [cell for cell in cells if cell.column == CASES["pmnist"]]
    return ([small] if small else []) + [[cell] for cell in cells if cell not in small]


def complete(made: Experiment, cells: Sequence[Cell]) -> Experiment:
    """Return the experiment with these cells, and with the claims that they decide."""
    places = {cell.place for cell in cells}
    claims = tuple(c for c in made.claims if {p for part in c.parts for p in (part.a, part.b) if p is not None} <= places)
    return dataclasses.replace(made, cells=tuple(cells), claims=claims)


def show_plan(cells: Sequence[Cell], study: Study) -> None:
    """Print each batch that is not recorded yet with its runs and estimated seconds, and the sum so far."""
    total, seeds = 0.0, study.options.seeds
    for batch in batches(cells):
        if all(study.is_recorded(cell) for cell in batch):
            print(f"{batch[0].column}, {', '.join(cell.row for cell in batch)}: recorded")
            continue
        first = [run for cell in batch for run in trials(cell)]
        second = [(cell, later_trials(cell)) for cell in batch if len(cell.candidates) > 1]
        last = [run for cell in batch for run in cell.candidates[:1] for _ in range(seeds)]
        cost = sum(estimate(run, ()) for run in [*first, *last]) + sum(n * estimate(cell.candidates[0], ()) for cell, n in second)
        cost += START * (len(fleets(first)) + 2 * len(fleets(last)))
        total += cost
        runs = len(first) + len(last) + sum(n for _, n in second)
        print(f"{batch[0].column}, {', '.join(cell.row for cell in batch)}: {runs} runs, {cost:.0f} s; {total:.0f} s in all")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", choices=EXPERIMENTS, default="beyond")
    parser.add_argument("--only", action="append", default=[], help=f"a column ({', '.join(CASES)}, ViT, …), or COLUMN:ROW; repeatable")
    parser.add_argument("--seeds", type=int, default=10, help="seeds that are reported, from 0 up")
    parser.add_argument("--seconds", type=float, default=540.0, help="start nothing that would end later")
    parser.add_argument("--plan", action="store_true", help="print rows, runs and estimated seconds; train nothing")
    parser.add_argument("--quick", action="store_true", help="a few images, one epoch, two seeds: runs all of the code and proves nothing")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, help="default: build/EXPERIMENT")
    options = parser.parse_args()
    options.out = options.out or Path("build") / options.experiment
    if options.quick:
        options.seeds = min(2, options.seeds)
    made = experiment(options.experiment, quick=options.quick)
    cells = [cell for cell in select(made, options.only) if cell.value == "average"]
    if not cells:
        parser.error(f"--only {' '.join(options.only)} names no row; --plan lists them")
    if options.plan:
        show_plan(cells, Study(options))
        return 0
    study = Study(options)
    with holding():
        left = [batch for batch in batches(cells) if not study.rows(batch)]
    recorded = [cell for cell in made.cells if study.is_recorded(cell)]
    if recorded:
        write_record(complete(made, recorded), study)
    return 3 if left else 0


def write_record(made: Experiment, study: Study) -> None:
    """Write the record of an experiment whose runs are all recorded, print its rows, and pack the runs."""
    options = study.options

    def load(runs: Sequence[Run], place: Path, what: str) -> list[Result]:
        return selfless.train(runs, out=place, device=options.device, data_dir=options.data, checkpoints=False)

    record = reproduce(made, seeds=options.seeds, out=options.out, train=load, data_dir=options.data, recorded=study.recorded)
    for cell in record["cells"]:
        if cell["value"] == "average" and cell["mean"] is not None:
            print(f"{cell['column']:<22} {cell['row']:<16} {cell['mean']:6.2f} ± {cell['std']:.2f}   {cell['method']}")
    for place in (options.out, options.out / CHOOSING):
        if Store(place).keys():
            Store(place).pack(remove=True)


if __name__ == "__main__":
    sys.exit(main())
