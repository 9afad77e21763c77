"""Sparsifiers: penalties that leave free capacity for later tasks. Each is a frozen value around one formula of `selfless.functional`.

`reads` says what a sparsifier acts on: the activations of the chosen layers, their weights, or every trainable parameter.
`penalty(x, alpha)` is the formula for one layer or parameter, without the strength. The keeper and the engine add λ·Σ_l penalty(x_l, α_l)
to the loss. To add a sparsifier, add a dataclass here, an entry to `SPARSIFIERS` and a row to tests/test_contracts.py. Sparsifiers can be
summed: `SLNID(1e-3) + DeCov(1e-3)`.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from selfless import functional
from selfless.functional import Discount, PairForm
from selfless.functional.gaussian import resolve_sigma
from selfless.terms import Strength, Term, check_choice, check_positive, one_number

Reads = Literal["activations", "weights", "parameters"]


@dataclass(frozen=True)
class Sparsifier(Term):
    """A term λ_SSL Σ_l R(H_l) of the loss; λ_SSL is `strength`."""

    role: ClassVar[str] = "sparsifier"
    strength: Strength
    reads: ClassVar[Reads] = "activations"
    decorrelates: ClassVar[bool] = False  # True if R is ½ Σ_{i≠j} S_ij C_ij², as DeCov; the engine then adds its gradient itself
    is_mean: ClassVar[bool] = False  # True if R is a mean over samples; over several ranks it then needs no other rank's activations

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset `pair_form`, `decorrelates` and `is_mean` in a subclass that overrides `penalty`: they describe the parent's."""
        super().__init_subclass__(**options)
        if "penalty" in cls.__dict__:
            _check_arguments(cls)
            for name in ("pair_form", "decorrelates", "is_mean"):  # what the parent says of its own formula
                if name not in cls.__dict__:
                    setattr(cls, name, Sparsifier.__dict__[name])
        if cls.is_custom() and ("pairs" in cls.__dict__ or "factors" in cls.__dict__):
            warnings.warn(
                f"{cls.__name__}: pairs() and factors() are not read any more, and its penalty() is used; "
                "for the fast gradient return a selfless.functional.PairForm from pair_form()",
                DeprecationWarning,
                stacklevel=3,
            )

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        """Return R of one layer or parameter, without the strength; `alpha` (N,) is None before the first consolidation."""
        raise NotImplementedError(f"{type(self).__name__} has no penalty: write penalty(self, x, alpha=None), which returns one number")

    def pair_form(self, n: int, alpha: Tensor | None = None) -> PairForm | None:
        """Return the pair form of a layer of n neurons if R = 1/M Σ_m hᵀSh, else None. The engine then adds the gradient 2Sh/M itself."""
        return None

    def covariance_form(self, n: int, alpha: Tensor | None = None) -> PairForm | None:
        """Return S of a sparsifier that decorrelates, R = ½ Σ_{i≠j} S_ij C_ij²; None if S_ij = 1."""
        return None


def _check_arguments(kind: type[Sparsifier]) -> None:
    """Raise TypeError unless `penalty` takes activations and α, as it is called."""
    function = kind.__dict__["penalty"]
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        return  # its arguments are not known
    taken = inspect.signature(function)
    try:
        taken.bind(None, None, None)
    except TypeError:
        names = ", ".join(taken.parameters)
        raise TypeError(f"{kind.__name__}.penalty takes ({names}) and gets activations and α: write penalty(self, x, alpha=None)") from None


def size_of(kind: Sparsifier, x: Tensor, alpha: Tensor | None = None) -> Tensor:
    """Return `kind.penalty(x, alpha)`; raise ValueError if it is not one number."""
    value: Tensor = one_number(kind.penalty(x, alpha), f"{type(kind).__name__}.penalty")
    return value


@dataclass(frozen=True)
class NoSparsifier(Sparsifier):
    """No penalty: No-Reg in the paper."""

    name: ClassVar[str] = "none"
    strength: float = 0.0

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return x.new_zeros(())


class _Inhibition:
    """Common part of SNI, SNID, SLNI and SLNID: R = 1/M Σ_m hᵀSh with S from `form`; if `absolute`, |h| replaces h."""

    is_mean: ClassVar[bool] = True
    auto_share: ClassVar[float | None] = 0.05  # docs/lab-notes/auto.md: measured on five networks
    absolute: bool

    def form(self, n: int, alpha: Tensor | None) -> PairForm:
        raise NotImplementedError

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        h = functional.samples(x, self.absolute)
        return self.form(h.shape[1], alpha).value(h)

    def pair_form(self, n: int, alpha: Tensor | None = None) -> PairForm | None:
        return None if self.absolute else self.form(n, alpha)


@dataclass(frozen=True)
class SNI(_Inhibition, Sparsifier):
    """Inhibition between all neurons of a layer (`functional.sni`)."""

    name: ClassVar[str] = "sni"
    strength: Strength = 1e-3
    absolute: bool = False

    def form(self, n: int, alpha: Tensor | None) -> PairForm:
        return PairForm(n)


