"""Runs whose stream and network are objects are loaded and continued."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import selfless
from selfless import Run


def make_task(number: int) -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(number)
    prototypes = torch.randn(2, 1, 4, 4, generator=generator)

    def half(n: int) -> TensorDataset:
        y = torch.arange(n) % 2
        return TensorDataset(prototypes[y] + 0.3 * torch.randn(n, 1, 4, 4, generator=generator), y)

    return half(40), half(10)


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 6))


def test_a_network_and_data_sets_as_objects_go_on(tmp_path: Path) -> None:
    tasks = [make_task(t) for t in range(3)]
    first = selfless.train(Run(stream=tasks[:2], model=make_network(), preserve="mas", epochs=2, batch=10, outputs=6), out=tmp_path)
    place, accuracy = tmp_path / first.run.key, float(first.accuracy[-1, 0])
    x, y = tasks[0][1].tensors
    del first
    gc.collect()  # as in another program: nobody holds the network
    loaded = selfless.load(place)
    with pytest.raises(ValueError, match=r"was passed as an object; pass it again.*result\.model\(network=…\)"):
        loaded.model()
    model = loaded.model(task=0, network=make_network())
    assert float((model(x).argmax(1) == y).double().mean()) == accuracy
    more = selfless.train(loaded.continued(tasks[2:], model=make_network()), out=tmp_path)
    assert more.data is not None
    assert [task.columns for task in more.data.tasks] == [range(0, 2), range(2, 4), range(4, 6)]
    assert more.accuracy[-1, 2] > 0.5
