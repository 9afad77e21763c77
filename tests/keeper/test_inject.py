"""inject=True: after loss.backward() the gradients are those of (loss + keeper.penalty()).backward()."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import EBLL, EWC, HAT, MAS, SI, SLNID, SNI, DeCov, L1Rep, L2Param, LwF, OrthReg, RWalk
from tests.keeper.nets import Net, batches, seeded, sequential

Twins = tuple[Any, Any, Any, Any]


def twins(preserve: Any, sparsify: Any, build: Callable[[], nn.Module] = Net, layers: Any = "auto", **options: Any) -> Twins:
    """Two equal models, one with keeper.penalty() in the loss and one whose keeper injects, after one task."""
    model = seeded(build)
    twin = copy.deepcopy(model)
    plain = selfless.attach(model, preserve, sparsify, layers, **options)
    injecting = selfless.attach(twin, preserve, sparsify, layers, inject=True, **options)
    if preserve is not None:
        for keeper in (plain, injecting):
            keeper.consolidate(batches())
        with torch.no_grad():
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                q.copy_(p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))))
    return model, plain, twin, injecting


def assert_same_gradients(model: nn.Module, twin: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


CASES = {
    "inhibition": (None, SLNID(0.1)),
    "discounted": (MAS(0.0), SLNID(0.1)),
    "not a mean over samples": (None, DeCov(0.1) + L1Rep(0.1)),
    "weights": (None, OrthReg(0.1) + L2Param(0.01)),
    "weights without biases": (None, OrthReg(0.1)),
    "explicit anchor": (MAS(3.0), SLNID(0.1)),
    "several anchors": (EWC(3.0, mode="per-task") + MAS(0.5), SNI(0.1)),
    "distillation": (LwF(2.0), SLNID(0.1)),
    "encoders": (EBLL(2.0, steps=3, code=4), None),
    "path": (SI(2.0), SLNID(0.1)),
}


@pytest.mark.filterwarnings("ignore:.* learns in the steps of an optimizer")
@pytest.mark.parametrize("build", [Net, sequential], ids=["functions", "modules"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_loss_plus_penalty(case: str, build: Any) -> None:
    if case in ("weights", "weights without biases", "encoders", "several anchors") and build is sequential:
        pytest.skip("covered by the other network")
    model, plain, twin, _ = twins(*CASES[case], build=build)
    for x, y in batches(1, count=2):  # the first pass discovers functional activations
        for m in (model, twin):
            m.zero_grad()
        (F.cross_entropy(model(x), y) + plain.penalty((x, y))).backward()
        F.cross_entropy(twin(x), y).backward()
        assert_same_gradients(model, twin)


def test_in_place_activations() -> None:
    model, plain, twin, _ = twins(None, SLNID(0.1), lambda: sequential(inplace=True))
    x, y = batches(1)[0]
    (F.cross_entropy(model(x), y) + plain.penalty()).backward()
    F.cross_entropy(twin(x), y).backward()
    assert_same_gradients(model, twin)


def test_each_backward_pass_has_its_own_inhibition() -> None:
    """Gradient accumulation: four batches, each loss divided by four; keeper.scale says so."""
    model, plain, twin, injecting = twins(MAS(1.0), SLNID(0.1))
    injecting.scale = 1 / 4
    for x, y in batches(1, count=4):
        ((F.cross_entropy(model(x), y) + plain.penalty()) / 4).backward()
        (F.cross_entropy(twin(x), y) / 4).backward()
    assert_same_gradients(model, twin)


def test_several_passes_of_one_loss_are_one_batch() -> None:
    model, plain, twin, _ = twins(MAS(1.0), DeCov(0.1) + SLNID(0.1))
    (a, y), (b, z) = batches(1, count=2)
    (F.cross_entropy(model(a), y) + F.cross_entropy(model(b[:7]), z[:7]) + plain.penalty()).backward()
    (F.cross_entropy(twin(a), y) + F.cross_entropy(twin(b[:7]), z[:7])).backward()
    assert_same_gradients(model, twin)


def test_passes_that_are_differentiated_apart_add_up() -> None:
    """Two losses of two passes: the inhibition of both together is that of one larger batch."""
    model, plain, twin, _ = twins(None, SLNID(0.1))
    (a, y), (b, z) = batches(1, count=2)
    (F.cross_entropy(model(a), y) + F.cross_entropy(model(b), z) + plain.penalty()).backward()
    first, second = F.cross_entropy(twin(a), y), F.cross_entropy(twin(b), z)
    first.backward()
    second.backward()
    assert_same_gradients(model, twin)


def test_a_grad_scaler_scales_what_is_injected() -> None:
    model, plain, twin, injecting = twins(MAS(1.0), SLNID(0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    injecting.scale = scaler
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    x, y = batches(1)[0]
    scaler.scale(F.cross_entropy(model(x), y) + plain.penalty()).backward()
    scaler.scale(F.cross_entropy(twin(x), y)).backward()
    assert_same_gradients(model, twin)
    for optimizer in optimizers:
        scaler.step(optimizer)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p, q, rtol=1e-4, atol=1e-6)
    injecting.scale = "1"
    with pytest.raises(TypeError, match=r"keeper\.scale takes a number"):
        F.cross_entropy(twin(x), y).backward()


def test_autocast() -> None:
    model, plain, twin, _ = twins(MAS(1.0), SLNID(0.1))
    x, y = batches(1)[0]
    with torch.autocast("cpu", torch.bfloat16):
        loss, other = F.cross_entropy(model(x), y) + plain.penalty(), F.cross_entropy(twin(x), y)
    loss.backward()
    other.backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(q.grad, p.grad, rtol=0.05, atol=0.01)


class Called(Net):
    """It is called with names, has a parameter that is a single number, and a head that no task has used yet."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.later = nn.Parameter(torch.tensor(0.9)), nn.Linear(12, 2)

    def forward(self, *, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(x) * self.factor


@pytest.mark.parametrize(("preserve", "dtype"), [(LwF(2.0), torch.float32), (MAS(2.0), torch.float32), (None, torch.bfloat16)], ids=str)
def test_models_that_are_called_with_names(preserve: Any, dtype: torch.dtype) -> None:
    """Gradients have the precision of the model, and parameters outside of the graph have none but that of the penalty."""
    model, twin = (seeded(Called).to(dtype) for _ in range(2))
    tasks = [[{"x": x.to(dtype), "labels": y} for x, y in batches(task, count=2)] for task in range(2)]
    keepers = [selfless.attach(m, preserve, SLNID(0.1) + L2Param(0.1), ["fc1", "fc2"], inject=m is twin) for m in (model, twin)]
    for keeper in keepers if preserve is not None else ():
        keeper.consolidate(tasks[0])
        with torch.no_grad():
            keeper.model.head.weight.mul_(1.5)
    for batch in tasks[1]:
        for m in (model, twin):
            m.zero_grad()
        (F.cross_entropy(model(**batch), batch["labels"]) + keepers[0].penalty(batch)).backward()
        F.cross_entropy(twin(**batch), batch["labels"]).backward()
        rtol, atol = (0.05, 0.01) if dtype == torch.bfloat16 else (1e-4, 1e-6)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            if not name.startswith("later"):  # it gets no gradient of the loss, so nothing is added to it
                assert q.grad.dtype == dtype
                assert_close(q.grad, p.grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize("preserve", [MAS(2.0), EWC(2.0, mode="per-task"), MAS(2.0, estimator="per-batch")], ids=str)
def test_nothing_is_injected_while_importances_are_measured(preserve: Any) -> None:
    """Ω of a parameter without a closed form is measured with its gradient; two tasks, so that there is an explicit anchor too."""
    found = []
    for inject in (False, True):
        model = seeded(Called)
        keeper = selfless.attach(model, preserve, L2Param(5.0), ["fc1", "fc2"], inject=inject)
        for task in range(2):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.1)
            keeper.consolidate([{"x": x, "labels": y} for x, y in batches(task, count=2)])
        found.append(keeper.state["omega"])
    for name, value in found[0].items():
        assert_close(found[1][name], value, msg=lambda text, name=name: f"{name}: {text}")


def test_a_pass_counts_in_its_backward_pass_after_a_step_of_another_optimizer() -> None:
    model, plain, twin, _ = twins(None, SLNID(0.1))
    x, y = batches(1)[0]
    idle = torch.optim.SGD([nn.Parameter(torch.zeros(1)), twin.head.bias], lr=0.0)
    (F.cross_entropy(model(x), y) + plain.penalty()).backward()
    loss = F.cross_entropy(twin(x), y)
    idle.step()
    loss.backward()
    assert_same_gradients(model, twin)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, where a graph breaks
def test_a_compiled_model() -> None:
    model, plain, twin, injecting = twins(MAS(1.0), SLNID(0.1), lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    compiled, (x, y) = torch.compile(twin, backend="aot_eager"), batches(1)[0]
    for _ in range(2):
        model.zero_grad()
        twin.zero_grad()
        (F.cross_entropy(model(x), y) + plain.penalty()).backward()
        F.cross_entropy(compiled(x), y).backward()
        assert_same_gradients(model, twin)
    assert injecting.log()["inhibition"] == pytest.approx(plain.log()["inhibition"], rel=1e-4)


def test_activation_checkpointing() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU()), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False))

    model, plain, twin, _ = twins(None, SLNID(0.1), Checkpointed)
    x, y = batches(1)[0]
    (F.cross_entropy(model(x), y) + plain.penalty()).backward()
    F.cross_entropy(twin(x), y).backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("preserve", [MAS(1.0), EWC(5.0), SI(2.0), RWalk(1.0), LwF(1.0)], ids=str)
