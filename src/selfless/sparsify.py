"""What leaves room: each sparsifier is a frozen value over one formula of `selfless.functional`.

A sparsifier says what it reads (`reads`: the activations of the chosen layers, the weights of the chosen layers, or every
trainable parameter), and `penalty(x, alpha)` is its formula for one of them, without the strength. λ·Σ_l penalty(x_l, α_l) is
then the same two lines in the keeper and in the engine. To add one: a dataclass here, an entry in `SPARSIFIERS`, a contract row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from selfless import functional
from selfless.functional import Discount
from selfless.terms import Term, check_choice, check_positive


@dataclass(frozen=True)
class Sparsifier(Term):
    """R(H_l), summed over layers and multiplied by `strength` (λ_SSL)."""

    strength: float
    reads: ClassVar[Literal["activations", "weights", "parameters"]] = "activations"
    discounted: ClassVar[bool] = False  # whether α matters: spares the neurons that earlier tasks need

    def __init_subclass__(cls, **options: Any) -> None:
        """A formula of its own is not that of the pairs, or of the factors, which a class inherits."""
        super().__init_subclass__(**options)
        own = cls.__dict__
        if "penalty" in own and "pairs" not in own:
            cls.pairs = Sparsifier.pairs  # type: ignore[method-assign]
        if ("penalty" in own or "pairs" in own) and "factors" not in own:
            cls.factors = Sparsifier.factors  # type: ignore[method-assign]

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        """R of one layer (or one parameter), unscaled. `alpha` is None before the first consolidation: no discount."""
        raise NotImplementedError

    def pairs(self, n: int, like: Tensor, alpha: Tensor | None = None) -> Tensor | None:
        """S (N, N) where R = 1/M Σ_m hᵀSh and no more (`functional.pair_weights`); None for any other penalty."""
        return None

    def factors(self, n: int, like: Tensor, alpha: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """(A, d) with S = AAᵀ − diag d, for wide layers (`functional.pair_factors`); None where there is no such form."""
        return None


@dataclass(frozen=True)
class NoSparsifier(Sparsifier):
    """No penalty: the paper's No-Reg."""

    name: ClassVar[str] = "none"
    strength: float = 0.0

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return x.new_zeros(())


@dataclass(frozen=True)
class SNI(Sparsifier):
    """Inhibition between all neurons of a layer (`functional.sni`)."""

    name: ClassVar[str] = "sni"
    strength: float = 1e-3
    absolute: bool = False

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return functional.sni(x, absolute=self.absolute)

    def pairs(self, n: int, like: Tensor, alpha: Tensor | None = None) -> Tensor | None:
        return None if self.absolute else functional.pair_weights(n, like, everywhere=True)

    def factors(self, n: int, like: Tensor, alpha: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        return None if self.absolute else functional.pair_factors(n, like, everywhere=True)


@dataclass(frozen=True)
class SNID(Sparsifier):
    """SNI that spares important neurons (`functional.snid`)."""

    name: ClassVar[str] = "snid"
    discounted: ClassVar[bool] = True
    strength: float = 1e-3
    discount: Discount = "product"
    absolute: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "discount", ("product", "max"))

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        if alpha is None:
            return functional.sni(x, absolute=self.absolute)
        return functional.snid(x, alpha, discount=self.discount, absolute=self.absolute)

    def pairs(self, n: int, like: Tensor, alpha: Tensor | None = None) -> Tensor | None:
        return None if self.absolute else functional.pair_weights(n, like, everywhere=True, alpha=alpha, discount=self.discount)

    def factors(self, n: int, like: Tensor, alpha: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        if self.absolute or (alpha is not None and self.discount == "max"):
            return None
        return functional.pair_factors(n, like, everywhere=True, alpha=alpha)


@dataclass(frozen=True)
class SLNI(Sparsifier):
    """Inhibition between neighbouring neurons (`functional.slni`). `sigma` is in neurons; None is the paper's N/6."""

    name: ClassVar[str] = "slni"
    strength: float = 1e-3
    sigma: float | None = None
    absolute: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sigma")

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return functional.slni(x, self.sigma, absolute=self.absolute)

    def pairs(self, n: int, like: Tensor, alpha: Tensor | None = None) -> Tensor | None:
        return None if self.absolute else functional.pair_weights(n, like, sigma=self.sigma)

    def factors(self, n: int, like: Tensor, alpha: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        return None if self.absolute else functional.pair_factors(n, like, sigma=self.sigma)


@dataclass(frozen=True)
class SLNID(Sparsifier):
    """The paper's own: local inhibition that spares important neurons (`functional.slnid`)."""

    name: ClassVar[str] = "slnid"
    discounted: ClassVar[bool] = True
    strength: float = 1e-3
    sigma: float | None = None
    discount: Discount = "product"
    absolute: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sigma")
        check_choice(self, "discount", ("product", "max"))

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        if alpha is None:
            return functional.slni(x, self.sigma, absolute=self.absolute)
        return functional.slnid(x, alpha, self.sigma, discount=self.discount, absolute=self.absolute)

    def pairs(self, n: int, like: Tensor, alpha: Tensor | None = None) -> Tensor | None:
        return None if self.absolute else functional.pair_weights(n, like, sigma=self.sigma, alpha=alpha, discount=self.discount)

    def factors(self, n: int, like: Tensor, alpha: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        if self.absolute or (alpha is not None and self.discount == "max"):
            return None
        return functional.pair_factors(n, like, sigma=self.sigma, alpha=alpha)


@dataclass(frozen=True)
class L1Rep(Sparsifier):
    """Few active neurons, by an L1 norm of the activations (`functional.l1_rep`)."""

    name: ClassVar[str] = "l1-rep"
    strength: float = 1e-5

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return functional.l1_rep(x)


@dataclass(frozen=True)
class DeCov(Sparsifier):
    """Decorrelated activations (`functional.decov`)."""

    name: ClassVar[str] = "decov"
    strength: float = 1e-4

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return functional.decov(x)


@dataclass(frozen=True)
class L1Param(Sparsifier):
    """Sparse parameters, over every trainable one (`functional.l1_param`)."""

    name: ClassVar[str] = "l1-param"
    reads: ClassVar[Literal["activations", "weights", "parameters"]] = "parameters"
    strength: float = 1e-5

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return functional.l1_param(x)


@dataclass(frozen=True)
class L2Param(Sparsifier):
    """Weight decay, over every trainable parameter (`functional.l2_param`): the paper's L2-WD."""

    name: ClassVar[str] = "l2-wd"
    reads: ClassVar[Literal["activations", "weights", "parameters"]] = "parameters"
    strength: float = 1e-4

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return functional.l2_param(x)


@dataclass(frozen=True)
class OrthReg(Sparsifier):
    """Decorrelated incoming weights of the chosen layers (`functional.orth_reg`)."""

    name: ClassVar[str] = "orth-reg"
    reads: ClassVar[Literal["activations", "weights", "parameters"]] = "weights"
    strength: float = 1e-3
    sharpness: float = 10.0

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return functional.orth_reg(x, self.sharpness)


SPARSIFIERS: dict[str, type[Sparsifier]] = {
    kind.name: kind for kind in (NoSparsifier, SNI, SNID, SLNI, SLNID, L1Rep, DeCov, L1Param, L2Param, OrthReg)
}
