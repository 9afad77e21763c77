"""Loops and models that once went wrong, each with the reason."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.testing import assert_close

import oracles
import selfless
from selfless import EWC, MAS, SI, SLNID, SNI, L1Rep, Maxout, functional, importance

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def made(build: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().to(dtype)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))


class Net(nn.Module):
    """Any function as its activation."""

    def __init__(self, act: Any = F.relu) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(6, 8), nn.Linear(8, 3), act

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def check_mas(model: nn.Module, x: Tensor) -> None:
    want = oracles.omega(model, [x], oracles.mas_loss, 1)
    got = importance.mas(model, [x])
    for name in want:
        assert_close(got[name], want[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------------------------------------------------------- importance
def test_a_module_registered_twice_survives() -> None:
    """functional_call with tied weights would swap the same slot twice and leave a dead tensor in the model."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b, self.head = self.a, nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))

    model = made(Twice, dtype=torch.float64)
    before = dict(model.named_parameters(remove_duplicate=False))
    check_mas(model, rand(7, 6, dtype=torch.float64))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[n] is before[n] for n in before)


def test_in_place_activation_after_a_linear_on_sequences() -> None:
    """The output is a view there: work in place on it moves the recorded edge out of the graph."""
    model = made(lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(28, 3)), dtype=torch.float64)
    x = rand(6, 4, 5, dtype=torch.float64)
    check_mas(model, x)
    assert importance.mas(model, [x])["0.weight"].max() > 0
    assert importance.neurons(model, [x], layers=["1"])["1"].shape == (7,)


@pytest.mark.parametrize("length", [5, 6])
def test_time_first_models_are_taken_sample_by_sample(length: int) -> None:
    """Batches that do not split along their first axis: vmap would broadcast, silently. Also when T equals M."""

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.encode, self.head = nn.Parameter(torch.ones(8)), nn.LSTM(8, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encode(x * self.scale)[0].mean(0))

    model, x = made(TimeFirst, dtype=torch.float64), rand(length, 6, 8, dtype=torch.float64)
    with pytest.warns(UserWarning, match="sample by sample"):
        got = importance.mas(model, [(x, torch.zeros(6).long())])
    want = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for m in range(6):
        grads = torch.autograd.grad(model(x[:, m : m + 1]).square().sum(), list(model.parameters()))
        for (n, _), g in zip(model.named_parameters(), grads, strict=True):
            want[n] += g.abs() / 6
    for name in want:
        assert_close(got[name], want[name], **CLOSE)


def test_mixing_is_seen_even_where_the_first_and_last_sample_say_nothing() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.layer(x.transpose(0, 1))).sum(0))

    model = made(Mixed, dtype=torch.float64)
    batch = (rand(6, 6, 4, dtype=torch.float64), torch.tensor([-100, 1, 2, 0, 1, -100]))
    got = importance.ewc(model, [batch])
    want = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for m in range(1, 5):
        loss = F.cross_entropy(model(batch[0][m : m + 1].transpose(0, 0)), batch[1][m : m + 1])
        for (n, _), g in zip(model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            want[n] += g.square() / 6
    for name in want:
        assert_close(got[name], want[name], **CLOSE)


def test_pruned_renormalised_and_extended_linears_have_no_closed_form() -> None:
    pruned = made(mlp, dtype=torch.float64)
    prune.l1_unstructured(pruned[0], "weight", 0.3)
    check_mas(pruned, rand(7, 6, dtype=torch.float64))
    assert importance.mas(pruned, [rand(7, 6, dtype=torch.float64)])["0.weight_orig"].max() > 0
    normed = made(mlp, dtype=torch.float64)
    torch.nn.utils.parametrizations.weight_norm(normed[0])
    check_mas(normed, rand(7, 6, dtype=torch.float64))

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.fc1.scale = nn.Parameter(torch.full((8,), 0.7))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(torch.tanh(self.fc1(x) * self.fc1.scale))

    check_mas(made(Scaled, dtype=torch.float64), rand(7, 6, dtype=torch.float64))
    hooked = made(mlp, dtype=torch.float64)
    hooked[0].register_forward_hook(lambda _m, _i, output: output * 2)
    check_mas(hooked, rand(7, 6, dtype=torch.float64))


def test_keyword_calls_sparse_embeddings_and_images_of_labels() -> None:
    class Keyword(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(input=torch.relu(self.fc1(input=x)))

    check_mas(made(Keyword, dtype=torch.float64), rand(7, 6, dtype=torch.float64))
    sparse = made(lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3)), dtype=torch.float64)
    ids = torch.arange(12).view(4, 3) % 9
    got = importance.mas(sparse, [ids])
    dense = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3)).double()
    dense.load_state_dict(sparse.state_dict())
    for name, want in importance.mas(dense, [ids]).items():
        assert_close(got[name], want, **CLOSE)
    pixels = made(lambda: nn.Sequential(nn.Conv2d(2, 5, 1)), dtype=torch.float64)
    batch = (rand(4, 2, 5, 5, dtype=torch.float64), torch.arange(100).view(4, 5, 5) % 5)
    total = torch.zeros_like(pixels[0].bias)
    for m in range(4):
        loss = F.cross_entropy(pixels(batch[0][m : m + 1]), batch[1][m : m + 1], reduction="sum")
        total += torch.autograd.grad(loss, pixels[0].bias)[0].square() / 4
    assert_close(importance.ewc(pixels, [batch])["0.bias"], total, **CLOSE)


