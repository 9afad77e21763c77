"""GPM and SGP: steps leave the outputs of old inputs unchanged, up to the energy that is kept."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import GPM, SGP
from selfless.engine.learner import Learner
from selfless.importance.inputs import draw_rows, measure_inputs
from selfless.preserve import NoPreserver
from tests import oracles
from tests.engine.small_runs import small
from tests.preserve.heads import NAMES, accuracy, data, learn, made


def inputs_of(model: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    """The inputs of a linear layer."""
    found: list[Tensor] = []
    with layer.register_forward_pre_hook(lambda _, args: found.append(args[0].detach())):  # type: ignore[attr-defined]
        model(x, 0)
    return found[0]


@pytest.mark.parametrize("term", [GPM(0.9, rise=0.03, samples=100), SGP(0.9, rise=0.03, alpha=2.0, samples=100)], ids=str)
def test_basis_and_scales_are_those_of_the_singular_value_decomposition(term: GPM) -> None:
    model = made(torch.float64)
    keeper = selfless.attach(model, term, heads=NAMES)
    seen: list[np.ndarray] = []
    for t in range(3):
        with torch.no_grad():
            model.body[0].weight.mul_(torch.rand(24, 1))  # other inputs of the second layer in every task
        tasks = [(x.double() * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.2, 0.1]).roll(t), y) for x, y in data(t)]
        keeper.consolidate(tasks, forward=lambda m, b, t=t: m(b[0], t))
        seen.append(inputs_of(model, model.body[2], torch.cat([x for x, _ in tasks])).T.numpy())
        basis, scale = oracles.gpm(seen, [0.9 + 0.03 * u for u in range(t + 1)], getattr(term, "alpha", None))
        found = keeper.state["basis"]["body.2.weight"]
        assert found.shape == basis.shape
        assert_close(found @ found.T, torch.tensor(basis @ basis.T))
        assert_close(found * keeper.state["scale"]["body.2.weight"] @ found.T, torch.tensor(basis * scale @ basis.T))


OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_old_outputs_do_not_change_at_all_with_all_directions(optimizer: str) -> None:
    """An optimizer that lives on through all tasks: its momentum of old tasks is projected too. Old heads and biases are held."""
    model = made(torch.float64)
    keeper = selfless.attach(model, GPM(1.0, samples=2), heads=NAMES)
    opt = OPTIMIZERS[optimizer](model.parameters())
    outputs: list[tuple[Tensor, Tensor]] = []
    for t in range(3):
        before = model.body[0].weight.detach().clone()
        for x, y in data(t) * 2:
            opt.zero_grad()
            F.cross_entropy(model(x.double(), t), y).backward()
            opt.step()
        tasks = [(x.double(), y) for x, y in data(t)]
        for u, (old, want) in enumerate(outputs):
            assert_close(model(old, u), want)
        keeper.consolidate(tasks, forward=lambda m, b, t=t: m(b[0], t))
        drawn = draw_rows(tasks, len(tasks), 2)[0][0]  # two of six dimensions
        assert (model.body[0].weight - before).abs().max() > 0.01
        outputs.append((drawn, model(drawn, t).detach()))


class Convolutions(nn.Module):
    """Two convolutions, one with padding, stride and groups, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Conv2d(4, 6, 2, groups=2, padding_mode="circular", padding=1)
        self.norm, self.head = nn.GroupNorm(2, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.second(self.first(x).relu())).relu().mean((2, 3)))
        return out


def test_patches_of_convolutions() -> None:
    torch.manual_seed(0)
    model, x = Convolutions().double(), torch.randn(1, 2, 5, 5).double()
    with torch.no_grad():
        model.first.weight[:, 1], x[:, 1] = 0, 0
    keeper = selfless.attach(model, GPM(1.0), heads=["head"])
    before = [model.first(x), model.second(model.first(x).relu())]
    keeper.consolidate([x])
    assert keeper.state["basis"]["first.weight"].shape == (18, 9)  # nine patches in the first channel, all different
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(7, 2, 5, 5).double()).square().sum().backward()
    moved = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    assert_close([model.first(x), model.second(model.first(x).relu())], before)
    assert not torch.equal(model.first.weight, moved["first.weight"])
    assert all(torch.equal(dict(model.named_parameters())[n], moved[n]) for n in ("first.bias", "second.bias", "norm.weight", "norm.bias"))


