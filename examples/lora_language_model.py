"""A causal language model with LoRA learns two texts one after another, with EWC on its own loss.

A small transformer learns a text of letters. Then its weights are frozen, and LoRA learns two more texts. This example shows:

- `keeper.consolidate(…, loss=…)`: a language model predicts the next letter, so its labels are shifted, and padding does not count;
- LoRA in a few lines: Ω is measured for the weights that train, and activations are read behind the adapter;
- Ω from one pass beside Ω from a loop over sentences: they are equal.

    python examples/lora_language_model.py

This is a demonstration, not evidence: the strength was chosen on these texts.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selfless
from selfless import EWC
from selfless.importance import next_token_loss  # (output, batch) → −Σ_t log p(next token) of each sentence; or write your own

Batch = dict[str, Tensor]
LETTERS, WIDTH, LENGTH, STEPS = " abcdefghijklmnopqrstuvwxyz", 48, 24, 60
TEXTS = {
    "base": ["the sun is up and the day is long", "a dog ran over the hill", "we like to read at night", "the river is cold in may"],
    "rhyme": ["one two buckle my shoe", "three four open the door", "five six pick up sticks", "seven eight lay them straight"],
    "latin": ["gallia est omnis divisa", "in partes tres quarum unam", "incolunt belgae aliam", "aquitani tertiam qui ipsorum"],
}


class LoRA(nn.Module):
    """W x + B A x: W is frozen, the thin matrices A and B train."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / math.sqrt(layer.in_features))
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.a.T @ self.b.T


class LanguageModel(nn.Module):
    """One block of a decoder with a tied head, in the form of Hugging Face: model(input_ids=…, labels=…)."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place, self.head = nn.Embedding(27, WIDTH), nn.Embedding(LENGTH, WIDTH), nn.Linear(WIDTH, 27, bias=False)
        self.norm1, self.norm2, self.norm3 = (nn.RMSNorm(WIDTH) for _ in range(3))
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.head.weight = self.token.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.token(input_ids) + self.place(torch.arange(LENGTH))
        h = self.norm1(x)
        x = x + self.out(F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h), is_causal=True))
        return self.head(self.norm3(x + self.down(self.act(self.up(self.norm2(x))))))

    def add_lora(self) -> None:
        self.requires_grad_(False)
        self.query, self.value, self.up, self.down = (LoRA(f) for f in (self.query, self.value, self.up, self.down))


def make_batch(sentences: list[str]) -> Batch:
    """Return letters as numbers, padded; a label of −100 is padding."""
    rows = [torch.tensor([LETTERS.index(c) for c in sentence[:LENGTH]]) for sentence in sentences]
    padded = (torch.stack([F.pad(row, (0, LENGTH - len(row)), value=value) for row in rows]) for value in (0, -100))
    return dict(zip(("input_ids", "labels"), padded, strict=True))


@torch.no_grad()
def bits(model: nn.Module, batch: Batch) -> float:
    """Return the mean loss of a letter, in bits."""
    return float(next_token_loss(model(**batch), batch).sum() / (batch["labels"][:, 1:] != -100).sum()) / math.log(2)


def train(model: nn.Module, batch: Batch, keeper: selfless.Keeper | None = None) -> None:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    if keeper is not None:
        keeper.anchor_with(optimizer)
    for _ in range(STEPS):
        loss = next_token_loss(model(**batch), batch).mean()
        optimizer.zero_grad()
        (loss if keeper is None else loss + keeper.penalty()).backward()
        optimizer.step()


def slow_omega(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Ω = mean_m (∂L_m/∂θ)², one sentence at a time."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in trained.items()}
    for m in range(len(batch["labels"])):
        one = {key: value[m : m + 1] for key, value in batch.items()}
        for name, g in zip(trained, torch.autograd.grad(next_token_loss(model(**one), one).sum(), list(trained.values())), strict=True):
            total[name] += g.square() / len(batch["labels"])
    return total


def main() -> dict[str, dict[str, float]]:
    base, rhyme, latin = (make_batch(TEXTS[name]) for name in ("base", "rhyme", "latin"))
    found: dict[str, dict[str, float]] = {}
    for name, strength in (("plain", 0.0), ("EWC", 10.0)):
        torch.manual_seed(0)
        model = LanguageModel()
        train(model, base)
        model.add_lora()
        keeper = selfless.attach(model, EWC(strength))
        train(model, rhyme, keeper)
        row = found[name] = {"learned": bits(model, rhyme)}
        keeper.consolidate([rhyme], loss=next_token_loss)
        pairs = [(keeper.state["omega"][n], value) for n, value in slow_omega(model, rhyme).items()]
        row["gap"] = max(float((fast - slow).abs().max() / slow.max()) for fast, slow in pairs)
        train(model, latin, keeper)
        row |= {"kept": bits(model, rhyme), "new": bits(model, latin)}
        print(f"{name:5}  rhyme: {row['learned']:.2f} bits a letter, {row['kept']:.2f} after latin; latin: {row['new']:.2f}", end="; ")
        print(f"Ω of one pass is that of a loop over sentences, up to {row['gap']:.0e}")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # fastest for networks as small as this one
    main()
