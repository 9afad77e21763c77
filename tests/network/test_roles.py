"""Roles of modules: which layer is the head, which are hidden, what is an activation, and where the neurons are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from selfless.activations import LWTA
from selfless.network import roles
from selfless.network.wiring import chain


class Reshape(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)


def convolutional() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 2))


@pytest.mark.parametrize(
    ("module", "is_one", "is_known"),
    [
        (nn.ReLU(), True, True),
        (nn.GELU(), True, True),
        (LWTA(2), True, True),
        (Reshape(), True, False),  # a module without parameters may be anything
        (nn.LogSoftmax(1), False, False),  # turns logits into probabilities
        (nn.MultiheadAttention(4, 2), False, False),
        (nn.Linear(2, 2), False, False),
        (nn.Flatten(), False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_what_is_an_activation(module: nn.Module, is_one: bool, is_known: bool) -> None:
    assert roles.is_activation(module) is is_one
    assert roles.is_known_activation(module) is is_known


def test_the_head_is_the_linear_layer_registered_last() -> None:
    model = convolutional()
    assert roles.output_layer(model) == "5"
    assert list(roles.hidden_layers(model)) == ["0", "3"]
    assert list(roles.hidden_layers(model, kinds=nn.Linear)) == ["3"]
    assert list(roles.nodes(model)) == ["0", "3"]
    assert roles.output_layer(nn.Sequential(nn.ReLU())) == ""
    assert roles.layer_before(model, "4") == "3"
    assert roles.layer_before(model, "0") == ""


def test_named_heads_are_the_heads() -> None:
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "heads": nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])})
    assert list(roles.hidden_layers(model, ["heads.0", "heads.1"])) == ["body"]
    assert list(roles.hidden_layers(model, ["heads"])) == ["body"]
    assert list(roles.nodes(model, ["heads"])) == ["body"]
    model["heads"] = nn.ModuleList()  # heads come later: no layer is one yet
    assert list(roles.hidden_layers(model)) == ["body"]


@pytest.mark.parametrize(("name", "inside"), [("fc", True), ("fc.weight", True), ("fc2.weight", False), ("a.fc", False)])
def test_a_name_is_within_a_module(name: str, inside: bool) -> None:
    assert roles.within(name, "fc") is inside


def test_the_axis_of_the_neurons() -> None:
    shapes = {(3, 5): -1, (3, 7, 5): -1, (3, 5, 7, 7): 1}
    assert {shape: roles.neuron_axis(torch.zeros(shape)) for shape in shapes} == shapes
    assert roles.neuron_axis(torch.zeros(3, 5, 7), axis=1) == 1
    assert [roles.feature_axis(m) for m in (nn.Linear(2, 2), nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.ReLU())] == [-1, 1, 1, None]
    assert [roles.output_width(m) for m in (nn.Linear(2, 3), nn.Conv2d(2, 4, 1), nn.ReLU(), None)] == [3, 4, None, None]
    assert roles.registered_axis(convolutional(), "1") == 1
    assert roles.registered_axis(convolutional(), "4") == -1


def test_the_two_ends_of_every_weight() -> None:
    """Gates 0 … 3 are the channels, 4 … 8 the hidden neurons, 9 means no gate; a channel has four positions after flattening."""
    model = convolutional()
    wiring = chain(model, {"1": model[1], "4": model[4]})
    assert wiring.size == 9
    assert wiring.rows["0.weight"].tolist() == [0, 1, 2, 3]
    assert wiring.columns["0.weight"].tolist() == [9, 9, 9]
    assert wiring.columns["3.weight"].tolist() == [i for i in range(4) for _ in range(4)]
    assert wiring.rows["5.bias"].tolist() == [9, 9]
    with pytest.raises(ValueError, match="the hidden layer '0' has no activation module"):
        chain(model, {"4": model[4]})
