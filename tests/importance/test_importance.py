"""Exact importance against loops over samples, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from selfless import importance
from selfless.network.layers import resolve
from tests import oracles

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Float64 and random everywhere, biases and normalisation included: a zero would hide a mistake."""
    model = model.double()
    g = seeded(seed)
    for tensor in [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]:
        with torch.no_grad():
            tensor.copy_(torch.rand(tensor.shape, generator=g, dtype=torch.float64) * 0.8 + 0.1)
            if tensor.requires_grad:
                tensor.sub_(0.5)
    return model


class Block(nn.Module):
    """A small transformer block on tokens, with a learned position and a class token's worth of pooling."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.place = nn.Parameter(torch.zeros(5, width))
        self.norm1 = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm2 = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        y = self.norm1(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


class Tied(nn.Module):
    """Weights used in two places: one module called twice, one parameter shared by two modules, one used functionally."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.head(x) + F.linear(x, self.head.weight).square()


class TimeFirst(nn.Module):
    """Runs its layer on (T, M, N): the leading axis is time, here as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x.transpose(0, 1)))
        return self.head(h.sum(0))


class Folded(nn.Module):
    """Folds tokens into the batch axis before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x.flatten(0, 1)))
        return self.head(h.view(*x.shape[:2], -1).sum(1))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, (3, 2), padding="same", dilation=2, padding_mode="reflect", bias=False),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


def data(*shape: int, seed: int = 1, classes: int = 3) -> list[Any]:
    """Two batches of unequal size."""
    g = seeded(seed)
    return [
        (torch.randn(m, *shape, generator=g, dtype=torch.float64), torch.randint(0, classes, (m,), generator=g)) for m in (shape[0] + 3, 4)
    ]


def tokens() -> list[Any]:
    g = seeded(2)
    return [(torch.randint(0, 11, (m, 5), generator=g), torch.randint(0, 3, (m,), generator=g)) for m in (6, 3)]


