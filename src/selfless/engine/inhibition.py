"""The sparsifiers of a fleet. Gradients of pair forms, hᵀSh, and of DeCov are added in the backward pass, layer by layer.

SNI, SNID, SLNI and SLNID are R = 1/M Σ_m hᵀSh with an S that changes once per task. Members with any of them, with different σ or without a
penalty (S = 0) share the same operation: g + 2 lr λ Sh/M. For wide layers S = AAᵀ − diag d, where A has only a few columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from selfless.engine.native.options import CovarianceGradient, PairGradient, Penalty, Switch
from selfless.engine.stack import each, mapping_error
from selfless.functional import DENSE, PairForm
from selfless.sparsify import NoSparsifier, Sparsifier, size_of
from selfless.terms import Term

MOST_DENSE = 1024  # on a GPU, use an N×N matrix up to this width if a member has no factors: matrix units have time for it
Form = tuple[Tensor, Tensor | None]  # (S, None) or (A, d)


class Slot:
    """The k-th sparsifier of every member: the k-th part of a sum, or none."""

    def __init__(self, kinds: Sequence[Sparsifier]) -> None:
        self.kinds = list(kinds)
        self.neighbours = _group(self.kinds)
        self.groups = self.neighbours  # members whose penalty is added to the loss
        self.by_layer: dict[str, PairGradient] = {}  # gradients of members with a pair form, added in the backward pass
        self.covariances: dict[str, CovarianceGradient] = {}  # gradients of members with DeCov, added in the backward pass
        self._decorrelates = torch.zeros(len(self.kinds))  # 1 for these members
        self._unscaled: dict[str, PairGradient] = {}
        self.switch = Switch()

    def prepare(self, widths: Mapping[str, int], alpha: Mapping[str, Tensor], like: Tensor) -> None:
        """Build the pair forms with the current α. Members without a pair form for every layer stay in `groups`."""
        self.by_layer, self._unscaled = {}, {}
        forms = {name: _forms(self.kinds, n, alpha.get(name), like) for name, n in widths.items()}
        members = {m for m in range(len(self.kinds)) if all(rows[m] is not None for rows in forms.values())} if forms else set()
        decorrelating = _decorrelating(self.kinds, widths, alpha)
        self.groups = [(kind, group) for kind, group in self.neighbours if group.start not in members | decorrelating]
        self.covariances = {}
        if any(self.kinds[m].is_on for m in decorrelating):
            self._decorrelates = like.new_tensor([float(m in decorrelating) for m in range(len(self.kinds))])
            weight = torch.zeros_like(self._decorrelates)  # all layers share it
            for name, n in widths.items():
                pairs = _covariance_pairs(self.kinds, decorrelating, n, alpha.get(name), like)
                self.covariances[name] = CovarianceGradient(weight, self.switch, pairs)
        if not any(self.kinds[m].is_on for m in members):
            return
        for name, rows in forms.items():
            chosen = [form if m in members else None for m, form in enumerate(rows)]
            self._unscaled[name] = _stack(chosen, widths[name], like)
            self.by_layer[name] = _empty_like(self._unscaled[name], self.switch)

    def scale(self, lr_lambda: Tensor) -> None:
        """Multiply by lr·λ of every member, (F,). This writes in place, as a captured step reads these tensors."""
        for covariance in list(self.covariances.values())[:1]:
            torch.mul(lr_lambda, self._decorrelates, out=covariance.weight)
        twice = 2 * lr_lambda
        for name, now in self.by_layer.items():
            unscaled = self._unscaled[name]
            if now.matrix is not None and unscaled.matrix is not None:
                torch.mul(unscaled.matrix, twice[:, None, None], out=now.matrix)
            if now.factors is not None and unscaled.factors is not None:
                torch.mul(unscaled.factors, twice.sqrt()[:, None, None], out=now.factors)
            if now.diagonal is not None and unscaled.diagonal is not None:
                torch.mul(unscaled.diagonal, twice[:, None], out=now.diagonal)

    def scaled_tensors(self) -> list[Tensor]:
        """Return the tensors that `scale` writes."""
        forms = [t for now in self.by_layer.values() for t in (now.matrix, now.factors, now.diagonal) if t is not None]
        return [*forms, *(covariance.weight for covariance in list(self.covariances.values())[:1])]

    def gradients(self) -> list[tuple[str, Penalty]]:
        """Return (layer, what it adds in the backward pass)."""
        return [*self.by_layer.items(), *self.covariances.items()]

    def is_on(self, members: slice) -> bool:
        """Return True if any of these members has a strength above 0."""
        return any(kind.is_on for kind in self.kinds[members])


def slots(terms: Sequence[Term]) -> list[Slot]:
    """Return one slot for each part of the longest sum. A member with fewer parts has NoSparsifier in the last slots."""
    count = max(len(term.parts) for term in terms)
    return [Slot([term.parts[k] if k < len(term.parts) else NoSparsifier() for term in terms]) for k in range(count)]


def penalties(kind: Sparsifier, x: Tensor, alpha: Tensor | None) -> Tensor:
    """Return the penalty of every member, (F,), of x (F, …) and α (F, N)."""
    try:
        return each(partial(size_of, kind), x, alpha)
    except RuntimeError as error:
        if (found := mapping_error(error, f"{type(kind).__name__}.penalty")) is None:
            raise
        raise found from error


@contextmanager
def inhibition_off(slots: Sequence[Slot]) -> Iterator[None]:
    """Inside `with`: backward passes do not add the gradients of the sparsifiers."""
    for slot in slots:
        slot.switch.on = False
    try:
        yield
    finally:
        for slot in slots:
            slot.switch.on = True


def _group(kinds: Sequence[Sparsifier]) -> list[tuple[Sparsifier, slice]]:
    """Return the groups of neighbouring members with the same sparsifier, at any strength."""
    groups, start = [], 0
    for kind, same in groupby([kind.neutral() for kind in kinds]):
        count = len(list(same))
        assert isinstance(kind, Sparsifier)
        groups.append((kind, slice(start, start + count)))
        start += count
    return groups


def _forms(kinds: Sequence[Sparsifier], n: int, alpha: Tensor | None, like: Tensor) -> list[Form | None]:
    """Return one form per member, all dense or all low-rank; None for a penalty without such a form at this width."""

    def form(m: int, kind: Sparsifier) -> PairForm | None:
        return kind.pair_form(n, None if alpha is None else alpha[m]) if kind.reads == "activations" else None

    found = [form(m, kind) for m, kind in enumerate(kinds)]
    dense: list[Form | None] = []
    if n <= DENSE:
        dense = [None if f is None else (f.matrix(like), None) for f in found]
        return dense
    wide: list[Form | None] = [None if f is None else f.factors(like) for f in found]
    if like.is_cuda and n <= MOST_DENSE and any(form is None and kind.is_on for form, kind in zip(wide, kinds, strict=True)):
        dense = [None if f is None else (f.matrix(like), None) for f in found]
        return dense
    return wide


def _decorrelating(kinds: Sequence[Sparsifier], widths: Mapping[str, int], alpha: Mapping[str, Tensor]) -> set[int]:
    """Return the members whose covariances are penalised in the backward pass: all, except those that weigh pairs of a wide layer.

    Such weights are an N×N matrix for each member.
    """

    def weighs_wide(m: int, kind: Sparsifier) -> bool:
        wide = [(n, alpha.get(name)) for name, n in widths.items() if n > MOST_DENSE]
        return any(kind.covariance_form(n, None if a is None else a[m]) is not None for n, a in wide)

    return {m for m, kind in enumerate(kinds) if kind.decorrelates and not weighs_wide(m, kind)}


def _covariance_pairs(kinds: Sequence[Sparsifier], members: set[int], n: int, alpha: Tensor | None, like: Tensor) -> Tensor | None:
    """Return S (F, N, N) of the members that decorrelate; None if S = 1 for all of them."""
    forms = {m: kinds[m].covariance_form(n, None if alpha is None else alpha[m]) for m in members}
    if all(form is None for form in forms.values()):
        return None
    ones = like.new_ones(n, n)
    return torch.stack([ones if (form := forms.get(m)) is None else form.matrix(like) for m in range(len(kinds))])


def _stack(forms: Sequence[Form | None], n: int, like: Tensor) -> PairGradient:
    """Stack the forms of the members. A member without a form gets zeros, a form of smaller rank gets columns of zeros."""
    found = [form for form in forms if form is not None]
    if found[0][1] is None:
        return PairGradient(matrix=torch.stack([like.new_zeros(n, n) if form is None else form[0] for form in forms]))
    rank = max(form[0].shape[1] for form in found)
    rank = max(16, 1 << (rank - 1).bit_length()) if like.is_cuda else rank  # whole tiles, for loads of 16 bytes
    factors = [like.new_zeros(n, rank) if form is None else F.pad(form[0], (0, rank - form[0].shape[1])) for form in forms]
    diagonal = [like.new_zeros(n) if form is None or form[1] is None else form[1] for form in forms]
    return PairGradient(factors=torch.stack(factors), diagonal=torch.stack(diagonal))


def _empty_like(form: PairGradient, switch: Switch) -> PairGradient:
    matrix, factors, diagonal = (None if t is None else torch.empty_like(t) for t in (form.matrix, form.factors, form.diagonal))
    return PairGradient(matrix, factors, diagonal, switch)
