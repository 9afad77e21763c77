"""The keeper in all the loops people write."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import EWC, MAS, SI, SLNI, SLNID, SNI, L1Rep, OrthReg, functional


class Net(nn.Module):
    """Activations as functions: the commonest way to write an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(6, 16), nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        return self.head(torch.relu(self.fc2(x)))


def sequential(inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace), nn.Linear(16, 12), nn.ReLU(inplace), nn.Linear(12, 3))


def seeded(build: Any = Net, seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def batches(seed: int = 0, count: int = 4, size: int = 20) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 6, generator=g), torch.randint(0, 3, (size,), generator=g)) for _ in range(count)]


def train(model: nn.Module, keeper: Any, optimizer: torch.optim.Optimizer, data: Any, epochs: int = 3) -> None:
    for _ in range(epochs):
        for x, y in data:
            loss = F.cross_entropy(model(x), y) + keeper.penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# ------------------------------------------------------------------------------------------------------ what penalty() means
@pytest.mark.parametrize(("build", "layers"), [(Net, ["fc1", "fc2"]), (Net, "auto"), (sequential, ["1", "3"]), (sequential, "auto")])
def test_penalty_is_the_formula_on_post_activations(build: Any, layers: Any) -> None:
    model, (x, _) = seeded(build), batches()[0]
    keeper = selfless.attach(model, sparsify=SLNI(0.5), layers=layers)
    first, second = (model.fc1, model.fc2) if build is Net else (model[0], model[2])
    for _ in range(2):  # the first pass discovers functional activations, the second uses what it found
        model(x)
        h1 = torch.relu(first(x).detach())
        h2 = torch.relu(second(h1).detach())
        assert_close(keeper.penalty(), 0.5 * (functional.slni(h1) + functional.slni(h2)))


def test_penalty_reaches_the_weights() -> None:
    model, (x, _) = seeded(), batches()[0]
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["fc1"])
    for _ in range(2):
        model.zero_grad()
        model(x)
        keeper.penalty().backward()
        got = model.fc1.weight.grad.clone()
        model.zero_grad()
        functional.sni(torch.relu(F.linear(x, model.fc1.weight, model.fc1.bias))).backward()
        assert_close(got, model.fc1.weight.grad)


def test_all_takes_convolutions_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 2)),
    )
    x, found = torch.randn(5, 1, 6, 6), []
    for layers in ("all", ["2", "4", "7"], "auto"):
        keeper = selfless.attach(model, None, SLNID(1.0), layers=layers)
        model(x)
        found.append(keeper.penalty().item())
        keeper.detach()
    assert found[0] == pytest.approx(found[1])
    assert found[0] > found[2] > 0  # the fully connected layer alone
    with pytest.raises(ValueError, match="layers='all' found no hidden"):
        selfless.attach(nn.Sequential(nn.Linear(2, 2)), None, SLNID(1.0), layers="all")


def test_norm_dropout_and_shared_activations_are_followed() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8)
            self.act, self.head = nn.GELU(), nn.Linear(8, 3)  # one activation module, used twice

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.b(self.act(self.norm(self.a(x))))))

    model, (x, _) = seeded(Normed), batches()[0]
    keeper = selfless.attach(model, sparsify=L1Rep(1.0))
    for _ in range(2):
        model(x)
        h1 = F.gelu(model.norm(model.a(x)))
        want = functional.l1_rep(h1) + functional.l1_rep(F.gelu(model.b(h1)))
        keeper_value = keeper.penalty()
        assert_close(keeper_value, want)
        keeper.collector.drop()  # the oracle's own calls went through the hooks too
    assert list(keeper.taps) == ["a", "b"]


def test_several_passes_are_one_larger_batch() -> None:
    model = seeded()
    (x1, _), (x2, _) = batches()[:2]
    keeper = selfless.attach(model, sparsify=SLNI(1.0), layers=["fc1"])
    model(x1)
    keeper.penalty()
    model(x1)
    model(x2)
    h = torch.relu(F.linear(torch.cat([x1, x2]), model.fc1.weight, model.fc1.bias))
    assert_close(keeper.penalty(), functional.slni(h))


def test_eval_and_no_grad_passes_do_not_count() -> None:
    model, (x, _) = seeded(), batches()[0]
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["fc1"])
    model(x)
    want = keeper.penalty()
    with torch.no_grad():
        model(x * 3)
    model.eval()
    model(x * 5)
    model.train()
    model(x)
    assert_close(keeper.penalty(), want)
    with torch.no_grad():
        assert keeper.penalty().item() == 0.0


