"""The memory of old samples in a training loop: heads, dictionaries, saving and loading, and messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import selfless
from selfless import DERpp, Replay
from tests.preserve.heads import NAMES, data, made


def forward(task: int) -> Any:
    return lambda model, batch: model(batch[0], task)


def test_every_sample_runs_through_the_head_of_its_task() -> None:
    """With a memory and a batch that hold all samples, the penalty is λ times the mean over all old samples."""
    model, forwards = made(torch.float64), [forward(t) for t in range(2)]
    keeper = selfless.attach(model, Replay(0.5, samples=1000, batch=1000), heads=NAMES)
    tasks = [[(x.double(), y) for x, y in data(t, count=2 + t)] for t in range(2)]
    for task, call in zip(tasks, forwards, strict=True):
        keeper.consolidate(iter(task), forward=call)
    losses = [F.cross_entropy(model(x, t), y, reduction="none") for t, task in enumerate(tasks) for x, y in task]
    cost = keeper.penalty()
    assert_close(cost, 0.5 * torch.cat(losses).mean())
    cost.backward()
    assert model.heads[1].weight.grad is not None
    assert model.heads[2].weight.grad is None
    twin = selfless.attach(made(torch.float64), Replay(0.5, samples=1000, batch=1000), heads=NAMES)
    with pytest.raises(ValueError, match="forwards="):
        twin.load_state_dict(keeper.state_dict())
    twin.load_state_dict(keeper.state_dict(), forwards=forwards)
    assert_close(twin.penalty(), cost)


class Widths(nn.Module):
    """A head of two classes and one of four."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 4)])

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        out: torch.Tensor = self.heads[task](x)
        return out


def test_heads_of_other_widths_keep_their_own_logits() -> None:
    torch.manual_seed(0)
    model = Widths()
    keeper = selfless.attach(model, DERpp(1.0, samples=100, batch=100, beta=0.0))
    tasks = [[(torch.randn(6, 3), torch.randint(0, n, (6,)))] for n in (2, 4)]
    for t, task in enumerate(tasks):
        keeper.consolidate(task, forward=forward(t))
    assert keeper.state["memory"]["logits"].shape == (12, 4)
    assert keeper.penalty().item() == pytest.approx(0.0, abs=1e-12)  # at θ*
    with torch.no_grad():
        model.heads[0].bias.add_(0.5)
    assert keeper.penalty().item() == pytest.approx(0.25 / 2)  # of one half of the samples


class Named(nn.Module):
    """A model that is called with names, as those of Transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"logits": self.linear(tokens * mask)}


def test_batches_may_be_dicts() -> None:
    torch.manual_seed(0)
    model = Named()
    keeper = selfless.attach(model, Replay(1.0, samples=50, batch=50))
    batches = [{"tokens": torch.randn(5, 4), "mask": torch.ones(5, 4), "labels": torch.randint(0, 3, (5,))} for _ in range(2)]
    keeper.consolidate(batches)
    whole = {name: torch.cat([b[name] for b in batches]) for name in batches[0]}
    assert_close(keeper.penalty(), F.cross_entropy(model(**whole)["logits"], whole["labels"]))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([torch.randn(4, 3)], "needs the class of each sample"),
        ([(torch.randn(4, 3), torch.randn(4))], "needs the class of each sample"),
        ([(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64), "name")], "one row per sample"),
        ([(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)), (torch.randn(4, 2, 3), torch.zeros(4, dtype=torch.int64))], "one shape"),
    ],
)
def test_samples_that_cannot_be_stored_are_an_error_and_change_nothing(batches: Any, message: str) -> None:
    model = nn.Linear(3, 2)
    keeper = selfless.attach(model, Replay(1.0))
    with pytest.raises(ValueError, match=message):
        keeper.consolidate(batches, forward=lambda m, b: m(b[0] if isinstance(b, (list, tuple)) else b).flatten(1)[:, :2])
    assert keeper.tasks == 0
    assert keeper.penalty().item() == 0.0


def test_it_can_be_injected_into_the_backward_pass() -> None:
    """The gradient of `attach(…, inject=True)` is that of a loss with the penalty."""
    gradients = []
    for inject in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        keeper = selfless.attach(model, Replay(2.0, samples=50, batch=50), inject=inject)
        batches = [(torch.randn(8, 3), torch.randint(0, 2, (8,))) for _ in range(2)]
        keeper.consolidate(batches)
        x, y = batches[0]
        loss = F.cross_entropy(model(x), y)
        (loss if inject else loss + keeper.penalty()).backward()
        assert keeper.log()["replayed"] > 0
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool])
def test_labels_may_be_any_whole_numbers(dtype: torch.dtype) -> None:
    x, y = data(0, count=1)[0]
    costs = []
    for labels in (y % 2, (y % 2).to(dtype)):
        keeper = selfless.attach(made(), Replay(1.0, samples=1000, batch=1000), heads=NAMES)
        keeper.consolidate([(x, labels)], forward=forward(0))
        costs.append(keeper.penalty())
    assert_close(costs[0], costs[1])