def test_training_is_the_same(preserve: Any) -> None:
    """Two tasks, two optimizers, the implicit anchor: states and weights agree, so the path of SI and RWalk is right too."""
    model = seeded()
    twin = copy.deepcopy(model)
    keepers = [selfless.attach(model, preserve, SLNID(0.01)), selfless.attach(twin, preserve, SLNID(0.01), inject=True)]
    for task in range(2):
        for m, keeper in zip((model, twin), keepers, strict=True):
            upper = [*m.fc2.parameters(), *m.head.parameters()]
            optimizers = [torch.optim.SGD(m.fc1.parameters(), lr=0.05), torch.optim.SGD(upper, lr=0.1)]
            for optimizer in optimizers:
                keeper.anchor_with(optimizer)
            for x, y in batches(task):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = F.cross_entropy(m(x), y)
                (loss if keeper is keepers[1] else loss + keeper.penalty((x, y))).backward()
                for optimizer in optimizers:
                    optimizer.step()
            keeper.consolidate(batches(task))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(q, p, rtol=1e-3, atol=1e-5)
    flat, other = (keeper.state_dict() for keeper in keepers)
    for name, value in flat.items():
        assert_close(other[name], value, rtol=1e-2, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.filterwarnings("ignore:.* learns in the steps of an optimizer")
def test_what_a_step_computed_is_freed() -> None:
    """Activations of a step with a backward pass, and of one without, are freed while the keeper lives."""
    alive: list[tuple[str, weakref.ref[Tensor]]] = []
    keepers = []
    for preserve, build, inject in itertools.product((None, SI(2.0), HAT(0.75), LwF(1.0)), (Net, sequential), (False, True)):
        if (build is Net and isinstance(preserve, HAT)) or (build is sequential and isinstance(preserve, LwF)):
            continue  # HAT needs activation modules, and LwF reads no activations
        model = seeded(build)
        keepers.append(selfless.attach(model, preserve, SLNID(0.1), inject=inject))
        name, optimizer = f"{preserve} {build.__name__} {inject}", torch.optim.SGD(model.parameters(), lr=0.1)
        for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
            layer.register_forward_hook(lambda _, x, y, name=name: alive.extend((name, weakref.ref(t)) for t in (*x, y)))
        keepers[-1].consolidate(batches(count=1))
        keepers[-1].begin_epoch(0, 1, batches=2)
        for x, y in batches(1, count=2):
            loss = F.cross_entropy(model(x), y)
            (loss if inject else loss + keepers[-1].penalty((x, y))).backward()
            optimizer.step()
        model(x)
        optimizer.step()
        del x, y, loss
    gc.collect()
    assert len(alive) > 100
    assert not {name for name, ref in alive if ref() is not None}


def test_a_path_needs_one_backward_pass_for_each_forward_pass() -> None:
    model, (x, y) = seeded(), batches()[0]
    with selfless.attach(model, SI(2.0), SLNID(0.1), inject=True):
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"si:2\) with inject=True needs one backward pass for each forward pass"):
            loss.backward()