def test_what_is_refused() -> None:
    model, x = made(mlp), rand(5, 6)
    with pytest.raises(TypeError, match="wrap a single batch"):
        importance.mas(model, x)
    with pytest.raises(ValueError, match="class numbers"):
        importance.ewc(model, [(x, torch.rand(5))])
    with torch.inference_mode(), pytest.raises(RuntimeError, match="needs gradients"):
        importance.mas(model, [x])
    with pytest.raises(TypeError, match="layers= takes names"):
        selfless.attach(model, sparsify=SNI(1.0), layers=[3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module"):
        selfless.attach("model")  # type: ignore[arg-type]
    for preserve in (SI(1.0), None):
        keeper = selfless.attach(made(mlp), preserve, SLNID(1e-3))
        with pytest.raises(ValueError, match="not finite"):
            keeper.consolidate([(x * float("nan"), torch.zeros(5).long())])
        assert keeper.tasks == 0


# -------------------------------------------------------------------------------------------------------------------- neurons
@pytest.mark.parametrize(
    ("build", "layer", "x", "n"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 20, 3)), "1", rand(3, 5, 4, 6), 8),
        (lambda: nn.Sequential(nn.Conv1d(2, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)), "2", rand(3, 2, 10), 6),
        (lambda: nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)), "0", rand(3, 2, 10), 6),
    ],
)
def test_the_neuron_axis_is_that_of_the_layer_behind(build: Any, layer: str, x: Tensor, n: int) -> None:
    model = made(build)
    keeper = selfless.attach(model, MAS(), SLNID(1.0), layers=[layer])
    model(x)
    found = keeper.collector.take()[layer]
    assert found.shape[1] == n
    model(x)
    keeper.penalty()
    keeper.consolidate([x])
    assert keeper.alpha[layer].shape == (n,)


def test_functional_conv1d_counts_channels_from_the_first_pass_on() -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv1d(2, 6, 3), nn.Linear(48, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.conv(x)).flatten(1))

    model, x = made(Conv), rand(3, 2, 10)
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["conv"])
    want = functional.sni(F.relu(F.conv1d(x, model.conv.weight, model.conv.bias)).transpose(1, 2))
    for _ in range(2):
        model(x)
        assert_close(keeper.penalty(), want)


def test_maxout_with_a_discount() -> None:
    model, x = made(lambda: nn.Sequential(nn.Linear(6, 16), Maxout(2), nn.Linear(8, 3))), rand(9, 6)
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-2))
    for _ in range(2):
        model(x)
        keeper.penalty().backward()
        keeper.consolidate([x])
    assert keeper.alpha["0"].shape == (8,)


# ---------------------------------------------------------------------------------------------------------------- recording
@pytest.mark.parametrize(
    "act",
    [
        lambda x: F.silu(x, inplace=True),
        lambda x: F.leaky_relu(x, 0.2, inplace=True),
        lambda x: x.relu_(),
        lambda x: x.clamp_(min=0.0),
        nn.SiLU(inplace=True),
        nn.ELU(inplace=True),
    ],
)
def test_in_place_activations_are_read_not_disturbed(act: Any) -> None:
    plain, model, x = made(lambda: Net(act)), made(lambda: Net(act)), rand(9, 6)
    keeper = selfless.attach(model, sparsify=L1Rep(1.0), layers=["fc1"])
    for _ in range(3):
        out = model(x)
        assert_close(out, plain(x))
        h = act(F.linear(x, plain.fc1.weight, plain.fc1.bias))
        value = keeper.penalty()
        assert_close(value, functional.l1_rep(h))
        (out.sum() + value).backward()


