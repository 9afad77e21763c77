"""Adam and AdamW in fleets: torch's steps, one rate per member, the same member alone and in a fleet."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from selfless import HAT, MAS, Run
from selfless.engine.adam import adam_step, entry_rates
from selfless.engine.learner import Learner
from selfless.keeper.anchor import step_sizes
from tests.engine.small_runs import small


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_the_step_and_the_step_sizes_are_those_of_torch(beta: float) -> None:
    torch.manual_seed(0)
    start, rates = torch.randn(3, 4, 5), torch.tensor([1e-3, 1e-2, 0.0])
    ours, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    theirs = [p.clone().requires_grad_() for p in start]
    optimizers = [torch.optim.Adam([p], lr=float(lr), betas=(beta, 0.999)) for p, lr in zip(theirs, rates, strict=True)]
    for t in range(1, 6):
        gradient = torch.randn_like(start)
        adam_step([ours], [first], [second], [gradient], rates, torch.tensor([t]), beta)
        for p, g, optimizer in zip(theirs, gradient, optimizers, strict=True):
            p.grad = g
            optimizer.step()
    assert_close(ours, torch.stack([p.detach() for p in theirs]))
    sizes = [step_sizes(optimizer, {p: "p"})["p"] for p, optimizer in zip(theirs, optimizers, strict=True)]
    assert_close(entry_rates(rates, second, torch.tensor([5])), torch.stack(sizes), rtol=1e-4, atol=0)


@pytest.mark.slow
def test_a_member_of_a_fleet_is_the_run_alone(tasks_npz: str) -> None:
    runs = [small(tasks_npz, optimizer="adamw", weight_decay=0.1, lr=lr, epochs=epochs) for lr, epochs in ((1e-3, 2), (3e-3, 3))]
    fleet = Learner(runs)
    fleet.learn()
    for m, run in enumerate(runs):
        alone = Learner([run])
        alone.learn()
        for name, p in alone.fleet.params.items():
            assert_close(fleet.fleet.params[name][m], p[0], rtol=1e-4, atol=1e-5)


def test_the_optimizer_changes_the_run_and_its_name_only_where_it_is_given(tasks_npz: str) -> None:
    plain = small(tasks_npz)
    assert "optimizer" not in plain.as_dict()
    assert Run(optimizer="sgd").key == Run().key
    keys = {plain.key, *(small(tasks_npz, optimizer=name).key for name in ("adam", "adamw"))}
    assert len(keys) == 3
    with pytest.raises(ValueError, match="optimizer is 'lion'; choose one of sgd, adam, adamw"):
        Run(optimizer="lion")  # type: ignore[arg-type]


def test_gates_that_need_the_rate_of_sgd_are_refused(tasks_npz: str) -> None:
    with pytest.raises(ValueError, match=r"use --optimizer sgd, or give the gates a rate of their own: hat:0.75,rate=0.05"):
        Learner([small(tasks_npz, preserve=HAT(0.75), optimizer="adam")])
    with pytest.raises(ValueError, match="hat"):
        Learner([small(tasks_npz, preserve=HAT(0.75) + MAS(0.1), optimizer="adam")])
