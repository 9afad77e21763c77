"""Your training loop with three more lines.

A small MLP with functional ReLUs learns three tasks one after another: the same ten classes of images, with the pixels in a different order
in each task. This example shows where the three lines go in a plain loop, how much less the network forgets with them, and how to print
the capacity that is free for the next task.

    python examples/own_loop.py

This is a demonstration, not evidence: the strengths were chosen on this data (docs/lab-notes.md).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selfless
from selfless import MAS, SLNID, metrics

Batches = list[tuple[Tensor, Tensor]]
PIXELS, CLASSES, TASKS, EPOCHS = 196, 10, 3, 8


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(PIXELS, 100), nn.Linear(100, 100), nn.Linear(100, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.fc2(F.relu(self.fc1(x)))))


def make_tasks(generator: torch.Generator) -> list[tuple[Batches, Batches]]:
    """Return (train, test) for each task. Every class is a prototype image plus noise; each task has another order of the pixels."""
    prototypes = torch.rand(CLASSES, PIXELS, generator=generator)
    tasks = []
    for _ in range(TASKS):
        order = torch.randperm(PIXELS, generator=generator)
        y = torch.randint(CLASSES, (3000,), generator=generator)
        x = (prototypes[y] + 0.6 * torch.randn(len(y), PIXELS, generator=generator))[:, order]
        batches = list(zip(x.split(100), y.split(100), strict=True))
        tasks.append((batches[:20], batches[20:]))
    return tasks


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches) -> float:
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
    return right / sum(len(y) for _, y in batches)


def learn(tasks: list[tuple[Batches, Batches]], preserve: MAS | None, sparsify: SLNID | None) -> tuple[list[list[float]], selfless.Keeper]:
    """Learn the tasks one after another; return accuracy[t][u], the accuracy on task u after learning task t, and the keeper."""
    torch.manual_seed(0)  # the same initial weights for every row of the table
    model = MLP()
    keeper = selfless.attach(model, preserve, sparsify, layers=["fc1", "fc2"])  # 1: before the first task
    history = []
    for train, _ in tasks:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        keeper.anchor_with(optimizer)  # pulls important weights back after every step, stable at any strength
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
    methods = {"plain": (None, None), "MAS": (MAS(0.03), None), "MAS + SLNID": (MAS(0.03), SLNID(1e-3))}
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
    print(f"\n{keeper.capacity()}")  # free: parameters that the tasks so far hardly use
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # fastest for networks as small as this one
    main()
