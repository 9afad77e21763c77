"""Sums of activations, and the measures that follow from them: against loops and eigenvalues, and laws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from selfless.capacity import Activity, observe
from selfless.capacity.activity import EVERY_POSITION, rows_of
from selfless.capacity.rooms import SETS, rooms, rooms_of_members, task_sets
from selfless.capacity.sets import compare
from tests import oracles


def drawn(seed: int, m: int = 40, n: int = 7) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(m, n, generator=g, dtype=torch.float64).relu()
    h[:, 2] = 0.0  # a dead neuron
    h[3] = 0.0  # a sample that nothing answers
    return h


@pytest.mark.parametrize("seed", range(3))
def test_every_measure_is_that_of_its_slow_definition(seed: int) -> None:
    h = drawn(seed)
    found = observe(h)
    lifetime = [oracles.sparseness(h[:, i].tolist()) for i in range(h.shape[1]) if bool(h[:, i].any())]
    population = [oracles.sparseness(row.tolist()) for row in h if bool(row.any())]
    assert found.lifetime() == pytest.approx(sum(lifetime) / len(lifetime))
    assert found.population() == pytest.approx(sum(population) / len(population))
    assert found.correlation() == pytest.approx(oracles.mean_correlation(h))
    assert found.rank() == pytest.approx(oracles.participation(h))
    assert_close(found.rate, (h > 0).double().mean(0))


def test_batches_add_up_and_members_are_apart() -> None:
    h = drawn(0)
    whole, parts = observe(h), observe(h[:15]) + observe(h[15:])
    stacked = observe(torch.stack([drawn(1), h]))
    for name in ("total", "size", "square", "fired", "pairs", "spread", "awake"):
        assert_close(getattr(parts, name), getattr(whole, name))
        assert_close(getattr(stacked.of_member(1), name), getattr(whole, name))
    assert parts.rows == whole.rows == 40


def measures(found: Activity) -> list[float]:
    return [found.lifetime(), found.population(), found.correlation(), found.rank(), float(found.rate.mean())]


def test_measures_are_free_of_scale_and_of_order() -> None:
    h = drawn(2)
    order = torch.randperm(h.shape[1], generator=torch.Generator().manual_seed(0))
    assert measures(observe(1e4 * h)) == pytest.approx(measures(observe(h)))
    assert measures(observe(h[:, order])) == pytest.approx(measures(observe(h)))


def test_the_ends_of_each_measure() -> None:
    one_each = observe(torch.eye(5, dtype=torch.float64))  # every sample has its neuron
    assert (one_each.lifetime(), one_each.population()) == (pytest.approx(1.0), pytest.approx(1.0))
    assert one_each.rank() == pytest.approx(4.0)  # the mean takes one dimension
    constant = observe(torch.ones(6, 3))
    assert (constant.lifetime(), constant.population(), constant.rank()) == (0.0, 0.0, 0.0)
    assert math.isnan(constant.correlation())
    copies = observe(torch.rand(9, 1, generator=torch.Generator().manual_seed(0)).expand(9, 4))
    assert copies.correlation() == pytest.approx(1.0)
    assert copies.rank() == pytest.approx(1.0)
    silent = observe(torch.zeros(6, 3))
    assert math.isnan(silent.lifetime())
    assert math.isnan(silent.population())
    assert float(silent.rate.sum()) == 0.0


def test_a_wide_layer_is_measured_on_evenly_spaced_neurons() -> None:
    h = torch.rand(3, 3000, generator=torch.Generator().manual_seed(0))
    found = observe(h)
    assert found.pairs.shape == (1024, 1024)
    assert found.total.shape == (3000,)
    assert found.rank() <= 2 + 1e-9


def test_positions_are_rows_but_not_more_than_needed() -> None:
    maps = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).view(1, 2, 3, 4, 4)
    assert_close(rows_of(maps, 2)[0], maps[0].movedim(1, -1).flatten(0, 2))
    assert rows_of(torch.zeros(1, 2, 3, 20, 20), 2).shape == (1, 2 * EVERY_POSITION, 3)
    assert rows_of(torch.zeros(4, 2, 3), -1).shape == (4, 2, 3)


def test_the_measures_of_all_members_at_once_are_those_of_each() -> None:
    """A dead neuron, a constant one, a silent member, two samples."""
    h = torch.stack([drawn(seed) for seed in range(4)])
    h[1], h[2, :, 4] = 0.0, 1.0
    for sums in (observe(h), observe(h[:, :2])):
        found = sums.measures()
        for m in range(len(h)):
            one = sums.of_member(m)
            want = [float((one.rate == 0).sum()), float(one.rate.mean()), one.lifetime(), one.population(), one.correlation(), one.rank()]
            assert [values[m] for values in found.values()] == pytest.approx(want, nan_ok=True)


def test_the_rooms_of_all_members_at_once_are_those_of_each() -> None:
    """Members whose earlier tasks were recorded with sets, or were not: a run may be continued from an older record."""
    h = torch.stack([drawn(seed) for seed in range(3)])
    sums, width = observe(h), h.shape[-1]
    sets = task_sets({"a": h.mean(1)}, {"a": sums})
    counts = [{}, {kind: {"a": torch.ones(width, dtype=torch.int32)} for kind in SETS}, {}]
    found = rooms_of_members(sets, counts, [0, 2, 1], {"a": sums})
    for m, (known, earlier) in enumerate(zip(counts, [0, 2, 1], strict=True)):
        own = {kind: {"a": sets[kind]["a"][m]} for kind in SETS}
        for kind in SETS:
            assert found[m]["a"].use[kind] == compare(own[kind]["a"], known.get(kind, {}).get("a", torch.zeros(width)), earlier)
        want = rooms(own, known, earlier, {"a": sums.of_member(m)})["a"].as_dict()
        got = found[m]["a"].as_dict()
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert got[name] == (pytest.approx(value, nan_ok=True) if value is not None else None), name
