"""What a keeper has learned, as flat named tensors, and back: read, checked, nothing changed until all of it is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from selfless.network.layers import Tap
from selfless.preserve import Preserver, State

PLAIN = ("tasks", "method", "begun", "called")


@dataclass(frozen=True)
class Saved:
    """`begun`: whether a step of the present task was seen. `called`: task by task, whether consolidate() was given forward=, which cannot
    be saved; None where it does not matter."""

    state: State
    alpha: dict[str, Tensor]
    tasks: int
    begun: bool
    called: list[bool] | None = None


def flat(preserve: Preserver, learned: Saved) -> dict[str, Tensor]:
    """As safetensors will take it."""
    found = {f"preserve.{group}.{name}": t for group, tensors in learned.state.items() for name, t in tensors.items()}
    found |= {f"alpha.{name}": t for name, t in learned.alpha.items()}
    method = torch.tensor(list(preserve.name.encode()), dtype=torch.uint8)
    plain = {"tasks": torch.tensor(learned.tasks), "method": method, "begun": torch.tensor(int(learned.begun))}
    if learned.called is not None:
        plain["called"] = torch.tensor(learned.called)
    return {n: t.detach().contiguous().clone() for n, t in found.items()} | plain


def read(state: Mapping[str, Tensor], preserve: Preserver, parameters: Mapping[str, Tensor]) -> Saved:
    """What `flat` made, for the same preserver."""
    if "tasks" not in state or "method" not in state:
        raise ValueError("this is not a keeper's state_dict: it has no 'tasks' and 'method'. Pass what keeper.state_dict() returned")
    method = bytes(state["method"].tolist()).decode()
    if method != preserve.name:
        raise ValueError(f"the state is of preserver {method!r}, but this keeper has {preserve.name!r}; attach with the same one")
    new: State = {group: {} for group in preserve.init(parameters)}
    alpha: dict[str, Tensor] = {}
    for key, tensor in state.items():
        kind, _, rest = key.partition(".")
        group, _, name = rest.partition(".")
        if not isinstance(tensor, Tensor) or (tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())):
            raise ValueError(f"{key!r} in the state is not a tensor of finite numbers; the file is damaged or from a run that diverged")
        if kind == "alpha":
            alpha[rest] = tensor.detach().clone()
        elif kind == "preserve" and (group in new or group == "offset"):
            new.setdefault(group, {})[name] = tensor.detach().clone()
        elif key not in PLAIN:
            raise ValueError(f"the state has {key!r}, which this keeper knows nothing of; was it saved by another version?")
    called = [bool(c) for c in state["called"].tolist()] if "called" in state else None
    return Saved(new, alpha, int(state["tasks"]), "begun" in state and bool(int(state["begun"])), called)


def check(learned: Saved, preserve: Preserver, shapes: Mapping[str, torch.Size], taps: Mapping[str, Tap]) -> None:
    """Against the model: its parameters' shapes, and the layers that a keeper follows."""
    state = learned.state
    if "omega" in state and state["omega"].keys() != state.get("anchor", {}).keys():
        lost = sorted(state["omega"].keys() ^ state["anchor"].keys())
        raise ValueError(f"the state has only one of Ω and θ* for {lost[0]!r}; it is incomplete")
    for group, tensors in state.items():
        for name, tensor in tensors.items() if group not in ("offset", *preserve.loose) else ():
            if name in shapes and tensor.shape != shapes[name]:
                raise ValueError(
                    f"parameter {name!r} is {tuple(tensor.shape)} in the state and {tuple(shapes[name])} in the model; "
                    "build the model the state was saved with"
                )
    if state.get("omega") and not state["omega"].keys() & shapes.keys():
        raise ValueError(f"the state has {next(iter(state['omega']))!r}, which the model has not; build the model the state was saved with")
    for name, a in learned.alpha.items():
        if name not in taps:
            raise ValueError(f"the state has layer {name!r}, but this keeper has {', '.join(taps) or 'none'}; attach with the same layers")
        width = getattr(taps[name].weighted, "out_features", getattr(taps[name].weighted, "out_channels", None))
        if a.dim() != 1 or (width is not None and width % len(a) != 0):
            raise ValueError(f"layer {name!r} has {width} neurons, but its importance in the state is {tuple(a.shape)}")
