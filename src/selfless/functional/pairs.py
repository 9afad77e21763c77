"""The pair form R = 1/M Σ_m hᵀSh: its value, its gradient 2Sh/M, its matrix S, its low-rank factors.

SNI, SNID, SLNI and SLNID are pair forms. `selfless.engine.inhibition` adds the gradient of many networks at once, with `add_dense` and
`add_factored` or, on a GPU, a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from selfless.functional.gaussian import band, bell, feature_count, fourier, gaussian, is_ordinary, reach
from selfless.functional.shapes import without_autocast

Discount = Literal["product", "max"]
Made = TypeVar("Made")
Operands = tuple[Tensor, Tensor | None]  # (S, None), or (A, d) with S = AAᵀ − diag d

DENSE = 128  # up to this width the N×N kernel is the fastest form on a CPU; above it no N×N tensor is built
DENSE_ON_GPU = 512  # there fewer kernels count for more than less arithmetic
_BY_ALPHA: MutableMapping[Tensor, tuple[tuple[object, ...], object]] = WeakIdKeyDictionary()  # S or its factors, while α lives
_BLOCK = 64  # neurons per block in the `max` discount, whose cost is O(M·N·block)


@dataclass(frozen=True)
class PairForm:
    """S of N neurons: S_ij = K_ij D_ij for i ≠ j, S_ii = 0.

    K_ij = exp(−(i−j)²/2σ²), or 1 if `sigma` is None.
    D_ij = exp(−(αᵢ+αⱼ)) for `discount="product"`, exp(−max(αᵢ, αⱼ)) for `"max"`, and 1 if `alpha` is None.
    """

    n: int
    sigma: float | None = None
    alpha: Tensor | None = None
    discount: Discount = "product"

    def __post_init__(self) -> None:
        if self.discount not in ("product", "max"):
            raise ValueError(f"discount is {self.discount!r}; it must be 'product' (the paper) or 'max' (the released code)")
        if self.alpha is not None and self.alpha.shape != (self.n,):
            raise ValueError(f"alpha has shape {tuple(self.alpha.shape)}, but h has {self.n} neurons: alpha must be ({self.n},)")

    def value(self, h: Tensor) -> Tensor:
        """R = 1/M Σ_m hᵀSh for h (M, N). For N > 128 (on a GPU 512) no N×N tensor is built."""
        if self.n <= _dense(h) and (self.sigma is not None or self.discount == "max"):
            return self._dense_value(h)
        if self.alpha is not None:
            if self.discount == "max":
                return _discounted_pairs(h, self._d(h), self.sigma)
            h = h * self._d(h)  # D_ij factors into dᵢdⱼ
        return _all_pairs(h) if self.sigma is None else _near_pairs(h, self.sigma)

    def _dense_value(self, h: Tensor) -> Tensor:
        """1/M ⟨h, hS⟩: two kernels and a division, whatever S is."""
        with without_autocast(h):
            return torch.vdot((h @ self.matrix(h)).flatten(), h.flatten()) / len(h)

    def gradient(self, h: Tensor) -> Tensor:
        """∂R/∂h = 2Sh/M, (M, N). It builds the N×N tensor if the form has no factors."""
        return _gradient(h, self.operands(h) or (self.matrix(h), None))

    def operands(self, like: Tensor) -> Operands | None:
        """Return what the gradient needs: (A, d) of a wide layer, None if it has no factors; S of a narrow one."""
        return (self.matrix(like), None) if self.n <= _dense(like) else self._kept("factors", like, self.factors)

    def _d(self, like: Tensor) -> Tensor:
        """d = exp(−α), (N,): D_ij is dᵢdⱼ or min(dᵢ, dⱼ)."""
        assert self.alpha is not None
        return torch.exp(-self.alpha.to(like.dtype))

    def matrix(self, like: Tensor) -> Tensor:
        """Return S (N, N), for narrow layers."""
        return self._kept("matrix", like, self._matrix)

    def _kept(self, what: str, like: Tensor, make: Callable[[Tensor], Made]) -> Made:
        """Return make(like), computed once for each α: it changes once a task."""
        alpha = self.alpha
        if alpha is None or not (is_ordinary(alpha) and is_ordinary(like)) or alpha.requires_grad or alpha.is_inference():
            return make(like)
        key = (what, self.sigma, self.discount, like.device, like.dtype, alpha._version)
        found = _BY_ALPHA.get(alpha)
        if found is None or found[0] != key:
            found = _BY_ALPHA[alpha] = (key, make(like))
        return found[1]  # type: ignore[return-value]

    def _matrix(self, like: Tensor) -> Tensor:
        kernel = _ones(self.n, like) if self.sigma is None else gaussian(self.n, self.sigma, like)
        if self.alpha is None:
            return kernel
        d = self._d(like)
        return kernel * (d[:, None] * d if self.discount == "product" else torch.minimum(d[:, None], d))

    def factors(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (A (N, r), d (N,)) with S = AAᵀ − diag d and r ≪ N, for wide layers; None if there is no such form with a small r."""
        if self.alpha is not None and self.discount == "max":
            return None
        if self.sigma is None:
            features, diagonal = torch.ones(self.n, 1, device=like.device, dtype=like.dtype), 1.0
        elif 4 * feature_count(self.n, self.sigma) > self.n:
            return None
        else:
            features, diagonal = fourier(self.n, self.sigma, like)
        ones = torch.ones(self.n, device=like.device, dtype=like.dtype)
        d = ones if self.alpha is None else self._d(like)
        return features * d[:, None], diagonal * d.square()


