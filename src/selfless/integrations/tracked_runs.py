"""What `selfless run --log` sends to a tracker: losses, penalties and accuracies in training, then accuracies by task, capacity and Ω.

The step of a value is the number of epochs that the run has trained, over all tasks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from selfless.engine.progress import Event
from selfless.integrations.trackers import Tracker, check_tracker, importance_maps, open_tracker
from selfless.spec import Result, Run

NOT_FINITE = -1.0  # how a record writes a loss or a penalty that was not finite


class TrackedRuns:
    """One tracker for each run of a command. A context manager; call `watch` while they train, and `finish` with their results."""

    def __init__(self, kind: str, out: Path) -> None:
        check_tracker(kind)
        self.kind, self.out = kind, out
        self.open: dict[str, Tracker] = {}
        self._stack = contextlib.ExitStack()
        self._live: set[tuple[str, int, int]] = set()  # (run, task, epoch) that was logged while it trained

    def __enter__(self) -> TrackedRuns:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def tracker(self, run: Run) -> Tracker:
        """Return the tracker of a run; open it, if this is its first value."""
        if run.key not in self.open:
            settings = {key: str(value) for key, value in run.as_dict().items() if value not in (None, {}, "")}
            folder = self.out / self.kind
            self.open[run.key] = self._stack.enter_context(open_tracker(self.kind, folder, f"{run.key}-{run.method}-{run.seed}", settings))
        return self.open[run.key]

    def watch(self, runs: Sequence[Run], event: Event) -> None:
        """Log an epoch while it trains: `watch` of `selfless.train`."""
        if event.evaluated or not event.loss:
            return
        for m, run in enumerate(runs):
            self._live.add((run.key, event.task, event.epoch))
            values = {"loss": event.loss[m], "accuracy": event.accuracy[m]} | {name: each[m] for name, each in event.penalties.items()}
            self._log(run, {f"train/{name}": value for name, value in values.items()}, event.task * event.epochs + event.epoch)

    def finish(self, results: Iterable[Result]) -> None:
        """Log the rest of each result: epochs that were trained before, and accuracies, capacity and importances by task."""
        for result in results:
            self._log_epochs(result)
            for task, row in enumerate(result.accuracy.tolist()):
                step = _epochs(result, task + 1)
                seen = [value for value in row[: task + 1] if not math.isnan(value)]
                values = {f"accuracy/task-{u + 1}": value for u, value in enumerate(row[: task + 1])}
                values["accuracy/average"] = sum(seen) / len(seen) if seen else math.nan
                self._log(result.run, values, step)
            for task, capacity in enumerate(result.capacity):
                self._log(result.run, _free(capacity), _epochs(result, task + 1))
            self._log(result.run, {f"summary/{name}": value for name, value in result.summary().items()}, _epochs(result))
            self._log_maps(result)

    def _log_epochs(self, result: Result) -> None:
        for task, epochs in enumerate(result.history):
            for epoch, values in enumerate(epochs):
                if (result.run.key, task, epoch + 1) not in self._live:
                    finite = {f"train/{name}": value for name, value in values.items() if value != NOT_FINITE}
                    self._log(result.run, finite, _epochs(result, task) + epoch + 1)

    def _log_maps(self, result: Result) -> None:
        """Log Ω and α after the last task, if the network was recorded."""
        if result.weights is None:
            return
        from safetensors.torch import load_file

        tensors = load_file(result.weights) if isinstance(result.weights, Path) else result.weights
        omega = {name.partition("omega.")[2]: t for name, t in tensors.items() if name.startswith("state.") and "omega." in name}
        alpha = {name.removeprefix("alpha."): t for name, t in tensors.items() if name.startswith("alpha.")}
        self.tracker(result.run).log_images(importance_maps(omega, alpha), _epochs(result))

    def _log(self, run: Run, values: dict[str, Any], step: int) -> None:
        finite = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
        if finite:
            self.tracker(run).log(finite, step)


def _epochs(result: Result, tasks: int | None = None) -> int:
    """Return how many epochs the first `tasks` tasks took; None: all."""
    return sum(len(epochs) for epochs in result.history[:tasks])


def _free(capacity: dict[str, Any]) -> dict[str, Any]:
    """Return the free shares of a recorded capacity by name: in all, and by layer."""
    whole = {f"free/{kind}": capacity.get(f"free_{kind}") for kind in ("parameters", "neurons")}
    return whole | {f"free/{kind}/{name}": share for kind in ("parameters", "neurons") for name, share in capacity.get(kind, {}).items()}