@dataclass(frozen=True)
class SNID(_Inhibition, Sparsifier):
    """SNI that inhibits important neurons less (`functional.snid`)."""

    name: ClassVar[str] = "snid"
    strength: Strength = 1e-3
    discount: Discount = "product"
    absolute: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "discount", ("product", "max"))

    def form(self, n: int, alpha: Tensor | None) -> PairForm:
        return PairForm(n, None, alpha, self.discount)


@dataclass(frozen=True)
class SLNI(_Inhibition, Sparsifier):
    """Inhibition between neighbouring neurons (`functional.slni`). `sigma` is in neurons; None is the paper's N/6."""

    name: ClassVar[str] = "slni"
    strength: Strength = 1e-3
    sigma: float | None = None
    absolute: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sigma")

    def form(self, n: int, alpha: Tensor | None) -> PairForm:
        return PairForm(n, resolve_sigma(self.sigma, n))


@dataclass(frozen=True)
class SLNID(_Inhibition, Sparsifier):
    """Local inhibition that inhibits important neurons less: the method of the paper (`functional.slnid`)."""

    name: ClassVar[str] = "slnid"
    strength: Strength = 1e-3
    sigma: float | None = None
    discount: Discount = "product"
    absolute: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sigma")
        check_choice(self, "discount", ("product", "max"))

    def form(self, n: int, alpha: Tensor | None) -> PairForm:
        return PairForm(n, resolve_sigma(self.sigma, n), alpha, self.discount)


@dataclass(frozen=True)
class L1Rep(Sparsifier):
    """L1 norm of the activations: few active neurons (`functional.l1_rep`)."""

    name: ClassVar[str] = "l1-rep"
    is_mean: ClassVar[bool] = True
    strength: float = 1e-5

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return functional.l1_rep(x)


@dataclass(frozen=True)
class DeCov(Sparsifier):
    """Penalty on correlated activations (`functional.decov`)."""

    name: ClassVar[str] = "decov"
    decorrelates: ClassVar[bool] = True
    strength: float = 1e-4

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return functional.decov(x)


@dataclass(frozen=True)
class SparingDeCov(Sparsifier):
    """DeCov that spares what old tasks need: SLNID's discount and locality on covariances (`functional.sparing_decov`).

        R = ½ Σ_{i≠j} D_ij K_ij C_ij²        ∂R/∂h_m = 2/M (S ∘ C)(h_m − h̄),   S_ij = D_ij K_ij,  S_ii = 0

    SLNID sums D_ij K_ij E[hᵢhⱼ]; here E[hᵢhⱼ] becomes C_ij², the squared covariance. SLNID makes neurons silent, and this one makes them
    differ. With D_ij = dᵢdⱼ, d = exp(−α), the pair (i, j) of R is that of DeCov for the activations √d·h: a neuron that old tasks need
    counts as if it were scaled down, so it is not moved to make room. Derivation of the gradient: dC_ij = 1/M Σ_m (dhᵢ xⱼ + xᵢ dhⱼ) with
    x = h − h̄ (the change of h̄ cancels, since Σ_m x = 0), and S is symmetric.

    local      K_ij = exp(−(i−j)²/2σ²), σ = `sigma` or N/6; False: K = 1
    discount   D_ij = exp(−(αᵢ+αⱼ)) for "product", exp(−max(αᵢ, αⱼ)) for "max"; "none": D = 1
    """

    name: ClassVar[str] = "decov-sparing"
    decorrelates: ClassVar[bool] = True
    strength: float = 1e-4
    sigma: float | None = None
    local: bool = True
    discount: Discount | Literal["none"] = "product"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sigma")
        check_choice(self, "discount", ("product", "max", "none"))

    def covariance_form(self, n: int, alpha: Tensor | None = None) -> PairForm | None:
        sigma = resolve_sigma(self.sigma, n) if self.local else None
        return PairForm(n, sigma) if self.discount == "none" else PairForm(n, sigma, alpha, self.discount)

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        h = functional.samples(x)
        form = self.covariance_form(h.shape[1], alpha)
        assert form is not None
        return functional.sparing_decov(h, form)


@dataclass(frozen=True)
class L1Param(Sparsifier):
    """L1 norm of every trainable parameter: sparse parameters (`functional.l1_param`)."""

    name: ClassVar[str] = "l1-param"
    reads: ClassVar[Reads] = "parameters"
    strength: float = 1e-5

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return functional.l1_param(x)


@dataclass(frozen=True)
class L2Param(Sparsifier):
    """Weight decay of every trainable parameter (`functional.l2_param`): L2-WD in the paper."""

    name: ClassVar[str] = "l2-wd"
    reads: ClassVar[Reads] = "parameters"
    strength: float = 1e-4

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return functional.l2_param(x)


@dataclass(frozen=True)
class OrthReg(Sparsifier):
    """Penalty on correlated incoming weights of the chosen layers (`functional.orth_reg`)."""

    name: ClassVar[str] = "orth-reg"
    reads: ClassVar[Reads] = "weights"
    strength: float = 1e-3
    sharpness: float = 10.0

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return functional.orth_reg(x, self.sharpness)


SPARSIFIERS: dict[str, type[Sparsifier]] = {
    kind.name: kind for kind in (NoSparsifier, SNI, SNID, SLNI, SLNID, L1Rep, DeCov, SparingDeCov, L1Param, L2Param, OrthReg)
}
