"""The laws of a sparsifier's formula, `penalty`, and of what it declares about it."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from selfless.keeper import attach
from selfless.sparsify import Sparsifier, size_of
from selfless.testing.comparing import Broken, descends, name_of, same
from selfless.testing.small import small_net, small_task


def is_one_number(kind: Sparsifier) -> None:
    """R is one finite number with a finite gradient, with and without α, in every precision."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        h = activations().to(dtype).requires_grad_()
        for alpha in (None, some_alpha()):
            value = size_of(kind, h, alpha)
            if not torch.isfinite(value):
                raise Broken(f"penalty() is {value.item()} for ordinary activations in {name_of(dtype)}")
            if alpha is None and not value.requires_grad:
                continue  # it may begin with the second task
            if not value.requires_grad:
                raise Broken("penalty() does not depend on what it gets; compute it from its first argument, without detach()")
            (gradient,) = torch.autograd.grad(value, h)
            if not gradient.any():
                raise Broken("the gradient of penalty() is 0 for ordinary activations, so it would change nothing")
            if not torch.isfinite(gradient).all():
                raise Broken(f"the gradient of penalty() is not finite in {name_of(dtype)}: a root or a quotient of 0?")


def is_finite_at_rest(kind: Sparsifier) -> None:
    """Silent neurons are what a sparsifier aims at."""
    for samples, alpha in ((7, some_alpha()), (7, None), (1, some_alpha())):
        h = torch.zeros((samples, 10), requires_grad=True)
        value = size_of(kind, h, alpha)
        (gradient,) = torch.autograd.grad(value, h, allow_unused=True) if value.requires_grad else (None,)
        if not torch.isfinite(value) or (gradient is not None and not torch.isfinite(gradient).all()):
            what = "the gradient of penalty()" if torch.isfinite(value) else "penalty()"
            raise Broken(f"{what} is not finite if all activations are 0 (samples: {samples}); add a small number to roots and quotients")


def falls_against_its_gradient(kind: Sparsifier) -> None:
    """Autograd follows `penalty`, unless a function of one's own says otherwise."""
    for alpha in (None, some_alpha()):
        descends(lambda at, alpha=alpha: size_of(kind, at["h"], alpha), {"h": activations() + 0.1})  # type: ignore[misc]


def does_not_grow_with_the_batch(kind: Sparsifier) -> None:
    """The same samples twice cost the same, so that λ does not depend on the size of a batch."""
    h = activations()
    for alpha in (None, some_alpha()):
        same("the same samples twice cost another penalty(), which", size_of(kind, h.repeat(2, 1), alpha), size_of(kind, h, alpha))


def scales_with_its_strength(kind: Sparsifier) -> None:
    """The keeper multiplies by λ, and λ = 0 is off."""
    (x, _), *_ = small_task(0)
    sizes = []
    for strength in (0.0, 1e-3, 2e-3):
        model = small_net()
        keeper = attach(model, sparsify=dataclasses.replace(kind, strength=strength))
        model(x)
        sizes.append(keeper.penalty().item())
    if sizes[0] != 0.0 or not math.isclose(sizes[2], 2 * sizes[1], rel_tol=1e-4, abs_tol=1e-12):
        raise Broken(f"at the strengths 0, 0.001 and 0.002 it costs {sizes}; leave the strength out of penalty()")


def maps_over_members(kind: Sparsifier) -> None:
    """A fleet maps `penalty` over its members."""
    h, alpha = activations(3), torch.rand(3, 10, generator=torch.Generator().manual_seed(1))
    alone = torch.stack([size_of(kind, x, a) for x, a in zip(h, alpha, strict=True)])
    together = torch.func.vmap(kind.penalty)(h, alpha)
    same("penalty() of one member", together, alone)


def is_the_mean_it_declares(kind: Sparsifier) -> None:
    """`is_mean`: over several ranks, the mean of their values is then the value of the whole batch."""
    h = activations().repeat(2, 1) + 0.1 * torch.rand(14, 10, generator=torch.Generator().manual_seed(2))
    for alpha in (None, some_alpha()):
        halves = torch.stack([size_of(kind, half, alpha) for half in h.chunk(2)]).mean()
        same("is_mean = True, but the mean over the halves of a batch", halves, size_of(kind, h, alpha))


def has_the_gradient_it_declares(kind: Sparsifier) -> None:
    """`pair_form`: the engine adds the gradient 2Sh/M of the pair form itself, without calling `penalty`."""
    for alpha in (None, some_alpha()):
        form = kind.pair_form(10, alpha)
        if form is not None:
            h = activations().requires_grad_()
            (gradient,) = torch.autograd.grad(size_of(kind, h, alpha), h)
            same("the gradient of pair_form()", form.gradient(h.detach()), gradient)


def has_the_covariance_it_declares(kind: Sparsifier) -> None:
    """`decorrelates`: the engine adds the gradient of ½ Σ_{i≠j} S_ij C_ij² itself, without calling `penalty`."""
    h = activations()
    centred = h - h.mean(0)
    squares = (centred.T @ centred / len(h)).fill_diagonal_(0.0).square()
    for alpha in (None, some_alpha()):
        form = kind.covariance_form(10, alpha)
        wanted = 0.5 * (squares if form is None else form.matrix(h) * squares).sum()
        same("decorrelates = True, but ½ Σ S_ij C_ij²", wanted, size_of(kind, h, alpha))


def activations(members: int | None = None) -> Tensor:
    shape = (7, 10) if members is None else (members, 7, 10)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).relu()


def some_alpha() -> Tensor:
    return torch.rand(10, generator=torch.Generator().manual_seed(1))
