"""Continue a finished run with new tasks. Its parameters, the states of its preservers and its α go on; its data are not needed.

    append      the stream of the new tasks, with output columns after those of the old tasks
    inherit     a fleet that starts from the tensors of the finished run; new outputs start as in a new network

The order of batches and all other random numbers depend on (seed, task, epoch), and tasks are counted from the first task of the first
run. So tasks 1 and 2, then task 3 in a continued run, give the same bits on a CPU as one run of three tasks, if the network has the same
outputs from the start (`Run.outputs`). Without that, outputs are added later. Then the biases of old heads started from other random
numbers, and products of another width are rounded differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from selfless.data import DataDescription, Joined, Part, Stream, Task, TaskDescription
from selfless.engine import scenario
from selfless.engine.fleet import Fleet
from selfless.network.given import PREFIX
from selfless.spec import Result, Run

Test = Part | Joined
NO_HEADS = "joint, blurred or has head='all'; only tasks that are learned one by one with heads of their own go on"


@dataclass(frozen=True, eq=False)
class Parent:
    """A finished run that is continued.

    result    its record
    data      the description of its data
    tensors   its final parameters, buffers, states and α
    tests     the test data of its tasks, with output columns as labels; None where they were not found
    """

    result: Result
    data: DataDescription
    tensors: Mapping[str, Tensor]
    tests: tuple[Test | None, ...]

    @property
    def unknown(self) -> list[str]:
        """The names of the tasks whose test data were not found."""
        return [task.name for task, test in zip(self.data.tasks, self.tests, strict=True) if test is None]


def check(run: Run, parent: Parent) -> None:
    """Raise ValueError if a run cannot continue its parent."""
    old, key = parent.result.run, parent.result.run.key
    for name in ("model", "model_options", "scenario", "augment"):
        before, now = getattr(old, name), getattr(run, name)
        if before != now and not (name == "model" and str(now).startswith(PREFIX)):  # the tensors show if an object is the same network
            raise ValueError(f"{name} is {now!r}, but run {key} has {before!r}, and its network goes on; leave {name} out")
    if [type(term) for term in run.preserve.parts] != [type(term) for term in old.preserve.parts]:
        raise ValueError(f"preserve is {run.preserve}, but run {key} has {old.preserve}, whose state goes on; only its options may change")
    if len(parent.result.history) != len(parent.data.tasks) or parent.result.accuracy_all is not None:
        raise ValueError(f"run {key} cannot be continued: its stream, {old.stream}, is {NO_HEADS}")


# ------------------------------------------------------------------------------------------------------------------- the stream
def append(stream: Stream, parent: Parent, kind: str) -> Stream:
    """Return the stream with the columns of a network that has learned the tasks of `parent`, in the scenario `kind`.

    New classes get new columns. Tasks share the old columns where they share them by definition (the domain scenario), and where all old
    and new tasks have one head with the same classes. In `evaluate` the old tasks come first, and no two tasks have the same name.
    """
    data = parent.data
    _check_inputs(stream, data)
    stream = scenario.arrange(stream, kind) if kind == "domain" else stream
    if any(task.group is not None or len(task.heads) > 1 for task in stream.tasks):
        raise ValueError(f"{stream.name} cannot continue a run: it is {NO_HEADS}")
    new_size, old_size = len(stream.tasks[0].columns), len(data.tasks[0].columns)
    if kind == "domain" and new_size != old_size:
        raise ValueError(
            f"the tasks of {stream.name} have {new_size} classes, the old ones {old_size}; the domain scenario needs equal numbers"
        )
    shift = 0 if kind == "domain" or _share_head(stream, data) else max(task.columns.stop for task in data.tasks)
    old = [_old_task(task, test, data) for task, test in zip(data.tasks, parent.tests, strict=True)]
    names = distinct_names([task.name for task in old], [task.name for task in stream.tasks])
    every = (*old, *(replace(_move(task, shift, data), name=name) for task, name in zip(stream.tasks, names, strict=True)))
    whole = replace(stream, tasks=every, evaluate=every, outputs=max(data.outputs, shift + stream.outputs))
    whole = scenario.arrange(whole, kind) if kind == "class" else whole
    missing = f"accuracy on {', '.join(parent.unknown)} is unknown: the data of old tasks were not found"
    notes = (*stream.notes, missing) if parent.unknown else stream.notes
    return replace(whole, tasks=whole.evaluate[len(old) :], notes=notes, learned=len(old))


def distinct_names(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the new names. One that a task has already gets the next number: after "task 1" and "task 2" follows "task 3"."""
    used, found = set(old), []
    for name in new:
        if name in used:
            stem = name.rstrip("0123456789").rstrip() or name
            numbers = [int(end) for other in used if other.startswith(stem) and (end := other.removeprefix(stem).strip()).isdecimal()]
            name = f"{stem} {max(numbers, default=1) + 1}"
        used.add(name)
        found.append(name)
    return found


