"""`check` and `find`: test a method against every law that holds for it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from selfless.inputs import describe_error
from selfless.terms import Term
from selfless.testing.laws import LAWS


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about accuracies and strengths, which mean nothing on these tasks
        return [Finding(law.says, _broken(law.test, term)) for law in LAWS if law.holds_for(term)]


def check(term: Term) -> None:
    """Raise AssertionError that lists every law a method breaks; return nothing if it keeps them all."""
    broken = [finding for finding in find(term) if finding.broken is not None]
    if broken:
        raise AssertionError("\n".join([f"{term.label} breaks {len(broken)} of the laws of a {term.role}:", *map(str, broken)]))


def _broken(test: Any, term: Term) -> str | None:
    """Return what an error of the test says; an error of the user's code names its file and line."""
    try:
        test(term)
    except AssertionError as error:
        return str(error) or "an assertion of its own failed"
    except Exception as error:
        return describe_error(error)
    return None


def _show(value: Any) -> str:
    return f"the class {value.__name__}: make one, as {value.__name__}(0.1)" if isinstance(value, type) else repr(value)
