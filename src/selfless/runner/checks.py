"""Check a whole list of runs before the first step, so that the last of many runs is not refused after all others have trained.

Every distinct stream is made and every distinct network is built once, as training would do it: what is wrong with a name, an option, a
file, a layer or a method is found here. All problems are listed together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from selfless.data import DataError, Stream, is_writable
from selfless.engine.build import build_fleet, build_streams, count_parameters
from selfless.engine.continuing import Parent, check
from selfless.runner.continuing import find_parent
from selfless.runner.memory import available
from selfless.runner.options import TrainOptions
from selfless.spec import Run

NUMBERS = ("lr", "momentum", "weight_decay", "epochs", "ramp", "schedule", "alpha", "anchor", "precision")  # no check depends on them
SHOWN = 6  # seeds that a message lists


@dataclasses.dataclass(frozen=True)
class Problem:
    """Why some runs cannot be trained."""

    runs: tuple[Run, ...]
    error: Exception

    @property
    def text(self) -> str:
        """The runs and the error, in one sentence."""
        methods = list(dict.fromkeys(run.method for run in self.runs))
        seeds = sorted({run.seed for run in self.runs})
        listed = ", ".join(map(str, seeds[:SHOWN])) + (f" and {len(seeds) - SHOWN} more" if len(seeds) > SHOWN else "")
        what = methods[0] if len(methods) == 1 else f"{len(methods)} methods, {methods[0]} and others,"
        return f"{what} on {self.runs[0].stream} with {self.runs[0].model}, seed{'s' * (len(seeds) > 1)} {listed}: {self.error}"


class CannotTrain(ValueError):
    """Runs that cannot be trained, with the problem of each. Nothing was trained."""


class MissingForAll(DataError):
    """The same, where every problem is one of data."""


def check_runs(runs: Sequence[Run], options: TrainOptions) -> None:
    """Raise an error that lists everything that keeps these runs from being trained; a single problem of all runs is raised as it is.

    `options.device` is resolved. Runs that differ only in numbers are checked once.
    """
    refuse(problems(runs, options), len(runs))


def refuse(found: Sequence[Problem], total: int) -> None:
    """Raise one error for these problems of a list of `total` runs; do nothing if there are none."""
    if len(found) == 1 and len(found[0].runs) == total:
        raise found[0].error
    if found:
        count = len({run for problem in found for run in problem.runs})
        lines = "\n".join(f"- {problem.text}" for problem in found)
        kind = MissingForAll if all(isinstance(problem.error, DataError) for problem in found) else CannotTrain
        raise kind(f"{count} of {total} runs cannot be trained, so nothing was trained:\n{lines}")


def problems(runs: Sequence[Run], options: TrainOptions) -> list[Problem]:
    """Return every problem of these runs, one for each distinct message."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_distinct(run), []).append(run)
    checks = _Checks(options)
    found: dict[str, Problem] = {}
    sizes: list[tuple[Sequence[Run], int]] = []
    for group in groups.values():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # training gives them
                sizes.append((group, checks.check(group[0])))
        except (ValueError, TypeError, OSError, RuntimeError, MemoryError, ArithmeticError) as error:
            known = found.get(str(error))
            found[str(error)] = Problem((*(known.runs if known else ()), *group), known.error if known else error)
    refusal = None if options.out is None else _check_folder(options, sizes)
    if refusal is not None:
        found[str(refusal)] = Problem(tuple(runs), refusal)
    return list(found.values())


def _distinct(run: Run) -> str:
    """Return the settings on which a check depends, as text."""
    terms = [[repr(term.neutral()) for term in sum_.parts] for sum_ in (run.preserve, run.sparsify)]
    is_off = [not term.is_on for term in run.sparsify.parts]
    fields = run.as_dict() | dict.fromkeys(NUMBERS) | {"preserve": terms[0], "sparsify": [terms[1], is_off], "seed": None}
    return json.dumps(fields, sort_keys=True)


class _Checks:
    """The checks of one call, with the streams and parents that they share."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        self.free = available(options.device)
        self.streams: dict[str, Stream | Exception] = {}
        self.parents: dict[str, Parent | None] = {}

    def check(self, run: Run) -> int:
        """Build the stream and the network of a run, as training does; return the bytes of its parameters. Raise what is wrong."""
        if run.parent not in self.parents:
            self.parents[run.parent] = find_parent(run, self.options)
        parent = self.parents[run.parent]
        if parent is not None:
            check(run, parent)
        stream = self._stream(run, parent)
        size = 4 * count_parameters(run, stream)
        copies = 3 if run.optimizer == "sgd" else 4  # parameters, gradients, and what the optimizer keeps
        if self.free is not None and copies * size > self.free:
            raise ValueError(
                f"{run.model} has {size // 4:,} parameters, so training needs at least {copies * size / 1e9:.1f} GB, and "
                f"{self.free / 1e9:.1f} GB are free on {self.options.device}; use a smaller network"
            )
        build_fleet([run], [stream], self.options.data_dir, torch.device("cpu"))
        return size

    def _stream(self, run: Run, parent: Parent | None) -> Stream:
        """Return the stream of a run; it is made once for all runs with the same one."""
        key = json.dumps([run.stream, run.tasks, run.held_out, run.stream_options, run.scenario, run.outputs, run.parent], sort_keys=True)
        if key not in self.streams:
            try:
                self.streams[key] = build_streams([run], self.options.data_dir, parent)[0]
            except (ValueError, TypeError, OSError, RuntimeError, ArithmeticError) as error:
                self.streams[key] = error
        found = self.streams[key]
        if isinstance(found, Exception):
            raise found
        return found


def _check_folder(options: TrainOptions, sizes: Sequence[tuple[Sequence[Run], int]]) -> Exception | None:
    """Return why results cannot be recorded in the folder; None if they can."""
    assert options.out is not None
    place = options.out.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return FileExistsError(f"cannot make the folder {options.out}: {place} is a file; choose another folder with --out")
    if not is_writable(place):
        return PermissionError(f"cannot write to {options.out}: permission denied in {place}; choose another folder with --out")
    needed = sum(len(group) * size for group, size in sizes) if options.checkpoints else 0
    with contextlib.suppress(OSError):
        if needed > (free := shutil.disk_usage(Path(place)).free):
            return OSError(
                f"the trained networks need at least {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free in {place}; "
                "use --no-checkpoints, or another --out"
            )
    return None
