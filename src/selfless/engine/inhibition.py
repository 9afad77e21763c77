"""The penalties of a fleet that are quadratic forms, as one matmul a layer on the backward pass.

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

DENSE_ON_GPU = 1024  # matrix units are idle enough for N×N up to here


class Inhibitions:
    """Per layer, S of all members; `members` are those whose penalty it is."""

    def __init__(self, kinds: Sequence[Sparsifier], widths: Mapping[str, int], alpha: Mapping[str, Tensor], like: Tensor) -> None:
        self.by_layer: dict[str, Inhibition] = {}
        self._unscaled: dict[str, Inhibition] = {}
        limit = DENSE_ON_GPU if like.is_cuda else DENSE
        found = {m: _forms(kind, widths, {n: a[m] for n, a in alpha.items()}, like, limit) for m, kind in enumerate(kinds)}
        self.members = {m for m, forms in found.items() if forms is not None}
        if not any(kinds[m].strength for m in self.members):
            return
        for name, n in widths.items():
            mine = [None if forms is None else forms[name] for forms in found.values()]
            if n <= limit:
                none = like.new_zeros(n, n)
                pairs = torch.stack([none if form is None else form[0] for form in mine])
                self._unscaled[name] = Inhibition(pairs=pairs)
                self.by_layer[name] = Inhibition(pairs=torch.empty_like(pairs))
            else:
                rank = max(form[0].shape[1] for form in mine if form is not None)
                empty = (like.new_zeros(n, rank), like.new_zeros(n))
                both = [empty if form is None else (F.pad(form[0], (0, rank - form[0].shape[1])), form[1]) for form in mine]
                factors, diagonal = torch.stack([a for a, _ in both]), torch.stack([d for _, d in both])
                self._unscaled[name] = Inhibition(factors=factors, diagonal=diagonal)
                self.by_layer[name] = Inhibition(factors=torch.empty_like(factors), diagonal=torch.empty_like(diagonal))

    def press(self, pressure: Tensor) -> None:
        """lr·λ of every member, (F,); in place, so that a recorded step goes on with it."""
        twice = 2 * pressure
        for name, now in self.by_layer.items():
            was = self._unscaled[name]
            if now.pairs is not None and was.pairs is not None:
                torch.mul(was.pairs, twice[:, None, None], out=now.pairs)
            elif now.factors is not None and was.factors is not None and now.diagonal is not None and was.diagonal is not None:
                torch.mul(was.factors, twice.sqrt()[:, None, None], out=now.factors)
                torch.mul(was.diagonal, twice[:, None], out=now.diagonal)


Form = tuple[Tensor, Tensor]


def _forms(kind: Sparsifier, widths: Mapping[str, int], alpha: Mapping[str, Tensor], like: Tensor, limit: int) -> dict[str, Form] | None:
    """Layer → (S, –) or (A, d); None where some layer has none."""
    forms: dict[str, Form] = {}
    if kind.reads != "activations":
        return None
    for name, n in widths.items():
        a = alpha.get(name) if kind.discounted else None
        dense = kind.pairs(n, like, a) if n <= limit else None
        form = (dense, dense) if dense is not None else kind.factors(n, like, a) if n > limit else None
        if form is None:
            return None
        forms[name] = form
    return forms
