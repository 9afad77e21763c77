"""The path integral of SI sees the task loss alone, in every kind of step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import SI, SNI, L1Rep, RWalk
from tests.keeper.nets import Net, batches, seeded, train
from tests.small_nets import made, mlp, rand


def si_path(
    sparsify: Any, implicit: bool, scaler: float = 1.0, accumulate: int = 1, clip: float | None = None, preserve: Any = None, parts: int = 1
) -> dict[str, Tensor]:
    """The path integral that the keeper saw; `parts`: how many optimizers share the parameters."""
    model = seeded(Net, 4).double()
    keeper = selfless.attach(model, preserve or SI(1.0), sparsify, layers=["fc1"])
    optimizers = [torch.optim.SGD(list(model.parameters())[k::parts], lr=0.05, momentum=0.9) for k in range(parts)]
    if implicit:
        keeper.anchor_with(optimizers[0])
    data = [(x.double(), y) for x, y in batches(2)]
    for x, y in data:
        model.zero_grad()
        for xs, ys in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            loss = F.cross_entropy(model(xs), ys) + keeper.penalty()
            (loss * scaler / accumulate).backward()
        for p in model.parameters():
            p.grad /= scaler
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
    return keeper.states[0]["path"]


def si_oracle(sparsify: Any, clip: float | None = None) -> dict[str, Tensor]:
    """The same training with two separate backward passes, and −Σ g_task·dθ written out."""
    model = seeded(Net, 4).double()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    path = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for x, y in [(x.double(), y) for x, y in batches(2)]:
        named = dict(model.named_parameters())
        task = torch.autograd.grad(F.cross_entropy(model(x), y), list(named.values()))
        h = F.relu(model.fc1(x))
        extra = torch.autograd.grad(sparsify.strength * sparsify.penalty(h), list(named.values()), allow_unused=True)
        for p, g, e in zip(named.values(), task, extra, strict=True):
            p.grad = g.clone() if e is None else g + e
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = {n: p.detach().clone() for n, p in named.items()}
        opt.step()
        for (n, p), g in zip(named.items(), task, strict=True):
            path[n] -= g * (p.detach() - before[n])
    return path


@pytest.mark.parametrize("implicit", [True, False])
@pytest.mark.parametrize(("scaler", "accumulate", "clip"), [(1.0, 1, None), (1024.0, 1, None), (1.0, 2, None), (512.0, 2, 0.3)])
def test_si_sees_the_task_loss_alone(implicit: bool, scaler: float, accumulate: int, clip: float | None) -> None:
    """A strong penalty must not leak into the path integral, whatever the loop does to its gradients."""
    sparsify = L1Rep(0.5)  # a mean over samples: two halves of a batch average to the whole
    got, want = si_path(sparsify, implicit, scaler, accumulate, clip), si_oracle(sparsify, clip)
    for name in want:
        assert_close(got[name], want[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("parts", [2, 3])
def test_several_optimizers_give_the_path_of_one(parts: int) -> None:
    """The first step must not end the sums of the others: theirs were clipped gradients then, with those of penalties."""
    sparsify = L1Rep(0.5)
    got, want = si_path(sparsify, True, 512.0, 2, 0.3, parts=parts), si_oracle(sparsify, 0.3)
    for name in want:
        assert_close(got[name], want[name], rtol=1e-8, atol=1e-10)


def test_an_optimizer_that_steps_every_second_batch() -> None:
    """Its gradients are of two batches, those of the other of one: −Σ g·dθ with g the mean, dθ = −lr Σ g."""
    model = seeded(Net, 4).double()
    keeper = selfless.attach(model, SI(1.0))
    often, seldom = (torch.optim.SGD(layer.parameters(), lr=0.05) for layer in (model.fc1, model.fc2))
    want = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for k, (x, y) in enumerate((x.double(), y) for x, y in batches(4)):
        (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
        for optimizer, prefix, of in ((often, "fc1", 1), (seldom, "fc2", 2)):
            if (k + 1) % of == 0:
                for name, p in model.named_parameters():
                    if name.startswith(prefix) and p.grad is not None:
                        want[name] += 0.05 * p.grad.square() / of
                optimizer.step()
                optimizer.zero_grad()
    for name, path in keeper.states[0]["path"].items():
        assert_close(path, want[name], rtol=1e-8, atol=1e-10)


def test_two_path_integrals_do_not_see_each_other() -> None:
    sparsify = L1Rep(0.5)
    got, want = si_path(sparsify, True, accumulate=2, preserve=SI(1.0) + RWalk(1.0)), si_oracle(sparsify)
    for name in want:
        assert_close(got[name], want[name], rtol=1e-8, atol=1e-10)


def test_si_leak_test_can_fail() -> None:
    """Without the separation the path integral would be visibly different: the test above has teeth."""
    strong, none = si_oracle(L1Rep(0.5)), si_oracle(L1Rep(0.0))
    assert (strong["fc1.weight"] - none["fc1.weight"]).abs().max() > 0.5 * none["fc1.weight"].abs().max()


def test_si_explicit_penalty_does_not_leak_on_the_second_task() -> None:
    model = seeded(Net, 4).double()
    keeper = selfless.attach(model, SI(5.0), layers=["fc1"])
    opt = torch.optim.SGD(model.parameters(), lr=0.02)
    data = [(x.double(), y) for x, y in batches(2)]
    train(model, keeper, opt, data)
    keeper.consolidate(data)
    assert keeper.state["omega"]["fc1.weight"].max() > 0
    assert all((t >= 0).all() for t in keeper.state["omega"].values())
    path = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for x, y in data:
        task = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        loss = F.cross_entropy(model(x), y) + keeper.penalty()
        opt.zero_grad()
        loss.backward()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        opt.step()
        for (n, p), g in zip(model.named_parameters(), task, strict=True):
            path[n] -= g * (p.detach() - before[n])
    for name in path:
        assert_close(keeper.state["path"][name], path[name], rtol=1e-8, atol=1e-12)


class ByHand:
    """Plain gradient descent without an optimizer object."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for p in self.parameters:
                p -= 0.05 * p.grad


