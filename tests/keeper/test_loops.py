"""The keeper in the loops that people write, and what it says about what they forget."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import EWC, MAS, SI, SLNID, SNI
from tests.keeper.nets import Net, batches, seeded, sequential, train


def test_frozen_and_late_parameters() -> None:
    model = seeded()
    model.fc1.weight.requires_grad_(False)
    keeper = selfless.attach(model, MAS(1.0), SLNID(1e-3), layers=["fc1", "fc2"])
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    keeper.anchor_with(opt)
    train(model, keeper, opt, batches())
    keeper.consolidate(batches())
    assert "fc1.weight" not in keeper.state["omega"]
    model.head2 = nn.Linear(12, 3)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    keeper.anchor_with(opt)
    train(model, keeper, opt, batches(1))
    assert "head2.weight" not in keeper.state["omega"]
    keeper.consolidate(batches(1))
    assert keeper.state["omega"]["head2.weight"].count_nonzero() == 0  # forward never used it
    keeper.consolidate(batches(1), forward=lambda m, b: m.head2(torch.relu(m.fc2(torch.relu(m.fc1(b[0]))))))
    assert keeper.state["omega"]["head2.weight"].max() > 0


def test_multi_head_forward() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

        def forward(self, x: Tensor, task: int) -> Tensor:
            return self.heads[task](self.body(x))

    model = seeded(Heads)
    keeper = selfless.attach(model, MAS(1.0), SLNID(1e-3))
    assert list(keeper.taps) == ["body.0", "heads.0"] or list(keeper.taps) == ["body.0"]
    with pytest.warns(UserWarning, match=r"left out.*heads\.0.*name the outputs"):
        model(batches()[0][0], 0)
    keeper.penalty()
    keeper.consolidate(batches(), forward=lambda m, b: m(b[0], 0))
    assert keeper.state["omega"]["heads.1.weight"].count_nonzero() == 0
    assert keeper.state["omega"]["heads.0.weight"].max() > 0
    assert list(keeper.alpha) == ["body.0"]


def test_generators_dicts_and_loaders() -> None:
    class HF(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = sequential()

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {"logits": self.net(x)}

    model = seeded(HF)
    want = selfless.attach(copy.deepcopy(model.net), EWC())
    want.consolidate(batches())
    forms: list[Any] = [
        ({"x": x, "labels": y} for x, y in batches()),
        torch.utils.data.DataLoader([{"x": x, "labels": y} for bx, by in batches() for x, y in zip(bx, by, strict=True)], batch_size=20),
    ]
    for form in forms:
        keeper = selfless.attach(model, EWC(), layers=["net.1"])
        keeper.consolidate(form)
        assert_close(keeper.state["omega"]["net.0.weight"], want.state["omega"]["0.weight"])
        keeper.detach()


def test_autocast_and_grad_scaler() -> None:
    model = seeded()
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3), layers=["fc1", "fc2"])
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    keeper.anchor_with(opt)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for task in range(2):
        for x, y in batches(task):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y) + keeper.penalty()
            assert loss.dtype == torch.float32
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        keeper.consolidate(batches(task))
    assert all(t.dtype == torch.float32 for t in keeper.state["omega"].values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # both inside Dynamo itself
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models(in_place: bool) -> None:
    torch._dynamo.reset()
    eager, model = seeded(sequential), seeded(sequential)
    if in_place:
        model.compile(backend="aot_eager")
    called = model if in_place else torch.compile(model, backend="aot_eager")
    one, two = selfless.attach(eager, MAS(0.1), SLNID(1e-2)), selfless.attach(called, MAS(0.1), SLNID(1e-2))
    opts = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (eager, model)]
    for keeper, m, opt in ((one, eager, opts[0]), (two, called, opts[1])):
        keeper.anchor_with(opt)
        for task in range(2):
            train(m, keeper, opt, batches(task))
            keeper.consolidate(batches(task))
    assert two.state["omega"].keys() == one.state["omega"].keys()
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="compiled model"):
        selfless.attach(torch.compile(seeded()), sparsify=SNI(1.0), layers=["fc1"])


def test_activation_checkpointing_counts_once() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checked(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.body, self.head, self.on = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 3), on

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=False) if self.on else self.body(x))

    ends = []
    for on in (False, True):
        model = seeded(lambda on=on: Checked(on))
        keeper = selfless.attach(model, MAS(0.1), SLNID(1e-2))
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        train(model, keeper, opt, batches())
        assert not keeper.collector.take()
        keeper.consolidate(batches())
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert_close(ends[0], ends[1])


@pytest.mark.slow
def test_less_forgetting_with_than_without() -> None:
    def forgotten(preserve: Any) -> float:
        model = seeded(Net, 1)
        keeper = selfless.attach(model, preserve, layers=["fc1", "fc2"])
        opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        keeper.anchor_with(opt)
        first, second = batches(5), batches(6)
        train(model, keeper, opt, first, epochs=40)
        before = sum(F.cross_entropy(model(x), y).item() for x, y in first)
        keeper.consolidate(first)
        train(model, keeper, opt, second, epochs=20)
        return sum(F.cross_entropy(model(x), y).item() for x, y in first) - before

    none = forgotten(None)
    for preserve in (MAS(0.3), EWC(30.0), SI(3.0)):
        assert forgotten(preserve) < 0.7 * none


def test_forgetting_to_call_penalty_is_said_once() -> None:
    model, (x, _) = seeded(sequential), batches()[0]
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["1"])
    for _ in range(64):
        model(x)
    with pytest.warns(UserWarning, match=r"without keeper\.penalty"):
        model(x)
    del keeper  # leaves no hooks behind
    assert not any(m._forward_hooks for m in model.modules())


class Grown(nn.Module):
    """Heads that are added task by task, registered before or after what they read."""

    def __init__(self, heads_first: bool = False) -> None:
        super().__init__()
        heads = nn.ModuleList([nn.Linear(12, 3)] if heads_first else [])
        parts = [("heads", heads), ("body", nn.Sequential(nn.Linear(6, 16), nn.ReLU())), ("fc", nn.Linear(16, 12))]
        for name, module in parts if heads_first else reversed(parts):
            self.add_module(name, module)

    def forward(self, x: Tensor, task: int = 0) -> Tensor:
        return self.heads[task](F.relu(self.fc(self.body(x))))


@pytest.mark.parametrize("heads_first", [False, True])
def test_every_hidden_layer_is_found_beside_heads_that_come_later_or_are_named(heads_first: bool) -> None:
    model = seeded(lambda: Grown(heads_first))
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3), heads=["heads.0"] if heads_first else [])
    if not heads_first:
        model.heads.append(nn.Linear(12, 3))
    model(batches()[0][0])
    keeper.penalty()
    assert set(keeper.taps) == {"fc", "body.0"}


def test_layers_below_a_no_grad_are_left_out() -> None:
    class Frozen(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = F.relu(self.fc1(x))
            return self.head(F.relu(self.fc2(x)))

    model = seeded(Frozen)
    keeper = selfless.attach(model, MAS(0.1))
    keeper.consolidate(batches())
    assert list(keeper.alpha) == ["fc2"]
    keeper.detach()
    with pytest.raises(ValueError, match="'fc1' does not reach the output"):
        selfless.attach(model, MAS(0.1), layers=["fc1", "fc2"]).consolidate(batches())


def test_what_is_forgotten_is_said() -> None:
    model, (x, y) = seeded(), batches()[0]
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.eval()
    model(x)
    with pytest.warns(UserWarning, match="eval mode"):
        keeper.penalty()
    keeper.consolidate([x])
    model.train()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="without keeper.penalty.*SLNID"):
        keeper.consolidate([x])
    keeper.detach()
    alone = selfless.attach(model, MAS(0.1))
    alone.anchor_with(optimizer)
    for _ in range(2):  # an implicit anchor needs no penalty()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            alone.consolidate([x])
