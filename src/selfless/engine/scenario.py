"""Scenarios: whether the task of an image is known in evaluation (van de Ven & Tolias, 2019).

    task     The task is known. An image is classified within the head of its task, with the parameters that the method keeps for it.
    domain   The task is not known and not needed. All tasks have the same outputs: column c is the c-th class of every task.
    class    The task is not known. One head contains every class seen so far, in training and in evaluation.

`arrange` changes the heads of a stream once; training and evaluation use these heads. If all tasks of a stream share one head already, the
domain scenario does not change it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from selfless.data import Joined, Part, Stream, Task
from selfless.preserve import Preserver
from selfless.preserve.capabilities import Anchored, Distils, Phased, Replays
from selfless.terms import Term


def arrange(stream: Stream, scenario: str) -> Stream:
    """Return the stream with the heads of the scenario; for "domain", also with its labels."""
    if scenario == "task":
        return stream
    joint = stream.is_joint
    blurred = any(task.train.weights is not None for task in stream.tasks)
    if scenario == "class":
        tops = [max(task.columns.stop for task in stream.evaluate[: u + 1]) for u in range(len(stream.evaluate))]
        tops = [stream.outputs] * len(tops) if blurred else tops  # every task contains every class
        names = {column: name for task in stream.evaluate for column, name in task.names.items()}

        def widen(task: Task, top: int) -> Task:
            classes = tuple(names[column] for column in range(top))
            return replace(task, heads=(range(top),), classes=classes, group=None, own=task.columns)

        evaluate = tuple(widen(task, top) for task, top in zip(stream.evaluate, tops, strict=True))
        tasks = tuple(widen(task, stream.outputs) for task in stream.tasks) if joint else evaluate
        return replace(stream, tasks=tasks, evaluate=evaluate)
    homes = list(dict.fromkeys(task.columns for task in stream.evaluate))
    sizes = sorted({len(home) for home in homes})
    if len(sizes) > 1:
        raise ValueError(
            f"the tasks of {stream.name} have {', '.join(map(str, sizes))} classes; in the domain scenario all tasks share their outputs "
            "and need the same number of classes: use --scenario task or class"
        )
    if len(homes) == 1 and homes[0] == range(stream.outputs):
        return stream
    if blurred:
        raise ValueError(f"{stream.name} mixes the classes of all tasks, so they cannot share outputs: use --scenario task or class")

    def share_head(task: Task) -> Task:
        held_out = None if task.held_out is None else _relabel(task.held_out, homes)
        train, test = _relabel(task.train, homes), _relabel(task.test, homes)
        classes = tuple(task.names[column] for column in task.columns)[: sizes[0]]
        return replace(task, heads=(range(sizes[0]),), classes=classes, group=None, train=train, test=test, held_out=held_out)

    evaluate = tuple(share_head(task) for task in stream.evaluate)
    return replace(stream, tasks=tuple(map(share_head, stream.tasks)) if joint else evaluate, evaluate=evaluate, outputs=sizes[0])


def columns_among(tasks: Sequence[Task], scenario: str, learned: int, u: int) -> range:
    """Return the columns for task u after `learned` tasks. In the class scenario these are all classes seen so far and those of u."""
    task_columns = tasks[u].columns
    if scenario != "class":
        return task_columns
    return range(max([task_columns.stop, *(task.columns.stop for task in tasks[:learned])]))


def warn(preserve: Term, scenario: str) -> None:
    """Warn about a method that does not work in this scenario."""
    terms: tuple[Preserver, ...] = preserve.parts
    for term in terms:
        kind = type(term).__name__
        if scenario != "task" and term.needs_task:
            warnings.warn(
                f"{kind} evaluates a task with the parameters it keeps for that task, but in the {scenario} scenario the task is not "
                "known: every image is classified with those of the newest task. Use --scenario task, or another method",
                stacklevel=2,
            )
        elif scenario == "class" and isinstance(term, Anchored) and not any(isinstance(other, Distils | Replays) for other in terms):
            warnings.warn(
                f"{kind} protects weights, but in the class scenario no loss compares old classes with new ones: expect old tasks to be "
                "lost. A method that distils at least compares outputs; joint training (the stream joint-…) gives the upper bound",
                stacklevel=2,
            )
        if scenario != "task" and isinstance(term, Phased) and term.warms_up(1) and _chose_warmup(term):
            warnings.warn(
                f"{kind} has a warm-up of the head of a task, but in the {scenario} scenario there is none: the warm-up has no effect",
                stacklevel=2,
            )


def _chose_warmup(term: Preserver) -> bool:
    """Return True if the user asked for the warm-up; False if the method has one by default, which needs no warning."""
    default: Any = type(term)()  # type: ignore[call-arg]
    return not default.warms_up(1)


def _relabel(part: Part | Joined, homes: Sequence[range]) -> Part | Joined:
    """Return the part with labels that count from the first column of its task; `homes` are the columns of all tasks."""
    if isinstance(part, Joined):
        return Joined(tuple(new for one in part.parts if isinstance(new := _relabel(one, homes), Part)))
    first = int(part.targets[0]) if len(part) else 0
    home = next((home for home in homes if first in home), homes[0])
    return replace(part, labels=part.labels - home.start)