def test_a_custom_in_place_module_runs_once() -> None:
    class Leak(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return t.mul_(torch.where(t > 0, 1.0, 0.1))

    plain, model, x = made(lambda: Net(Leak())), made(lambda: Net(Leak())), rand(9, 6)
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["fc1"])
    for _ in range(3):
        assert_close(model(x), plain(x))
        keeper.penalty()


def test_checkpointing_with_functional_activations() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checked(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(checkpoint(lambda x: F.gelu(self.fc1(x)), x, use_reentrant=False))

    plain, model, x = made(lambda: Net(F.gelu)), made(Checked), rand(9, 6)
    one, two = (selfless.attach(m, sparsify=L1Rep(1.0), layers=["fc1"]) for m in (plain, model))
    for _ in range(3):
        for m, keeper in ((plain, one), (model, two)):
            m.zero_grad()
            (m(x).sum() + keeper.penalty()).backward()
        assert_close(model.fc1.weight.grad, plain.fc1.weight.grad)


def test_a_first_pass_in_eval_mode_or_that_fails_does_not_count() -> None:
    model, x = made(Net), rand(9, 6)
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["fc1"])
    model.eval()
    with torch.no_grad():
        model(x * 100)
    with pytest.raises(RuntimeError):
        model.train()(rand(2, 5))
    copy.deepcopy(model)(x * 10)
    model(x)
    assert_close(keeper.penalty(), functional.sni(F.relu(F.linear(x, model.fc1.weight, model.fc1.bias))))


def test_passes_of_different_length_and_passes_before_a_step() -> None:
    model = made(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    keeper = selfless.attach(model, sparsify=L1Rep(1.0), layers=["1"])
    model(rand(4, 5, 6))
    model(rand(4, 7, 6))
    keeper.penalty().backward()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model(rand(4, 6)).sum().backward()  # a warm-up step without a penalty
    opt.step()
    model(rand(4, 6))
    keeper.penalty().backward()


def test_multi_head_perceptrons_under_auto() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
            self.heads = nn.ModuleList([nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)) for _ in range(2)])

        def forward(self, x: Tensor, task: int) -> Tensor:
            return self.heads[task](self.body(x))

    model, x = made(Heads), rand(9, 6)
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3))
    for task in range(2):
        model(x, task)
        keeper.penalty().backward()
        keeper.consolidate([(x,)], forward=lambda m, b, t=task: m(b[0], t))
    assert set(keeper.alpha) == {"body.0", "heads.0.0", "heads.1.0"}


def test_a_shared_activation_module_serves_each_layer_apart() -> None:
    relu = nn.ReLU()
    model, x = made(lambda: nn.Sequential(nn.Linear(6, 8), relu, nn.Linear(8, 5), relu, nn.Linear(5, 3))), rand(9, 6)
    keeper = selfless.attach(model, MAS(0.1), SLNID(1.0))
    h1 = F.relu(F.linear(x, model[0].weight, model[0].bias))
    h2 = F.relu(F.linear(h1, model[2].weight, model[2].bias))
    for _ in range(2):
        model(x)
        assert_close(keeper.penalty(), functional.slni(h1) + functional.slni(h2))
    keeper.consolidate([x])
    assert {n: len(a) for n, a in keeper.alpha.items()} == {"0": 8, "2": 5}
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["1"])
    model(x)
    with pytest.raises(RuntimeError, match="serves several layers"):
        keeper.penalty()


def test_copies_and_pickles_of_the_model_are_free_of_the_keeper() -> None:
    model, x = made(mlp), rand(9, 6)
    keeper = selfless.attach(model, sparsify=SNI(1.0))
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    model(x)
    twin(x * 10)
    loaded(x * 10)
    h = F.relu(F.linear(x, model[0].weight, model[0].bias))
    assert_close(keeper.penalty(), functional.sni(h) + functional.sni(F.relu(F.linear(h, model[2].weight, model[2].bias))))


