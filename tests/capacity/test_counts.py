"""Free parameters and neurons: counts, shares, and the printed table."""

import math

import torch

from selfless.capacity import THRESHOLD, Capacity, Free, count_free


def test_an_importance_below_the_threshold_is_free():
    omega = torch.tensor([[0.0, 0.005], [THRESHOLD, 1.0]])
    assert count_free(omega) == Free(2, 4)
    assert count_free(omega, threshold=0.001) == Free(1, 4)
    assert str(Free(1, 4000)) == "1 of 4,000 (0.0 %)"


def test_shares_are_over_all_layers():
    capacity = Capacity({"a": Free(1, 2), "b": Free(2, 8)}, {"a": Free(0, 3)}, tasks=2)
    assert (capacity.free_parameters, capacity.free_neurons) == (0.3, 0.0)
    assert capacity.as_dict()["parameters"] == {"a": 0.5, "b": 0.25}
    assert str(capacity).splitlines() == [
        "free after 2 tasks by the paper's threshold: importance < 0.01, whose scale depends on network and method",
        "  neurons     a  0 of 3 (0.0 %)",
        "  parameters  a  1 of 2 (50.0 %)",
        "  parameters  b  2 of 8 (25.0 %)",
        "  parameters  all  3 of 10 (30.0 %)",
    ]


def test_without_importances_nothing_is_known():
    empty = Capacity({}, {}, tasks=1)
    assert math.isnan(empty.free_parameters)
    assert empty.as_dict()["free_neurons"] is None
    assert str(empty).splitlines() == [
        "free after 1 task by the paper's threshold: importance < 0.01, whose scale depends on network and method",
        "  neurons     not measured: no layer is attached",
        "  parameters  not measured: no preserver measures their importance",
    ]


def test_the_reasons_why_nothing_is_measured() -> None:
    assert "neurons     not measured yet: consolidate() measures them when a task ends" in str(Capacity({}, {}, 0))
    assert str(Capacity({}, {}, 1)).splitlines()[1:] == [
        "  neurons     not measured: no layer is attached",
        "  parameters  not measured: no preserver measures their importance",
    ]
