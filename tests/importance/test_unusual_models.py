"""Models for which an importance once went wrong, each with the reason."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.testing import assert_close

import selfless
from selfless import SI, SLNID, SNI, importance
from selfless.importance import LogLikelihood, closed
from tests import oracles
from tests.small_nets import Net, made, mlp, rand

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def check_mas(model: nn.Module, x: Tensor) -> None:
    want = oracles.omega(model, [x], oracles.mas_loss, 1)
    got = importance.mas(model, [x])
    for name in want:
        assert_close(got[name], want[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


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
            return self.head(self.encode(x * self.scale.exp())[0].mean(0))

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


class Centred(Net):
    """Samples depend on each other. Where all are the same, no gradient reaches `fc1`."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(torch.relu(h - h.mean(0)))


class Falling(Net):
    """Samples depend on each other. All gradients at the output of `fc2` are negative."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.fc2(torch.tanh(self.fc1(x)))
        return F.softplus(-out - out.mean(0))


@pytest.mark.parametrize("kind", [Centred, Falling])
def test_what_a_check_must_not_take_for_exact(kind: type[nn.Module]) -> None:
    """A gradient of zero fits every closed form, and a check must not look at positive entries alone."""
    model, first = (
        made(kind, dtype=torch.float64),
        torch.ones(5, 6, dtype=torch.float64) if kind is Centred else rand(5, 6, dtype=torch.float64),
    )
    other = rand(7, 6, dtype=torch.float64)
    want = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for value in (v for x in (first, other) for v in model(x).square().sum(1)):
        for name, g in zip(want, torch.autograd.grad(value, list(model.parameters()), retain_graph=True), strict=True):
            want[name] += g.abs() / 12
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is slow, sample by sample
        got = importance.mas(model, [first, other])
    for name in want:
        assert_close(got[name], want[name], **CLOSE)


def test_parts_on_a_cpu_fit_the_cache() -> None:
    a = torch.zeros(4, 2)
    assert closed.chunk_memory(a, 10 * closed.CACHE) == closed.CACHE
    assert closed.chunk_memory(a, 100) == 100
    assert closed.chunk_memory(a.to("meta"), 10 * closed.CACHE) == 10 * closed.CACHE


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


class Summed(nn.Module):
    """A shared encoder of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def encode(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) + self.encode(x.flip(1))


class Skipping(nn.Module):
    """A bias that is added at two places, and a layer that is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.bias = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.twice(torch.relu(a + self.bias))
        return a + b + self.twice(torch.relu(b)) + self.bias


class LastStep(nn.Module):
    """Read at the last step, where the reverse direction has seen one step: the true Ω of its recurrent weights is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.head = nn.GRU(6, 5, bidirectional=True, batch_first=True), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.unsqueeze(1) * torch.arange(1, 5, dtype=x.dtype).view(1, 4, 1)
        return self.head(self.encode(steps)[0][:, -1])


