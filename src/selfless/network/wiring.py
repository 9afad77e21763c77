"""Wiring: which hidden neurons are at the two ends of every weight, for methods that treat neurons (HAT, AGS-CL).

A weight W[i, j] connects neuron j of one hidden layer to neuron i of the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfless.network.roles import WEIGHTED


@dataclass(frozen=True)
class Wiring:
    """The hidden neurons at the two ends of every weight, for a chain of layers.

    Neurons are numbered from 0 to size − 1 over all gated layers. The number `size` means: no gate (inputs and outputs of the network).
    """

    size: int
    place: dict[str, Tensor]  # gated layer → the numbers of its neurons (N,)
    rows: dict[str, Tensor]  # parameter → the neuron that each row (first axis) computes
    columns: dict[str, Tensor]  # weight → the neuron that each column (second axis) reads


def chain(model: nn.Module, gated: Mapping[str, nn.Module]) -> Wiring:
    """Return the wiring of a chain of layers in the order of definition. Each hidden layer is followed by its activation in `gated`."""
    names = {module: name for name, module in gated.items()}
    device = next(model.parameters()).device
    place: dict[str, Tensor] = {}
    ends: list[tuple[str, nn.Module, str, str]] = []  # (name, layer, gate of its inputs, gate of its outputs)
    size, last = 0, ""
    for name, module in model.named_modules():
        if isinstance(module, WEIGHTED):
            if getattr(module, "groups", 1) != 1 or getattr(module, "transposed", False):
                raise ValueError(
                    f"neurons are followed only through plain linear layers and convolutions; {name!r} is grouped or transposed"
                )
            ends.append((name, module, last, ""))
        elif module in names:
            if type(module).__module__ != "torch.nn.modules.activation" or isinstance(module, (nn.GLU, nn.Softmax)) or not ends:
                raise ValueError(f"a hidden layer needs a pointwise activation of torch.nn after it; {name!r} is {type(module).__name__}")
            before, layer, source, _ = ends[-1]
            width = int(layer.weight.shape[0])  # type: ignore[index]
            last = names[module]
            place[last] = torch.arange(size, size + width, device=device)
            ends[-1] = (before, layer, source, last)
            size += width
        elif any(True for _ in module.parameters(recurse=False)):
            raise ValueError(
                f"neurons are followed through linear layers and convolutions only; {name!r} ({type(module).__name__}) has parameters too. "
                "Leave such layers out, or take a method that follows no neurons, such as LwF or PackNet"
            )
    gates = [gate for *_, gate in ends]
    for k, (name, *_, gate) in enumerate(ends):
        if not gate and any(gates[k + 1 :]):
            raise ValueError(f"the hidden layer {name!r} has no activation module: add one after it and name it in layers=[…]")
    if not place:
        raise ValueError("no hidden layer has an activation module; add nn.ReLU() modules and name them in layers=[…]")
    rows, columns = {}, {}
    for name, layer, source, gate in ends:
        weight: Any = layer.weight
        outside = torch.tensor([size], device=device)
        rows[f"{name}.weight"] = place[gate] if gate else outside.expand(weight.shape[0]).clone()
        if layer.bias is not None:
            rows[f"{name}.bias"] = rows[f"{name}.weight"]
        reads = place[source] if source else outside
        if weight.shape[1] % len(reads):
            raise ValueError(
                f"{name!r} reads {weight.shape[1]} values, not a multiple of the {len(reads)} neurons before it; use a plain chain of "
                "layers, without branches"
            )
        columns[f"{name}.weight"] = reads.repeat_interleave(weight.shape[1] // len(reads))
    return Wiring(size, place, rows, columns)