def test_convolution_channels_and_conv1d() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 3)))
    x = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    keeper = selfless.attach(model, MAS(), SLNID(1.0), layers=["0"])
    model(x)
    assert_close(keeper.penalty(), functional.slni(model[1](model[0](x)).detach()))
    keeper.consolidate([(x, torch.zeros(4).long())])
    assert keeper.alpha["0"].shape == (5,)

    model = seeded(lambda: nn.Sequential(nn.Conv1d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(30, 3)))
    keeper = selfless.attach(model, MAS(), SLNID(1.0), layers=["1"])
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0))
    model(x)
    h = F.relu(F.conv1d(x, model[0].weight, model[0].bias)).transpose(1, 2)
    assert_close(keeper.penalty(), functional.slni(h))
    keeper.consolidate([x])
    assert keeper.alpha["1"].shape == (5,)


def test_weights_of_activation_layers_for_orth_reg() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.act1, self.head = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act1(self.fc1(x)))

    for layers in (["act1"], ["fc1"], "auto"):
        model, (x, _) = seeded(Named), batches()[0]
        keeper = selfless.attach(model, sparsify=OrthReg(1.0), layers=layers)
        model(x)
        assert_close(keeper.penalty(), functional.orth_reg(model.fc1.weight))


# ------------------------------------------------------------------------------------------------------------------ the anchor
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strength", [0.0, 1e-6, 1.0, 1e4, 1e12])
def test_implicit_anchor_is_stable_at_any_strength(optimizer: str, strength: float) -> None:
    model = seeded()
    keeper = selfless.attach(model, MAS(strength), layers=["fc1"])
    opt = OPTIMIZERS[optimizer](model.parameters())
    keeper.anchor_with(opt)
    train(model, keeper, opt, batches())
    keeper.consolidate(batches())
    anchor = {n: p.detach().clone() for n, p in model.named_parameters()}
    omega = {n: t.clone() for n, t in keeper.state["omega"].items()}
    train(model, keeper, opt, batches(1), epochs=5)
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all()
        moved = (p.detach() - anchor[name]).abs()
        if strength == 1e12:  # everything that matters at all is held where it was
            assert moved[omega[name] > 1e-4].max() < 1e-4
    if strength == 0.0:
        assert max((p.detach() - anchor[n]).abs().max() for n, p in model.named_parameters()) > 1e-3


def test_explicit_anchor_diverges_where_the_implicit_one_does_not() -> None:
    finite = []
    for implicit in (True, False):
        model = seeded()
        keeper = selfless.attach(model, MAS(1e4), layers=["fc1"], check_finite=False)
        opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if implicit:
            keeper.anchor_with(opt)
        train(model, keeper, opt, batches())
        keeper.consolidate(batches())
        train(model, keeper, opt, batches(1), epochs=10)
        finite.append(all(bool(torch.isfinite(p).all()) for p in model.parameters()))
    assert finite == [True, False]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam", "adamw"])
def test_implicit_agrees_with_explicit_for_small_steps(optimizer: str) -> None:
    """As lr·λ·Ω → 0 the implicit anchor pulls as hard as the explicit penalty does, whatever the optimizer.

    A thousand parameters under the same zero-mean gradient noise (which is what Adam's second moment then measures), anchored at 0,
    starting from 1: the pull is the mean distance that the penalty adds to their way.
    """

    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1000, dtype=torch.float64))

    def mean_end(mode: str, strength: float) -> float:
        model, noise = Points(), torch.Generator().manual_seed(0)
        keeper = selfless.attach(model, MAS(strength))
        keeper.state, keeper.tasks = {"omega": {"w": torch.ones(1000)}, "anchor": {"w": torch.zeros(1000)}}, 1
        keeper.state = {group: {"w": t["w"].double()} for group, t in keeper.state.items()}
        opt = OPTIMIZERS[optimizer](model.parameters())
        for group in opt.param_groups:
            group["lr"], group["weight_decay"] = 1e-3, 0.0
        if mode == "implicit":
            keeper.anchor_with(opt)
        for _ in range(400):
            loss = (model.w * torch.randn(1000, generator=noise, dtype=torch.float64)).sum() + keeper.penalty()
            opt.zero_grad()
            loss.backward()
            opt.step()
        return float(model.w.detach().mean())

    free = mean_end("explicit", 0.0)
    explicit, implicit = free - mean_end("explicit", 0.02), free - mean_end("implicit", 0.02)
    assert explicit > 1e-3
    assert implicit == pytest.approx(explicit, rel=0.06)


