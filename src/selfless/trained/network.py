"""A trained network as an `nn.Module`: as a task is evaluated, on images as the data set has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfless.data import Augment, DataDescription, Resident
from selfless.models import build
from selfless.preserve import Preserver, State
from selfless.preserve.base import read_states
from selfless.preserve.capabilities import Evaluates, Gated

Tensors = Mapping[str, Tensor]


class TrainedNetwork(nn.Module):
    """f(x)[:, columns]: logits of images x (n, C, H, W) as the data set has them, over the classes of a task or over all classes.

    x is uint8, 0 … 255, or float32, 0 … 1, if the data set stores bytes; float32 as stored otherwise. It is cropped, scaled and shifted
    here, as in training. `network` is the plain network, which takes inputs that are prepared already and returns all columns.

    classes   the names of the outputs, in order; with the name of the task, "on (night)", where classes of several tasks have one name
    columns   the output columns of `network` that are returned
    """

    scale: Tensor
    byte_scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, data: DataDescription, columns: range) -> None:
        super().__init__()
        self.network, self.data, self.columns = network, data, columns
        self.classes = data.class_names(columns)
        for name, dtype in (("scale", torch.float32), ("byte_scale", torch.uint8)):
            scale, shift = _affine(data, dtype)
            self.register_buffer(name, scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(self.prepare(x))
        return logits[:, self.columns.start : self.columns.stop]

    def prepare(self, x: Tensor) -> Tensor:
        """Return images as the network takes them: cropped at the centre if training did, scaled, shifted, float32."""
        if not isinstance(x, Tensor):
            raise TypeError(f"the network takes a tensor of images, not {type(x).__name__}; pass torch.from_numpy(x) or torch.as_tensor(x)")
        allowed = (torch.uint8, torch.float32) if self.data.dtype == "uint8" else (torch.float32,)
        if x.dim() != 4 or tuple(x.shape[1:]) != self.data.image_shape or x.dtype not in allowed:
            kinds = "uint8 (0 … 255) or float32 (0 … 1)" if len(allowed) == 2 else "float32"
            raise ValueError(
                f"the network takes images (n, {', '.join(map(str, self.data.image_shape))}) of {kinds}, "
                f"not {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
            )
        if self.data.input_shape != self.data.image_shape:
            x = Augment(centre=self.data.input_shape[1])(x)
        return x.to(torch.float32) * (self.byte_scale if x.dtype == torch.uint8 else self.scale) - self.shift


def check_network(model: object, function: str) -> None:
    """Raise TypeError unless the model is the network of a run, which knows its inputs and classes."""
    if not isinstance(model, TrainedNetwork):
        raise TypeError(
            f"{function} takes the network of a run, result.model() or selfless.load('results/KEY').model(), not a "
            f"{type(model).__name__}: it knows the shape of its inputs and the names of its classes"
        )


def _affine(data: DataDescription, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (scale, shift) for images of this type, as (C or 1, 1, 1); the training loop computes the same numbers."""
    empty = Resident(torch.zeros(0, *data.image_shape, dtype=dtype), torch.zeros(0, dtype=torch.int64), mean=data.mean, std=data.std)
    scale, shift = empty.affine()
    return scale.view(-1, 1, 1), (torch.zeros(1) if shift is None else shift).view(-1, 1, 1)


class GatedActivation(nn.Module):
    """An activation whose neurons are multiplied by the gates of a task."""

    gate: Tensor

    def __init__(self, activation: nn.Module, gate: Tensor) -> None:
        super().__init__()
        self.activation = activation
        self.register_buffer("gate", gate)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.activation(x)
        return h * self.gate.view(-1, *[1] * (h.dim() - 2))  # (n, N) or (n, N, H, W)


def restore(
    name: str,
    options: Mapping[str, Any],
    terms: Sequence[Preserver],
    tensors: Tensors,
    data: DataDescription,
    *,
    task: int | None = None,
    learned: int,
    scenario: str = "task",
) -> TrainedNetwork:
    """Return the network `name` with the recorded `tensors`, in eval mode, as task `task` is evaluated.

    The task selects the parameters and gates that a preserver keeps for it, and its output columns. None: as the newest task, with all
    columns. Where the task is not known in evaluation (other scenarios), all tasks are evaluated as the newest.

    learned   how many tasks were learned
    """
    if ":" not in name:  # our networks read pretrained weights from a file, which is not needed here
        options = {key: value for key, value in options.items() if key not in ("weights", "fc")}
    network = build(name, outputs=data.outputs, input_shape=data.input_shape, seed=0, **options)
    state = {n.partition(".")[2]: t for n, t in tensors.items() if n.startswith(("params.", "buffers."))}
    trained = {n: state[n] for n, _ in network.named_parameters()}
    used = learned - 1 if task is None or scenario != "task" else min(task, learned - 1)
    gates: dict[str, Tensor] = {}
    for term, term_state in zip(terms, read_states(terms, tensors), strict=True):
        state |= _evaluated(term, term_state, trained, used)
        gates |= term.hard_gate(term_state, used) if isinstance(term, Gated) else {}
    network.load_state_dict(state)
    for layer, gate in gates.items():
        above, _, name = layer.rpartition(".")
        setattr(network.get_submodule(above), name, GatedActivation(network.get_submodule(layer), gate))
    return TrainedNetwork(network, data, _columns(data, task, scenario)).eval()


def _evaluated(term: Preserver, state: State, parameters: Tensors, task: int) -> dict[str, Tensor]:
    """Return the parameters that a preserver replaces for a task."""
    return term.evaluated_parameters(state, parameters, task) if isinstance(term, Evaluates) else {}


def _columns(data: DataDescription, task: int | None, scenario: str) -> range:
    """Return the output columns of a task; all that any task uses if the task is not given, or among which all are classified."""
    if task is None or scenario == "class":
        return range(max(one.columns.stop for one in data.tasks))
    return data.tasks[task].columns
