"""Options of one forward pass over stacked parameters: which outputs to keep, and what to add in the backward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from selfless.engine.native.hardware import kernels
from selfless.functional.pairs import add_dense, add_factored

Tensors = dict[str, Tensor]


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


@dataclass(frozen=True)
class PairGradient:
    """The gradient 2Sh/M of R = 1/M Σ_m hᵀSh for every member: the stacked form of `functional.PairForm`.

    S is `matrix` (F, N, N), or for wide layers AAᵀ − diag d with A = `factors` (F, N, r) and d = `diagonal` (F, N). These tensors already
    contain the factor 2, λ and the learning rate.
    """

    matrix: Tensor | None = None
    factors: Tensor | None = None
    diagonal: Tensor | None = None

    def add_to(self, g: Tensor, h: Tensor) -> Tensor:
        """Return g + 2Sh/M for g, h (F, M, N)."""
        if self.matrix is not None:
            return add_dense(g, h, self.matrix)
        assert self.factors is not None
        assert self.diagonal is not None
        fast = kernels(h)
        if fast is not None:
            result: Tensor = fast.inhibit(g.contiguous(), h.contiguous(), self.factors, self.diagonal, 1 / h.shape[1])
            return result
        return add_factored(g, h, self.factors, self.diagonal)


@dataclass(frozen=True)
class ForwardOptions:
    """Options of one forward pass: keep the outputs of `layers` in `outputs`, inhibit them, measure importances."""

    layers: Collection[str] = ()
    outputs: Tensors = field(default_factory=dict)
    inhibit: Mapping[str, Sequence[PairGradient]] = field(default_factory=dict)
    measure: Measure | None = None  # what to compute instead of the gradient of parameters; None: the gradient
    weights: Measure | None = None  # has the weights of the samples for the probes
    probes: Mapping[str, Tensor] = field(default_factory=dict)  # layer → zeros (F, N), at the input of the activation
    resized: Collection[str] = ()  # activations that change the number of neurons (Maxout): the probe is at their output
    positive: bool = False  # no input is below zero
    gates: Mapping[str, Tensor] = field(default_factory=dict)  # layer → factors of its outputs (F, N)
