"""Norms of groups and their proximal step, against a sum by group and against the minimum it claims to be."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from selfless.functional.groups import group_norm, shrink_groups


def parts() -> list[torch.Tensor]:
    """A matrix, a bias and a convolution whose rows belong to four groups."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 3), (4,), (4, 2, 3, 3))]


def test_the_norm_is_that_of_all_entries_of_a_group() -> None:
    for n, norm in enumerate(group_norm(parts())):
        assert_close(norm, torch.cat([part[n].flatten() for part in parts()]).norm())


def test_the_step_is_the_minimum_of_its_objective() -> None:
    given = parts()
    centres = [part.flip(0) / 3 for part in given]
    amount = torch.tensor([0.0, 0.5, 1.0, 100.0], dtype=torch.float64)
    found = shrink_groups(given, centres, amount)

    def objective(theta: list[torch.Tensor]) -> torch.Tensor:
        near = sum(((t - g).square().sum() for t, g in zip(theta, given, strict=True)), torch.zeros((), dtype=torch.float64))
        return near / 2 + (amount * group_norm([t - c for t, c in zip(theta, centres, strict=True)])).sum()

    least = objective(found)
    generator = torch.Generator().manual_seed(1)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(20):
            other = [t + size * torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in found]
            assert objective(other) > least
    for part, centre, now in zip(given, centres, found, strict=True):
        assert torch.equal(now[0], part[0])  # an amount of 0 changes nothing
        assert torch.equal(now[3], centre[3])  # a group nearer than its amount becomes its centre


def test_a_group_at_its_centre_stays() -> None:
    (theta,) = shrink_groups([torch.ones(2, 3)], [torch.ones(2, 3)], torch.tensor([0.0, 1.0]))
    assert torch.equal(theta, torch.ones(2, 3))
