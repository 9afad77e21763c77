"""Room measured in a keeper, in a run and in any model: the same numbers, once per task, and saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import MAS, SLNID, Run
from selfless.capacity import Capacity, measure, observe
from selfless.capacity.measuring import Peeked
from selfless.capacity.rooms import counts_of


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3))


def task(seed: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(16, 5, generator=g), torch.randint(0, 3, (16,), generator=g)) for _ in range(3)]


def flat(room: Any) -> list[float]:
    return [v for v in room.as_dict().values() if isinstance(v, float)]


def test_a_keeper_measures_each_task_once_and_as_a_finished_model_does() -> None:
    model = net()
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3))
    read: list[int] = []

    def once(batches: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for i, batch in enumerate(batches):
            read.append(i)
            yield batch

    for seed in range(3):
        keeper.consolidate(once(task(seed)))
    assert read == [0, 1, 2] * 3
    found, alone = keeper.capacity(), measure(model, [task(seed) for seed in range(3)])
    assert found.layers.keys() == alone[-1].layers.keys()
    for name, room in found.layers.items():
        assert room.use == alone[-1].layers[name].use
        assert flat(room) == pytest.approx(flat(alone[-1].layers[name]))
    assert found.network is not None
    assert found.network.neurons == 17
    assert found.network.use["importance"].earlier == 2
    assert "neurons by α" in str(found)
    assert "overlap" in str(found)
    with torch.no_grad():
        h = torch.cat([F.relu(model[0](x)) for x, _ in task(2)])
    assert next(iter(found.layers.values())).rank == pytest.approx(observe(h).rank())


def test_counts_are_saved_and_an_older_state_loads_without_them() -> None:
    keepers = [selfless.attach(net(), MAS(0.1)) for _ in range(3)]
    keepers[0].consolidate(task(0))
    saved = keepers[0].state_dict()
    keepers[1].load_state_dict(saved)
    keepers[2].load_state_dict({n: t for n, t in saved.items() if not n.startswith("room.")})
    for keeper in keepers:
        keeper.consolidate(task(1))
    uses = [{n: room.use["importance"] for n, room in keeper.capacity().layers.items()} for keeper in keepers]
    assert uses[0] == uses[1]
    assert {use.earlier for use in uses[2].values()} == {0}


def test_a_functional_activation_and_a_convolution_are_read() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(F.relu(self.conv(x)).mean((2, 3)))
            return out

    torch.manual_seed(0)
    model, x = Net(), torch.randn(6, 1, 5, 5)
    (found,) = measure(model, [[x]], layers=["conv"])
    h = F.relu(model.conv(x)).movedim(1, -1).flatten(0, -2)
    assert found.layers["conv"].correlation == pytest.approx(observe(h).correlation())
    with pytest.raises(ValueError, match="task 1 has no batches"):
        measure(model, [[]], layers=["conv"])


def test_batches_are_peeked_at_and_then_all_read() -> None:
    peeked = Peeked(iter([torch.zeros(4, 1)] * 5), samples=8)
    assert (len(peeked.first), len(list(peeked))) == (2, 5)
    assert len(list(Peeked([torch.zeros(4, 1)] * 5, samples=8))) == 5


def test_a_record_holds_the_room_after_each_task(tasks_npz: str) -> None:
    result = selfless.train(Run(stream=tasks_npz, model="mlp-16", sparsify="slnid:1e-3", tasks=3, epochs=1, batch=50, seed=0))
    last = result.capacity[-1]
    counts = counts_of(result.capacity)["importance"]
    for name, room in last["layers"].items():
        assert room["importance"]["used"] == int((counts[name] > 0).sum())
        assert room["importance"]["shared"] == int((counts[name] > 1).sum())
        assert 0 <= room["population"] <= 1
    assert last["network"]["neurons"] == 32
    assert last["network"]["importance"]["chance"] is not None


def test_capacity_without_data_has_no_layers() -> None:
    assert Capacity({}, {}, tasks=0).network is None
    assert "layers" not in Capacity({}, {}, tasks=0).as_dict()
    assert_close(torch.tensor(selfless.attach(net(), MAS(0.1)).capacity().tasks), torch.tensor(0))
