"""Where results belong: one place for each stream and network, trials of a strength apart; and what the tasks are called there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from selfless.report.groups import Group, Value, over_seeds

if TYPE_CHECKING:
    from selfless.spec import Result, Run


class Place(NamedTuple):
    """The results of one stream and one network."""

    title: str
    results: tuple[Result, ...]


class Trial(NamedTuple):
    """The runs of one candidate strength, which differ in the seed only."""

    where: str
    method: str
    seeds: int
    held_out: Value


def divide(results: Sequence[Result]) -> tuple[list[Place], list[Result]]:
    """Return the places in order of first appearance, and the trials, which belong to none."""
    found: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        if not is_trial(result):
            found.setdefault(_address(result.run), []).append(result)
    short = [f"{stream}, {model}" for stream, _, model, _ in found]
    titles = [name if short.count(name) == 1 else name + _options(where) for name, where in zip(short, found, strict=True)]
    places = [Place(" ".join(title.split()), tuple(members)) for title, members in zip(titles, found.values(), strict=True)]
    return places, list(filter(is_trial, results))


def is_trial(result: Result) -> bool:
    """Return True for a run that scores a strength on held-out data of the first task, as `selfless tune` trains them."""
    return result.run.tasks == 1 and result.run.held_out > 0


def trial_rows(trials: Sequence[Result]) -> list[Trial]:
    """Return one row per candidate, by stream and network, weak strengths first."""
    found: dict[tuple[str, str, tuple[float, ...]], list[Result]] = {}
    for r in trials:
        found.setdefault((f"{r.run.stream}, {r.run.model}", r.run.method, tuple(t.strength for t in r.run.sparsify.parts)), []).append(r)
    rows = []
    for (where, method, _), members in sorted(found.items(), key=lambda item: (item[0][0], item[0][2])):
        scores = [float(r.held_out[-1, 0]) for r in members if r.status == "done" and r.held_out is not None]
        rows.append(Trial(where, method, len(members), over_seeds(scores)))
    return rows


def _address(run: Run) -> tuple[str, str, str, str]:
    return run.stream, json.dumps(dict(run.stream_options)), run.model, json.dumps(dict(run.model_options))


def _options(where: tuple[str, ...]) -> str:
    """Return " (classes_per_task 5)": the options that tell two places of one name apart."""
    given: Mapping[str, Any] = {**json.loads(where[1]), **json.loads(where[3])}
    return f" ({', '.join(f'{k} {v}' for k, v in given.items()) or 'no options'})"


# ------------------------------------------------------------------------------------------------------------------ task names
def task_names(found: Sequence[Group]) -> list[str]:
    """Return the names of the tasks, if all finished runs agree on them; else nothing. A run may have only the first tasks."""
    every = [tuple(map(str, r.about.get("tasks") or ())) for g in found for r in g.done]
    longest = max(every, key=len, default=())
    return list(longest) if all(names == longest[: len(names)] for names in every) else []


def class_names(found: Sequence[Group]) -> list[tuple[str, ...]]:
    """Return the classes of each task, if the records know them and all agree; else nothing."""
    known = [tuple(task.classes for task in r.data.tasks) for g in found for r in g.results if r.data is not None]
    longest = max(known, key=len, default=())
    return list(longest) if known and all(classes == longest[: len(classes)] for classes in known) else []


def is_numbered(u: int, name: str) -> bool:
    """Return True for a name that only repeats the number of task u = 0, 1, …, as "permutation 3" of the third."""
    return not name or name.split()[-1] == str(u + 1)


def task_heading(u: int, names: Sequence[str]) -> str:
    """Return what a column of task u is called: "task 3", or "3 garden birds"."""
    return f"task {u + 1}" if u >= len(names) or is_numbered(u, names[u]) else f"{u + 1} {names[u]}"