def test_the_change_of_outputs_is_bounded_by_the_energy_that_is_left_out() -> None:
    """‖ΔW R‖² ≤ ‖ΔW‖² (1 − ε) ‖R‖² for the inputs R of the old task."""
    model = made()
    keeper = selfless.attach(model, GPM(0.7, samples=100), heads=NAMES)
    learn(model, keeper, 0)
    x = torch.cat([x for x, _ in data(0)])
    before = model.body[0].weight.detach().clone()
    learn(model, keeper, 1)
    step = model.body[0].weight.detach() - before
    assert step.abs().max() > 0.01
    assert (step @ x.T).square().sum() <= step.square().sum() * 0.3 * x.square().sum()


def test_sgp_with_all_scales_one_is_gpm_and_at_strength_zero_there_is_no_method() -> None:
    def train(term: Any) -> list[Tensor]:
        model = made()
        keeper = selfless.attach(model, term, heads=NAMES)
        for t in range(2):
            learn(model, keeper, t, epochs=2)
        return [p.detach() for p in model.parameters()]

    assert_close(train(SGP(0.9, alpha=1e12)), train(GPM(0.9)))
    assert all(map(torch.equal, train(GPM(0.0)), train("none")))
    assert not torch.allclose(train(SGP(0.9))[0], train(GPM(0.9))[0])


def test_projecting_steps_is_projecting_gradients_with_sgd() -> None:
    """The papers' form: the gradient is projected, and a new optimizer with momentum takes it."""
    model = made(torch.float64)
    keeper = selfless.attach(model, SGP(0.9, alpha=1.0), heads=NAMES)
    learn_double = [(x.double(), y) for x, y in data(0)]
    keeper.consolidate(learn_double, forward=lambda m, b: m(b[0], 0))
    twin = made(torch.float64)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin)]
    for x, y in data(1):
        for m, opt in zip((model, twin), opts, strict=True):
            opt.zero_grad()
            F.cross_entropy(m(x.double(), 1), y).backward()
            if m is twin:
                for n, p in m.body.named_parameters():
                    assert p.grad is not None
                    basis, scale = (keeper.state[group].get(f"body.{n}") for group in ("basis", "scale"))
                    p.grad = torch.zeros_like(p) if basis is None or scale is None else p.grad - p.grad @ (basis * scale) @ basis.T
            opt.step()
    assert_close(list(model.parameters()), list(twin.parameters()))


def test_old_tasks_are_kept_and_new_ones_learnt() -> None:
    def train(term: Any) -> list[float]:
        model = made()
        keeper = selfless.attach(model, term, heads=NAMES)
        for t in range(3):
            learn(model, keeper, t, epochs=8)
        return [accuracy(model, t) for t in range(3)]

    kept, free = train(SGP(0.9, samples=100)), train("none")
    assert kept[0] > free[0] + 0.1
    assert kept[2] > 0.6


def test_the_head_of_an_old_task_is_held_and_its_own_is_free() -> None:
    """With a loss that reaches all heads."""
    model = made()
    keeper = selfless.attach(model, GPM(0.9), heads=NAMES)
    learn(model, keeper, 0, epochs=1)
    before = [head.weight.detach().clone() for head in model.heads]
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=0.1), data(1)[0]
    torch.stack([F.cross_entropy(model(x, t), y) for t in range(3)]).sum().backward()
    optimizer.step()
    assert torch.equal(model.heads[0].weight, before[0])
    assert_close(model.heads[1].weight, before[1] - 0.1 * model.heads[1].weight.grad)


def test_a_head_without_a_name_is_free_until_its_task_has_ended() -> None:
    model = made()
    keeper = selfless.attach(model, GPM(0.9))
    for t in range(2):
        before = model.heads[t].weight.detach().clone()
        learn(model, keeper, t, epochs=1)
        assert not torch.equal(model.heads[t].weight, before)
        assert "heads.2.weight" not in keeper.state["basis"]
        assert "heads.2.bias" not in keeper.state["held"]