def _check_inputs(stream: Stream, data: DataDescription) -> None:
    """Raise ValueError if the images of a stream are not those that the network takes."""
    part = stream.tasks[0].train.parts[0]
    dtype = str(part.images.dtype).removeprefix("torch.")
    if (stream.input_shape, dtype) != (data.image_shape, data.dtype):
        given = f"{stream.input_shape} {dtype}"
        raise ValueError(f"{stream.name} has images {given}, but the network takes {data.image_shape} {data.dtype}; convert them first")
    for name, other, trained in (("mean", part.mean, data.mean), ("std", part.std, data.std)):
        if other not in (None, trained):
            raise ValueError(f"{stream.name} has {name} {other}, but the network was trained with {trained} and keeps it; leave {name} out")


def _share_head(stream: Stream, data: DataDescription) -> bool:
    """Return True if all old and new tasks have one head, with the same classes."""
    heads = {(task.columns, task.classes) for task in data.tasks} | {(task.columns, task.classes) for task in stream.tasks}
    return len(heads) == 1 and len(data.tasks) + len(stream.tasks) > 2  # of one task each, nothing says that they share a head


def _old_task(task: TaskDescription, test: Test | None, data: DataDescription) -> Task:
    """Return an old task for evaluation; without its data its test part is empty."""
    nothing = torch.zeros(0, dtype=torch.int64)
    empty = Part(torch.zeros(0, *data.image_shape, dtype=getattr(torch, data.dtype)), nothing, nothing, mean=data.mean, std=data.std)
    return Task(task.name, task.classes, (task.columns,), empty, empty if test is None else test)


def _move(task: Task, shift: int, data: DataDescription) -> Task:
    """Return a new task with its columns moved by `shift` and its images normalised as the network's are."""
    (head,) = task.heads
    held_out = None if task.held_out is None else move_part(task.held_out, shift, data)
    train, test = move_part(task.train, shift, data), move_part(task.test, shift, data)
    return replace(task, heads=(range(head.start + shift, head.stop + shift),), train=train, test=test, held_out=held_out)


def move_part(part: Test, shift: int, data: DataDescription) -> Test:
    """Return a part whose labels are moved by `shift` columns, with the normalisation in `data`."""
    if isinstance(part, Joined):
        return Joined(tuple(new for one in part.parts if isinstance(new := move_part(one, shift, data), Part)))
    return replace(part, labels=torch.where(part.labels < 0, part.labels, part.labels + shift), mean=data.mean, std=data.std)


# -------------------------------------------------------------------------------------------------------------------- the fleet
def inherit(fleet: Fleet, parent: Parent, heads: Sequence[tuple[range, ...]], outputs: int) -> None:
    """Start a fleet of new networks from the tensors of the finished run, for every member; `heads` are those of all tasks.

    An output that the finished run did not have starts from the new network. Its state is that after as many tasks which ended where they
    began and to which it was not important.
    """
    learned = len(parent.data.tasks)
    for part in fleet.parts:
        part.skip_tasks(learned)
    fresh = fleet.tensors()
    kept = {n: t for n, t in fresh.items() if not n.startswith(("params.", "buffers.", "alpha.", "state."))}  # the optimizer starts anew
    grown = {name: _grow(name, tensor.to(fleet.device), fresh.get(name), fleet.size) for name, tensor in parent.tensors.items()}
    missing = [name for name in fresh if name.startswith(("params.", "buffers.")) and name not in grown]
    if missing:
        raise ValueError(f"the recorded network has no {missing[0].partition('.')[2]}; has its class changed since it was trained?")
    fleet.restore(kept | grown, learned)
    if fleet.run.scenario == "task":
        fleet.place_heads(heads, outputs)


def _grow(name: str, old: Tensor, new: Tensor | None, members: int) -> Tensor:
    """Return a tensor of the finished run for all members, (F, …), with the further rows of `new` where the network has more outputs."""
    stacked = old.expand(members, *old.shape).clone()
    if new is None or stacked.shape == new.shape:
        return stacked
    if stacked.dim() < 2 or stacked.shape[2:] != new.shape[2:] or stacked.shape[1] > new.shape[1]:
        what = name.partition(".")[2]
        raise ValueError(
            f"{what} is {tuple(old.shape)} in the recorded network and {tuple(new.shape[1:])} in the continued one; only the rows of the "
            "output layer may depend on the number of outputs"
        )
    return torch.cat([stacked, new[:, stacked.shape[1] :].to(stacked.dtype)], 1)