def _gradient(h: Tensor, operands: Operands) -> Tensor:
    """2Sh/M."""
    a, diagonal = operands
    factor = 2 / h.shape[0]
    if diagonal is None:
        return torch.addmm(h, h, a, beta=0, alpha=factor)
    return torch.addmm(h * diagonal, h @ a, a.T, beta=-factor, alpha=factor)


class _Values(torch.autograd.Function):
    """R of some layers, (layers,). Their gradients G = 2Sh/M come with the values, ½⟨G, h⟩; the backward pass only multiplies."""

    @staticmethod
    def forward(ctx: Any, forms: Sequence[PairForm], operands: Sequence[Operands], *hs: Tensor) -> Tensor:
        gradients = [_gradient(h, own) for h, own in zip(hs, operands, strict=True)]
        ctx.forms = forms
        ctx.save_for_backward(*hs, *gradients)
        return torch.stack([torch.vdot(g.view(-1), h.reshape(-1)) for g, h in zip(gradients, hs, strict=True)]).mul_(0.5)

    @staticmethod
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor | None, ...]:
        hs, gradients = ctx.saved_tensors[: len(factors)], ctx.saved_tensors[len(factors) :]
        if torch.is_grad_enabled():  # someone differentiates twice
            gradients = [form.gradient(h) for form, h in zip(ctx.forms, hs, strict=True)]
        return (None, None, *(factor * g for factor, g in zip(factors.unbind(), gradients, strict=True)))


def pair_values(forms: Sequence[PairForm], hs: Sequence[Tensor]) -> Tensor:
    """Return R of some layers h (M, N), each with its form: (layers,), as `PairForm.value`, with fewer kernels in a training loop."""
    operands = [form.operands(h) if is_ordinary(h) else None for form, h in zip(forms, hs, strict=True)]
    known = [own for own in operands if own is not None]
    if len(known) < len(hs):
        return torch.stack([form.value(h) for form, h in zip(forms, hs, strict=True)])
    with without_autocast(hs[0]):
        return _Values.apply(tuple(forms), known, *hs)  # type: ignore[no-any-return, no-untyped-call]


