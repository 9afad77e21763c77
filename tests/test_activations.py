"""Maxout and LWTA against loops over windows, and the laws they keep."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from selfless.activations import LWTA, Maxout, lwta, maxout

SHAPES = [(5, 12), (3, 4, 12), (2, 12, 3, 5), (12,)]


def windows(x: Tensor, window: int) -> list[Tensor]:
    """The slow, obvious view: a list of windows, each (…, w, …), units moved to the front."""
    units = x.movedim(1 if x.ndim == 4 else -1, 0)
    return [units[i : i + window] for i in range(0, len(units), window)]


def sample(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [1, 2, 3, 12])
def test_maxout_is_the_largest_of_each_window(shape, window):
    x = sample(shape)
    expected = torch.stack([group.amax(0) for group in windows(x, window)])
    assert_close(maxout(x, window).movedim(1 if x.ndim == 4 else -1, 0), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [1, 2, 3, 12])
def test_lwta_keeps_the_winner_and_zeroes_the_rest(shape, window):
    x = sample(shape)
    expected = torch.cat([torch.where(group == group.amax(0), group, 0.0) for group in windows(x, window)])
    assert_close(lwta(x, window), expected.movedim(0, 1 if x.ndim == 4 else -1))


def test_windows_of_one_change_nothing():
    x = sample((4, 6))
    assert_close(maxout(x, 1), x)
    assert_close(lwta(x, 1), x)


def test_maxout_is_the_sum_of_lwta_over_each_window():
    x = sample((7, 12))
    assert_close(maxout(x, 3), lwta(x, 3).reshape(7, 4, 3).sum(-1))


def test_a_negative_winner_keeps_its_value():
    assert_close(lwta(torch.tensor([[-1.0, -2.0]])), torch.tensor([[-1.0, 0.0]]))


@pytest.mark.parametrize("activation", [maxout, lwta])
def test_a_tie_has_exactly_one_winner_and_it_alone_has_a_gradient(activation):
    x = torch.ones(3, 8, requires_grad=True)
    activation(x).sum().backward()
    assert_close(x.grad, torch.tensor([[1.0, 0.0] * 4] * 3))
    assert_close(lwta(torch.ones(3, 8)), torch.tensor([[1.0, 0.0] * 4] * 3))


@pytest.mark.parametrize("module", [Maxout(), LWTA(), Maxout(3), LWTA(3)], ids=repr)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_gradient_vmap_and_compile(module, shape):
    x = sample((4, *shape))
    expected = torch.stack([module(member) for member in x])
    assert_close(torch.func.vmap(module)(x), expected)
    assert torch.autograd.gradcheck(module, x[0].requires_grad_())


@pytest.mark.parametrize("module", [Maxout(), LWTA()], ids=repr)
def test_compiles_without_a_graph_break(module):
    x = sample((3, 8))
    assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), module(x))


@pytest.mark.parametrize("activation", [maxout, lwta])
def test_dtype_empty_batches_and_non_contiguous_input(activation):
    assert activation(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert activation(torch.ones(0, 4)).shape[0] == 0
    x = sample((6, 5)).T
    assert_close(activation(x), activation(x.contiguous()))


@pytest.mark.parametrize("activation", [maxout, lwta])
@pytest.mark.parametrize(("shape", "window"), [((2, 5), 2), ((2, 3, 4, 4), 2), ((2, 4), 0), ((2, 4), 8)])
def test_units_that_do_not_divide_are_refused(activation, shape, window):
    with pytest.raises(ValueError, match=f"units .* do not divide into windows of {window}"):
        activation(torch.ones(shape), window)


def test_other_refusals():
    with pytest.raises(ValueError, match="scalar"):
        maxout(torch.tensor(1.0))
    with pytest.raises(ValueError, match="at least 1"):
        Maxout(0)
