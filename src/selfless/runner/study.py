"""Read how far the runs in a folder are, whoever trains them: from records, logs, and the notes of `selfless.runner.live`.

Only files are read, so the folder may be on another machine. Times are differences between times of one clock: that of the writer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from selfless.inputs import check_outcome, check_result
from selfless.runner.archive import NAME, read_archive
from selfless.runner.live import is_alive, read_note
from selfless.runner.store import METRICS
from selfless.spec import Run

State = Literal["running", "waiting", "failed", "stopped", "done"]
STATES: tuple[State, ...] = ("running", "waiting", "failed", "stopped", "done")
Fleets = list[tuple[Path, dict[str, Any]]]  # the notes of fleets, with their paths
SLACK = 5.0  # seconds by which the clock of a file server may differ from that of the machine that trains


@dataclass(frozen=True)
class RunState:
    """One run and where it is.

    accuracy   the average test accuracy over the tasks learnt so far, 0 to 1; None before the first has ended
    event      the last event of its fleet, as a dictionary (`selfless.engine.progress.Event`); {} unless it is running
    fleet      the number of the fleet among those that run
    reason     why it failed or stopped
    """

    key: str
    method: str
    stream: str
    model: str
    seed: int
    state: State
    accuracy: float | None = None
    event: dict[str, Any] = field(default_factory=dict)
    fleet: int = -1
    reason: str = ""


@dataclass(frozen=True)
class Snapshot:
    """All runs of a folder at one moment.

    speed          run-steps a second of all fleets that run
    per_hour       runs that were finished per hour, since the study began; None before the first
    seconds_left   estimated seconds to the end of all runs; None while there is nothing to estimate from
    """

    runs: tuple[RunState, ...]
    speed: float = 0.0
    per_hour: float | None = None
    seconds_left: float | None = None

    def count(self, state: State) -> int:
        return sum(run.state == state for run in self.runs)

    @property
    def is_over(self) -> bool:
        """True if nothing runs and nothing waits."""
        return not self.count("running") and not self.count("waiting")


class StudyReader:
    """Reads one folder again and again. It remembers the runs of a study whose note is gone because it has ended."""

    def __init__(self, out: Path | str) -> None:
        self.out = Path(out)
        self._plans: dict[Path, dict[str, Any]] = {}  # the note of a study → its last content
        self._records: dict[Path, tuple[int, dict[str, Any]]] = {}  # metrics.json → (time of change, what we need of it)

    def look(self) -> Snapshot:
        """Return where every run is now: those of studies that run or stopped, else all that are recorded in the folder."""
        fleets = [(path, note) for path in sorted(self.out.rglob("training-*.json")) if (note := read_note(path)) is not None]
        fleets = [(path, note) for path, note in fleets if is_alive(note, _changed(path, note))]
        present = set(self.out.rglob("study-*.json"))
        for path in present:
            if (note := read_note(path)) is not None:
                self._plans[path] = note
        found: dict[tuple[Path, str], RunState] = {}
        for number, (path, note) in enumerate(fleets):
            for m, run in enumerate(note["runs"]):
                averages = note["event"]["average"]
                accuracy = averages[m] if averages else None
                state = RunState(**run, state="running", accuracy=accuracy, event=note["event"], fleet=number)
                found[path.parent.parent, run["key"]] = state
        lively: list[tuple[float, list[RunState]]] = []  # of each study that runs: the seconds so far, and its runs
        for path, plan in self._plans.items():
            own = _fleets_of(plan, path, fleets)
            alive = path in present and self._is_alive(plan, path, own)
            states = [found.get((path.parent, run["key"])) or self._planned(run, path.parent, plan, alive) for run in plan["runs"]]
            found |= {(path.parent, state.key): state for state in states}
            if alive and "running" in {state.state for state in states}:
                lively.append((max(note["updated"] for _, note in own) - plan["started"], states))
        if not found:
            found = {(state_path, state.key): state for state_path, state in self._recorded()}
        rank = {state: i for i, state in enumerate(STATES)}
        runs = sorted(found.values(), key=lambda run: rank[run.state])
        speed = sum(note["event"]["speed"] or 0.0 for _, note in fleets)
        rates = [rate for elapsed, states in lively if (rate := _rate(elapsed, states)) is not None]
        left = [seconds for elapsed, states in lively if (seconds := _estimate(elapsed, states)) is not None]
        return Snapshot(tuple(runs), speed, sum(rates) if rates else None, max(left, default=None))

    def _is_alive(self, plan: dict[str, Any], path: Path, own: Fleets) -> bool:
        """Return whether a study still runs: its process exists, or one of its fleets gives a sign."""
        if "ended" in plan:
            return False
        return is_alive(plan, max(_changed(p, note) for p, note in [(path, plan), *own]))

    def _planned(self, run: dict[str, Any], folder: Path, plan: dict[str, Any], alive: bool) -> RunState:
        """Return the state of a run of a study that no fleet trains now."""
        record = self._record(folder / run["key"] / METRICS, since=plan["started"] - SLACK)
        if record is not None:
            return RunState(**run, **record)
        if alive:
            return RunState(**run, state="waiting")
        return RunState(**run, state="stopped", reason=plan.get("ended", "its process ended"))

    def _record(self, path: Path, since: float = 0.0) -> dict[str, Any] | None:
        """Return state, accuracy and reason of a recorded run; None if it is not recorded, or was before `since`."""
        try:
            changed = path.stat().st_mtime_ns
            if changed < since * 1e9:
                return None
            if path not in self._records or self._records[path][0] != changed:
                self._records[path] = changed, _outcome(path.read_bytes())
        except OSError:
            return None
        return self._records[path][1]

    def _recorded(self) -> Iterable[tuple[Path, RunState]]:
        """Yield every run of the folder: recorded ones, and those that have a log but no record."""
        for path in sorted(self.out.rglob(NAME)):
            for key, line in read_archive(path).items():
                yield path.parent, RunState(key, **_names(line), **_outcome(line))
        for path in sorted(self.out.rglob(METRICS)):
            record = self._record(path)
            if record is not None:
                yield path.parent.parent, RunState(path.parent.name, **_names(path.read_bytes()), **record)
        for path in sorted(self.out.rglob("log.jsonl")):
            if not (path.parent / METRICS).exists():
                state = RunState(path.parent.name, path.parent.name, "", "", 0, "stopped", reason=_last_line(path))
                yield path.parent.parent, state


def _fleets_of(plan: dict[str, Any], path: Path, fleets: Fleets) -> Fleets:
    """Return the fleets of one study; another one may run on a machine with another clock."""
    keys = {run["key"] for run in plan["runs"]}
    return [(p, note) for p, note in fleets if p.parent.parent == path.parent and keys & {run["key"] for run in note["runs"]}]


def _changed(path: Path, note: dict[str, Any]) -> float:
    """Return when a note was written: by its own clock, or by that of the file system if that is later."""
    try:
        return float(max(note["updated"], path.stat().st_mtime))
    except OSError:
        return float(note["updated"])


def _outcome(text: str | bytes) -> dict[str, Any]:
    """Return state, accuracy and reason from the content of a metrics.json; one that cannot be read counts as failed."""
    try:
        values = json.loads(text)
        check_outcome(values)
    except (ValueError, RecursionError) as error:
        return {"state": "failed", "accuracy": None, "reason": f"its record cannot be read ({error}); train it again with --force"}
    failed = values["status"] != "done"
    return {"state": "failed" if failed else "done", "accuracy": values["summary"].get("average"), "reason": values["error"]}


def _names(text: str | bytes) -> dict[str, Any]:
    """Return method, stream, model and seed of a recorded run; of a method that cannot be read or imported here, its name."""
    try:
        values = json.loads(text)
        check_result(values)
    except (ValueError, RecursionError):
        return {"method": "unreadable", "stream": "", "model": "", "seed": 0}
    run = values["run"]
    try:
        method = Run.from_dict(run).method
    except (ValueError, TypeError):
        method = str(run["preserve"].get("name", "a sum of methods")) if isinstance(run["preserve"], dict) else run["preserve"]
    return {"method": method, "stream": run["stream"], "model": run["model"], "seed": run["seed"]}


def _last_line(path: Path) -> str:
    """Return where a log ends, in words."""
    try:
        last = json.loads(path.read_bytes().splitlines()[-1])
        return f"its log ends after task {int(last['task'])}, epoch {int(last['epoch'])}"
    except (OSError, IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return "its log is empty"


def _rate(elapsed: float, states: Sequence[RunState]) -> float | None:
    """Return finished runs per hour."""
    done = sum(run.state in ("done", "failed") for run in states)
    return 3600 * done / elapsed if done and elapsed > 0 else None


def _estimate(elapsed: float, states: Sequence[RunState]) -> float | None:
    """Return the seconds to the end of a study.

    If no run waits: the longest time of its fleets. Else time so far · share to do / share done, as the number of workers stays the same.
    """
    own = [run.event["seconds_left"] for run in states if run.state == "running" and run.event["seconds_left"] is not None]
    if not any(run.state == "waiting" for run in states):
        return max(own, default=None)
    return estimate(elapsed, [run.event["share"] if run.state == "running" else float(run.state in ("done", "failed")) for run in states])


def estimate(elapsed: float, shares: Sequence[float]) -> float | None:
    """t (N − Σ s) / Σ s: the seconds to the end of N runs, of which the shares s are done after t seconds; None before anything is done."""
    done = sum(shares)
    return elapsed * (len(shares) - done) / done if done > 0 else None


def as_dict(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as JSON values."""
    runs = [replace(run, event={}).__dict__ | {"progress": run.event} for run in snapshot.runs]
    for run in runs:
        del run["event"], run["fleet"]
    counts = {state: snapshot.count(state) for state in STATES}
    return {"counts": counts, "runs": runs, "speed": snapshot.speed, "per_hour": snapshot.per_hour, "seconds_left": snapshot.seconds_left}
