"""Damping: the closed form of the implicit step, its limits, and when the curvature is measured."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from selfless.functional import damping, largest_curvature, measures_curvature

POSITIVE = st.floats(1e-6, 1e6)


@settings(max_examples=50, deadline=None)
@given(lr=POSITIVE, strength=POSITIVE, r=st.floats(0.1, 10.0), slope=st.floats(0.1, 10.0))
def test_it_is_the_step_that_minimises_the_linear_model(lr: float, strength: float, r: float, slope: float) -> None:
    """Δ = argmin λ/2 (r + ∇r Δ)² + Δ²/(2 lr), in one dimension, where D = r²/2 and ∇D = r ∇r."""
    value, gradient = torch.tensor(r**2 / 2, dtype=torch.float64), torch.tensor(r * slope, dtype=torch.float64)
    curvature = largest_curvature(torch.zeros((), dtype=torch.float64), value, gradient.square())
    assert_close(curvature, torch.tensor(slope**2, dtype=torch.float64), rtol=1e-6, atol=0.0)
    step = -lr * strength * damping(torch.tensor(lr * strength, dtype=torch.float64), curvature) * gradient
    best = -(strength * r * slope) / (strength * slope**2 + 1 / lr)
    assert_close(step, torch.tensor(best, dtype=torch.float64), rtol=1e-6, atol=1e-12)
    assert abs(float(step) * slope) <= r * (1 + 1e-9)  # it never passes the goal


def test_without_curvature_nothing_is_damped() -> None:
    assert_close(damping(torch.tensor([0.1, 1e6]), torch.zeros(2)), torch.ones(2))


def test_the_largest_recent_curvature_counts() -> None:
    last = torch.tensor([10.0, 10.0, 10.0])
    got = largest_curvature(last, torch.tensor([1.0, 1.0, 0.0]), torch.tensor([40.0, 2.0, float("inf")]))
    assert_close(got, torch.tensor([20.0, 9.0, 9.0]))


@pytest.mark.parametrize("steps", [7, 23])
def test_it_is_measured_at_first_and_then_now_and_again(steps: int) -> None:
    assert [n for n in range(steps) if measures_curvature(n)] == [0, 1, 2, 3, 4, *range(5, steps, 5)]
