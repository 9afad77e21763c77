"""The penalties of a fleet that are quadratic forms, as one operation a layer on the backward pass.

SNI, SNID, SLNI and SLNID are R = 1/M Σ_m hᵀSh with an S that changes once a task. Members of any of them, of different σ, and members
without a penalty (S = 0) then share the same operation: g + 2 lr λ Sh/M. Wide layers take S = AAᵀ − diag d, A of a few columns, instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from selfless.engine.native import Inhibition
from selfless.functional import DENSE
from selfless.sparsify import Sparsifier

MOST_DENSE = 1024  # on a GPU, where a member has no factors, N×N up to here: matrix units are idle enough


class Inhibitions:
    """Per layer, S of all members; `members` are those whose penalty it is."""

    def __init__(self, kinds: Sequence[Sparsifier], widths: Mapping[str, int], alpha: Mapping[str, Tensor], like: Tensor) -> None:
        self.by_layer: dict[str, Inhibition] = {}
        self._unscaled: dict[str, Inhibition] = {}
        forms = {name: _forms(kinds, n, alpha.get(name), like) for name, n in widths.items()}
        self.members = {m for m in range(len(kinds)) if all(of[m] is not None for of in forms.values())} if forms else set()
        if not any(kinds[m].strength for m in self.members):
            return
        for name, of in forms.items():
            mine = [form if m in self.members else None for m, form in enumerate(of)]
            self._unscaled[name] = _stacked(mine, widths[name], like)
            self.by_layer[name] = _empty_like(self._unscaled[name])

    def press(self, pressure: Tensor) -> None:
        """lr·λ of every member, (F,); in place, so that a recorded step goes on with it."""
        twice = 2 * pressure
        for name, now in self.by_layer.items():
            was = self._unscaled[name]
            if now.pairs is not None and was.pairs is not None:
                torch.mul(was.pairs, twice[:, None, None], out=now.pairs)
            if now.factors is not None and was.factors is not None:
                torch.mul(was.factors, twice.sqrt()[:, None, None], out=now.factors)
            if now.diagonal is not None and was.diagonal is not None:
                torch.mul(was.diagonal, twice[:, None], out=now.diagonal)

    def pressed(self) -> list[Tensor]:
        """What `press` writes."""
        return [t for now in self.by_layer.values() for t in (now.pairs, now.factors, now.diagonal) if t is not None]


Form = tuple[Tensor, Tensor | None]  # (S, None) or (A, d)


def _forms(kinds: Sequence[Sparsifier], n: int, alpha: Tensor | None, like: Tensor) -> list[Form | None]:
    """Of every member, all of one sort; None for a penalty that is not such a form, or not at this width."""

    def own(m: int, kind: Sparsifier) -> Tensor | None:
        return alpha[m] if alpha is not None and kind.discounted else None

    def dense() -> list[Form | None]:
        found = [kind.pairs(n, like, own(m, kind)) if kind.reads == "activations" else None for m, kind in enumerate(kinds)]
        return [None if s is None else (s, None) for s in found]

    if n <= DENSE:
        return dense()
    wide: list[Form | None] = [kind.factors(n, like, own(m, kind)) if kind.reads == "activations" else None for m, kind in enumerate(kinds)]
    if like.is_cuda and n <= MOST_DENSE and any(form is None and kind.strength for form, kind in zip(wide, kinds, strict=True)):
        return dense()
    return wide


def _stacked(forms: Sequence[Form | None], n: int, like: Tensor) -> Inhibition:
    """Members without a form get zeros, those of a smaller rank columns of zeros."""
    found = [form for form in forms if form is not None]
    if found[0][1] is None:
        return Inhibition(pairs=torch.stack([like.new_zeros(n, n) if form is None else form[0] for form in forms]))
    rank = max(form[0].shape[1] for form in found)
    rank = max(16, 1 << (rank - 1).bit_length()) if like.is_cuda else rank  # in whole tiles: loads of 16 bytes
    factors = [like.new_zeros(n, rank) if form is None else F.pad(form[0], (0, rank - form[0].shape[1])) for form in forms]
    diagonal = [like.new_zeros(n) if form is None or form[1] is None else form[1] for form in forms]
    return Inhibition(factors=torch.stack(factors), diagonal=torch.stack(diagonal))


def _empty_like(form: Inhibition) -> Inhibition:
    made = [None if t is None else torch.empty_like(t) for t in (form.pairs, form.factors, form.diagonal)]
    return Inhibition(*made)
