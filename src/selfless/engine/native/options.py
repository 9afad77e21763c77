"""Options of one forward pass over stacked parameters: which outputs to keep, and what to add in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from selfless.engine.draws import Draws
from selfless.engine.native.hardware import HAS_OUT_DTYPE, kernels
from selfless.functional.pairs import add_dense, add_factored

Tensors = dict[str, Tensor]
Product = tuple[Tensor, Tensor | None, float]  # (P, shift, scale) of a gradient scale·hP − shift: P (F, N, N), shift (F, N)


@dataclass
class Measure:
    """Compute Σ_m w_m |∂_m|^power instead of the gradient Σ_m ∂_m. `rows` (F, B) are the weights w_m; set them before the backward pass."""

    power: int
    rows: Tensor | None = None

    def weighted(self, g: Tensor) -> Tensor:
        """Return g (F, B, …) scaled so that |g_m|^power contains the factor w_m."""
        if self.rows is None:
            return g
        rows = self.rows if self.power == 1 else self.rows.sqrt()
        return g * rows.view(*rows.shape, *[1] * (g.dim() - 2)).to(g.dtype)


class Switch:
    """If not `on`, the penalties that hold this switch add nothing in a backward pass."""

    def __init__(self) -> None:
        self.on = True


@dataclass(frozen=True)
class PairGradient:
    """The gradient 2Sh/M of R = 1/M Σ_m hᵀSh for every member: the stacked form of `functional.PairForm`.

    S is `matrix` (F, N, N), or for wide layers AAᵀ − diag d with A = `factors` (F, N, r) and d = `diagonal` (F, N). These tensors already
    contain the factor 2, λ and the learning rate.
    """

    matrix: Tensor | None = None
    factors: Tensor | None = None
    diagonal: Tensor | None = None
    switch: Switch = field(default_factory=Switch)

    @property
    def any_precision(self) -> bool:
        """True if `add_to` also accepts half precision."""
        return self.matrix is not None

    def member(self, m: int) -> PairGradient:
        """Return the gradient of one member."""
        matrix, factors, diagonal = (None if t is None else t[m : m + 1] for t in (self.matrix, self.factors, self.diagonal))
        return PairGradient(matrix, factors, diagonal, self.switch)

    def as_product(self, h: Tensor) -> Product:
        """Return (P, shift, scale) with 2Sh/M = scale·hP − shift."""
        assert self.matrix is not None
        return self.matrix, None, 1 / h.shape[1]

    def add_to(self, g: Tensor, h: Tensor, owed: bool = False) -> Tensor:
        """Return g + 2Sh/M for g, h (F, M, N); `owed`: 0 where h is 0, the backward pass of the ReLU before."""
        if not self.switch.on:
            return _masked(g, h, owed)
        fast = kernels(h)
        if self.matrix is not None:
            if fast is not None and fast.is_map(h):
                added: Tensor = fast.add_product(g.contiguous(), h.contiguous(), *self.as_product(h), owed)
                return added
            return _masked(add_dense(g, h, self.matrix), h, owed)
        assert self.factors is not None
        assert self.diagonal is not None
        if fast is not None:
            result: Tensor = fast.inhibit(g.contiguous(), h.contiguous(), self.factors, self.diagonal, 1 / h.shape[1])
            return _masked(result, h, owed)
        return _masked(add_factored(g, h, self.factors, self.diagonal), h, owed)


@dataclass(frozen=True)
class CovarianceGradient:
    """The gradient 2/M (h − h̄)(S ∘ C) of R = ½ Σ_{i≠j} S_ij C_ij² for every member. `weight` (F,) is λ times the learning rate.

    S is `pairs` (F, N, N), whose diagonal is not read; None: S = 1, as in DeCov.
    """

    weight: Tensor
    switch: Switch = field(default_factory=Switch)
    pairs: Tensor | None = None
    any_precision: ClassVar[bool] = True

    def member(self, m: int) -> CovarianceGradient:
        """Return the gradient of one member."""
        return CovarianceGradient(self.weight[m : m + 1], self.switch, None if self.pairs is None else self.pairs[m : m + 1])

    def as_product(self, h: Tensor) -> Product:
        """Return (P, shift, scale) with 2 weight/M (h − h̄)(S ∘ C) = scale·hP − shift, on a GPU."""
        fast = kernels(h)
        assert fast is not None
        matrix, shift = fast.covariance_matrix(h.contiguous(), self.weight, self.pairs)
        return matrix, shift, 1.0

    def add_to(self, g: Tensor, h: Tensor, owed: bool = False) -> Tensor:
        """Return g + 2 weight/M (h − h̄)(S ∘ C) for g, h (F, M, N), with S_ii = 0; `owed` as in `PairGradient`."""
        if not self.switch.on:
            return _masked(g, h, owed)
        fast = kernels(h)
        if fast is not None and fast.is_map(h):
            added: Tensor = fast.add_product(g.contiguous(), h.contiguous(), *self.as_product(h), owed)
            return added
        x = _centred(h)
        if self.pairs is None and 2 * h.shape[1] <= h.shape[2]:
            return _masked(self._add_by_samples(g, x), h, owed)
        parts = count_parts(*h.shape[1:]) if h.is_cuda else 1
        pairs = _over_samples(x, parts)  # M C
        pairs.diagonal(dim1=1, dim2=2).zero_()
        pairs *= self._per_pair(h)
        if self.pairs is not None:
            pairs *= self.pairs
        return _masked(torch.baddbmm(g, x, pairs.to(x.dtype)), h, owed)

    def _add_by_samples(self, g: Tensor, x: Tensor) -> Tensor:
        """Return g + 2 weight/M² (XXᵀX − X diag XᵀX), by the M×M products of samples, for a layer much wider than the batch.

        The difference is that of rounded numbers: a neuron far larger than all others loses digits, as in the formula of the keeper.
        """
        per_pair = self._per_pair(x)
        products = bmm_wide(x, x.mT) * per_pair
        own = x.to(products.dtype).square().sum(1, keepdim=True) * per_pair
        return torch.baddbmm(torch.addcmul(g, x, own.to(x.dtype), value=-1), products.to(x.dtype), x)

    def _per_pair(self, h: Tensor) -> Tensor:
        """2 weight/M², (F, 1, 1)."""
        return (2 / h.shape[1] ** 2 * self.weight)[:, None, None]


def _centred(h: Tensor) -> Tensor:
    """Return h − h̄ for h (F, M, N), with the means in float32."""
    members, samples = h.shape[:2]
    parts = count_parts(samples, h.shape[2]) if h.is_cuda else 1
    blocks = h.reshape(members * parts, samples // parts, -1)
    sums = bmm_wide(blocks.new_ones(1, 1, 1).expand(len(blocks), 1, samples // parts), blocks)
    return h - (sums.view(members, parts, -1).sum(1, keepdim=True) / samples).to(h.dtype)


def _over_samples(x: Tensor, parts: int) -> Tensor:
    """Return XᵀX (F, N, N) for X (F, M, N), as a sum over so many parts of the samples."""
    members, samples, neurons = x.shape
    blocks = x.reshape(members * parts, samples // parts, neurons)
    return bmm_wide(blocks.mT, blocks).view(members, parts, neurons, neurons).sum(1)


def count_parts(samples: int, neurons: int) -> int:
    """Return into how many parts of the samples a GPU divides hᵀh (N×N) of a member, so that all of it is busy.

    A wide layer fills a GPU alone. Its parts would each be a matrix of N² numbers, written and read once more.
    """
    most = max(1, min(32, 2**20 // neurons**2))
    return math.gcd(samples, 1 << (most.bit_length() - 1))  # a power of two has many divisors in common with a batch


def _masked(g: Tensor, h: Tensor, owed: bool) -> Tensor:
    """Return g, and 0 where h is 0 if `owed`."""
    if not owed:
        return g
    masked: Tensor = torch.ops.aten.threshold_backward(g, h, 0)
    return masked


def bmm_wide(a: Tensor, b: Tensor) -> Tensor:
    """Return the product in float32, also for half precision."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda and HAS_OUT_DTYPE else torch.bmm(a, b).float()


Penalty = PairGradient | CovarianceGradient  # what a layer adds in the backward pass


@dataclass(frozen=True)
class ForwardOptions:
    """Options of one forward pass: keep the outputs of `layers` in `outputs`, inhibit them, measure importances."""

    layers: Collection[str] = ()
    outputs: Tensors = field(default_factory=dict)
    differentiable: Collection[str] | None = None  # the outputs that the caller differentiates; None: all. Each is a copy on a GPU
    inhibit: Mapping[str, Sequence[Penalty]] = field(default_factory=dict)
    measure: Measure | None = None  # what to compute instead of the gradient of parameters; None: the gradient
    weights: Measure | None = None  # has the weights of the samples for the probes
    probes: Mapping[str, Tensor] = field(default_factory=dict)  # layer → zeros (F, N), at the input of the activation
    resized: Collection[str] = ()  # activations that change the number of neurons (Maxout): the probe is at their output
    positive: bool = False  # no input is below zero
    gates: Mapping[str, Tensor] = field(default_factory=dict)  # layer → factors of its outputs (F, N)
    buffers: Tensors = field(default_factory=dict)  # running statistics of batch norm
    draws: Draws | None = None  # the random numbers of every member; None: members share one generator