@pytest.mark.parametrize("make", [ByHand, lambda p: torch.optim.SGD(p, lr=0.05, fused=True), lambda p: torch.optim.SGD(p, lr=0.05)])
def test_si_sees_every_kind_of_step(make: Any) -> None:
    model, x, y = made(mlp, dtype=torch.float64), rand(20, 6, dtype=torch.float64), torch.arange(20) % 3
    keeper = selfless.attach(model, SI(1.0))
    opt = make(model.parameters())
    path = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for _ in range(3):
        loss = F.cross_entropy(model(x), y) + keeper.penalty()
        opt.zero_grad()
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        opt.step()
        for n, p in model.named_parameters():
            path[n] -= grads[n] * (p.detach() - before[n])
    start = made(mlp, dtype=torch.float64)
    keeper.consolidate([x])
    for (n, p), q in zip(model.named_parameters(), start.parameters(), strict=True):
        want = path[n].clamp(min=0) / ((p - q).square() + 0.1)
        assert_close(keeper.state["omega"][n], want, rtol=1e-8, atol=1e-12)


def test_si_and_a_skipped_step() -> None:
    """What a GradScaler throws away must leave no trace, in the loop's own order: penalty, zero_grad, backward, step."""
    ends = []
    for skip in (False, True):
        model, x, y = made(mlp, dtype=torch.float64), rand(20, 6, dtype=torch.float64), torch.arange(20) % 3
        keeper = selfless.attach(model, SI(1.0), L1Rep(0.5))
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for k in range(4):
            loss = F.cross_entropy(model(x), y) + keeper.penalty()
            opt.zero_grad()
            (loss * (float("inf") if skip and k == 1 else 1.0)).backward()
            if skip and k == 1:
                loss = F.cross_entropy(model(x), y) + keeper.penalty()  # the scaler skipped; the same batch again
                opt.zero_grad()
                loss.backward()
            opt.step()
        ends.append(keeper.state["path"])
    for name in ends[0]:
        assert_close(ends[1][name], ends[0][name])


