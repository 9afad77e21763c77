"""Directions of inputs by energy, against the singular values of the inputs themselves."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from selfless.functional.subspace import along, new_directions, pack, sizes_along


def inputs(rank: int = 6, seed: int = 0) -> torch.Tensor:
    """Ten inputs of six features, as columns, with singular values that fall by half."""
    q = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]
    r = torch.linalg.qr(torch.randn(10, 6, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64))[0]
    s = 0.5 ** torch.arange(6, dtype=torch.float64) * (torch.arange(6) < rank)
    return (q * s) @ r.mT


@pytest.mark.parametrize("energy", [0.5, 0.76, 0.97, 1.0])
def test_without_a_basis_they_are_the_first_singular_vectors(energy: float) -> None:
    x = inputs()
    u, s, _ = torch.linalg.svd(x)
    count = int((s.square().cumsum(0) / s.square().sum() < energy - 1e-12).sum()) + 1
    vectors, values = new_directions(torch.zeros(6, 0, dtype=torch.float64), x @ x.mT, energy)
    assert_close(values, torch.where(torch.arange(6) < count, s, 0.0))
    assert_close(vectors @ vectors.mT, u[:, :count] @ u[:, :count].mT)
    assert int((vectors.norm(dim=0) > 0).sum()) == count


def test_only_what_the_basis_lacks_is_added() -> None:
    old, new = inputs(rank=2), inputs(seed=5)
    basis, _ = new_directions(torch.zeros(6, 0, dtype=torch.float64), old @ old.mT, 1.0)
    basis, scale = pack(basis, basis.norm(dim=0))
    assert int((scale > 0).sum()) == 2
    vectors, _ = new_directions(basis, new @ new.mT, 0.99)
    assert_close(basis.mT @ vectors, torch.zeros(6, 6, dtype=torch.float64))
    both = torch.cat([basis, vectors], 1)
    assert float((both.mT @ new).square().sum() / new.square().sum()) >= 0.99
    used = [v for v in vectors.mT if v.norm() > 0]
    without = torch.cat([basis, *(v[:, None] for v in used[:-1])], 1)
    assert float((without.mT @ new).square().sum() / new.square().sum()) < 0.99  # the last one was needed
    nothing, zeros = new_directions(basis, old @ old.mT, 1.0)
    assert not nothing.any()
    assert not zeros.any()


def test_sizes_are_those_of_the_inputs_along_each_column() -> None:
    x, basis = inputs(), torch.linalg.qr(inputs(seed=3))[0][:, :4]
    assert_close(sizes_along(basis, x @ x.mT), (basis.mT @ x).norm(dim=1))


def test_packing_puts_used_columns_first_and_keeps_at_most_as_many_as_features() -> None:
    basis, scale = torch.arange(8.0).repeat(3, 1), torch.tensor([0, 2.0, 0, 1, 0, 0, 3, 0])
    columns, scales = pack(basis, scale)
    assert columns[0].tolist() == [1, 3, 6]
    assert scales.tolist() == [2, 1, 3]


def test_the_part_along_a_basis_is_a_projection_if_every_scale_is_one() -> None:
    basis = torch.linalg.qr(inputs(seed=3))[0][:, :4]
    step = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = torch.tensor([1.0, 0.5, 0.0, 2.0], dtype=torch.float64)
    wanted = torch.stack([sum(s * (row.flatten() @ m) * m for m, s in zip(basis.mT, scale, strict=True)) for row in step])  # type: ignore[arg-type]
    assert_close(along(step, basis, scale), wanted.view(5, 2, 3))
    whole = along(step, basis, torch.ones(4, dtype=torch.float64))
    assert_close(along(whole, basis, torch.ones(4, dtype=torch.float64)), whole)
