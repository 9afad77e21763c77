"""The quadratic anchor: its value, and the implicit step as the minimum that it claims to be."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from selfless.functional.anchor import LARGEST, Anchor, anchor_share, anchor_value


def tensors(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 2, generator=generator, dtype=torch.float64) for _ in range(count)]


def test_the_value_is_the_sum_over_the_parameters_that_have_an_importance() -> None:
    theta, star, omega = tensors(3)
    anchor = Anchor({"a": omega.square(), "gone": omega}, {"a": star, "gone": star})
    rows = zip(*(t.flatten().tolist() for t in (omega, theta, star)), strict=True)
    wanted = sum(w * w * (t - s) ** 2 for w, t, s in rows)
    assert float(anchor.value({"a": theta, "b": theta})) == pytest.approx(wanted)
    assert float(anchor_value(theta, omega.square(), star)) == pytest.approx(wanted)
    assert float(anchor.value({"b": theta})) == 0
    two = Anchor({"a": omega.square(), "b": omega.square()}, {"a": star, "b": star})
    assert float(two.value({"a": theta, "b": theta})) == pytest.approx(2 * wanted)


@pytest.mark.parametrize("strength", [1e-3, 1.0, 1e6])
def test_the_implicit_step_is_a_minimum(strength: float) -> None:
    theta, star, omega = tensors(3)
    omega, step = omega.square(), torch.tensor(0.1 * strength, dtype=torch.float64)
    share = Anchor({"a": omega, "b": omega}, {"a": star, "b": star}).shares({"a": step})
    assert list(share) == ["a"]
    after = (theta + share["a"] * (star - theta)).requires_grad_()
    (2 * step * omega * (after - star).square() + (after - theta).square()).sum().backward()
    assert_close(after.grad, torch.zeros_like(theta), atol=1e-9 * max(strength, 1), rtol=0)


def test_the_share_is_exact_at_the_ends() -> None:
    omega = torch.tensor([0.0, 1.0, 3.0, LARGEST, torch.inf])
    assert anchor_share(omega, torch.tensor(1.0)).tolist() == [0, 0.5, 0.75, 1, 1]
    assert anchor_share(omega[:4], torch.tensor(1e30)).tolist() == [0, 1, 1, 1]
