"""Networks as objects: what can be named, what can be digested, and what can be neither."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from selfless.models import build
from selfless.network.given import check_unchanged, digest_module, is_unnamed, name_network


def factory(outputs: int, input_shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, outputs))


class Scaled(nn.Module):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor, self.head = factor, nn.Linear(36, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * self.head(x.flatten(1))


def seeded(kind: Any, *arguments: Any) -> Any:
    torch.manual_seed(0)
    return kind(*arguments)


def test_what_can_be_imported_has_that_name() -> None:
    assert name_network(factory) == (f"{__name__}:factory", None)
    assert name_network(Scaled) == (f"{__name__}:Scaled", None)
    assert name_network("mlp-128") == ("mlp-128", None)


def test_what_cannot_be_imported_has_a_new_name_and_builds() -> None:
    width = 7

    def closure(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, width), nn.ReLU(), nn.Linear(width, outputs))

    for made in (closure, lambda outputs: closure(outputs), functools.partial(factory, input_shape=(1, 6, 6))):
        name, held = name_network(made)
        assert is_unnamed(name)
        assert held is made
        assert name_network(made)[0] == name, "one object, one name"
        assert build(name, outputs=4, input_shape=(1, 6, 6), seed=0)(torch.zeros(2, 1, 6, 6)).shape == (2, 4)
    with pytest.raises(TypeError, match="model is a int"):
        name_network(3)


def test_a_module_is_named_by_all_that_it_computes() -> None:
    one = seeded(Scaled)
    name, _ = name_network(one)
    assert name.startswith("given:Scaled:")
    assert not is_unnamed(name)
    assert name_network(seeded(Scaled))[0] == name
    others = [seeded(Scaled, 3.0), Scaled(), seeded(nn.Linear, 36, 4), seeded(Scaled).half()]
    others[-1].head.float()  # the same type again, with rounded weights
    frozen = seeded(Scaled)
    frozen.head.requires_grad_(False)
    assert len({digest_module(other) for other in (one, *others, frozen)}) == 6
    copies = [build(name, outputs=4, input_shape=(1, 6, 6), seed=s) for s in (0, 1)]
    for made in copies:
        assert made is not one
        assert torch.equal(made.head.weight, one.head.weight)  # type: ignore[union-attr]
    with torch.no_grad():
        one.head.weight += 1
    with pytest.raises(ValueError, match="Scaled has changed since the run was created"):
        check_unchanged(name)


def test_a_module_is_not_digested_where_that_would_not_be_honest() -> None:
    hooked, configured = Scaled(), Scaled()
    hooked.head.register_forward_hook(lambda *_: None)
    configured.rule = lambda x: x  # type: ignore[assignment]

    class Local(Scaled):
        """Its code is not in a file that says it all."""

    for made in (hooked, configured, Local(), nn.Sequential(Local())):
        assert digest_module(made) is None
        assert is_unnamed(name_network(made)[0])


def test_a_name_without_its_object_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"pass it again: train\(run, model=…\)"):
        build("given:Net:0123456789abcdef", outputs=4, input_shape=(1, 6, 6))
