"""Small transformers in the forms that people have: BERT's, Llama's, GPT-2's, torch's own, and LoRA around a layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, PLACES, CLASSES = 13, 8, 9, 3


class RMSNorm(nn.Module):
    """Llama's: the scale multiplies the normalised input, which is computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(width) + 0.5), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)


class ShiftedNorm(RMSNorm):
    """Gemma's: the scale is 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * (1.0 + self.weight)


class Conv1D(nn.Module):
    """GPT-2's linear layer: the weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / nx**0.5), nn.Parameter(torch.randn(nf) / 9)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)


class Act(nn.Module):
    """A custom activation without parameters, as the ones of Transformers are."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(x))


class Block(nn.Module):
    """Attention with separate projections, then an MLP; `linear` and `norm` say in which form."""

    def __init__(self, norm: Any = nn.LayerNorm, linear: Any = nn.Linear) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.query, self.key, self.value, self.out = (linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.act, self.down = linear(WIDTH, 2 * WIDTH), Act(), linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.out(F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h), is_causal=True))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Text(nn.Module):
    """Tokens → a class (`words=False`) or the next token (`words=True`, with the head tied to the embedding if `tied`)."""

    def __init__(self, block: Any = Block, *, words: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.token, self.place, self.block = nn.Embedding(WORDS, WIDTH), nn.Embedding(PLACES, WIDTH), block()
        self.head, self.words = nn.Linear(WIDTH, WORDS if words else CLASSES, bias=not tied), words
        if tied:
            self.head.weight = self.token.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # one row for all samples, as in BERT and GPT-2
        h = self.block(self.token(input_ids) + self.place(places))
        return self.head(h if self.words else h.mean(1))


class LoRA(nn.Module):
    """A frozen layer plus a trained product of two thin matrices."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))


class SavedHead(nn.Module):
    """PEFT's wrapper of a head that is trained: the frozen original, which never runs, and the copy that does."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.original_module = head
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(head.in_features, head.out_features)})
        self.original_module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.modules_to_save["default"](x)
        return result


def with_lora() -> Text:
    """Everything frozen but LoRA on the MLP and a copy of the head, as PEFT prepares a classifier."""
    model = Text().requires_grad_(False)
    model.block.up, model.block.down = LoRA(model.block.up), LoRA(model.block.down)
    model.head = SavedHead(model.head)
    return model


def stock(*, batch_first: bool = True, depth: int = 2) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=batch_first)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


class Vision(nn.Module):
    """A class token, learned positions that are sliced, a layer scale, and a head on rows of all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.token = nn.Parameter(torch.randn(1, PLACES, WIDTH)), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.scale, self.norm, self.head = nn.Parameter(torch.rand(WIDTH)), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = x + self.scale * torch.tanh(x + self.place[:, : x.shape[1]])
        return self.head(self.norm(x).view(-1, WIDTH)).view(len(x), -1)


def tokens(count: int = 5, length: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(WORDS, (count, length), generator=torch.Generator().manual_seed(seed))
