"""Train with live progress, for every command that trains."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from selfless.cli.terminal import open_console

if TYPE_CHECKING:
    from selfless.integrations.tracked_runs import TrackedRuns
    from selfless.runner import TrainOptions
    from selfless.spec import Result, Run


def train_with_progress(runs: Sequence[Run], options: TrainOptions, *, as_json: bool, log: str | None = None) -> list[Result]:
    """Train with live progress on standard error, or load the results that are recorded in `options.out`. `log`: the name of a tracker."""

    from selfless.cli.progress import progress_lines
    from selfless.runner import Store, train_runs

    assert options.out is not None, "commands record what they train"
    console = open_console(stderr=True, quiet=as_json)
    store = Store(options.out, options.data_dir)
    recorded = set() if options.force else {run for run in runs if store.load(run) is not None}
    changed = 0 if options.force else sum(run not in recorded and store.get(run.key) is not None for run in runs)
    if changed:
        what = "1 recorded run was" if changed == 1 else f"{changed} recorded runs were"
        console.print(
            f"{what} made from other files (your data, network or method has changed) and will be replaced; another --out keeps both",
            soft_wrap=True,
        )
    if recorded:
        many = "s" if len(runs) > 1 else ""
        console.print(f"{len(recorded)} of {len(runs)} run{many} recorded in {options.out} already; --force trains again", soft_wrap=True)

    for line in dict.fromkeys(filter(None, map(folder_order, set(runs) - recorded))):
        console.print(line, soft_wrap=True, highlight=False, markup=False)

    def waiting(run: Run) -> None:
        console.print(f"another process is training {run.method}; waiting for it")

    quiet = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()  # a custom network may print
    with track(log, options) as tracked, quiet:
        with progress_lines(console, len(set(runs) - recorded)) as follow:
            watch = None if tracked is None else tracked.watch
            results = train_runs(runs, dataclasses.replace(options, follow=follow, waiting=waiting, watch=watch))
        if tracked is not None:
            tracked.finish(dict.fromkeys(results))
    for line in fleet_speeds([r for r in results if r.run not in recorded]):
        console.print(line, style="dim", highlight=False, soft_wrap=True)
    return results


def track(log: str | None, options: TrainOptions) -> contextlib.AbstractContextManager[TrackedRuns | None]:
    """Return the trackers of the runs, in the folder of results; None without --log."""
    if log is None:
        return contextlib.nullcontext()
    from selfless.integrations.tracked_runs import TrackedRuns

    assert options.out is not None
    return TrackedRuns(log, options.out)


def folder_order(run: Run) -> str:
    """Return the order in which folders are learnt, if their names decide it; else nothing."""
    from pathlib import Path

    from selfless.data.sources.folders import task_folders

    kind, _, place = run.stream.removeprefix("joint-").partition(":")
    if kind != "folders" or "task_order" in run.stream_options or not Path(place).is_dir():
        return ""
    names = task_folders(Path(place))[: run.tasks]
    if len(names) < 2:
        return ""
    other = json.dumps(list(reversed(names)) if len(names) < 4 else [names[-1], "…"], ensure_ascii=False)
    return f"tasks in the order of their names: {', '.join(names)}; for another order: --stream-option 'task_order={other}'"


def fleet_speeds(results: Sequence[Result]) -> list[str]:
    """Return a line for every fleet among these: the number of runs, the hardware, the speed, and the memory of the GPU it used."""
    fleets: dict[tuple[Any, ...], dict[str, Any]] = {}
    for about in (r.about for r in results if r.about.get("run_steps_per_second")):
        fleets.setdefault((about["seconds"], about["run_steps_per_second"]), about)
    lines = []
    for about in fleets.values():
        size, memory = about["fleet"], about.get("memory")
        line = f"{size} run{'s as one fleet' if size > 1 else ''} on {about['hardware']}: {about['seconds']:.1f} s, "
        line += f"{about['run_steps_per_second']:,.0f} run-steps a second"
        lines.append(line + (f", {memory['peak_gb']:.1f} GB ({memory['share']:.0%} of its memory)" if memory else ""))
    return lines