def test_tied_weights_and_other_parameters_are_held() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out, self.place = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False), nn.Parameter(torch.zeros(4))
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.out.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            h = self.table(x) + self.place
            out: Tensor = self.out(self.attention(h, h, h, need_weights=False)[0].mean(1))
            return out

    model, x = Tied(), torch.randint(0, 9, (3, 5))
    names = dict(model.named_parameters())
    found = measure_inputs(model, lambda: model(x), names)
    assert not found.moments
    assert sorted(found.others) == sorted(names)


def test_padded_tokens_are_no_inputs() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(2, 4, 3)
    mask = torch.tensor([[True, True, False, False], [True, True, True, False]])
    found = measure_inputs(layer, lambda: layer(x), {"weight", "bias"}, mask)
    assert_close(found.moments["weight"], x[mask].double().T @ x[mask].double())
    assert_close((found + found).moments["weight"], 2 * found.moments["weight"])
    assert found.others == ["bias"]


def test_rows_are_drawn_evenly_from_all_batches() -> None:
    batches = [{"x": torch.full((6, 2), float(i)), "n": "name", "k": 7} for i in range(4)]
    (drawn,) = draw_rows(batches, len(batches), 6)
    (one,) = draw_rows(batches[:1], 1, 2)
    assert one["x"].untyped_storage().nbytes() == 2 * 2 * 4  # not a view that keeps the whole batch
    assert drawn["x"][:, 0].tolist() == [0, 1, 1, 2, 3, 3]
    assert (drawn["n"], drawn["k"]) == ("name", 7)
    graphs = [(torch.full((6, 2), float(i)), torch.randint(6, (9, 2))) for i in range(4)]
    drawn = draw_rows(graphs, len(graphs), 12)
    assert [x[0, 0].item() for x, _ in drawn] == [0, 2]  # twelve rows: two whole graphs, each with its own edges
    assert all(torch.equal(edges, graphs[2 * k][1]) for k, (_, edges) in enumerate(drawn))
    ragged = [torch.zeros(3, 2), torch.zeros(3, 5)]
    assert [len(b) for b in draw_rows(ragged, len(ragged), 99)] == [3, 3]


@pytest.mark.parametrize(
    ("options", "message"), [({"strength": 1.5}, "at most 1"), ({"first": 2}, "at most 1"), ({"samples": 0}, "samples")]
)
def test_errors(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPM(**options)


def test_a_sum_with_a_method_that_sets_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="packnet sets weights to other values"):
        GPM(0.9) + selfless.PackNet(0.5)
    with pytest.raises(ValueError, match="variant"):
        GPM(0.9) + SGP(0.9)


def test_a_loader_is_read_without_keeping_its_batches() -> None:
    alive, most = set[int](), 0

    class Loader:
        def __len__(self) -> int:
            return 120

        def __iter__(self) -> Any:
            nonlocal most
            for i in range(120):
                x = torch.randn(100, 6)
                alive.add(i)
                weakref.finalize(x, alive.discard, i)
                most = max(most, len(alive))
                yield x, torch.zeros(100, dtype=torch.int64)
                del x

    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    selfless.attach(model, GPM(0.9, samples=10)).consolidate(Loader())
    assert most < 40  # some are kept for the activity of the layers


class Slowed(GPM):
    """Does not ask whether its strength is 0, as the built-in methods do."""

    name: ClassVar[str] = "slowed"

    def project_step(self, state: Any, before: Any, after: Any) -> dict[str, Tensor]:
        return {name: before[name] + (after[name] - before[name]) / (1 + self.strength) for name in after}


def test_a_method_of_strength_0_changes_no_step(tasks_npz: str) -> None:
    found = []
    for term in (Slowed(0.0), NoPreserver(), Slowed(0.5)):
        learner = Learner([small(tasks_npz, tasks=2, preserve=term)])
        learner.learn()
        found.append(learner.fleet.params)
    for name, p in found[0].items():
        assert_close(p, found[1][name], rtol=0, atol=0)
    assert any(not torch.equal(p, found[1][name]) for name, p in found[2].items())