def test_gates_learn_the_same() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    model = seeded(build)
    twin = copy.deepcopy(model)
    found = []
    for m, inject in ((model, False), (twin, True)):
        keeper = selfless.attach(m, HAT(0.75), inject=inject)
        keeper.parts[0].draw_noise = lambda n: torch.linspace(-2, 2, n)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        keeper.scale = 0.5
        keeper.begin_epoch(0, 1, batches=4)
        for x, y in batches():
            loss = F.cross_entropy(m(x), y)
            optimizer.zero_grad()
            (0.5 * (loss if inject else loss + keeper.penalty())).backward()
            optimizer.step()
        found.append(keeper.state["embedding"]["all"])
    assert_close(found[1], found[0])
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(q, p)


def test_a_root_that_is_never_called() -> None:
    """A LightningModule's training_step may call submodules: activations are found all the same."""
    model, plain, twin, _ = twins(
        None, SLNID(0.1), lambda: nn.ModuleDict({"body": nn.Sequential(*sequential()[:4]), "head": nn.Linear(12, 3)})
    )
    x, y = batches(1)[0]
    (F.cross_entropy(model["head"](model["body"](x)), y) + plain.penalty()).backward()
    F.cross_entropy(twin["head"](twin["body"](x)), y).backward()
    assert_same_gradients(model, twin)


