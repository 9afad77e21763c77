"""The sparsifiers of a keeper with their strengths; "auto" is measured in the first task (`selfless.functional.scale`)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from selfless.functional.scale import Scale, complete, follow, scaled_strength, settle, start_scale
from selfless.keeper.part import Part
from selfless.sparsify import Reads, Sparsifier


class Sparsifiers:
    """The sparsifiers, and the scale of each one with strength "auto", by its number. Scales follow R in the first task, then stay."""

    def __init__(self, terms: Sequence[Sparsifier]) -> None:
        self.terms = terms
        self.found: dict[int, Scale] = {i: start_scale(torch.zeros(())) for i, term in enumerate(terms) if term.is_auto}
        self.is_first_task = True

    def reading(self, *what: Reads) -> dict[int, Sparsifier]:
        """Return the sparsifiers that are on and read this, by their number."""
        return {number: term for number, term in enumerate(self.terms) if term.is_on and term.reads in what}

    def follow(self, number: int, sizes: Tensor) -> None:
        """Take over R of one sparsifier in a training step, of its layers; only "auto" in the first task needs it."""
        if self.is_first_task and number in self.found:
            self.found[number] = follow(self.found[number], sizes.detach().sum())

    def strength(self, number: int) -> Tensor | float:
        """λ of one sparsifier: a number, or for "auto" what its scale says now."""
        term = self.terms[number]
        return scaled_strength(self.found[number], term.share) if number in self.found else term.fixed_strength

    def end_task(self) -> None:
        """Settle the scales. Warn if there was no positive R in the first task."""
        self.is_first_task = False
        for i, scale in self.found.items():
            self.found[i] = settle(scale)
            if not bool(self.found[i]["settled"]):
                warnings.warn(
                    f"{self.terms[i].label}('auto') found no positive R in the first task, so its strength stays 0; add keeper.penalty() "
                    "to the loss, and use absolute=True for activations with a sign",
                    stacklevel=4,
                )

    def load(self, found: dict[int, Scale], tasks: int) -> None:
        """Use scales that were saved after `tasks` tasks."""
        self.found |= {i: complete(scale) for i, scale in found.items() if i in self.found}
        self.is_first_task = tasks == 0

    def move_to(self, device: torch.device) -> None:
        """Move the scales to a device."""
        if self.found:
            self.found = {i: {n: t.to(device) for n, t in scale.items()} for i, scale in self.found.items()}

    def strengths(self, parts: Sequence[Part]) -> dict[str, float | None]:
        """Return λ of every preserver and sparsifier by name; None where "auto" has not been measured yet."""
        known = {part.term.name: part.known_strength for part in parts}
        for i, term in enumerate(self.terms):
            scale = self.found.get(i)
            is_open = scale is not None and not bool(scale["settled"])
            known[term.name] = None if is_open else term.fixed_strength if scale is None else float(scaled_strength(scale, term.share))
        return {name: strength for name, strength in known.items() if name != "none"}

    def describe(self, parts: Sequence[Part]) -> str:
        """Return ", strengths={mas: 0.03, slnid: 0.0002}" if a strength is "auto", else nothing."""
        if not self.found and not any(part.term.is_auto for part in parts):
            return ""
        texts = [f"{name}: {'not yet measured' if s is None else format(s, '.3g')}" for name, s in self.strengths(parts).items()]
        return f", strengths={{{', '.join(texts)}}}"
