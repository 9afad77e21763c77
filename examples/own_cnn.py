"""A convolutional network with BatchNorm, one head per task.

Three tasks, each with five classes of small colour images. This example shows:

- SLNID on the channels of the convolutions and on the units of the hidden fully connected layer;
- `forward=` for a model that takes more than x;
- how to treat BatchNorm. Its running statistics are not parameters, so no importance protects them: they are learnt in the first task and
  kept fixed afterwards.

    python examples/own_cnn.py

This is a demonstration, not evidence: the strengths were chosen on this data (docs/lab-notes.md).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selfless
from selfless import MAS, SLNID, metrics

Batches = list[tuple[Tensor, Tensor]]
CLASSES, TASKS, EPOCHS = 5, 3, 8


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1, self.act1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.conv2, self.norm2, self.act2 = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()
        self.fc, self.act3 = nn.Linear(32 * 3 * 3, 64), nn.ReLU()
        self.heads = nn.ModuleList(nn.Linear(64, CLASSES) for _ in range(TASKS))

    def forward(self, x: Tensor, task: int) -> Tensor:
        x = F.max_pool2d(self.act1(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(self.act2(self.norm2(self.conv2(x))), 2)
        return self.heads[task](self.act3(self.fc(x.flatten(1))))


def make_tasks(generator: torch.Generator) -> list[tuple[Batches, Batches]]:
    """Return (train, test) for each task. Every class is a smooth colour pattern at a random position, with noise."""
    tasks = []
    for _ in range(TASKS):
        patterns = F.interpolate(torch.randn(CLASSES, 3, 4, 4, generator=generator), size=(16, 16), mode="bilinear")
        y = torch.randint(CLASSES, (900,), generator=generator)
        corners = torch.randint(5, (len(y), 2), generator=generator).tolist()
        x = torch.stack([patterns[c, :, i : i + 12, j : j + 12] for c, (i, j) in zip(y.tolist(), corners, strict=True)])
        x = x + 1.0 * torch.randn(x.shape, generator=generator)
        batches = list(zip(x.split(50), y.split(50), strict=True))
        tasks.append((batches[:12], batches[12:]))
    return tasks


@torch.no_grad()
def accuracy(model: CNN, batches: Batches, task: int) -> float:
    model.eval()
    right = sum(int((model(x, task).argmax(1) == y).sum()) for x, y in batches)
    return right / sum(len(y) for _, y in batches)


def set_training(model: CNN, first: bool) -> None:
    """Set training mode; after the first task, BatchNorm no longer updates its statistics."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train(first)


def learn(tasks: list[tuple[Batches, Batches]], preserve: MAS | None, sparsify: SLNID | None) -> tuple[list[list[float]], selfless.Keeper]:
    """Learn the tasks one after another; return accuracy[t][u], the accuracy on task u after learning task t, and the keeper."""
    torch.manual_seed(0)  # the same initial weights for every row of the table
    model = CNN()
    keeper = selfless.attach(model, preserve, sparsify, layers=["act*"])  # 1: before the first task; all three activations
    history = []
    for task, (train, _) in enumerate(tasks):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        keeper.anchor_with(optimizer)  # once for each optimizer: pulls important weights back after every step
        for _ in range(EPOCHS):
            set_training(model, first=task == 0)
            for x, y in train:
                loss = F.cross_entropy(model(x, task), y) + keeper.penalty()  # 2: in every step
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        keeper.consolidate(train, forward=lambda model, batch, task=task: model(batch[0], task))  # 3: when a task ends
        history.append([accuracy(model, test, u) for u, (_, test) in enumerate(tasks)])
    return history, keeper


def main() -> dict[str, dict[str, float]]:
    tasks = make_tasks(torch.Generator().manual_seed(0))
    methods = {"plain": (None, None), "MAS": (MAS(0.1), None), "MAS + SLNID": (MAS(0.1), SLNID(1e-3))}
    found: dict[str, dict[str, float]] = {}
    print(
        f"accuracy in % after the last of {TASKS} tasks\n\n{'':13}"
        + "".join(f"task {u + 1:<3}" for u in range(TASKS))
        + "average  forgotten  free"
    )
    for name, (preserve, sparsify) in methods.items():
        history, keeper = learn(tasks, preserve, sparsify)
        room = keeper.capacity().free_parameters
        found[name] = {"average": metrics.average(history), "forgetting": metrics.forgetting(history), "free": room}
        cells = "".join(f"{100 * a:6.1f}  " for a in history[-1])
        free = f"{100 * room:5.1f} %" if preserve else "    –"
        print(f"{name:12} {cells}{100 * found[name]['average']:6.1f}   {100 * found[name]['forgetting']:8.1f}  {free}")
    print(f"\n{keeper.capacity()}")  # free: parameters, channels and units that the tasks so far hardly use
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # fastest for networks as small as this one
    main()