def test_the_penalty_keeps_float64() -> None:
    model = made(mlp, dtype=torch.float64)
    keeper = selfless.attach(model, MAS(0.1), SNI(1.0))
    model(rand(4, 6, dtype=torch.float64))
    assert keeper.penalty().dtype == torch.float64


def test_a_keeper_and_its_model_are_freed() -> None:
    model = made(mlp)
    keeper = selfless.attach(model, SI(1.0), SLNID(1e-3))
    model(rand(4, 6))
    keeper.penalty().backward()
    gone = weakref.ref(keeper)
    del keeper, model
    gc.collect()
    assert gone() is None


# ------------------------------------------------------------------------------------------------------------------ optimizers
def test_a_new_optimizer_is_anchored_too() -> None:
    """A fresh optimizer a task is common; forgetting to name it must not silently leave the network unprotected."""
    model, x = made(mlp), rand(20, 6)
    keeper = selfless.attach(model, MAS(1e6))
    keeper.anchor_with(torch.optim.SGD(model.parameters(), lr=0.1))
    keeper.consolidate([x])
    before = model[0].weight.detach().clone()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        opt.zero_grad()
        (F.cross_entropy(model(x), torch.arange(20) % 3) + keeper.penalty()).backward()
        opt.step()
    assert (model[0].weight - before)[keeper.state["omega"]["0.weight"] > 1e-3].abs().max() < 1e-4


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


# ------------------------------------------------------------------------------------------------------------------------ state
def test_damaged_states_are_refused_and_channels_last_is_saved() -> None:
    from safetensors.torch import load, save

    model, x = made(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))), rand(3, 2, 6, 6)
    model.to(memory_format=torch.channels_last)
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3), layers=["1"])
    keeper.consolidate([x])
    good = load(save(keeper.state_dict()))
    keeper.load_state_dict(good)
    for change, message in (
        ({"alpha.1": torch.ones(7)}, "has 4 neurons"),
        ({"preserve.omega.3.bias": None}, "only one of Ω and θ"),
        ({"preserve.other.3.bias": torch.ones(3)}, "unknown to this keeper"),
        ({"preserve.omega.3.bias": torch.full((3,), float("nan"))}, "finite"),
        ({"preserve.omega.3.bias": torch.ones(4)}, r"is \(4,\) in the state"),
        ({"extra": torch.ones(1)}, "unknown to this keeper"),
    ):
        bad = {k: v for k, v in (good | change).items() if v is not None}
        with pytest.raises(ValueError, match=message):
            keeper.load_state_dict(bad)
    assert keeper.tasks == 1


def test_ewc_on_a_fully_frozen_model_still_tells_its_capacity() -> None:
    model, x = made(mlp), rand(9, 6)
    keeper = selfless.attach(model, EWC(1.0))
    keeper.consolidate([(x, torch.arange(9) % 3)])
    model.requires_grad_(False)
    assert keeper.capacity().parameters["0.weight"].total == 48


def test_the_kept_shares_follow_the_optimizer() -> None:
    """Freezing, other optimizers and moved parameters: the anchor pulls what the stepping optimizer holds, at its rate."""
    model, x = made(mlp), rand(20, 6)
    keeper = selfless.attach(model, MAS(10.0))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper.anchor_with(opt)
    keeper.consolidate([x])
    for frozen in (0, 2):
        for k in (0, 2):
            model[k].weight.requires_grad_(k != frozen)
        opt.step()
    model.requires_grad_(True)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    held = model[2].weight.detach().clone()
    torch.optim.SGD([model[0].weight], lr=0.1).step()
    assert_close(model[2].weight.detach(), held)


def test_si_mid_task_state_round_trips() -> None:
    x, y = rand(20, 6, dtype=torch.float64), torch.arange(20) % 3
    ends = []
    for stop in (False, True):
        model = made(mlp, dtype=torch.float64)
        keeper = selfless.attach(model, SI(1.0))
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for k in range(4):
            if stop and k == 2:
                saved = keeper.state_dict()
                keeper.detach()
                keeper = selfless.attach(model, SI(1.0))
                keeper.load_state_dict(saved)
            opt.zero_grad()
            (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
            opt.step()
        keeper.consolidate([x])
        ends.append(keeper.state["omega"])
    for name in ends[0]:
        assert_close(ends[1][name], ends[0][name])