def test_schedulers_and_groups_are_read_at_every_step() -> None:
    model = seeded()
    keeper = selfless.attach(model, MAS(1.0), layers=["fc1"])
    keeper.consolidate(batches())
    opt = torch.optim.SGD(
        [{"params": [model.fc1.weight], "lr": 0.2}, {"params": [model.fc2.weight], "lr": 0.0}, {"params": [model.head.bias]}], lr=0.1
    )
    keeper.anchor_with(opt)
    before = {n: p.detach().clone() + 0.1 for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    opt.step()
    pull = 2 * 0.2 * keeper.state["omega"]["fc1.weight"]
    assert_close(model.fc1.weight.detach(), (before["fc1.weight"] + pull * (before["fc1.weight"] - 0.1)) / (1 + pull))
    assert_close(model.fc2.weight.detach(), before["fc2.weight"])
    assert_close(model.head.weight.detach(), before["head.weight"])  # in no optimizer: nothing moves it, nothing pulls it
    opt.param_groups[0]["lr"] = 0.0
    held = model.fc1.weight.detach().clone()
    opt.step()
    assert_close(model.fc1.weight.detach(), held)


# ------------------------------------------------------------------------------------------------------------------------- SI
def si_path(sparsify: Any, implicit: bool, scaler: float = 1.0, accumulate: int = 1, clip: float | None = None) -> dict[str, Tensor]:
    """The path integral that the keeper saw."""
    model = seeded(Net, 4).double()
    keeper = selfless.attach(model, SI(1.0), sparsify, layers=["fc1"])
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if implicit:
        keeper.anchor_with(opt)
    data = [(x.double(), y) for x, y in batches(2)]
    for x, y in data:
        opt.zero_grad()
        for xs, ys in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            loss = F.cross_entropy(model(xs), ys) + keeper.penalty()
            (loss * scaler / accumulate).backward()
        for p in model.parameters():
            p.grad /= scaler
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
    return keeper.state["path"]


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


# --------------------------------------------------------------------------------------------------------- loops people write
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


def test_follows_the_model_to_another_device_and_dtype() -> None:
    model = seeded()
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3), layers=["fc1"])
    keeper.consolidate(batches())
    assert_close(keeper.state_dict()["alpha.fc1"], keeper.alpha["fc1"])
    model.to("meta")
    keeper.follow_device()
    assert keeper.state["omega"]["fc1.weight"].device.type == "meta"
    assert keeper.alpha["fc1"].device.type == "meta"


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


# --------------------------------------------------------------------------------------------------------------- bad input
def test_bad_input_at_attach() -> None:
    model = seeded()
    with pytest.raises(ValueError, match=r"layer 'fc9' is not in the model; its layers are fc1, fc2, head"):
        selfless.attach(model, sparsify=SNI(1.0), layers=["fc9"])
    with pytest.raises(ValueError, match="must be finite and ≥ 0"):
        MAS(-1.0)
    with pytest.raises(TypeError, match="plain number"):
        SLNID(torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="preserve= takes one of"):
        selfless.attach(model, SLNID(1e-3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Did you mean 'slnid'"):
        selfless.attach(model, "mas:0.1", "slni d:1")
    with pytest.raises(ValueError, match="no trainable parameters"):
        selfless.attach(seeded().requires_grad_(False), MAS())
    with pytest.raises(ValueError, match="discount"):
        SLNID(1e-3, discount="sum")  # type: ignore[arg-type]


def test_bad_input_in_the_loop_leaves_the_state_alone() -> None:
    model, (x, y) = seeded(), batches()[0]
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3), layers=["fc1", "fc2"])
    with pytest.raises(RuntimeError, match="no forward pass since the last"):
        keeper.penalty()
    model(x)
    keeper.penalty()
    keeper.consolidate(batches())
    saved = keeper.state_dict()
    with pytest.raises(RuntimeError, match="no forward pass since the last"):
        keeper.penalty()
    model(x * float("nan"))
    with pytest.raises(ValueError, match="layer 'fc1' has NaN"):
        keeper.penalty()
    with pytest.raises(ValueError, match="batches are empty"):
        keeper.consolidate([])
    with pytest.raises(ValueError, match="not finite"):
        keeper.consolidate([(x * float("inf"), y)])
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match="none of the model's"):
        keeper.anchor_with(other)
    for key, value in keeper.state_dict().items():
        assert_close(value, saved[key])
    model(x)
    assert torch.isfinite(keeper.penalty())


def test_unreached_layers_and_silent_layers() -> None:
    class Spare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare, self.act = nn.Linear(4, 4), nn.ReLU()

    model, (x, _) = seeded(Spare), batches()[0]
    keeper = selfless.attach(model, MAS(), SNI(1.0), layers=["fc1", "act"])
    model(x)
    with pytest.raises(RuntimeError, match="layer 'act' was never reached"):
        keeper.penalty()
    with pytest.raises(ValueError, match="layer 'act' was never reached"):
        keeper.consolidate(batches())
    model = seeded()
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["head"])
    model(x)
    with pytest.raises(RuntimeError, match="found no activation right after layer 'head'"):
        keeper.penalty()


