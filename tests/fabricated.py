"""Results and an experiment made up for tests: no training, known numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from selfless import MAS, SLNID, NoSparsifier
from selfless.experiments.base import Cell, Claim, Experiment, at_least, at_most
from selfless.files import write_json
from selfless.spec import Result, Run


def result(run: Run, average: float, *, held_out: float | None = None, status: str = "done") -> Result:
    """Return a result with every task at `average` (0 to 1) plus a little noise by run; on held-out data at `held_out`."""
    tasks = run.tasks or 5
    joint = run.stream.startswith("joint-")
    noise = np.random.default_rng(int(hashlib.sha256(run.key.encode()).hexdigest()[:8], 16)).normal(0, 0.002)
    matrix = np.full((1 if joint else tasks, tasks), average + noise)
    aside = np.full_like(matrix, average if held_out is None else held_out) if run.held_out else None
    free = {"tasks": 1, "threshold": 0.01, "free_parameters": 0.5, "free_neurons": 0.1, "parameters": {"fc1.weight": 0.4}, "neurons": {}}
    about = {"seconds": 10.0, "fleet": 5, "hardware": "a machine", "torch": "2", "commit": "abc", "notes": []}
    return Result(
        run,
        matrix,
        np.full(tasks, 0.1),
        [[] for _ in matrix],
        [free] * len(matrix),
        accuracy_all=matrix / 2 if run.stream.startswith("blurred") else None,
        held_out=aside,
        status=status,  # type: ignore[arg-type]
        error="" if status == "done" else "the loss was not finite",
        about=about,
    )


def trainer(score: Callable[[Run], float], calls: list[tuple[str, int]] | None = None, fails: Callable[[Run], bool] = lambda run: False):  # type: ignore[no-untyped-def]
    """Return a stand-in for the runner: `score(run)` is the accuracy; it records metrics.json as the store does."""

    def train(runs: Sequence[Run], place: Path, what: str) -> list[Result]:
        if calls is not None:
            calls.append((what, len(runs)))
        assert len(runs) == len(set(runs)), "a run was asked for twice"
        made = [result(run, score(run), status="failed" if fails(run) else "done") for run in runs]
        for one in made:
            write_json(place / one.run.key / "metrics.json", one.as_dict())
        return made

    return train


A, B = ("SLNID", "MNIST"), ("No-Reg", "MNIST")


def small(**fields: Any) -> Experiment:
    """Return an experiment of four cells: one with nothing to run, one without a choice."""
    cells = (
        Cell(*B, tuple(Run(preserve=MAS(a)) for a in (0.1, 0.2)), published=92.67),
        Cell(*A, tuple(Run(sparsify=SLNID(s)) for s in (1e-4, 1e-3, 1e-2)), published=95.83),
        Cell("joint", "MNIST", (Run(stream="joint-permuted-mnist", sparsify=NoSparsifier()),)),
        Cell("later", "MNIST", published=50.0),
    )
    claims = (
        Claim("SLNID is ahead", (at_least(A, B, 1, 3.16),)),
        Claim("SLNID is far ahead", (at_least(A, B, 50),)),
        Claim("SLNID is not ahead", (at_most(A, B, 0),)),
        Claim("later is ahead", (at_least(("later", "MNIST"), B),)),
    )
    return Experiment("fig-2", "A | small one", "figure 2", "bars", cells, claims, **fields)


def score(run: Run) -> float:
    """Return an accuracy: SLNID is best at 1e-3, No-Reg at λ_Ω = 0.2."""
    if run.sparsify.strength:
        return 0.95 if run.sparsify.strength == 1e-3 else 0.85
    return 0.90 if run.preserve.strength == 0.2 else 0.80
