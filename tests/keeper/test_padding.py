"""Padded tokens are no samples: a padded batch has the penalty, the gradients, Ω and α of its sentences alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selfless
from selfless import MAS, SLNID, LwF

LENGTHS, WORDS = (5, 2, 3), 7


class Words(nn.Module):
    """Tokens → one output per token; each token is read alone, so that padding can change nothing else."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.token, self.up, self.act, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)
        self.functional = functional

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        n = self.up(self.token(input_ids))
        return self.head(torch.relu(n) if self.functional else self.act(n))


def sentences() -> list[Tensor]:
    return [torch.randint(1, WORDS, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


def padded() -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(sentences(), batch_first=True)
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]).long()}


def model(functional: bool = False) -> Words:
    torch.manual_seed(0)
    return Words(functional).double()


@pytest.mark.parametrize("functional", [False, True])
def test_the_penalty_is_that_of_the_sentences(functional: bool) -> None:
    one, other = model(functional), model(functional)
    costs = []
    for keeper, batch in (
        (a := selfless.attach(one, None, SLNID(1.0), ["up"]), padded()),
        (b := selfless.attach(other, None, SLNID(1.0), ["up"]), None),
    ):
        for _ in range(2):  # the first pass finds a function, the second has a hook
            keeper.model(**batch) if batch is not None else [keeper.model(s[None]) for s in sentences()]
            cost = keeper.penalty()
            costs.append(cost.item())
        cost.backward()
    assert costs == pytest.approx(costs[:1] * 4)
    torch.testing.assert_close(a.log(), b.log())
    torch.testing.assert_close(one.up.weight.grad, other.up.weight.grad)


@pytest.mark.parametrize("functional", [False, True])
def test_injected_gradients_are_those_of_the_penalty(functional: bool) -> None:
    one, other = model(functional), model(functional)
    injecting = selfless.attach(one, None, SLNID(1.0), ["up"], inject=True)
    one(**padded()).square().sum().backward()
    keeper = selfless.attach(other, None, SLNID(1.0), ["up"])
    (other(**padded()).square().sum() + keeper.penalty()).backward()
    torch.testing.assert_close(one.up.weight.grad, other.up.weight.grad)
    assert injecting.log()["inhibition"] > 0


def test_importances_are_means_over_sentences() -> None:
    keepers: list[Any] = []
    for batches in ([padded()], [s[None] for s in sentences()]):
        keepers.append(selfless.attach(model(), MAS(1.0)))
        keepers[-1].consolidate(batches)
    torch.testing.assert_close(keepers[0].state, keepers[1].state)
    torch.testing.assert_close(keepers[0].alpha, keepers[1].alpha)


def test_padded_outputs_are_not_distilled() -> None:
    keeper = selfless.attach(model(), LwF(1.0))
    keeper.consolidate([padded()])
    with torch.no_grad():
        keeper.model.head.weight.add_(1)
    first, second = padded(), padded()
    second["input_ids"] = second["input_ids"] + (1 - second["attention_mask"])  # other words in the padding
    costs = [keeper.penalty(batch) for batch in (first, second)]
    assert costs[0] > 0
    torch.testing.assert_close(*costs)


def test_a_mask_without_padding_changes_nothing_and_a_submodule_has_no_mask() -> None:
    net = model()
    keeper = selfless.attach(net, None, SLNID(1.0), ["up"])
    ids = padded()["input_ids"]
    costs = []
    for mask in (None, torch.ones_like(ids)):
        net(ids, attention_mask=mask)
        costs.append(keeper.penalty())
    assert costs[0] == costs[1]
    net(**padded())
    keeper.collector.drop()
    net.act(net.up(net.token(ids)))  # not a call of the model: no mask is known
    assert keeper.penalty() == costs[0]


def test_detach_removes_the_hooks() -> None:
    net = model()
    selfless.attach(net, None, SLNID(1.0), ["up"]).detach()
    assert not net._forward_hooks
    assert not net._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:.*left out")
def test_an_encoder_of_torch_with_a_mask_of_padding() -> None:
    """In eval mode without gradients torch passes nested tensors between its layers, which no hook can read."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(30, 16, padding_idx=0), nn.Linear(16, 4)
            self.encode = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

        def forward(self, ids: Tensor) -> Tensor:
            padding = ids == 0
            return self.head(self.encode(self.embed(ids), src_key_padding_mask=padding).masked_fill(padding[..., None], 0).mean(1))

    ids = torch.randint(1, 30, (8, 9), generator=torch.Generator().manual_seed(0))
    ids[:4, 5:] = 0
    torch.manual_seed(0)
    network, batch = Encoder(), (ids, torch.arange(8) % 4)
    keeper = selfless.attach(network, MAS(1.0) + LwF(1.0), SLNID(1e-3))
    (nn.functional.cross_entropy(network(ids), batch[1]) + keeper.penalty(batch)).backward()
    keeper.consolidate([batch])
    assert "encode.layers.1.linear1" in keeper.capacity().layers
    assert torch.backends.mha.get_fastpath_enabled()
