"""RWalk: the two recursions of the paper, written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selfless
from selfless import RWalk
from tests import oracles


def test_rwalk_is_the_two_recursions_written_out() -> None:
    """Every entry of a linear model, step by step, over two tasks; Ω is both parts over their largest."""
    model = nn.Linear(3, 2).double()
    keeper = selfless.attach(model, RWalk(1.0, average=0.7, every=4, damping=1e-3))
    names = [n for n, _ in model.named_parameters()]
    entries = [(n, i) for n, p in model.named_parameters() for i in range(p.numel())]
    fishers, olds = dict.fromkeys(entries, 0.0), dict[tuple[str, int], float]()
    for t in range(2):
        g = torch.Generator().manual_seed(t)
        opt, steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), dict[tuple[str, int], list[tuple[float, float, float]]]()
        batches = [(torch.randn(8, 3, generator=g).double(), torch.randint(0, 2, (8,), generator=g)) for _ in range(10)]
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            task = dict(zip(names, torch.autograd.grad(loss, list(model.parameters()), retain_graph=True), strict=True))
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            opt.zero_grad()
            (loss + keeper.penalty()).backward()
            opt.step()
            for n, i in entries:
                after = model.get_parameter(n).detach().flatten()[i].item()
                steps.setdefault((n, i), []).append((before[n].flatten()[i].item(), after, task[n].flatten()[i].item()))
        keeper.consolidate(batches)
        found = {e: oracles.rwalk(steps[e], 0.7, 4, 1e-3, fishers[e]) for e in entries}
        fishers = {e: f for e, (f, _) in found.items()}
        most_f, most_s = max(fishers.values()), max(s for _, s in found.values())
        olds = {e: (s / most_s + olds[e]) / 2 if olds else s / most_s for e, (_, s) in found.items()}
        for n, i in entries:
            want = fishers[n, i] / most_f + olds[n, i]
            assert keeper.state["omega"][n].flatten()[i].item() == pytest.approx(want, rel=1e-9)


def test_random_walk_takes_single_numbers() -> None:
    """A learned temperature, say: a parameter without axes."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * self.scale

    torch.manual_seed(0)
    model = Scaled()
    keeper = selfless.attach(model, RWalk(every=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    for _ in range(5):
        loss = F.cross_entropy(model(x), y) + keeper.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    keeper.consolidate([(x, y)])
    assert float(keeper.state["omega"]["scale"]) > 0


def test_a_parameter_that_comes_later_starts_its_own_path() -> None:
    """Observed from the second step on, `b` has the state of a method that knew only its own steps."""
    term = RWalk(1.0, every=2)
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    state = term.init({"a": a})
    state = term.observe(state, {"a": a}, {"a": a - 0.1}, {"a": torch.ones(2)})
    both = term.observe(state, {"a": a - 0.1, "b": b}, {"a": a - 0.2, "b": b - 0.3}, {"a": torch.ones(2), "b": torch.full((1,), 2.0)})
    alone = term.observe(term.init({"b": b}), {"b": b}, {"b": b - 0.3}, {"b": torch.full((1,), 2.0)})
    for group in ("path", "fisher", "score", "start", "window"):
        torch.testing.assert_close(both[group]["b"], alone[group]["b"])
    ended = term.consolidate(alone, {"b": b - 0.3, "new": torch.zeros(2)}, {})
    assert ended["omega"].keys() == ended["anchor"].keys() == {"b"}
    assert ended["path"].keys() == {"b", "new"}
    with pytest.raises(ValueError, match=r"RWalk: average is 1\.5; it is the weight of the newest gradient, at most 1"):
        RWalk(1.0, average=1.5)
    assert term.consolidate(term.init({}), {}, {})["omega"] == {}