@pytest.mark.parametrize("to_none", [True, False])
def test_a_skipped_step_of_one_of_several_optimizers(to_none: bool) -> None:
    """Its gradients are thrown away, those of the other one are added up."""
    model = seeded(Net, 4).double()
    keeper = selfless.attach(model, SI(1.0))
    fast, slow = (torch.optim.SGD(layer.parameters(), lr=0.05) for layer in (model.fc1, model.fc2))
    want = {name: torch.zeros_like(p) for name, p in model.fc1.named_parameters()}
    for k, (x, y) in enumerate((x.double(), y) for x, y in batches(4)):
        (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
        if k % 2:
            for name, p in model.fc1.named_parameters():
                want[name] += 0.05 * p.grad.square()
            fast.step()
        if k == 3:
            slow.step()
        fast.zero_grad(set_to_none=to_none)
    for name, path in want.items():
        assert_close(keeper.states[0]["path"][f"fc1.{name}"], path, rtol=1e-8, atol=1e-10)


def test_scales_are_kept_for_parameters_that_no_optimizer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of them: and what is forgotten must not shift those that count."""
    paths = []
    for most in (3, 1000):
        monkeypatch.setattr("selfless.keeper.path.MOST", most)
        model = seeded(Net, 4).double()
        keeper = selfless.attach(model, SI(1.0))
        often, late = (torch.optim.SGD(layer.parameters(), lr=0.05) for layer in (model.fc1, model.fc2))
        for k, (x, y) in enumerate((x.double(), y) for x, y in batches(2, count=7)):
            ((k + 1) * (F.cross_entropy(model(x), y) + keeper.penalty())).backward()
            often.step()
            often.zero_grad()
        late.step()
        paths.append(keeper.states[0]["path"])
    assert_close(paths[0]["fc1.weight"], paths[1]["fc1.weight"])
    assert_close(paths[0]["fc2.weight"], paths[1]["fc2.weight"] * 28 / 18)  # divided by 5 + 6 + 7, not by 1 + 2 + … + 7


def test_si_measures_parameters_that_come_during_a_task() -> None:
    """Of one that is trained, the path from there on; of one that is not, 0."""
    model, x, y = made(mlp, dtype=torch.float64), rand(20, 6, dtype=torch.float64), torch.arange(20) % 3
    keeper = selfless.attach(model, SI(1.0))
    (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    model.factor, model.idle = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizer, path = torch.optim.SGD(model.parameters(), lr=0.05), torch.zeros(3, dtype=torch.float64)
    for _ in range(3):
        before = model.factor.detach().clone()
        loss = F.cross_entropy(model(x) * model.factor, y)
        (gradient,) = torch.autograd.grad(loss, model.factor, retain_graph=True)
        optimizer.zero_grad()
        (loss + keeper.penalty()).backward()
        optimizer.step()
        path -= gradient * (model.factor.detach() - before)
    keeper.consolidate([x])
    assert_close(keeper.state["omega"]["factor"], path.clamp(min=0) / ((model.factor.detach() - 1).square() + 0.1))
    assert not keeper.state["omega"]["idle"].any()


def test_si_freezing_and_late_loading() -> None:
    model, x, y = made(mlp), rand(20, 6), torch.arange(20) % 3
    keeper = selfless.attach(model, SI(1.0), SNI(1e-3))
    model.load_state_dict(made(mlp, seed=9).state_dict())  # after attach: the task starts from these
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for k in range(4):
        if k == 2:
            model[0].weight.requires_grad_(False)
        loss = F.cross_entropy(model(x), y) + keeper.penalty()
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert (keeper.state["start"]["2.weight"] - model[2].weight).abs().max() < 0.2
    keeper.consolidate([(x, y)])