class StackedForm:
    """The forms of layers of the same shape (M, N) with a strength λ, for the steps of a training loop: S is computed once."""

    def __init__(self, operands: Sequence[Operands], strength: float, samples: int) -> None:
        factor = 2 * strength / samples
        diagonals = [d for _, d in operands if d is not None]
        self._a = torch.stack([a for a, _ in operands])
        self._scaled = factor * self._a  # 2λS/M, or 2λA/M
        self._diagonal = factor * torch.stack(diagonals).unsqueeze(1) if diagonals else None
        self.halves = torch.full((len(operands),), 0.5, device=self._a.device, dtype=self._a.dtype)

    def gradient(self, h: Tensor) -> Tensor:
        """2λSh/M for h (L, M, N)."""
        if self._diagonal is None:
            return torch.bmm(h, self._scaled)
        return torch.baddbmm(h * self._diagonal, torch.bmm(h, self._scaled), self._a.mT, beta=-1)

    def sizes(self, hs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return λ Σ_l R; and without a gradient 2λR of each layer, (L,), and the layers as one tensor (L, M, N)."""
        return _Stacked.apply(self, *hs)  # type: ignore[no-any-return, no-untyped-call]


class LayerForm:
    """The form of one layer h (M, N) with a strength λ, for a backward pass: S is computed once."""

    def __init__(self, operands: Operands, strength: float, samples: int) -> None:
        self._a, diagonal = operands
        factor = 2 * strength / samples
        self._scaled = factor * self._a  # 2λS/M, or 2λA/M
        self._diagonal = None if diagonal is None else factor * diagonal

    def add(self, gradient: Tensor, h: Tensor, scale: float = 1.0) -> Tensor:
        """Return gradient + s · 2λSh/M."""
        if self._diagonal is None:
            return torch.addmm(gradient, h, self._scaled, alpha=scale)
        return torch.addmm(torch.addcmul(gradient, h, self._diagonal, value=-scale), h @ self._scaled, self._a.T, alpha=scale)

    def gradient(self, h: Tensor) -> Tensor:
        """Return 2λSh/M."""
        with without_autocast(h):
            if self._diagonal is None:
                return h @ self._scaled
            return torch.addmm(h * self._diagonal, h @ self._scaled, self._a.T, beta=-1)

    def value(self, h: Tensor, gradient: Tensor | None = None) -> Tensor:
        """Return λR = ½⟨2λSh/M, h⟩; the gradient 2λSh/M may be given."""
        gradient = self.gradient(h) if gradient is None else gradient
        with without_autocast(h):
            return 0.5 * torch.vdot(gradient.flatten(), h.flatten())


class _Stacked(torch.autograd.Function):
    """`StackedForm.sizes`: ½⟨G, h⟩ with the gradient G, which the backward pass only multiplies."""

    @staticmethod
    def forward(ctx: Any, form: StackedForm, *hs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.stack(hs)
        gradient = form.gradient(h)
        twice = (gradient * h).sum((1, 2))
        ctx.form = form
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(twice, h)
        ctx.save_for_backward(gradient, *hs)
        return torch.dot(twice, form.halves), twice, h

    @staticmethod
    def backward(ctx: Any, factor: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient, *hs = ctx.saved_tensors
        if torch.is_grad_enabled():  # someone differentiates twice
            gradient = ctx.form.gradient(torch.stack(hs))
        return (None, *([None] * len(hs) if factor is None else (gradient * factor).unbind()))


def _dense(like: Tensor) -> int:
    """Return the largest width at which an N×N tensor is built."""
    return DENSE_ON_GPU if like.is_cuda else DENSE


def add_dense(g: Tensor, h: Tensor, s: Tensor) -> Tensor:
    """g + Sh/M for g, h (F, M, N) and S (F, N, N)."""
    return torch.baddbmm(g, h, s.to(h.dtype), alpha=1 / h.shape[1])


def add_factored(g: Tensor, h: Tensor, a: Tensor, d: Tensor) -> Tensor:
    """g + (AAᵀ − diag d)h/M for g, h (F, M, N), A (F, N, r) and d (F, N)."""
    share = 1 / h.shape[1]
    g = torch.baddbmm(g, torch.bmm(h, a), a.mT, alpha=share)
    return g.addcmul_(h, d.unsqueeze(1), value=-share)


def _ones(n: int, like: Tensor) -> Tensor:
    """K = 1 with a zero diagonal."""
    return 1 - torch.eye(n, device=like.device, dtype=like.dtype)


def _all_pairs(h: Tensor) -> Tensor:
    """1/M Σ_{i≠j} Σ_m hᵢ hⱼ = mean_m [(Σᵢ hᵢ)² − Σᵢ hᵢ²]."""
    return (h.sum(1).square() - h.square().sum(1)).mean()


def _near_pairs(h: Tensor, sigma: float) -> Tensor:
    """1/M Σ_{i≠j} K_ij Σ_m hᵢ hⱼ with the Gaussian K: as a band or by Fourier features, whichever is cheaper."""
    n = h.shape[1]
    with without_autocast(h):
        if reach(sigma) < feature_count(n, sigma):  # σ of a few neurons: a short convolution
            near = F.conv1d(h.unsqueeze(1), band(sigma, h).view(1, 1, -1), padding=reach(sigma)).squeeze(1)
            return (near * h).sum(1).mean()
        features, diagonal = fourier(n, sigma, h)
        return ((h @ features).square().sum(1) - diagonal * h.square().sum(1)).mean()


def _discounted_pairs(h: Tensor, d: Tensor, sigma: float | None) -> Tensor:
    """1/M Σ_{i≠j} K_ij min(dᵢ, dⱼ) Σ_m hᵢ hⱼ, d = exp(−α)  (K = 1 if σ is None), for wide layers: no N×N tensor is built.

    Sort the neurons by d, so that min(dᵢ, dⱼ) is d of the earlier one, and cut the sorted order into blocks. Pairs within a block are
    summed directly. Pairs of two blocks use the features φ of K: 2 Σ_b ⟨Σ_{i∈b} dᵢφ(i)hᵢ, Σ_{j in later blocks} φ(j)hⱼ⟩.
    """
    n = h.shape[1]
    with without_autocast(h):
        if sigma is not None and reach(sigma) < feature_count(n, sigma):  # σ of a few neurons: neighbours only
            near = bell(torch.arange(1, reach(sigma) + 1, device=h.device, dtype=torch.float64), sigma).to(h.dtype)
            pairs = [near[k - 1] * torch.minimum(d[k:], d[:-k]) * h[:, k:] * h[:, :-k] for k in range(1, min(n, len(near) + 1))]
            return 2 * torch.stack([p.sum(1) for p in pairs]).sum(0).mean()
        order = torch.argsort(d)
        pad = -n % _BLOCK
        neuron = F.pad(order, (0, pad)).view(-1, _BLOCK)  # the neuron at each position of the order, (blocks, block)
        h = F.pad(h[:, order], (0, pad)).view(h.shape[0], -1, _BLOCK).transpose(0, 1)  # (blocks, M, block), padded with zeros
        d = F.pad(d[order], (0, pad)).view(-1, _BLOCK)
        weight = torch.minimum(d[:, :, None], d[:, None, :]) * (1 - torch.eye(_BLOCK, device=h.device, dtype=h.dtype))
        if sigma is None:
            phi = torch.ones_like(d).unsqueeze(2)
        else:
            phi = fourier(n, sigma, h)[0][neuron]
            weight = weight * bell(neuron[:, :, None] - neuron[:, None, :], sigma).to(h.dtype)
        inside = ((h @ weight) * h).sum((0, 2))
        sums = h @ phi  # (blocks, M, F)
        later = sums.flip(0).cumsum(0).flip(0) - sums
        across = (((h * d[:, None, :]) @ phi) * later).sum((0, 2))
        return (inside + 2 * across).mean()
