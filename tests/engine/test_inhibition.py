"""Gradients of sparsifiers that the engine adds in the backward pass, beside autograd through the formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from selfless import MAS, SLNID, DeCov, Run, SparingDeCov, functional
from selfless.engine.inhibition import MOST_DENSE, Slot
from selfless.engine.learner import Learner
from selfless.engine.native.options import CovarianceGradient, PairGradient, Switch, count_parts
from selfless.sparsify import Sparsifier


@pytest.mark.parametrize(("samples", "neurons"), [(64, 5), (5, 64), (8, 16), (1, 7)])
def test_the_gradient_of_decov_is_autograds(samples: int, neurons: int) -> None:
    """For many samples and for few, where the products of samples are fewer than those of neurons."""
    shape = (3, samples, neurons)
    h = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).relu().requires_grad_()
    weight, g = torch.tensor([0.1, 0.0, 2.0], dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    cost = (weight * torch.stack([functional.decov(one) for one in h])).sum()
    assert_close(CovarianceGradient(weight).add_to(g, h.detach()), g + torch.autograd.grad(cost, h)[0])


def test_the_gradient_of_a_sparing_decov_is_autograds() -> None:
    """Members of one slot may be sparing, plain or neither; a plain one has S = 1."""
    g = torch.Generator().manual_seed(0)
    h = torch.randn(3, 64, 6, generator=g, dtype=torch.float64).relu().requires_grad_()
    alpha = {"fc1": torch.rand(3, 6, generator=g, dtype=torch.float64)}
    kinds = [SparingDeCov(0.1), DeCov(0.1), SparingDeCov(0.1, local=False, discount="max")]
    slot = Slot(kinds)
    slot.prepare({"fc1": 6}, alpha, h.detach())
    assert slot.groups == []
    weight = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)
    slot.scale(weight)
    cost = sum(w * kind.penalty(one, a) for w, kind, one, a in zip(weight, kinds, h, alpha["fc1"], strict=True))
    ((_, gradient),) = slot.gradients()
    zero = torch.zeros_like(h)
    assert_close(gradient.add_to(zero, h.detach()), torch.autograd.grad(cost, h)[0])


def test_pairs_of_a_wide_layer_are_weighed_by_the_formula_alone() -> None:
    """A matrix of weights for each member would be as large as the layer squared; a plain DeCov beside it needs none."""
    kinds, h = [SparingDeCov(0.1), DeCov(0.1)], torch.zeros(2, 4, MOST_DENSE + 1)
    slot, alpha = Slot(kinds), {"fc1": torch.rand(2, MOST_DENSE + 1)}
    slot.prepare({"fc1": MOST_DENSE + 1}, alpha, h)
    assert [members for _, members in slot.groups] == [slice(0, 1)]
    assert slot.covariances["fc1"].pairs is None
    slot.scale(torch.ones(2))
    assert slot.covariances["fc1"].weight.tolist() == [0.0, 1.0]
    slot.prepare({"fc1": MOST_DENSE}, {"fc1": torch.rand(2, MOST_DENSE)}, h)
    assert slot.groups == []


@pytest.mark.parametrize("samples", [1, 64, 200, 997])
@pytest.mark.parametrize("neurons", [4, 32, 190, 256, 300, 500, 2048])
def test_the_parts_of_a_covariance_stay_small(samples: int, neurons: int) -> None:
    """All parts together have about a million numbers at most, unless a single one has more; they divide the samples evenly."""
    parts = count_parts(samples, neurons)
    assert samples % parts == 0
    assert parts == 1 or parts * neurons**2 <= 2**20


def test_narrow_layers_are_divided_and_wide_ones_are_not() -> None:
    assert [count_parts(200, n) for n in (32, 256, 2048)] == [8, 8, 1]
    assert [count_parts(64, n) for n in (181, 190, 220, 256, 300, 500)] == [32, 16, 16, 16, 8, 4]


def test_a_switch_turns_it_off() -> None:
    switch = Switch()
    switch.on = False
    g = torch.ones(1, 4, 2)
    assert CovarianceGradient(torch.ones(1), switch).add_to(g, torch.randn(1, 4, 2)) is g


def test_the_mask_of_a_relu_that_is_owed() -> None:
    """`owed` is the backward pass of the ReLU before, for both kinds of penalty, on or off."""
    draw = torch.Generator().manual_seed(0)
    h, g = torch.randn(2, 16, 4, generator=draw).relu(), torch.randn(2, 16, 4, generator=draw)
    s, off = torch.rand(2, 4, 4, generator=draw), Switch()
    off.on = False
    factored = PairGradient(factors=torch.rand(2, 4, 2, generator=draw), diagonal=torch.rand(2, 4, generator=draw))
    weight = torch.ones(2)
    for penalty in (PairGradient(matrix=s), factored, CovarianceGradient(weight), CovarianceGradient(weight, off)):
        assert_close(penalty.add_to(g.clone(), h, True), torch.where(h > 0, penalty.add_to(g.clone(), h), 0.0))
    wide = h.mT.contiguous()  # more neurons than samples
    added = CovarianceGradient(weight).add_to(g.mT.clone(), wide)
    assert_close(CovarianceGradient(weight).add_to(g.mT.clone(), wide, True), torch.where(wide > 0, added, 0.0))


@dataclass(frozen=True)
class Mine(Sparsifier):
    """SLNID as a user would write it, without a pair form."""

    name: ClassVar[str] = "mine"
    strength: float = 1e-2

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return SLNID(1.0).penalty(x, alpha)


@pytest.mark.parametrize("members", [1, 2])
def test_a_sparsifier_of_ones_own_gets_alpha(tasks_npz: str, members: int) -> None:
    """As in the keeper: without α its discount would be off in every run, and nobody would know."""
    found = []
    for kind in (SLNID(0.1), Mine(0.1)):
        chosen = {"preserve": MAS(0.1), "sparsify": kind, "epochs": 1, "batch": 50, "lr": 0.05}
        learner = Learner([Run(tasks_npz, "mlp-12", seed=seed, **chosen) for seed in range(members)])
        learner.learn()
        found.append(learner.fleet.params)
    for name, value in found[0].items():
        assert_close(found[1][name], value, rtol=1e-4, atol=1e-6)


@dataclass(frozen=True)
class Conditional(Mine):
    name: ClassVar[str] = "conditional"

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return x.mean() if x.mean() > 0 else x.sum()


@dataclass(frozen=True)
class BySample(Mine):
    name: ClassVar[str] = "by-sample"

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return x.sum(-1)


@dataclass(frozen=True)
class Empty(Sparsifier):
    name: ClassVar[str] = "empty"
    strength: float = 1.0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Conditional(0.1), r"Conditional.penalty cannot be mapped over the members of a fleet \(vmap: .*control flow\). Write it without"),
        (
            BySample(0.1),
            r"BySample.penalty returned a tensor of shape \(50,\); it must return a tensor with one number: end with .mean\(\)",
        ),
        (Empty(0.1), r"Empty has no penalty: write penalty\(self, x, alpha=None\)"),
    ],
)
def test_a_fault_of_ones_own_sparsifier_is_said(tasks_npz: str, kind: Sparsifier, message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        Learner([Run(tasks_npz, "mlp-12", sparsify=kind, seed=seed, epochs=1, batch=50) for seed in range(2)]).learn()
