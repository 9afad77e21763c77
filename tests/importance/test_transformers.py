"""Transformers: Ω equals the loop over samples, by closed forms alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from selfless import importance
from selfless.importance.fallback import Fallback
from selfless.importance.graph import shape_of
from tests import oracles, text_nets
from tests.small_nets import made, rand

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
TELLS_SHAPES = shape_of(torch.ones(1, requires_grad=True).exp().grad_fn) is not None  # torch 2.4 does not; some closed forms need them


@pytest.fixture(autouse=True)
def _closed_forms_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if not TELLS_SHAPES:
        return  # the fallback gives the same values, more slowly

    def refuse(_self: Fallback, names: list[str], *_: Any) -> None:
        raise AssertionError(f"no closed form for {names}")

    monkeypatch.setattr(Fallback, "reduce", refuse)


TEXT: dict[str, Callable[[], nn.Module]] = {
    "BERT: LayerNorm, separate projections, positions that samples share": text_nets.Text,
    "Llama: RMSNorm": lambda: text_nets.Text(lambda: text_nets.Block(text_nets.RMSNorm, lambda i, o: nn.Linear(i, o, bias=False))),
    "Gemma: 1 + weight": lambda: text_nets.Text(lambda: text_nets.Block(text_nets.ShiftedNorm)),
    "torch's RMSNorm": lambda: text_nets.Text(lambda: text_nets.Block(nn.RMSNorm)),
    "GPT-2: Conv1D": lambda: text_nets.Text(lambda: text_nets.Block(linear=lambda i, o: text_nets.Conv1D(o, i))),
    "a tied head": lambda: text_nets.Text(words=True, tied=True),
    "LoRA": text_nets.with_lora,
    "attention of torch": lambda: text_nets.Text(text_nets.stock),
    "one block used twice": lambda: text_nets.Text(lambda: nn.Sequential(*[text_nets.Block()] * 2)),
}


@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("power", [1, 2])
def test_equals_the_loop_over_samples(name: str, power: int) -> None:
    model = made(TEXT[name], dtype=torch.float64)
    batches = [text_nets.tokens(), text_nets.tokens(2, seed=1), text_nets.tokens(1, length=4, seed=2)]
    want = oracles.omega(model, batches, oracles.mas_loss, power)
    got = importance.measure(model, batches, importance.FunctionNorm(power)).omega
    assert want.keys() == got.keys()
    for key in want:
        assert_close(got[key], want[key], **CLOSE, msg=lambda m, n=key: f"{n}: {m}")
    assert sum(bool(value.any()) for value in got.values()) >= len(got) - 1  # the bias of the keys has no effect on attention


def test_small_memory_changes_nothing() -> None:
    model = made(lambda: text_nets.Text(words=True, tied=True), dtype=torch.float64)
    want = importance.mas(model, [text_nets.tokens()])
    for key, value in importance.mas(model, [text_nets.tokens()], memory=1).items():
        assert_close(value, want[key], **CLOSE)


@pytest.mark.skipif(not TELLS_SHAPES, reason="this version of torch does not tell shapes: without closed forms, samples must come first")
@pytest.mark.parametrize("length", [5, 4])
def test_positions_first(length: int) -> None:
    """Torch's default is (positions, samples, features); also where there are as many positions as samples."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.head = text_nets.stock(batch_first=False), nn.Linear(text_nets.WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encode(x).mean(0))

    model, x = made(First, dtype=torch.float64), rand(length, 4, text_nets.WIDTH, dtype=torch.float64)
    got = importance.mas(model, [x])
    want = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for m in range(4):
        grads = torch.autograd.grad(model(x[:, m : m + 1]).square().sum(), list(model.parameters()))
        for name, g in zip(want, grads, strict=True):
            want[name] += g.abs() / 4
    for name in want:
        assert_close(got[name], want[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def test_vision_transformers() -> None:
    model, x = made(text_nets.Vision, dtype=torch.float64), rand(4, 5, text_nets.WIDTH, dtype=torch.float64)
    want = oracles.omega(model, [x], oracles.mas_loss, 1)
    for name, value in importance.mas(model, [x]).items():
        assert_close(value, want[name], **CLOSE)


def test_the_exact_fisher_of_a_transformer() -> None:
    """One backward pass per class over one graph, with weights: the streamed pass must not free what the next one needs."""
    model, x = made(text_nets.Text, dtype=torch.float64), text_nets.tokens(3)
    want = oracles.exact_fisher(model, [x])
    for name, value in importance.ewc(model, [x], fisher="exact").items():
        assert_close(value, want[name], **CLOSE)


HUGGING_FACE = {
    "bert": ("BertForSequenceClassification", "BertConfig", {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}),
}


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_models_of_hugging_face(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the models of Hugging Face: pip install transformers")
    name, config, options = HUGGING_FACE[kind]
    options |= {} if kind == "gpt2" else {"num_attention_heads": 2, "max_position_embeddings": 16}
    build = getattr(transformers, name)
    model = made(lambda: build(getattr(transformers, config)(vocab_size=text_nets.WORDS, **options)), dtype=torch.float64)
    batch = {"input_ids": text_nets.tokens()}
    want = oracles.omega(model, [batch], oracles.mas_loss, 1)
    for key, value in importance.mas(model, [batch]).items():
        assert_close(value, want[key], rtol=1e-6, atol=1e-9, msg=lambda m, n=key: f"{n}: {m}")