def test_resized_parameters_are_named() -> None:
    model = seeded()
    keeper = selfless.attach(model, MAS(0.1), layers=["fc1"])
    keeper.consolidate(batches())
    model.head = nn.Linear(12, 5)
    with pytest.raises(ValueError, match=r"'head.weight' was \(3, 12\) .* is \(5, 12\) now"):
        keeper.penalty()


def test_state_dict_round_trip_and_mismatch() -> None:
    model = seeded()
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3), layers=["fc1", "fc2"])
    keeper.consolidate(batches())
    saved = keeper.state_dict()
    fresh = selfless.attach(copy.deepcopy(model), MAS(0.1), SLNID(1e-3), layers=["fc1", "fc2"])
    fresh.load_state_dict(saved)
    assert fresh.tasks == 1
    for key, value in fresh.state_dict().items():
        assert_close(value, saved[key])
    with pytest.raises(ValueError, match="preserver 'mas', but this keeper has 'ewc'"):
        selfless.attach(seeded(), EWC(), layers=["fc1"]).load_state_dict(saved)
    with pytest.raises(ValueError, match="attach with the same layers"):
        selfless.attach(seeded(), MAS(), layers=["fc1"]).load_state_dict(saved)
    small = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    other = selfless.attach(small, MAS(0.1))
    with pytest.raises(ValueError, match="in the model"):
        other.load_state_dict(saved)
    assert other.tasks == 0


def test_detach_context_and_repr() -> None:
    model, (x, _) = seeded(sequential), batches()[0]
    with selfless.attach(model, MAS(0.1), SLNID(1e-3)) as keeper:
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        keeper.anchor_with(opt)
        assert repr(keeper).startswith("Keeper(MAS(strength=0.1")
        assert "layers=[0, 2], anchor=implicit, tasks=0" in repr(keeper)
    with pytest.raises(RuntimeError, match="was detached"):
        keeper.penalty()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model(x)


def test_capacity_counts_what_is_free() -> None:
    model = seeded(sequential)
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3))
    assert keeper.capacity().free_parameters == 1.0
    keeper.consolidate(batches())
    omega = torch.cat([t.flatten() for t in keeper.state["omega"].values()])
    found = keeper.capacity(threshold=0.05)
    assert found.free_parameters == pytest.approx(float((omega < 0.05).double().mean()))
    assert found.neurons["0"].total == 16
    assert "parameters" in str(found)


def test_forgetting_to_call_penalty_is_said_once() -> None:
    model, (x, _) = seeded(sequential), batches()[0]
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["1"])
    for _ in range(64):
        model(x)
    with pytest.warns(UserWarning, match=r"without keeper\.penalty"):
        model(x)
    del keeper  # leaves no hooks behind
    assert not any(m._forward_hooks for m in model.modules())


# ------------------------------------------------------------------------------------------------------ what people do, and forget
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
    with pytest.raises(ValueError, match="'fc1' does not reach the output"):
        selfless.attach(model, MAS(0.1), layers=["fc1", "fc2"]).consolidate(batches())


def test_a_keeper_is_not_copied() -> None:
    keeper = selfless.attach(seeded(), MAS(0.1))
    for how in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="load_state_dict"):
            how(keeper)
    copy.deepcopy(keeper.model)


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
    alone = selfless.attach(model, MAS(0.1))
    alone.anchor_with(optimizer)
    for _ in range(2):  # an implicit anchor needs no penalty()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            alone.consolidate([x])


@pytest.mark.parametrize(
    ("given", "message"), [("pair", r"wrap a single batch as \[\(x, y\)\]"), (None, "not None"), ("tensor", r"as \[x\]")]
)
def test_what_is_no_loader_is_refused(given: str | None, message: str) -> None:
    pair = batches()[0]
    with pytest.raises(TypeError, match=message):
        selfless.attach(seeded(), MAS(0.1)).consolidate({"pair": pair, "tensor": pair[0]}.get(given or ""))  # type: ignore[arg-type]


def test_a_model_that_takes_more_is_told_how_to_be_called() -> None:
    model = seeded(lambda: nn.Bilinear(6, 6, 3))
    with pytest.raises(TypeError) as caught:
        selfless.attach(model, MAS(0.1)).consolidate(batches())
    assert any("forward=" in note for note in caught.value.__notes__)


def test_an_activation_that_is_not_recognised_is_said_to_be_so() -> None:
    class Odd(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.glu(self.fc2(self.fc1(x)).repeat(1, 2)))

    model = seeded(Odd)
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3))
    model(batches()[0][0])
    with pytest.raises(RuntimeError, match="no activation function of torch right after any hidden layer"):
        keeper.penalty()
