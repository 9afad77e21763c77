"""Which neurons a task uses, and how sets overlap: against loops over tasks, over random sets, and laws."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from selfless.capacity import Use, by_firing, by_share, by_threshold, compare, overlaps
from selfless.capacity.rooms import LayerRoom, add_sets, counts_of, pack, unpack, whole


def test_the_smallest_set_that_carries_the_share_is_found() -> None:
    alpha = torch.tensor([0.5, 3.0, 0.0, 1.5, 1.0, 0.0])
    for share in (0.3, 0.5, 0.75, 0.9, 1.0):
        best = min(
            size
            for size in range(7)
            if any(float(alpha[list(c)].sum()) >= share * 6.0 - 1e-9 for c in itertools.combinations(range(6), size))
        )
        found = by_share(alpha, share)
        assert int(found.sum()) == best
        assert float(alpha[found].sum()) >= share * 6.0 - 1e-9
        assert torch.equal(by_share(1e-6 * alpha, share), found)  # free of scale, as a threshold is not
    assert not by_share(torch.zeros(4)).any()
    assert by_threshold(alpha).sum() == 4
    assert by_threshold(1e-6 * alpha).sum() == 0
    assert by_firing(torch.tensor([0.0, 0.049, 0.05, 1.0])).tolist() == [False, False, True, True]


def test_counts_say_what_the_sets_of_all_tasks_say() -> None:
    g = torch.Generator().manual_seed(0)
    sets = [torch.rand(30, generator=g) < 0.4 for _ in range(6)]
    counts = torch.zeros(30)
    for t, now in enumerate(sets):
        found = compare(now, counts, t)
        union = torch.stack(sets[: t + 1]).sum(0)
        assert (found.used, found.shared, found.free) == (int((union > 0).sum()), int((union > 1).sum()), int((union == 0).sum()))
        assert found.new == int((now & (counts == 0)).sum())
        if t:
            each = [float((now & old).sum() / now.sum()) for old in sets[:t]]
            assert found.overlap == pytest.approx(sum(each) / t)
            assert found.chance == pytest.approx(sum(float(old.sum()) / 30 for old in sets[:t]) / t)
        counts += now
    assert math.isnan(compare(sets[0], torch.zeros(30), 0).overlap)


def test_chance_is_the_mean_and_variance_over_all_sets_of_that_size() -> None:
    counts = torch.tensor([0.0, 3.0, 1.0, 1.0, 2.0, 0.0])
    hits = torch.tensor([float(counts[list(c)].sum()) for c in itertools.combinations(range(6), 2)])
    found = compare(torch.tensor([True, True, False, False, False, False]), counts, 3)
    assert found.expected == pytest.approx(float(hits.mean()))
    assert found.variance == pytest.approx(float(hits.var(correction=0)))
    assert found.deviation == pytest.approx((3 - float(hits.mean())) / float(hits.std(correction=0)))


def test_layers_add_up_to_the_network() -> None:
    a = compare(torch.tensor([True, False]), torch.tensor([1.0, 0.0]), 1)
    b = compare(torch.tensor([True, True, False]), torch.tensor([0.0, 1.0, 1.0]), 1)
    total = a + b
    assert (total.total, total.now, total.used, total.free, total.shared) == (5, 3, 4, 1, 2)
    assert total.overlap == pytest.approx(2 / 3)
    layers = {"one": LayerRoom(2, {"importance": a}, 1, active=0.5, rank=1.5), "two": LayerRoom(3, {"importance": b}, active=1.0, rank=2.0)}
    room = whole(layers)
    assert room is not None
    assert (room.active, room.rank, room.dead) == (pytest.approx(0.8), 3.5, 1)
    assert room.as_dict()["lifetime"] is None
    with pytest.raises(ValueError, match="do not add up"):
        _ = a + Use(1, 1, 0, 1, 1, 5)


def test_sets_go_through_a_record() -> None:
    g = torch.Generator().manual_seed(1)
    sets = [{"importance": {"fc1": torch.rand(13, generator=g) < 0.5}, "firing": {}} for _ in range(3)]
    records = [{"sets": pack(one)} for one in sets]
    for one, entry in zip(sets, records, strict=True):
        assert_close(unpack(entry["sets"])["importance"]["fc1"], one["importance"]["fc1"])
    counts = counts_of([records[0], {"free_neurons": 1.0}, records[1]])["importance"]["fc1"]
    assert_close(counts, sets[0]["importance"]["fc1"].int() + sets[1]["importance"]["fc1"].int())
    assert_close(add_sets({}, sets[2])["importance"]["fc1"], sets[2]["importance"]["fc1"].int())
    matrix = overlaps(records)
    assert [matrix[i][i] for i in range(3)] == pytest.approx([1.0] * 3)
    assert matrix[0][1] == matrix[1][0]
    assert math.isnan(overlaps([{}, records[0]])[0][1])


def test_a_mean_over_layers_leaves_out_those_without_the_measure() -> None:
    layers = [LayerRoom(10, lifetime=0.5), LayerRoom(20), LayerRoom(10, lifetime=0.7)]
    for order in itertools.permutations(layers):
        total = whole({str(i): room for i, room in enumerate(order)})
        assert total is not None
        assert (total.neurons, total.lifetime) == (40, pytest.approx(0.6))
    assert whole({}) is None
