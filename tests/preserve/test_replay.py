"""Replay and DER++: the loss against a loop over samples, the memory, and what marks them as methods that use old data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from selfless import HAT, MAS, DERpp, LwF, Replay, Run
from selfless.preserve import PRESERVERS
from selfless.preserve.capabilities import Replays
from tests import oracles


def rows(count: int, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], list[range]]:
    """Samples of three tasks with two, three and one columns of their own, or all six."""
    spans = [range(2), range(2, 5), range(5, 6), range(6)]
    own = [spans[i % 4] for i in range(count)]
    label = torch.tensor([span[int(torch.randint(len(span), (), generator=generator))] for span in own])
    made = {"first": torch.tensor([s.start for s in own]), "last": torch.tensor([s.stop for s in own]), "label": label}
    return made | {"logits": torch.randn(count, 6, generator=generator, dtype=torch.float64)}, own


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_the_loss_is_that_of_a_loop_over_samples(beta: float) -> None:
    g = torch.Generator().manual_seed(0)
    memory, own = rows(12, g)
    outputs = torch.randn(12, 6, generator=g, dtype=torch.float64, requires_grad=True)
    among = [range(6) if i % 2 else span for i, span in enumerate(own)]
    columns = torch.tensor([[c in span for c in range(6)] for span in among])
    term = DERpp(1.0, beta=beta)
    got = term.replay_loss(outputs, memory, columns)
    want = oracles.der(outputs, memory["logits"], memory["label"], own, among, beta)
    assert_close(got, torch.tensor(want, dtype=torch.float64))
    plain = oracles.der(outputs, outputs, memory["label"], own, among, 1.0)  # without the first term
    assert_close(Replay(1.0).replay_loss(outputs, memory, columns), torch.tensor(plain, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(got.sum(), outputs)
    outside = ~(columns | term.own_columns(memory, outputs))
    assert torch.isfinite(gradient).all()
    assert not gradient[outside].any()  # a column of another task's head has no part in it
    stacked = term.replay_loss(outputs.expand(2, -1, -1), {n: t.expand(2, *t.shape) for n, t in memory.items()}, columns.expand(2, -1, -1))
    assert torch.equal(stacked[1], got)


def test_the_memory_keeps_whole_rows_with_the_smallest_keys() -> None:
    term, g = Replay(1.0, samples=5), torch.Generator().manual_seed(0)
    state: Any = term.init({"w": torch.zeros(1)})
    assert not term.memory(state)
    keys = torch.randperm(40, generator=g)
    for part in torch.arange(40).split(9):
        state = term.remember(state, {"key": keys[part], "label": part})
    assert torch.equal(term.memory(state)["key"], torch.arange(5))
    assert torch.equal(keys[term.memory(state)["label"]], torch.arange(5))


def test_a_method_that_uses_old_data_says_so() -> None:
    assert {name for name, kind in PRESERVERS.items() if kind.keeps_data} == {"replay", "der"}
    run = Run(preserve="replay:1,samples=50")  # type: ignore[arg-type]
    assert run.preserve == Replay(1.0, samples=50)

    class Mine(Replay):
        pass

    assert Mine.keeps_data
    assert issubclass(Mine, Replays)


def test_what_cannot_be_is_an_error() -> None:
    for wrong in ({"samples": 0}, {"samples": 1.5}, {"batch": 0}):
        with pytest.raises(ValueError, match="whole number ≥ 1"):
            Replay(1.0, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="beta is -1"):
        DERpp(1.0, beta=-1)
    with pytest.raises(ValueError, match="cannot be combined"):
        Replay(1.0) + HAT()
    assert str(Replay(1.0, samples=50) + LwF(1.0) + MAS(0.1)) == "replay:1,samples=50+lwf:1+mas:0.1"