def test_passes_that_do_not_count() -> None:
    _, _, twin, injecting = twins(None, SLNID(0.1), sequential)
    reference, (x, y) = copy.deepcopy(twin), batches(1)[0]
    twin.eval()
    F.cross_entropy(twin(x), y).backward()
    F.cross_entropy(reference.eval()(x), y).backward()
    assert_same_gradients(reference, twin)
    twin.train()
    injecting.detach()
    for m in (twin, reference):
        m.zero_grad()
        F.cross_entropy(m(x), y).backward()
    assert_same_gradients(reference, twin)


def test_penalty_is_refused_and_in_place_changes_are_said() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.act, self.head = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.act(self.fc1(x))
            h += x
            return self.head(h)

    model = seeded(Residual)
    keeper = selfless.attach(model, None, SLNID(0.1), layers=["act"], inject=True)
    x, y = batches()[0]
    loss = F.cross_entropy(model(x), y)
    with pytest.raises(RuntimeError, match="leave it out of the loss"):
        keeper.penalty()
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_sparse_gradients() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))

    model = seeded(build)
    twin = copy.deepcopy(model)
    x, y = torch.arange(8).view(4, 2), torch.tensor([0, 1, 2, 0])
    keepers = [selfless.attach(model, MAS(1.0), SNI(0.1)), selfless.attach(twin, MAS(1.0), SNI(0.1), inject=True)]
    for m, keeper in zip((model, twin), keepers, strict=True):
        keeper.consolidate([(x, y)])
        with torch.no_grad():
            m[0].weight.add_(0.1)
        loss = F.cross_entropy(m(x), y)
        (loss if keeper is keepers[1] else loss + keeper.penalty()).backward()
    assert_same_gradients(model, twin)
