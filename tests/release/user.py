"""A user's program that names the public surface, for a run of mypy --strict and pyright against the installed wheel; it also runs.

`assert_type` names types that a user relies on: a checker fails if an annotation of the package is missing or has become `Any`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, assert_type

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import selfless
from selfless import EWC, MAS, SLNID, Capacity, Keeper, PackNet, Result, Run
from selfless.preserve import Group, Preserver, State, Tensors


@dataclass(frozen=True)
class Close(Preserver):
    """λ Σ |θ − θ*|: a method of the user's."""

    name: ClassVar[str] = "close"
    groups: ClassVar[tuple[Group, ...]] = (Group("anchor"),)
    strength: float = 0.1

    def penalty(self, state: State, parameters: Tensors) -> Tensor:
        return torch.stack([(parameters[name] - old).abs().sum() for name, old in state["anchor"].items()]).sum()

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        return {"anchor": {name: parameter.detach().clone() for name, parameter in parameters.items()}}


def build(outputs: int, input_shape: tuple[int, int, int]) -> nn.Module:
    channels, height, width = input_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 16), nn.ReLU(), nn.Linear(16, outputs))


def own_loop() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    keeper = selfless.attach(model, preserve=MAS(0.1), sparsify=SLNID(1e-3))
    assert_type(keeper, Keeper)
    keeper.anchor_with(optimizer)
    loader = DataLoader(TensorDataset(torch.randn(64, 20), torch.randint(0, 4, (64,))), batch_size=32)
    for epoch in range(2):
        keeper.begin_epoch(epoch, 2, batches=len(loader))
        for x, y in loader:
            loss = F.cross_entropy(model(x), y) + assert_type(keeper.penalty((x, y)), Tensor)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    keeper.consolidate(loader)
    with keeper.evaluating(0), torch.no_grad():
        model(torch.randn(2, 20))
    assert_type(keeper.capacity(), Capacity)
    assert_type(keeper.log(), dict[str, float])
    state: dict[str, Tensor] = keeper.state_dict()
    keeper.load_state_dict(state)
    keeper.detach()
    selfless.attach(model, preserve=EWC(10) + MAS(0.1), layers=["1"], inject=True).detach()
    selfless.attach(model, preserve=Close(0.1), sparsify="slnid:auto").detach()
    print(selfless.describe(model))


def whole_runs(out: Path) -> None:
    x, y = torch.randint(0, 256, (60, 1, 6, 6), dtype=torch.uint8), torch.arange(60) % 2
    stream = selfless.stream([((x, y), (x, y)), ((x.flip(-1), y), (x, y))], name="lamps")
    run = Run(preserve=PackNet(0.5), sparsify="slnid:1e-3", model="mlp-16", batch=20, epochs=1)
    result = selfless.train(run, stream=stream, out=out)
    assert_type(result, Result)
    results = selfless.train([run], stream=stream, out=out)
    assert_type(results, list[Result])
    again = selfless.load(out / result.run.key)
    assert_type(again, Result)
    assert_type(again.average, float)
    network = again.model(task=0)
    classes: tuple[str, ...] = network.classes
    settings: dict[str, Any] = again.summary()
    print(classes, sorted(settings))


def formulas() -> None:
    h, model = torch.rand(8, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert_type(selfless.functional.sni(h), Tensor)
    assert_type(selfless.functional.slnid(h, torch.ones(4), sigma=1.0), Tensor)
    omega: dict[str, Tensor] = selfless.importance.mas(model, [h])
    alpha: dict[str, Tensor] = selfless.importance.neurons(model, [h], layers=["1"])
    print(sorted(omega), sorted(alpha))


if __name__ == "__main__":
    import tempfile

    own_loop()
    formulas()
    with tempfile.TemporaryDirectory() as folder:
        whole_runs(Path(folder))