@pytest.mark.parametrize("kind", [Summed, Skipping, LastStep])
@pytest.mark.parametrize("power", [1, 2])
def test_a_parameter_of_several_uses_leaves_the_backward_pass_alone(kind: type[nn.Module], power: int) -> None:
    """δ at one use is also the gradient that flows on: the sum over uses must not be written into it."""
    model, x = made(kind, dtype=torch.float64), [rand(9, 6, dtype=torch.float64, seed=k) for k in range(2)]
    want = oracles.omega(model, x, oracles.mas_loss, power)
    got = importance.measure(model, x, importance.FunctionNorm(power)).omega
    for name in want:
        assert_close(got[name], want[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.filterwarnings("ignore:.*sample by sample")
@pytest.mark.parametrize("samples", [6, 7, 8])  # as many as an expert has inputs, as neither, as it has outputs
def test_experts_that_no_sample_of_a_batch_reaches(samples: int) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            to_b, h = x[:, 0] > 0, x.new_zeros(len(x), 8)
            h[~to_b], h[to_b] = torch.relu(self.a(x[~to_b])), torch.relu(self.b(x[to_b]))
            return self.head(h)

    model = made(Experts, dtype=torch.float64)
    one_way, mixed = rand(samples, 6, dtype=torch.float64), rand(samples, 6, dtype=torch.float64, seed=1)
    one_way[:, 0] = -1
    for batches in ([one_way, mixed], [mixed, one_way], [one_way]):
        want, got = oracles.omega(model, batches, oracles.mas_loss, 1), importance.mas(model, batches)
        for name in want:
            assert_close(got[name], want[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def test_local_mas_measures_the_neurons_of_a_frozen_layer() -> None:
    """Its n needs a gradient for α although no parameter before it does."""
    free, frozen = made(mlp, dtype=torch.float64), made(mlp, dtype=torch.float64)
    frozen[0].requires_grad_(False)
    found = []
    for model in (free, frozen):
        keeper = selfless.attach(model, "mas-local:1", SLNID(1e-3))
        keeper.consolidate([(rand(7, 6, dtype=torch.float64), torch.zeros(7).long())])
        found.append(keeper.alpha)
    assert found[0].keys() == found[1].keys()
    for layer, alpha in found[0].items():
        assert alpha.max() > 0
        assert_close(found[1][layer], alpha)


class Folds(Net):
    """Tokens (M, 4, 3) through an MLP that sees each token, or a window of two tokens, as a sample of its own, or not."""

    def __init__(self, rows: int | None) -> None:
        super().__init__()
        self.rows, self.fc, self.relu, self.head = rows, nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x if self.rows is None else x.reshape(-1, self.rows, 3) if self.rows > 1 else x.flatten(0, 1)
        return self.head(self.relu(self.fc(tokens))).reshape(len(x), -1)


def test_neurons_of_packed_tokens_weigh_as_much_in_every_batch() -> None:
    """Each token is a row; samples of several lengths."""

    class Packed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            rows = torch.relu(self.fc(x[torch.arange(x.shape[1]) < lengths[:, None]]))
            return self.head(torch.stack([part.sum(0) for part in rows.split(lengths.tolist())]))

    model, x = made(Packed), rand(4, 4, 3)
    calls = {"forward": lambda model, batch: model(*batch)}
    sizes = [
        float(importance.neurons(model, [(x, torch.tensor(one))], ["fc"], **calls)["fc"].sum()) for one in ([3, 3, 3, 3], [3, 3, 3, 2])
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.3)  # not three times as much
    with pytest.raises(ValueError, match="ran on 12 rows of a batch of 4 samples"):
        importance.neurons(model, [(x, torch.tensor([3, 3, 3, 3]))], ["fc"], objective=LogLikelihood("exact"), **calls)


def test_small_gradients_of_samples_that_depend_on_each_other_are_no_rounding_errors() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.p = nn.Linear(3, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            return h + 1e-6 * torch.cos(self.p) * (x.repeat(1, 2)[:, :4] - x.repeat(1, 2)[:, :4].mean(0))

    model, x = made(Scaled), rand(8, 3)
    with pytest.warns(UserWarning, match="sample by sample"):
        got = importance.mas(model, [x])["p"]
    values = model(x).square().sum(1)
    want = sum(torch.autograd.grad(v, model.p, retain_graph=True)[0].abs() for v in values) / 8
    assert_close(got, want, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("rows", [1, 2])
def test_neurons_of_folded_positions_weigh_as_much_as_of_others(rows: int) -> None:
    x = rand(6, 4, 3)
    plain, folded = Folds(None), Folds(rows)
    folded.load_state_dict(plain.state_dict())
    assert_close(importance.neurons(folded, [x], ["fc"])["fc"], importance.neurons(plain, [x], ["fc"])["fc"])


class Normed(Net):
    """The biases before an instance norm have no effect: their gradients are rounding errors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.head = nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(F.instance_norm(self.up(torch.relu(F.instance_norm(self.first(x)))))))


@pytest.mark.parametrize("power", [1, 2])
def test_a_gradient_of_rounding_errors_needs_no_loop_over_samples(power: int) -> None:
    model, x = Normed(), rand(16, 2, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = importance.mas(model, [x]) if power == 1 else importance.ewc(model, [(x, torch.zeros(16, 12, 12).long())])
    if power == 1:
        want = oracles.omega(model, [x], oracles.mas_loss, 1)
        for name in want:
            assert_close(got[name], want[name], rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert float(got["up.bias"].max()) < 1e-6 * float(got["up.weight"].max())
