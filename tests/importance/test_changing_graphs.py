"""Models whose batches differ in more than their numbers: what was found out on one batch must not be taken for granted on another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import selfless
from selfless import HAT, MAS, SLNID, importance
from tests.keeper.nets import batches, seeded, sequential
from tests.small_nets import made, rand

pytestmark = pytest.mark.filterwarnings("ignore:.*sample by sample")


def wide_rand(*shape: int, seed: int = 0) -> Tensor:
    return rand(*shape, seed=seed, dtype=torch.float64)


def check(model: nn.Module, data: list[Any], call: Callable[[nn.Module, Any], Tensor] = lambda model, x: model(x)) -> None:
    """Compare with one backward pass for each sample of a batch."""
    model.eval()
    want, samples = {name: torch.zeros_like(p) for name, p in model.named_parameters()}, 0
    for batch in data:
        for value in call(model, batch).flatten(1).square().sum(1):
            grads = torch.autograd.grad(value, list(model.parameters()), retain_graph=True, allow_unused=True)
            for name, g in zip(want, grads, strict=True):
                want[name] += 0 if g is None else g.abs()
            samples += 1
    got = importance.mas(model, data, forward=call)
    for name, total in want.items():
        assert_close(got[name], total / samples, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


class Packed(nn.Module):
    """Tokens without padding. With equal lengths each sample has as many rows as the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        rows = torch.tanh(self.layer(x[torch.arange(x.shape[1]) < lengths[:, None]]))
        return self.head(torch.stack([part.sum(0) for part in rows.split(lengths.tolist())]))


def test_rows_that_belong_to_other_samples_in_each_batch() -> None:
    lengths = [[4, 4, 4, 4], [1, 7, 2, 6], [8, 1, 1, 6]]
    data = [(wide_rand(4, 8, 3, seed=k), torch.tensor(one)) for k, one in enumerate(lengths)]
    check(made(Packed, dtype=torch.float64), data, lambda model, batch: model(*batch))


class TwoLayouts(nn.Module):
    """One layer, with the samples first and with the positions first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layer(x)).mean(1)
        second = torch.tanh(self.layer(x.transpose(0, 1).contiguous())).square().mean(0)
        return self.head(torch.cat([first, second], 1))


class Experts(nn.Module):
    """Each token goes to one expert; the rows of an expert may be a multiple of the samples by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(3, 2), nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(3, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 3)
        weight, chosen = self.gate(rows).softmax(-1).max(-1)
        out = x.new_zeros(len(rows), 4)
        for k, expert in enumerate(self.experts):
            own = (chosen == k).nonzero()[:, 0]
            out = out.index_add(0, own, torch.tanh(expert(rows[own])) * weight[own, None])
        return self.head(out.view(*x.shape[:2], 4).sum(1))


