"""The state of a keeper as flat named tensors, and back. A saved state is checked completely before the keeper uses it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfless.distributed.shards import local
from selfless.functional.scale import Scale
from selfless.keeper.room import Room
from selfless.network.calling import Forward
from selfless.network.layers import Tap
from selfless.network.roles import output_width, within
from selfless.preserve import Preserver, State
from selfless.preserve.capabilities import Anchored, Distils, Replays
from selfless.sparsify import Sparsifier

if TYPE_CHECKING:
    from selfless.keeper.keeper import Keeper

PLAIN = ("tasks", "method", "begun", "called", "distilled", "epoch", "chosen")


@dataclass(frozen=True)
class Learned:
    """The states of the preservers, α, and the progress of the keeper.

    `begun` is True if the current task has started. `called` says for each task if consolidate() had a forward=, which cannot be saved;
    None if no preserver needs it. `scales` and `measured` are those of the strength "auto": of each sparsifier by its number, and λ of each
    preserver, None if it has none. `room` are the counts of tasks by neuron, if they were saved. `distilled` is how often each preserver
    distilled in the current task: its curvature is measured in some of these steps. `epoch` is the epoch that was begun last in the current
    task, and of how many. `chosen` is True if parameters= chose what is preserved.
    """

    states: list[State]
    alpha: dict[str, Tensor]
    tasks: int
    begun: bool
    called: list[bool] | None
    scales: dict[int, Scale]
    measured: list[float | None]
    room: dict[str, Tensor]
    distilled: list[int]
    epoch: tuple[int, int] | None
    chosen: bool = False


def save(keeper: Keeper, epoch: tuple[int, int] | None = None) -> dict[str, Tensor]:
    """Return the state of a keeper, in this epoch of its current task, as flat named tensors."""
    terms = [part.term for part in keeper.parts]
    calls = any(isinstance(term, Distils | Replays) for term in terms)
    called = [forward is not None for forward in keeper.forwards] if calls and keeper.tasks else None
    begun = any(part.path_started for part in keeper.parts)
    measured = [part.measured for part in keeper.parts]
    scales, room = keeper.sparsifiers.found, keeper.room.tensors()
    distilled = [part.distilled for part in keeper.parts]
    progress = (keeper.tasks, begun, called, scales, measured, room, distilled, epoch, keeper.choice is not None)
    return flatten(terms, Learned(keeper.states, keeper.alpha, *progress))


def load(keeper: Keeper, state: Mapping[str, Tensor], forwards: Sequence[Forward | None] | None) -> tuple[int, int] | None:
    """Let a keeper use a state that `save` returned, if it fits the model. Return the epoch that was begun last, if there was one."""
    terms = [part.term for part in keeper.parts]
    new = unflatten(state, terms)
    check(new, terms, {n: p.shape for n, p in keeper.model.named_parameters()}, keeper.taps)
    check_scales(new, terms, keeper.sparsifiers.terms)
    calls: list[Forward | None] = list(forwards) if forwards is not None else [None] * new.tasks
    if len(calls) != new.tasks:
        raise ValueError(
            f"forwards has {len(calls)} entries, but the state has {new.tasks} tasks; give one for each, None for the usual call"
        )
    if forwards is None and any(new.called or ()):
        raise ValueError(
            f"the {new.tasks} tasks of this state were consolidated with forward=, which a file cannot store; "
            "pass forwards=[one per task] to load_state_dict"
        )
    keeper.forwards, keeper.alpha, keeper.tasks, keeper.room = calls, new.alpha, new.tasks, Room.of_tensors(new.room)
    keeper.sparsifiers.load(new.scales, new.tasks)
    for part, saved, measured, distilled in zip(keeper.parts, new.states, new.measured, new.distilled, strict=True):
        part.load(saved, keeper.preserved(), new.begun, measured)
        part.distilled = distilled
        if part.gates is not None:
            part.gates.resume(part.state, begun=new.tasks > 0 or new.epoch is not None)
    keeper.follow_device()
    unknown, missing = unmatched(new, terms, keeper)
    keeper.notices.check_names(unknown, missing)
    keeper.notices.check_choice(new.chosen, keeper.choice is not None, missing, new.tasks)
    keeper.notices.check_distance(keeper.parts, keeper.trainable())
    return new.epoch


def flatten(terms: Sequence[Preserver], learned: Learned) -> dict[str, Tensor]:
    """Return named tensors, as safetensors accepts them. The states of several preservers are numbered."""
    numbers = [""] if len(terms) == 1 else [f"{i}." for i in range(len(terms))]
    found = {
        f"preserve.{number}{group}.{name}": t
        for number, state in zip(numbers, learned.states, strict=True)
        for group, tensors in state.items()
        for name, t in tensors.items()
    }
    found |= {f"alpha.{name}": t for name, t in learned.alpha.items()}
    found |= {f"scale.sparsify.{i}.{name}": t for i, scale in learned.scales.items() for name, t in scale.items()}
    found |= {f"scale.preserve.{i}": torch.tensor(t) for i, t in enumerate(learned.measured) if t is not None}
    found |= {f"room.{name}": t for name, t in learned.room.items()}
    method = torch.tensor(list(_method(terms).encode()), dtype=torch.uint8)
    plain = {"tasks": torch.tensor(learned.tasks), "method": method, "begun": torch.tensor(int(learned.begun))}
    if learned.called is not None:
        plain["called"] = torch.tensor(learned.called)
    if any(learned.distilled):
        plain["distilled"] = torch.tensor(learned.distilled)
    if learned.epoch is not None:
        plain["epoch"] = torch.tensor(learned.epoch)
    if learned.chosen:
        plain["chosen"] = torch.tensor(1)
    return {n: t.detach().contiguous().clone() for n, t in found.items()} | plain


def unflatten(flat: Mapping[str, Tensor], terms: Sequence[Preserver]) -> Learned:
    """Return the state that `flatten` made flat, for the same preservers."""
    if not isinstance(flat, Mapping) or "tasks" not in flat or "method" not in flat:
        raise ValueError("this is not the state_dict of a keeper: it has no 'tasks' and 'method'. Pass what keeper.state_dict() returned")
    method = bytes(flat["method"].tolist()).decode()
    if method != _method(terms):
        raise ValueError(f"the state is of preserver {method!r}, but this keeper has {_method(terms)!r}; attach with the same one")
    states: list[State] = [{group.name: {} for group in term.groups} for term in terms]
    alpha: dict[str, Tensor] = {}
    scales: dict[int, Scale] = {}
    measured: list[float | None] = [None for _ in terms]
    room: dict[str, Tensor] = {}
    for key, tensor in flat.items():
        kind, _, rest = key.partition(".")
        if not isinstance(tensor, Tensor) or (tensor.is_floating_point() and not bool(torch.isfinite(local(tensor)).all())):
            raise ValueError(f"{key!r} in the state is not a tensor of finite numbers; the file is damaged or from a run that diverged")
        if kind == "alpha":
            alpha[rest] = tensor.detach().clone()
        elif kind == "room":
            room[rest] = tensor.detach().clone()
        elif kind == "scale":
            role, number, *name = rest.split(".")
            if role == "preserve":
                measured[int(number)] = float(tensor)
            else:
                scales.setdefault(int(number), {})[name[0]] = tensor.detach().clone()
        elif kind == "preserve":
            _put(states, terms, key, rest, tensor)
        elif key not in PLAIN:
            raise ValueError(f"the state has {key!r}, which is unknown to this keeper; was it saved by another version?")
    called = [bool(c) for c in flat["called"].tolist()] if "called" in flat else None
    begun = "begun" in flat and bool(int(flat["begun"]))
    distilled = flat["distilled"].tolist() if "distilled" in flat else [0 for _ in terms]
    first, count = flat["epoch"].tolist() if "epoch" in flat else (-1, 0)
    epoch = (int(first), int(count)) if count else None
    return Learned(states, alpha, int(flat["tasks"]), begun, called, scales, measured, room, distilled, epoch, "chosen" in flat)


def _method(terms: Sequence[Preserver]) -> str:
    return "+".join(term.name for term in terms)


def _put(states: list[State], terms: Sequence[Preserver], key: str, rest: str, tensor: Tensor) -> None:
    """Put one saved tensor into the state it belongs to; `rest` is `key` without "preserve."."""
    number, _, tail = rest.partition(".")
    i, rest = (int(number), tail) if len(terms) > 1 and number.isdigit() and int(number) < len(terms) else (0, rest)
    group, _, name = rest.partition(".")
    if group in terms[i].retired:
        return
    declared = states[i] if terms[i].groups else states[i] | {group: states[i].get(group, {})}
    if group not in declared:
        raise ValueError(f"the state has {key!r}, which is unknown to this keeper; was it saved by another version?")
    declared[group][name] = tensor.detach().clone()
    states[i] = declared


def check(learned: Learned, terms: Sequence[Preserver], shapes: Mapping[str, torch.Size], taps: Mapping[str, Tap]) -> None:
    """Raise ValueError unless the state fits the model: the shapes of its parameters, and the layers of the keeper."""
    for term, state in zip(terms, learned.states, strict=True):
        _check_shapes(term, state, shapes)
    for name, a in learned.alpha.items():
        if name not in taps:
            raise ValueError(
                f"the state has layer {name!r}, but this keeper has {', '.join(taps) or 'none'}; attach with the same layers, or, if "
                "modules were renamed, rename the keys of the state too"
            )
        width = output_width(taps[name].weighted)
        if a.dim() != 1 or (width is not None and width % len(a) != 0):
            raise ValueError(
                f"layer {name!r} has {width} neurons, but its importance in the state has shape {tuple(a.shape)}; "
                "build the model the state was saved with"
            )


def unmatched(learned: Learned, terms: Sequence[Preserver], keeper: Keeper) -> tuple[list[str], list[str]]:
    """Return names: parameters in the state but not in the model, and in the model but not in the state; heads are left out.

    Only anchors and distillation are asked, because they store a value of every parameter.
    """
    whole = [state for term, state in zip(terms, learned.states, strict=True) if isinstance(term, Anchored | Distils)]
    saved = {name for state in whole for name in state.get("anchor", {})}

    def outside(names: Iterable[str]) -> list[str]:
        return sorted(name for name in names if not any(within(name, head) for head in keeper.heads))

    there = {name for name, _ in keeper.model.named_parameters()}
    return (outside(saved - there), outside(keeper.preserved().keys() - saved)) if saved else ([], [])


def check_scales(learned: Learned, terms: Sequence[Preserver], sparsifiers: Sequence[Sparsifier]) -> None:
    """Raise ValueError if a term with strength "auto" finds no measured strength in a state in which the first task has ended."""
    missing = [t.label for t, found in zip(terms, learned.measured, strict=True) if t.is_auto and found is None]
    missing += [t.label for i, t in enumerate(sparsifiers) if t.is_auto and i not in learned.scales]
    if learned.tasks and missing:
        raise ValueError(f"the state has no measured strength of {missing[0]}('auto'); it was saved with a number: attach with that number")


def _check_shapes(term: Preserver, state: State, shapes: Mapping[str, torch.Size]) -> None:
    """Raise ValueError unless the tensors of one preserver have the shapes of the parameters."""
    term.check_state(state)
    for group in term.groups:
        for name, tensor in state[group.name].items() if group.like_parameter else ():
            if name in shapes and tensor.shape != shapes[name]:
                raise ValueError(
                    f"parameter {name!r} is {tuple(tensor.shape)} in the state and {tuple(shapes[name])} in the model; "
                    "build the model the state was saved with"
                )
    named = {name for group in term.groups if group.like_parameter for name in state[group.name]}
    if named and not named & shapes.keys():
        raise ValueError(
            f"the state has {min(named)!r}, which is not in the model; build the model the state was saved with, or, if modules were "
            "renamed, rename the keys of the state too"
        )
