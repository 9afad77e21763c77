"""EWC with the user's own loss: Ω equals a loop over samples with that loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import EWC, IMM, MAS, importance
from selfless.importance import next_token_loss
from tests import text_nets
from tests.small_nets import made, mlp, rand

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def slow_omega(model: nn.Module, samples: list[Any], value: Callable[[nn.Module, Any], Tensor]) -> dict[str, Tensor]:
    """mean_m (∂L_m/∂θ)², one sample at a time; `value` returns the loss of one sample."""
    model.eval()
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    for sample in samples:
        trained = [p for p in model.parameters() if p.requires_grad]
        for name, g in zip(total, torch.autograd.grad(value(model, sample), trained), strict=True):
            total[name] += g.square() / len(samples)
    return total


def check(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert_close(got[name], want[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def test_a_causal_language_model_with_padding() -> None:
    model = made(lambda: text_nets.Text(words=True, tied=True), dtype=torch.float64)
    ids = text_nets.tokens(7)
    labels = ids.clone()
    labels[1, 4:] = labels[5, 2:] = -100  # padding

    def one(model: nn.Module, m: int) -> Tensor:
        logp = model(ids[m : m + 1])[0].log_softmax(-1)
        return -sum(logp[t, ids[m, t + 1]] for t in range(5) if labels[m, t + 1] != -100)

    want = slow_omega(model, list(range(7)), one)
    batches = [{"input_ids": ids[s], "labels": labels[s]} for s in (slice(0, 4), slice(4, 7))]
    check(importance.ewc(model, batches, loss=next_token_loss), want)
    unshifted = importance.ewc(model, batches)
    assert any(not torch.allclose(unshifted[n], want[n], rtol=0.1) for n in want)  # the default loss is another one
    model.train()
    with selfless.attach(model, EWC(1.0)) as keeper:
        keeper.consolidate(batches, loss=next_token_loss)
        check(dict(keeper.state["omega"]), want)
    pairs = [(b["input_ids"], b["labels"]) for b in batches]
    check(importance.ewc(model, pairs, loss=next_token_loss), want)


@pytest.mark.parametrize("columns", [0, 2])
def test_regression(columns: int) -> None:
    """An output (M,) reaches the loss as it is: as (M, 1) it would broadcast against labels (M,)."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out, self.scale = nn.Linear(6, 8), nn.Linear(8, max(columns, 1)), nn.Parameter(torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.out(torch.tanh(self.fc(x)) * self.scale.exp())  # the scale has no closed form: vmap
            return y if columns else y.squeeze(-1)

    def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (
            F.mse_loss(output, batch[1], reduction="none").flatten(1).sum(1) if columns else F.mse_loss(output, batch[1], reduction="none")
        )

    model, x = made(Line, dtype=torch.float64), rand(9, 6, dtype=torch.float64)
    y = rand(9, columns, seed=1, dtype=torch.float64) if columns else rand(9, seed=1, dtype=torch.float64)
    want = slow_omega(model, list(range(9)), lambda model, m: (model(x[m : m + 1]) - y[m]).square().sum())
    check(importance.ewc(model, [(x[:5], y[:5]), (x[5:], y[5:])], loss=loss), want)


def test_several_labels_and_other_methods() -> None:
    model, x = made(mlp, dtype=torch.float64), rand(8, 6, dtype=torch.float64)
    y = (rand(8, 3, seed=1, dtype=torch.float64) > 0).double()

    def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, batch[1], reduction="none").sum(1)

    def one(model: nn.Module, m: int) -> Tensor:
        p = model(x[m : m + 1])[0].sigmoid()
        return -(y[m] * p.log() + (1 - y[m]) * (1 - p).log()).sum()

    want = slow_omega(model, list(range(8)), one)
    for term in (EWC(1.0), EWC(1.0) + MAS(1.0), EWC(1.0, alpha="function")):
        with selfless.attach(model, term) as keeper:
            keeper.consolidate([(x, y)], loss=loss)
            check(dict(keeper.states[0]["omega"]), want)
    with selfless.attach(model, MAS(1.0)) as keeper:
        keeper.consolidate([(x, y)], loss=loss)  # MAS has no loss, so it is ignored
        check(dict(keeper.state["omega"]), importance.mas(model, [x]))
    with selfless.attach(model, IMM()) as keeper:
        keeper.consolidate([(x, y)], loss=loss)  # without it: labels must be class numbers


def test_what_is_refused() -> None:
    model, x = made(mlp), rand(5, 6)
    batch = (x, torch.arange(5) % 3)
    with pytest.raises(ValueError, match=r"one loss per sample, a tensor of shape \(5,\), but it returned shape \(\)"):
        importance.ewc(model, [batch], loss=lambda output, batch: F.cross_entropy(output, batch[1]))
    with pytest.raises(TypeError, match="takes a function"):
        importance.ewc(model, [batch], loss="mse")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fisher='sampled'"):
        importance.ewc(model, [batch], fisher="sampled", loss=next_token_loss)
    with pytest.raises(ValueError, match="needs an output"):
        importance.ewc(model, [batch], loss=next_token_loss)
    with pytest.raises(ValueError, match=r"not \(2, 4, 3\) and none"):
        next_token_loss(rand(2, 4, 3), rand(2, 4))
    with selfless.attach(model, EWC(1.0)) as keeper, pytest.raises(ValueError, match="one loss per sample"):
        keeper.consolidate([batch], loss=lambda output, batch: output)
    assert keeper.tasks == 0
