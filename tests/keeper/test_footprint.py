"""keeper.footprint(): what is held, what is predicted, and the table of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selfless
from selfless import EBLL, EWC, HAT, IMM, MAS, SI, LwF, OnlineEWC, PackNet, RWalk
from selfless.capacity.activity import SUMS
from selfless.keeper import pieces
from selfless.keeper.counting import LiveBytes
from selfless.keeper.footprint import Footprint
from selfless.keeper.room import activity_bytes, look
from selfless.preserve import PRESERVERS
from selfless.preserve.capabilities import ProjectsSteps

DOCS = Path(__file__).resolve().parents[2] / "docs" / "own-loop.md"
SIZE = 128


def deep() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(SIZE, SIZE), nn.ReLU())), nn.Linear(SIZE, 4))


class Words(nn.Module):
    """Almost all parameters are one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.act, self.head = nn.Embedding(20_000, 32), nn.ReLU(), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.table(x).mean(1)))


def tasks(build: Any, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    xs = [torch.randint(0, 20_000, (4, 6), generator=g) if build is Words else torch.randn(4, SIZE, generator=g) for _ in range(1)]
    return [(x, torch.randint(0, 4, (4,), generator=g)) for x in xs]


def train(model: nn.Module, keeper: Any, data: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    keeper.anchor_with(optimizer)
    for epoch in range(2):
        keeper.begin_epoch(epoch, 2, batches=len(data))
        for x, y in data:
            (F.cross_entropy(model(x), y) + keeper.penalty((x, y))).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_live_bytes_counts_what_lives() -> None:
    with LiveBytes() as count:
        a = torch.zeros(1000)
        assert (count.now, count.peak) == (4000, 4000)
        b = a[10:] + 1  # the view costs nothing
        assert count.now == 4000 + 990 * 4
        del b
        a.add_(1)
        assert (count.now, count.peak) == (4000, 7960)
        c = a.view(10, 100).abs().sum()
        del a
        assert count.now == c.nbytes


CASES: list[tuple[Any, Any, dict[str, Any]]] = [
    (deep, MAS(0.1), {}),
    (deep, EWC(1.0, mode="per-task"), {}),
    (deep, SI(1.0), {}),
    (deep, RWalk(1.0), {}),
    (deep, IMM(1e-3), {}),
    (deep, PackNet(0.5), {}),
    (deep, HAT(0.75), {}),
    (deep, LwF(1.0) + MAS(0.1), {}),
    (deep, MAS(0.1), {"state_dtype": torch.bfloat16}),
    (Words, MAS(0.1), {}),
    (Words, EWC(1.0), {"state_dtype": torch.bfloat16}),
]


@pytest.mark.parametrize(("build", "term", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.slow
def test_predictions_are_what_is_measured(build: Any, term: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = build()
    with LiveBytes() as count:
        count.know(*model.parameters())
        keeper = selfless.attach(model, term, **options)
        for task in range(2):
            data = tasks(build, task)
            train(model, keeper, data)
            found, count.peak = keeper.footprint(), count.now
            assert found.bytes == pytest.approx(count.now, rel=0.02, abs=20_000)
            keeper.consolidate(data)
            assert found.peak == pytest.approx(count.peak, rel=0.15)
            assert sum(found.after.values()) == pytest.approx(count.now, rel=0.02, abs=20_000)


def test_two_copies_for_omega_and_the_anchor() -> None:
    """A large embedding: Ω and θ* are kept, and one more copy at the peak; the anchor of a step takes none."""
    torch.manual_seed(0)
    model, data = Words(), tasks(Words)
    for term in (MAS(0.1), EWC(1.0)):
        with selfless.attach(model, term) as keeper:
            keeper.consolidate(data)
            assert keeper.footprint().copies == pytest.approx(2, abs=0.01)
            assert keeper.footprint().peak_copies < 3.5
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            keeper.anchor_with(optimizer)
            F.cross_entropy(model(data[0][0]), data[0][1]).backward()
            with LiveBytes() as count:
                optimizer.step()
            assert count.peak < 0.5 * keeper.footprint().model
            assert keeper.footprint().copies == pytest.approx(2, abs=0.01)


def test_it_prints_a_table() -> None:
    keeper = selfless.attach(deep(), MAS(0.1))
    keeper.consolidate(tasks(deep))
    lines = str(keeper.footprint()).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["omega", "anchor", "all", "consolidate"]
    assert lines[3].split()[3] == "2.00"


def test_the_table_has_units_copies_and_what_comes_next() -> None:
    found = Footprint({"omega": 512, "old": 1536}, {"omega": 3 * 2**20, "new": 5 * 2**30}, peak=2**20, model=1024)
    assert (found.bytes, found.copies, found.copies_after, found.peak_copies) == (2048, 2.0, 5245952.0, 1024.0)
    assert str(found).splitlines() == [
        "                    now  copies   next task  copies",
        "omega             512 B    0.50     3.0 MiB  3072.00",
        "old             1.5 KiB    1.50         0 B    0.00",
        "new                 0 B    0.00     5.0 GiB  5242880.00",
        "all             2.0 KiB    2.00     5.0 GiB  5245952.00",
        "consolidate                         1.0 MiB  1024.00",
    ]


MORE: list[tuple[Any, float, dict[str, Any]]] = [
    (LwF(1.0), 1, {}),
    (MAS(0.1) + EWC(1.0), 4, {}),
    (SI(1.0), 5, {}),
    (RWalk(1.0), 8, {}),
    (MAS(0.1), 1.5, {"state_dtype": torch.bfloat16}),
    (MAS(0.1), 2, {"state_device": "cpu"}),
    (selfless.AGSCL(1.0), 2, {}),
]


@pytest.mark.parametrize(("term", "held", "options"), MORE, ids=str)
def test_the_groups_are_predicted_to_the_byte(term: Any, held: float, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(SIZE, 16), nn.ReLU(), nn.Linear(16, 4)), tasks(deep)
    keeper = selfless.attach(model, term, layers=["1"], **options)
    for _ in range(2):
        train(model, keeper, data)
        found = keeper.footprint()
        keeper.consolidate(data)
        assert found.after == keeper.footprint().groups
        measured = len({type(part) for part in term.parts if part.measures})  # with one objective each
        assert found.peak >= max(found.bytes + measured * found.model, sum(found.after.values()))
    assert keeper.footprint().copies == pytest.approx(held, abs=0.2)


def test_what_a_projection_holds_is_at_most_what_is_predicted() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(SIZE, 16), nn.ReLU(), nn.Linear(16, 4)), tasks(deep)
    keeper = selfless.attach(model, selfless.GPM(0.9))
    found = keeper.footprint()
    keeper.consolidate(data)
    held = keeper.footprint().groups
    assert held.pop("held") == 8 * 2  # one number for each parameter without a weight: the biases
    assert held.keys() == found.after.keys() == {"basis", "scale", "count"}
    assert all(0 < size <= found.after[name] for name, size in held.items())
    assert found.peak >= sum(p[0].numel() ** 2 * 8 for p in model.parameters() if p.dim() > 1)  # the inputs of all layers, (d, d)


def test_the_sums_over_activations_are_predicted_to_the_byte() -> None:
    """Layers below and above the number of neurons whose pairs are summed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, 16), nn.Linear(16, 100), nn.Linear(100, 4))
    model.forward = lambda x: model[2](F.relu(model[1](F.relu(model[0](x)))))  # type: ignore[method-assign]
    with selfless.attach(model, MAS(0.1)) as keeper:
        activity, _ = look(model, keeper.collector, tasks(deep), None)
        assert activity.keys() == {"0", "1"}
        sums = [t for one in activity.values() for name in SUMS if (t := getattr(one, name)).dim()]  # but for a few numbers
        assert activity_bytes(model, keeper.taps) == sum(t.numel() * t.element_size() for t in sums)


@pytest.mark.parametrize(("term", "width", "held"), [(MAS(0.1), 8, 2), (LwF(1.0) + MAS(0.1), 64, 3)])
def test_what_is_predicted_is_held_afterwards(term: Any, width: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one large layer, whose Ω of a batch counts at the peak, or two: the groups to the byte, the peak nearly."""
    monkeypatch.setattr(pieces, "PIECE", {"cpu": 2**12, "other": 2**12} if width == 8 else pieces.PIECE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512 // width * 8), nn.ReLU(), nn.Linear(512 // width * 8, width), nn.ReLU(), nn.Linear(width, 4))
    data = [(torch.randn(4, 64), torch.randint(0, 4, (4,)))]
    with LiveBytes() as count:
        count.know(*model.parameters())
        keeper = selfless.attach(model, term)
        for _ in range(2):
            train(model, keeper, data)
            found, count.peak = keeper.footprint(), count.now
            keeper.consolidate(data)
            peak = count.peak
            assert found.after == keeper.footprint().groups
            assert found.peak == pytest.approx(peak, rel=0.15)
    assert keeper.footprint().copies == pytest.approx(held, abs=0.3)
    assert found.model == sum(p.numel() for p in model.parameters()) * 4


TERMS = [MAS(0.1), selfless.LocalMAS(0.1), EWC(1.0), OnlineEWC(1.0), SI(1.0), RWalk(1.0)]
TERMS += [LwF(1.0), EBLL(1.0, steps=2, code=2), IMM(1e-3), PackNet(0.5), HAT(0.75), selfless.AGSCL(1.0)]


@pytest.mark.slow
def test_the_table_of_the_documentation() -> None:
    """Copies held after two tasks, and at the peak of `consolidate`, on a network of eight equal layers."""
    rows: dict[str, list[float]] = {}
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| (`\w+`(?:, `\w+`)*) \| ([\d.]+) \| ([\d.]+) \|", line):
            rows |= {name: [float(match[2]), float(match[3])] for name in re.findall(r"`(\w+)`", match[1])}
    grows = {kind.__name__ for kind in PRESERVERS.values() if kind.keeps_data or issubclass(kind, ProjectsSteps)}
    assert rows.keys() == {kind.__name__ for kind in PRESERVERS.values()} - grows - {"NoPreserver"}
    for term in TERMS:
        torch.manual_seed(0)
        model = deep()
        keeper = selfless.attach(model, term)
        for task in range(2):
            train(model, keeper, tasks(deep, task))
            found = keeper.footprint()
            keeper.consolidate(tasks(deep, task))
        held, peak = rows[type(term).__name__]
        assert keeper.footprint().copies == pytest.approx(held, abs=0.06), type(term).__name__
        assert found.peak_copies == pytest.approx(peak, abs=0.06), type(term).__name__
