"""What is known when a task is evaluated (van de Ven & Tolias, 2019): which task it is, or not.

    task     an image comes with its task: it is classified within that task's head, with whatever the method keeps for the task
    domain   the task is not known and need not be: all tasks have the same outputs, column c being each task's c-th class
    class    the task is not known and must be found out: one head over every class seen so far, in training and in evaluation

A stream is arranged once; training and evaluation then follow its heads. A stream whose tasks share a head is its own domain stream.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from selfless.data import Joined, Part, Stream, Task
from selfless.preserve import Preserver
from selfless.preserve.capabilities import Anchored, Distils, Phased
from selfless.terms import Term


def arrange(stream: Stream, scenario: str) -> Stream:
    """Return the stream with the heads, and for "domain" the labels, of the scenario."""
    if scenario == "task":
        return stream
    joint = len(stream.tasks) < len(stream.evaluate)
    blurred = any(task.train.weights is not None for task in stream.tasks)
    if scenario == "class":
        tops = [max(columns(task).stop for task in stream.evaluate[: u + 1]) for u in range(len(stream.evaluate))]
        tops = [stream.outputs] * len(tops) if blurred else tops  # whose every task shows every class
        evaluate = tuple(replace(task, heads=(range(top),), group=None) for task, top in zip(stream.evaluate, tops, strict=True))
        tasks = tuple(replace(task, heads=(range(stream.outputs),), group=None) for task in stream.tasks) if joint else evaluate
        return replace(stream, tasks=tasks, evaluate=evaluate)
    homes = list(dict.fromkeys(columns(task) for task in stream.evaluate))
    sizes = sorted({len(home) for home in homes})
    if len(sizes) > 1:
        raise ValueError(
            f"the tasks of {stream.name} have {', '.join(map(str, sizes))} classes; the domain scenario gives them all the same outputs, "
            "so they need as many: use --scenario task or class"
        )
    if len(homes) == 1 and homes[0] == range(stream.outputs):
        return stream
    if blurred:
        raise ValueError(f"{stream.name} mixes the classes of all tasks, so they cannot share outputs: use --scenario task or class")

    def shared(task: Task) -> Task:
        aside = None if task.held_out is None else _move(task.held_out, homes)
        train, test = _move(task.train, homes), _move(task.test, homes)
        return replace(task, heads=(range(sizes[0]),), group=None, train=train, test=test, held_out=aside)

    evaluate = tuple(shared(task) for task in stream.evaluate)
    return replace(stream, tasks=tuple(map(shared, stream.tasks)) if joint else evaluate, evaluate=evaluate, outputs=sizes[0])


def columns(task: Task) -> range:
    """The output columns among which a task is classified: its group's, or its head's."""
    if task.group is not None:
        return task.group
    return range(task.heads[0].start, task.heads[-1].stop)


def columns_among(tasks: Sequence[Task], scenario: str, learned: int, u: int) -> range:
    """The columns for task u after `learned` tasks: in the class scenario, every class seen by then and its own."""
    own = columns(tasks[u])
    return range(max([own.stop, *(columns(task).stop for task in tasks[:learned])])) if scenario == "class" else own


def warn(preserve: Term, scenario: str) -> None:
    """Warn of a method that cannot do its work where the task is not known."""
    terms: tuple[Preserver, ...] = preserve.parts
    for term in terms:
        kind = type(term).__name__
        if scenario != "task" and term.needs_task:
            warnings.warn(
                f"{kind} evaluates a task with what it kept for that task, and in the {scenario} scenario the task is not "
                "known: every image is classified by the newest task's network. Use --scenario task, or a method with one network for all",
                stacklevel=2,
            )
        elif scenario == "class" and isinstance(term, Anchored) and not any(isinstance(other, Distils) for other in terms):
            warnings.warn(
                f"{kind} holds weights, and in the class scenario nothing sets old classes against new ones: expect old tasks to be lost. "
                "lwf compares outputs at least; the stream joint-… (joint-split-mnist) shows what could be had",
                stacklevel=2,
            )
        if scenario != "task" and isinstance(term, Phased) and term.warms_up(1) and not type(term)().warms_up(1):  # type: ignore[call-arg]
            warnings.warn(
                f"{kind}'s warm-up is of a task's own head, and in the {scenario} scenario there is none: it has no effect", stacklevel=2
            )


def _move(part: Part | Joined, homes: Sequence[range]) -> Part | Joined:
    """Labels counted from the first column of the task they are of."""
    if isinstance(part, Joined):
        return Joined(tuple(moved for one in part.parts if isinstance(moved := _move(one, homes), Part)))
    first = int(part.targets[0]) if len(part) else 0
    home = next((home for home in homes if first in home), homes[0])
    return replace(part, labels=part.labels - home.start)
