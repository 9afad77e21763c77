"""A transformer encoder, trained with AdamW.

The model classifies short documents (sequences of tokens) by topic. Three tasks have different topics and share one head.
This example shows:

- the keeper on the MLPs of a transformer, where every token counts as a sample;
- `absolute=True`, because GELU gives negative values and the paper's penalty assumes activations ≥ 0;
- the implicit anchor with AdamW, which takes its step sizes from the optimizer.

    python examples/own_transformer.py

This is a demonstration, not evidence: the strengths were chosen on this data (docs/lab-notes.md).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selfless
from selfless import MAS, SLNID, metrics

Batches = list[tuple[Tensor, Tensor]]
WORDS, LENGTH, CLASSES, TASKS, EPOCHS = 200, 16, 4, 3, 3
THRESHOLD = 0.03  # three times the default: "free" depends on the scale of the importances


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (M, heads, T, d)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))).mean(1))


def make_tasks(generator: torch.Generator) -> list[tuple[Batches, Batches]]:
    """Return (train, test) for each task. A document is about one topic; a topic prefers some words to others."""
    tasks = []
    for _ in range(TASKS):
        topics = (2 * torch.randn(CLASSES, WORDS, generator=generator)).softmax(1)
        y = torch.randint(CLASSES, (1200,), generator=generator)
        x = torch.multinomial(topics[y], LENGTH, replacement=True, generator=generator)
        batches = list(zip(x.split(50), y.split(50), strict=True))
        tasks.append((batches[:16], batches[16:]))
    return tasks


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches) -> float:
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
    return right / sum(len(y) for _, y in batches)


def learn(tasks: list[tuple[Batches, Batches]], preserve: MAS | None, sparsify: SLNID | None) -> tuple[list[list[float]], selfless.Keeper]:
    """Learn the tasks one after another; return accuracy[t][u], the accuracy on task u after learning task t, and the keeper."""
    torch.manual_seed(0)  # the same initial weights for every row of the table
    model = Transformer()
    keeper = selfless.attach(model, preserve, sparsify, layers=["blocks.*.act"])  # 1: before the first task; every block's MLP
    history = []
    for train, _ in tasks:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        keeper.anchor_with(optimizer)  # once for each optimizer: pulls important weights back after every step
        for _ in range(EPOCHS):
            model.train()
            for x, y in train:
                loss = F.cross_entropy(model(x), y) + keeper.penalty()  # 2: in every step
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        keeper.consolidate(train)  # 3: when a task ends
        history.append([accuracy(model, test) for _, test in tasks])
    return history, keeper


def main() -> dict[str, dict[str, float]]:
    tasks = make_tasks(torch.Generator().manual_seed(0))
    methods = {"plain": (None, None), "MAS": (MAS(1.0), None), "MAS + SLNID": (MAS(1.0), SLNID(3e-3, absolute=True))}
    found: dict[str, dict[str, float]] = {}
    print(
        f"accuracy in % after the last of {TASKS} tasks\n\n{'':13}"
        + "".join(f"task {u + 1:<3}" for u in range(TASKS))
        + "average  forgotten  free"
    )
    for name, (preserve, sparsify) in methods.items():
        history, keeper = learn(tasks, preserve, sparsify)
        room = keeper.capacity(THRESHOLD).free_parameters
        found[name] = {"average": metrics.average(history), "forgetting": metrics.forgetting(history), "free": room}
        cells = "".join(f"{100 * a:6.1f}  " for a in history[-1])
        free = f"{100 * room:5.1f} %" if preserve else "    –"
        print(f"{name:12} {cells}{100 * found[name]['average']:6.1f}   {100 * found[name]['forgetting']:8.1f}  {free}")
    print(f"\n{keeper.capacity(THRESHOLD)}")  # free: parameters and units that the tasks so far hardly use
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # fastest for networks as small as this one
    main()