class OneToken(nn.Module):
    """An embedding of one token a sample, tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Any:
        return self.out(torch.tanh(self.table(x)))


CASES: dict[str, tuple[Any, Any]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)), lambda: data(5)),
    "cnn": (cnn, lambda: data(4, 16, 15)),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3, stride=2, padding=2, padding_mode="circular"), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)),
        lambda: data(3, 10),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, (1, 2, 3), groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 3 * 3 * 2, 3)),
        lambda: data(2, 3, 4, 4),
    ),
    "transformer": (Block, tokens),
    "tied": (Tied, lambda: data(6, classes=4)),
    "one token": (OneToken, lambda: [(torch.arange(7) % 5, torch.arange(7) % 3)]),
    "time first": (TimeFirst, lambda: [(torch.randn(6, 6, 4, dtype=torch.float64, generator=seeded(3)), torch.arange(6) % 3)]),
    "folded": (Folded, lambda: [(torch.randn(6, 5, 4, dtype=torch.float64, generator=seeded(3)), torch.arange(6) % 3)]),
    "sequence": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Flatten(), nn.Linear(30, 3)), lambda: data(5, 4)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["mas", "ewc"])
def test_equals_the_loop_over_samples(case: str, kind: str) -> None:
    build, batches = CASES[case][0], CASES[case][1]()
    model = fill(build())
    if kind == "mas":
        got, want = importance.mas(model, batches), oracles.omega(model, batches, oracles.mas_loss, 1)
    else:
        got, want = importance.ewc(model, batches), oracles.omega(model, batches, oracles.log_likelihood, 2)
    assert got.keys() == want.keys()
    for name in want:
        assert want[name].abs().max() > 0 or name == "embed.weight", f"the case does not exercise {name}"
        assert_close(got[name], want[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", ["mlp", "cnn", "transformer", "tied"])
@pytest.mark.parametrize("kind", ["mas", "ewc"])
def test_per_batch_equals_its_loop(case: str, kind: str) -> None:
    model, batches = fill(CASES[case][0]()), CASES[case][1]()
    if kind == "mas":
        got = importance.mas(model, batches, estimator="per-batch")
        want = oracles.omega_per_batch(model, batches, oracles.mas_loss, 1)
    else:
        got = importance.ewc(model, batches, estimator="per-batch")
        want = oracles.omega_per_batch(model, batches, oracles.log_likelihood, 2)
    for name in want:
        assert_close(got[name], want[name], **CLOSE)


@pytest.mark.parametrize("case", ["mlp", "cnn", "tied"])
def test_exact_fisher_is_the_expectation_over_classes(case: str) -> None:
    model, batches = fill(CASES[case][0]()), CASES[case][1]()
    got, want = importance.ewc(model, batches, fisher="exact"), oracles.exact_fisher(model, batches)
    for name in want:
        assert_close(got[name], want[name], **CLOSE)


def test_the_sampled_fisher_is_that_of_the_labels_which_its_generator_draws() -> None:
    model, batches = fill(CASES["mlp"][0]()), CASES["mlp"][1]()
    drawing = seeded(5)
    drawn = [(x, torch.multinomial(model(x).detach().softmax(-1), 1, generator=drawing)[:, 0]) for x, _ in batches]
    got, want = importance.ewc(model, batches, fisher="sampled", generator=seeded(5)), importance.ewc(model, drawn)
    for name in want:
        assert_close(got[name], want[name], **CLOSE)


def test_alpha_of_the_exact_fisher_is_the_expectation_over_classes() -> None:
    """Σ_c p_c |∂ log p_c/∂n|, in as many backward passes as there are classes."""
    model, (x, _) = fill(CASES["mlp"][0]()), CASES["mlp"][1]()[0]
    want = torch.zeros(model[0].out_features, dtype=torch.float64)
    for one in x:
        n = model[0](one[None]).detach().requires_grad_()
        log_p = model[1:](n.clone()).log_softmax(-1)[0]
        for c in range(len(log_p)):
            want += log_p[c].exp().detach() * torch.autograd.grad(log_p[c], n, retain_graph=True)[0][0].abs() / len(x)
    got = importance.neurons(model, [x], ["1"], importance.LogLikelihood("exact"))
    assert_close(got["1"], want, **CLOSE)


@pytest.mark.slow
def test_sampled_fisher_tends_to_the_exact_one() -> None:
    model, batches = fill(CASES["mlp"][0]()), CASES["mlp"][1]()
    want = importance.ewc(model, batches, fisher="exact")["4.weight"]
    got = importance.ewc(model, batches * 400, fisher="sampled", generator=seeded(5))["4.weight"]
    assert_close(got, want, rtol=0.12, atol=1e-3)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_convolution(draw: st.DataObject) -> None:
    pick = lambda lo, hi: draw.draw(st.integers(lo, hi))  # noqa: E731
    groups, stride, dilation = pick(1, 3), pick(1, 3), pick(1, 2)
    kernel, padding, size = pick(1, 3), draw.draw(st.sampled_from([0, 1, 2, "valid"])), pick(6, 9)
    layer = nn.Conv2d(groups * pick(1, 2), groups * pick(1, 2), kernel, stride, padding, dilation, groups, bias=draw.draw(st.booleans()))
    model = fill(nn.Sequential(layer, nn.Tanh(), nn.Flatten()))
    x = torch.randn(pick(1, 4), layer.in_channels, size, size + 1, dtype=torch.float64, generator=seeded(pick(0, 99)))
    want = oracles.omega(model, [x], oracles.mas_loss, 1)
    got = importance.mas(model, [x], memory=draw.draw(st.sampled_from([1, 4000, 2**20])))
    for name in want:
        assert_close(got[name], want[name], **CLOSE)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 300, 2**20]))
def test_any_linear_on_sequences(m: int, t: int, n: int, k: int, memory: int) -> None:
    model = fill(nn.Sequential(nn.Linear(n, k), nn.Tanh(), nn.Flatten()))
    x = torch.randn(m, t, n, dtype=torch.float64, generator=seeded(m + t))
    want, got = oracles.omega(model, [x], oracles.mas_loss, 1), importance.mas(model, [x], memory=memory)
    for name in want:
        assert_close(got[name], want[name], **CLOSE)


def test_alpha_is_the_gradient_at_the_pre_activation() -> None:
    model, (x, _) = fill(CASES["mlp"][0]()), CASES["mlp"][1]()[0]
    first = oracles.alpha(model, lambda m, x: m[0](x), lambda m, n: m[4](m[3](m[2](torch.relu(n)))), x)
    second = oracles.alpha(model, lambda m, x: m[2](torch.relu(m[0](x))), lambda m, n: m[4](m[3](n)), x)
    got = importance.neurons(model, [x], layers=["1", "3"])
    assert list(got) == ["1", "3"]
    assert_close(got["1"], first, **CLOSE)
    assert_close(got["3"], second, **CLOSE)
    by_linear = importance.neurons(model, [x], layers=["0", "2"])
    assert_close(by_linear["0"], first, **CLOSE)
    assert_close(by_linear["2"], second, **CLOSE)


@pytest.mark.parametrize("estimator", ["per-sample", "per-batch"])
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_alpha_may_be_of_another_objective_than_omega(fisher: Any, estimator: Any) -> None:
    """In one pass: Ω as without, α as `neurons` gives it alone."""
    model, batches = fill(CASES["mlp"][0]()), CASES["mlp"][1]()
    taps, loss, norm = resolve(model, ["1", "3"]), importance.LogLikelihood(fisher), importance.FunctionNorm()
    passed: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: passed.append(1))
    found = importance.measure(model, iter(batches), loss, alpha_objective=norm, taps=taps, estimator=estimator)
    handle.remove()
    plain = importance.measure(model, batches, loss, taps=taps, estimator=estimator)
    alone = importance.neurons(model, batches, layers=["1", "3"])
    assert len(passed) == len(batches)
    for name, omega in plain.omega.items():
        assert_close(found.omega[name], omega)
    for name, alpha in alone.items():
        assert_close(found.alpha[name], alpha)
        assert not torch.allclose(plain.alpha[name], alpha)


def test_alpha_of_a_frozen_layer_and_of_channels() -> None:
    model, batches = fill(cnn()), CASES["cnn"][1]()
    got = importance.neurons(model, batches, layers=["5"])["5"]
    for p in list(model.parameters())[:-2]:
        p.requires_grad_(False)
    assert got.shape == (4,)
    assert_close(importance.neurons(model, batches, layers=["5"])["5"], got)


def test_one_pass_gives_both_and_leaves_the_model_as_it_was() -> None:
    model = fill(CASES["cnn"][0]()).train()
    model[1].eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(1))
    batches = CASES["cnn"][1]()
    found = importance.measure(model, iter(batches), importance.FunctionNorm(), taps=resolve(model, ["2", "5"]))
    assert len(seen) == len(batches)
    assert found.samples == sum(len(x) for x, _ in batches)
    assert set(found.alpha) == {"2", "5"}
    assert model.training
    assert not model[1].training
    assert all(p.grad is None for p in model.parameters())
    for name, tensor in model.state_dict().items():
        assert_close(tensor, before[name])


def test_frozen_and_unused_parameters() -> None:
    model = fill(CASES["mlp"][0]())
    model[0].weight.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(3))
    got = importance.mas(model, CASES["mlp"][1]())
    assert "0.weight" not in got
    assert got["unused"].count_nonzero() == 0


def test_a_model_that_defies_vmap_is_taken_sample_by_sample() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x) * self.scale.exp()
            return y if y.sum().item() > 0 else y * 2

    model = fill(Branches())
    x = torch.randn(5, 4, dtype=torch.float64, generator=seeded(8))
    with pytest.warns(UserWarning, match="sample by sample"):
        got = importance.mas(model, [x[:1], x[1:2]])
    want = oracles.omega(model, [x[:2]], oracles.mas_loss, 1)
    assert_close(got["scale"], want["scale"], **CLOSE)


def test_dicts_and_sequence_labels() -> None:
    class LM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {"logits": self.head(torch.tanh(self.embed(input_ids)))}

    model = fill(LM())
    for tokens in (6, 7):  # 7: as many tokens as classes
        ids = torch.randint(0, 7, (5, tokens), generator=seeded())
        batches = [{"input_ids": ids, "labels": ids.flip(1)}]
        want = oracles.omega(model, batches, oracles.log_likelihood, 2)
        got = importance.ewc(model, batches)
        for name in want:
            assert_close(got[name], want[name], **CLOSE)


def test_one_token_of_a_sample_needs_no_axis() -> None:
    model = fill(nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    ids = torch.tensor([0, 3, 3, 1])
    got, want = importance.mas(model, [ids]), oracles.omega(model, [ids], oracles.mas_loss, 1)
    for name in want:
        assert_close(got[name], want[name], **CLOSE)


def test_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))

    model, batches = fill(Net(False)), data(5)
    want = oracles.omega(model, batches, oracles.mas_loss, 1)
    got = importance.mas(model, batches)
    for name in want:
        assert_close(got[name], want[name], **CLOSE)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        importance.mas(fill(Net(True)), [batches[0][0].requires_grad_()])


def test_bad_input_says_what_and_the_remedy() -> None:
    model = fill(CASES["mlp"][0]())
    x, _ = CASES["mlp"][1]()[0]
    with pytest.raises(ValueError, match="batches are empty"):
        importance.mas(model, [])
    with pytest.raises(ValueError, match="needs labels"):
        importance.ewc(model, [x])
    with pytest.raises(ValueError, match=r"layer '9' is not in the model; its layers are 0, 1"):
        importance.neurons(model, [x], layers=["9"])
    with pytest.raises(ValueError, match="not finite"):
        importance.mas(model, [x * float("nan")])
    with pytest.raises(ValueError, match="per-sample"):
        importance.mas(model, [x], estimator="exact")  # type: ignore[arg-type]
