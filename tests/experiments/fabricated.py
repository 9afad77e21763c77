"""Results made up for tests of what is done with results: no training, known numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from selfless.files import write_json
from selfless.spec import Result, Run


def result(run: Run, average: float, *, held_out: float | None = None, status: str = "done") -> Result:
    """Every task at `average` (0 to 1), with a little of the run's own noise; on held-out data at `held_out`, if there is any."""
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
    """A stand-in for the runner: `score(run)` is the accuracy; records metrics.json as the store does."""

    def train(runs: Sequence[Run], place: Path, what: str) -> list[Result]:
        if calls is not None:
            calls.append((what, len(runs)))
        assert len(runs) == len(set(runs)), "a run was asked for twice"
        made = [result(run, score(run), status="failed" if fails(run) else "done") for run in runs]
        for one in made:
            write_json(place / one.run.key / "metrics.json", one.as_dict())
        return made

    return train
