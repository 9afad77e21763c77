"""Roles of modules: which layer is the head, which are hidden, what is an activation, and where the neurons are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import selfless
from selfless.activations import LWTA
from selfless.network import calling, roles
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


class Wrapped(nn.Module):
    """Its output is an object, as those of transformers are."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self.layer, self.output = nn.Linear(2, 2), output

    def forward(self, x: torch.Tensor) -> object:
        return self.output


def test_a_model_is_called_and_what_it_returns_must_be_logits() -> None:
    logits = torch.ones(3, 2)
    for output in ({"logits": logits}, SimpleNamespace(logits=logits)):
        assert calling.run_batch(Wrapped(output), torch.ones(3, 2)) is logits
    with pytest.raises(TypeError, match=r"output is not a tensor and has no \.logits; pass forward=lambda model, batch"):
        calling.run_batch(Wrapped(3), torch.ones(3, 2))
    with pytest.raises(TypeError, match=r"a dict of 'pose', 'force'; join several outputs with torch\.cat"):
        calling.run_batch(Wrapped({"pose": logits, "force": logits}), torch.ones(3, 2))
    assert calling.run_batch(Wrapped(torch.ones(3)), torch.ones(3, 2)).shape == (3, 1)
    assert calling.run_batch(Wrapped(torch.tensor(1.0)), torch.ones(3, 2)).shape == (1, 1)
    with pytest.raises(RuntimeError) as error:
        calling.run_batch(nn.Linear(2, 2), torch.ones(3, 5))
    assert "to call the model in another way, pass forward=lambda model, batch" in error.value.__notes__[0]
    calling.check_batches([torch.ones(1, 2)], None)
    calling.check_batches([torch.ones(1, 2)], print)
    for wrong, message in ((lambda: 0, r"but yours takes \(\)"), (3, "not 3")):
        with pytest.raises(TypeError, match=rf"forward= must be a function of \(model, batch\), {message}; write"):
            calling.check_batches([torch.ones(1, 2)], wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"wrap a single batch as \[\(x, y\)\]"):  # of a dynamics model: x and y have the same shape
        calling.check_batches((torch.ones(3, 2), torch.ones(3, 2)), None)
    calling.check_labels(torch.tensor([-100, -100]), 2)
    with pytest.raises(ValueError, match="2"):
        calling.check_labels(torch.tensor([0, 2]), 2)


@pytest.mark.parametrize(
    ("layers", "kind", "message"),
    [
        (3, TypeError, "layers= takes names, globs, modules, 'auto' or 'all', not 3"),
        ([3], TypeError, "layers= takes names, globs or modules, not 3"),
        ([nn.ReLU()], ValueError, "layers= contains a ReLU that is not part of the model; pass one of the model's modules"),
        ("relu", ValueError, "layer 'relu' is not in the model; its layers are 0, 1, 2, 3, 4, 5"),
        ("x*", ValueError, "layer 'x\\*' is not in the model"),
    ],
)
def test_layers_that_are_not_there(layers: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        selfless.attach(convolutional(), "mas:1", "slnid:1", layers=layers)


def test_a_module_or_a_pattern_stands_for_its_layers() -> None:
    model = convolutional()
    assert set(selfless.attach(model, "mas:1", "slnid:1", layers=model[4]).taps) == {"4"}
    assert set(selfless.attach(convolutional(), "mas:1", "slnid:1", layers="[14]").taps) == {"1", "4"}
    with pytest.raises(ValueError, match=r"layers='auto' found no hidden nn.Linear in the model .* layers=\['act1', …\]"):
        selfless.attach(nn.Sequential(nn.Linear(2, 2)), "mas:1", "slnid:1")
