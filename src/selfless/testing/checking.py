"""`check` and `find`: test a method against every law that holds for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from selfless.engine.stack import mapping_error
from selfless.inputs import describe_error, own_place
from selfless.terms import Term
from selfless.testing.comparing import Broken
from selfless.testing.laws import LAWS, Law


@dataclass(frozen=True)
class Finding:
    """One law: what it says, and how the method breaks it (None: it keeps it)."""

    law: str
    broken: str | None = None

    def __str__(self) -> str:
        return f"✓ {self.law}" if self.broken is None else f"✗ {self.law}: {self.broken}"


def find(term: Term) -> list[Finding]:
    """Test a preserver, a sparsifier or a sum of them on small networks; return one finding per law that holds for it."""
    if not isinstance(term, Term):
        raise TypeError(f"check takes a method, as MAS(0.1), not {_show(term)}")
    return [finding(law, term) for law in LAWS if law.holds_for(term)]


def check(term: Term) -> None:
    """Raise AssertionError that lists every law a method breaks; return nothing if it keeps them all."""
    broken = [found for found in find(term) if found.broken is not None]
    if broken:
        raise AssertionError("\n".join([f"{term.label} breaks {len(broken)} of the laws of a {term.role}:", *map(str, broken)]))


def finding(law: Law, term: Term) -> Finding:
    """Test one law. An error of the user's code is told with its file and line."""
    try:
        with _usual_settings():
            law.test(term)
    except Broken as error:
        return Finding(law.says, str(error))
    except Exception as error:
        mapped = mapping_error(error, type(term).__name__) if isinstance(error, RuntimeError) else None
        place = own_place(error)
        told = describe_error(error) if mapped is None else str(mapped) if place is None else f"{place}: {mapped}"
        return Finding(law.says, " ".join(told.split()))
    return Finding(law.says)


@contextmanager
def _usual_settings() -> Iterator[None]:
    """Inside `with`: gradients, float32, no warnings, and random numbers that leave those of the caller alone."""
    dtype = torch.get_default_dtype()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")  # about accuracies and strengths, which mean nothing on these tasks
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _show(value: Any) -> str:
    return f"the class {value.__name__}: make one, as {value.__name__}(0.1)" if isinstance(value, type) else repr(value)
