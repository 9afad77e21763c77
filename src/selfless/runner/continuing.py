"""Find the finished run that a run continues, and the test data of its tasks where they are still on this machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

from selfless.data import DataError, Joined, Part, Stream, stream
from selfless.engine.continuing import Parent, move_part
from selfless.engine.scenario import arrange
from selfless.runner.options import TrainOptions
from selfless.runner.sources import is_made_from
from selfless.runner.store import Store
from selfless.spec import Result, Run
from selfless.trained import described, digest, read_tensors

Test = Part | Joined


def find_parent(run: Run, options: TrainOptions) -> Parent | None:
    """Return the finished run that `run` continues, from the folder `options.parents`; None for a run with a new network."""
    if not run.parent:
        return None
    key, _, wanted = run.parent.partition("@")
    place = options.parents or Path("results")
    result = Store(place).get(key)
    if result is None:
        raise ValueError(f"{place} has no run {key}, which is to be continued; name its folder: --continue DIR/KEY, or train(parents=DIR)")
    tensors = read_tensors(result)
    if digest(result) != wanted:
        raise ValueError(f"run {key} in {place} was trained again since: its weights are not those that this run continues")
    return Parent(result, described(result), tensors, tuple(known_tests(result, place, options.data_dir)))


def known_tests(result: Result, place: Path, data_dir: Path | None) -> list[Test | None]:
    """Return the test data of every task that a network learned, with output columns as labels; None where they are not found.

    A continued run knows the data of its own tasks; those of earlier tasks are found by the records of its parents, in `place`.
    """
    data, own = described(result), _find_stream(result, data_dir)
    parent = Store(place).get(result.run.parent.partition("@")[0]) if result.run.parent else None
    older = known_tests(parent, place, data_dir) if parent is not None and parent.data is not None else []
    if own is None:
        return older + [None] * (len(data.tasks) - len(older))
    before = len(data.tasks) - len(own.evaluate)
    tests: list[Test | None] = [*older] if len(older) == before else [None] * before
    for task, known in zip(own.evaluate, data.tasks[before:], strict=True):
        tests.append(move_part(task.test, known.columns.start - task.columns.start, data))
    return tests


def _find_stream(result: Result, data_dir: Path | None) -> Stream | None:
    """Return the stream of a recorded run; None if its data are not on this machine, or have changed."""
    run = result.run
    with contextlib.suppress(DataError, OSError, TypeError, ValueError):
        if not is_made_from(run, result.about.get("made_from", ""), data_dir):
            return None
        shape = described(result).image_shape if run.parent else None
        options = {"seed": run.seed, "held_out": run.held_out, "data_dir": data_dir, "shape": shape, **run.stream_options}
        found = stream(run.stream, tasks=run.tasks, download=False, **options)
        return arrange(found, run.scenario) if run.scenario == "domain" else found
    return None