class Codebook(nn.Module):
    """The call of the embedding is detached; its weight is used in a product."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.code = nn.Linear(3, 4), nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.encode(x) @ self.code.weight.T
        return scores + self.code(scores.argmax(1)).detach().sum(1, keepdim=True)


class Masked(nn.Module):
    """A layer is called with a function of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("mask", torch.tensor([0.0, 1.0, 3.0]).expand(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        weight = {"weight": self.layer.weight * self.mask}
        return self.head(torch.tanh(torch.func.functional_call(self.layer, weight, (x,))))


class Checkpointed(nn.Module):
    """A shared layer whose activations are computed again in the backward pass, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda x: x + torch.tanh(self.shared(x)), x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("kind", [TwoLayouts, Experts, Codebook, Masked, Checkpointed])
def test_the_loop_over_samples(kind: type[nn.Module]) -> None:
    shape = (2, 2, 3) if kind is Experts else (4, 3, 3) if kind is TwoLayouts else (4, 3)
    check(made(kind, seed=4, dtype=torch.float64), [wide_rand(*shape, seed=k) for k in range(12 if kind is Experts else 3)])


class Mixed(nn.Module):
    """Rows are mixed by a matrix of the data, as in a graph network; the identity mixes none."""

    def __init__(self, product: str) -> None:
        super().__init__()
        self.product, self.layer, self.head = product, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        h = self.layer(x)
        if self.product == "sparse":
            return self.head(torch.tanh(torch.sparse.mm(a.to_sparse(), h)))
        if self.product == "right":
            return self.head(torch.tanh((h.mT @ a.mT).mT))
        if self.product == "sum":
            return self.head(torch.tanh((a[:, :, None] * h[None]).sum(1)))
        if self.product == "attention":
            return self.head(torch.tanh((h @ h.mT).masked_fill(a == 0, -torch.inf).softmax(1) @ h))
        if self.product in MIXES:
            return self.head(torch.tanh(MIXES[self.product](h, a)))
        return self.head(torch.tanh(a @ h if self.product == "mm" else torch.bmm(a[None], h[None])[0]))


def _rows(h: Tensor, a: Tensor) -> Tensor:
    """Return a row number for each entry of h, its own one if `a` is the identity."""
    return a.argmax(1)[:, None].expand_as(h)


def _share(a: Tensor) -> Tensor:
    """Return a factor for each row, 0 if `a` is the identity."""
    return (a - torch.eye(5, dtype=a.dtype)).abs().sum(1, keepdim=True)


def _edges(h: Tensor, a: Tensor) -> Tensor:
    """Messages along edges, as in a graph network; the identity has an edge from each node to itself."""
    to, source = (a > 0.2).nonzero().T
    return torch.zeros_like(h).index_add(0, to, h[source])


MIXES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mv": lambda h, a: torch.stack([torch.mv(a, h[:, k]) for k in range(4)], 1),
    "scatter_add": lambda h, a: torch.zeros_like(h).scatter_add(-2, _rows(h, a), h),
    "scatter_reduce": lambda h, a: torch.zeros_like(h).scatter_reduce(0, _rows(h, a), h, "sum"),
    "gather": lambda h, a: h.gather(-2, _rows(h, a)),
    "edges": _edges,
    "mean": lambda h, a: h + (h * _share(a)).mean(0),
    "sum of all": lambda h, a: h + (h * _share(a)).sum(),
    "cumsum": lambda h, a: h + (h * _share(a)).cumsum(-2),
    "amax": lambda h, a: h + h.amax(0) * _share(a),
    "select": lambda h, a: h + h[2] * _share(a),
    "softmax": lambda h, a: h + h.softmax(0) * _share(a),
}


@pytest.mark.parametrize("product", ["mm", "bmm", "sparse", "right", "sum", "attention", *MIXES])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_matrix_that_mixes_samples_in_some_batches(product: str, is_first: bool) -> None:
    data = [(wide_rand(5, 3, seed=k), wide_rand(5, 5, seed=k + 9).softmax(1)) for k in range(2)]
    data.insert(0 if is_first else 2, (wide_rand(5, 3, seed=7), torch.eye(5, dtype=torch.float64)))
    model = Mixed(product)
    check(made(lambda: model, dtype=torch.float64), data, lambda model, batch: model(*batch))


class Messages(nn.Module):
    """A graph network whose edges (2, E) are no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.head = nn.Linear(3, 4), nn.Parameter(torch.randn(4)), nn.Linear(4, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.layer(x) * torch.cos(self.scale)
        return self.head(torch.tanh(torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])))


def test_vmap_with_row_numbers_of_the_whole_batch() -> None:
    data = [(wide_rand(6, 3, seed=k), torch.randint(6, (2, 9), generator=torch.Generator().manual_seed(k))) for k in range(2)]
    check(made(Messages, dtype=torch.float64), data, lambda model, batch: model(*batch))


class Context(nn.Module):
    """All samples share the rows of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ torch.cos(self.a) + context.square().mean(0) @ torch.cos(self.a)))


class Coupled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(x @ torch.cos(self.a))
        return z - z.mean(0) / 2


@pytest.mark.parametrize("sizes", [(8, 5), (5, 8)])
def test_a_shared_tensor_with_as_many_rows_as_samples(sizes: tuple[int, ...]) -> None:
    data = [(wide_rand(n, 3, seed=n), wide_rand(5, 3, seed=9)) for n in sizes]
    check(made(Context, dtype=torch.float64), data, lambda model, batch: model(*batch))


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1)])
def test_a_batch_of_one_sample_proves_nothing(sizes: tuple[int, ...]) -> None:
    check(made(Coupled, dtype=torch.float64), [wide_rand(n, 3, seed=n) for n in sizes])


def test_class_weights_with_as_many_classes_as_samples() -> None:
    """vmap would slice the weights too, and stops with an assertion: then the loop over samples measures."""

    class Curved(Coupled):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ torch.cos(self.a))

    model, weight = made(Curved, dtype=torch.float64), torch.arange(1, 5, dtype=torch.float64)
    data = [(wide_rand(n, 3, seed=n), torch.arange(n) % 4, weight) for n in (8, 4)]

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], weight=batch[2], reduction="none")

    got = importance.ewc(model, data, loss=loss)
    want = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in data:
        for value in loss(model(batch[0]), batch):
            for name, g in zip(want, torch.autograd.grad(value, list(model.parameters()), retain_graph=True), strict=True):
                want[name] += g.square() / 12
    for name, total in want.items():
        assert_close(got[name], total, rtol=1e-9, atol=1e-12)


def test_neurons_of_a_transformer_with_positions_first() -> None:
    class Encoder(nn.Module):
        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            self.encode = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
            self.head, self.batch_first = nn.Linear(8, 3), batch_first

        def forward(self, x: Tensor) -> Tensor:
            h = self.encode(x) if self.batch_first else self.encode(x.transpose(0, 1)).transpose(0, 1)
            return self.head(h.mean(1))

    models = [made(lambda b=b: Encoder(b), dtype=torch.float64) for b in (True, False)]
    data = [(wide_rand(n, 5, 8, seed=n), torch.arange(n) % 3) for n in (7, 4, 5)]  # 5: as many positions as samples
    for objective in (importance.FunctionNorm(), importance.LogLikelihood("exact")):
        found = [importance.neurons(model, data, ["encode.linear1"], objective)["encode.linear1"] for model in models]
        assert found[0].max() > 0
        assert_close(found[1], found[0])


def test_drawn_labels_leave_out_what_has_none() -> None:
    model, tokens = made(lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))), torch.arange(48).view(8, 6) % 7
    labels = tokens.clone()
    labels[:, 3:] = -100
    generator = torch.Generator().manual_seed(0)
    drawn = importance.LogLikelihood("sampled", generator).targets(model(tokens), labels)[0][0]
    assert torch.equal(drawn == -100, labels == -100)
    assert bool((drawn[:, :3] >= 0).all())


def test_local_mas_leaves_out_the_head_that_gives_the_output() -> None:
    class Watched(nn.Module):
        """Another layer runs after the head."""

        def __init__(self, watched: bool) -> None:
            super().__init__()
            self.encode, self.head, self.other, self.watched = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2), watched

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.encode(x))
            out = self.head(h)
            self.seen = self.other(h) if self.watched else None
            return out

    found = [importance.measure(made(lambda w=w: Watched(w)), [rand(5, 3)], importance.LayerNorms()).omega for w in (False, True)]
    for name in ("encode.weight", "head.weight", "head.bias"):
        assert_close(found[1][name], found[0][name])
    twice = made(lambda: nn.Sequential(layer := nn.Linear(3, 3), nn.ReLU(), layer))
    with pytest.raises(ValueError, match="'0' runs again: use MAS there"):
        importance.measure(twice, [rand(5, 3)], importance.LayerNorms())


def test_hat_goes_on_with_its_gates_after_the_last_epoch() -> None:
    """Saved between the last epoch and the end of the task, where no begin_epoch is left to call."""
    model = seeded(sequential)
    keeper = selfless.attach(model, HAT(0.75) + MAS(1.0), SLNID(1e-3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper.anchor_with(optimizer)
    for epoch in range(2):
        keeper.begin_epoch(epoch, 2, batches=4)
        for x, y in batches():
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
            optimizer.step()
    copy = seeded(sequential)
    copy.load_state_dict(model.state_dict())
    other = selfless.attach(copy, HAT(0.75) + MAS(1.0), SLNID(1e-3))
    other.load_state_dict(keeper.state_dict())
    for one in (keeper, other):
        one.consolidate(batches())
    for found, want in ((other.states[1]["omega"], keeper.states[1]["omega"]), (other.alpha, keeper.alpha)):
        for name, value in want.items():
            assert_close(found[name], value)
    model.eval(), copy.eval()
    again = selfless.attach(made(sequential), HAT(0.75) + MAS(1.0), SLNID(1e-3))
    again.load_state_dict(keeper.state_dict())
    again.model.load_state_dict(model.state_dict())
    x = batches()[0][0]
    assert_close(again.model.eval()(x), model(x))
