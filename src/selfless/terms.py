"""Terms: what preservers and sparsifiers share. A name, a strength, a spelling on the command line, and a sum.

slnid:1e-3            a term of this package at strength 1e-3
slnid:1e-3,sigma=4    with an option
mine:Close:0.1        a custom class, `Close` of the module mine.py
lwf:1+mas:0.1         a sum: `LwF(1) + MAS(0.1)`, each part with its own strength and state
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from operator import attrgetter
from typing import Any, ClassVar, TypeVar


@dataclass(frozen=True)
class Term:
    """A frozen value: equal terms name equal runs. `strength` is a finite number ≥ 0."""

    strength: float
    name: ClassVar[str] = ""
    role: ClassVar[str] = ""  # "preserver" or "sparsifier": only terms of one role add up
    later: ClassVar[tuple[str, ...]] = ()  # options added after runs were recorded: left out of a run's name at their default

    def __post_init__(self) -> None:
        value = self.strength
        label = type(self).__name__
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{label}: strength must be a plain number, not {value!r} of type {type(value).__name__}")
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{label}: strength is {value}; it must be finite and ≥ 0 (0 switches the term off)")
        object.__setattr__(self, "strength", float(value))

    @property
    def parts(self) -> tuple[Any, ...]:
        """The terms it is a sum of: itself, unless it is a `Sum`."""
        return (self,)

    def neutral(self) -> Term:
        """The same term at strength 0: what the members of a fleet have in common."""
        return replace(self, strength=0.0)

    def __add__(self, other: object) -> Term:
        """A sum of two terms of one role: `LwF(1) + MAS(0.1)`."""
        if not isinstance(other, Term):
            return NotImplemented
        found: Term = add([*self.parts, *other.parts])
        return found

    def check_sum(self, other: Any) -> None:
        """Raise ValueError, with the reason, if `self + other` cannot be."""

    @property
    def label(self) -> str:
        """Its class, for sentences: "MAS", or "LwF + MAS" for a sum."""
        return type(self).__name__

    @classmethod
    def is_custom(cls) -> bool:
        """True for a class that is not of this package."""
        return not cls.__module__.startswith("selfless.")

    @classmethod
    def spelling(cls) -> str:
        """Its name in records and on the command line: `name`, or module:Class of a custom class."""
        return f"{cls.__module__}:{cls.__qualname__}" if cls.is_custom() else cls.name

    def __str__(self) -> str:
        if self.name == "none":
            return self.name
        default = type(self)()  # type: ignore[call-arg]
        others = [f.name for f in dataclass_fields(self) if f.name != "strength" and getattr(self, f.name) != getattr(default, f.name)]
        return ",".join([f"{self.spelling()}:{self.strength:g}", *(f"{name}={_spell(getattr(self, name))}" for name in others)])


@dataclass(frozen=True)
class Sum(Term):
    """Several terms of one role at once. Whoever uses a term goes through `parts`; each keeps its own strength and state."""

    strength: float = field(default=0.0, init=False, compare=False)  # the largest of its parts: 0 only if all are off
    terms: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", max(term.strength for term in self.terms))

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.terms

    @property
    def name(self) -> str:  # type: ignore[override]
        return "+".join(term.name for term in self.terms)

    @property
    def role(self) -> str:  # type: ignore[override]
        return self.terms[0].role

    @property
    def label(self) -> str:
        return " + ".join(term.label for term in self.terms)

    def spelling(self) -> str:  # type: ignore[override]
        return "+".join(term.spelling() for term in self.terms)

    def neutral(self) -> Sum:
        return Sum(tuple(term.neutral() for term in self.terms))

    def __str__(self) -> str:
        return "+".join(map(str, self.terms))


def add(terms: list[Any]) -> Any:
    """The sum of terms of one role; `none` adds nothing, and a sum of one is that term."""
    if len({term.role for term in terms}) > 1:
        raise TypeError(f"{' + '.join(map(str, terms))}: preservers and sparsifiers do not add up; give them apart")
    live = [term for term in terms if term.name != "none"] or terms[:1]
    for i, one in enumerate(live):
        for other in live[i + 1 :]:
            if isinstance(one, type(other)) or isinstance(other, type(one)):
                names = f"{one.name} + {other.name}"
                raise ValueError(f"{names}: one contains the other; keep one of them and change its strength")
            one.check_sum(other)
            other.check_sum(one)
    return live[0] if len(live) == 1 else Sum(tuple(live))


def check_positive(term: Term, field: str) -> None:
    """Raise unless the field is None or a positive number."""
    value = getattr(term, field)
    if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise ValueError(f"{type(term).__name__}: {field} is {value!r}; it must be a positive number")


def check_count(term: Term, field: str, low: int = 0) -> None:
    """Raise unless the field is a whole number; 2.0, as read from the command line, becomes 2."""
    value = getattr(term, field)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value != int(value) or value < low:
        raise ValueError(f"{type(term).__name__}: {field} is {value!r}; it must be a whole number ≥ {low}")
    object.__setattr__(term, field, int(value))


def check_choice(term: Term, field: str, choices: tuple[str, ...]) -> None:
    """Raise unless the field is one of the choices."""
    value = getattr(term, field)
    if value not in choices:
        raise ValueError(f"{type(term).__name__}: {field} is {value!r}; choose one of {', '.join(map(repr, choices))}")


T = TypeVar("T", bound=Term)


def parse(text: str, kinds: Mapping[str, type[T]], what: str) -> T:
    """Read `name[:strength[,option=value…]]`, a custom `module:Class[:strength…]`, or a sum of these joined by +."""
    parts = [_parse_one(part, kinds, what) for part in re.split(r"\+(?=[A-Za-z_])", text.strip())]  # 1e+3 is a number
    found: T = parts[0] if len(parts) == 1 else add(parts)
    return found


def _parse_one(text: str, kinds: Mapping[str, type[T]], what: str) -> T:
    head, *options = text.strip().split(",")
    name, _, strength = head.partition(":")
    if name not in kinds and strength[:1].isalpha():
        attribute, _, strength = strength.partition(":")
        name = f"{name}:{attribute}"
        kinds = {name: _import_term(name, what)}
    if name not in kinds:
        close = difflib.get_close_matches(name.lower(), kinds, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        if name.lower() == "joint":  # the upper bound of every table, which is no method
            hint = " Joint training is a stream: --stream joint-permuted-mnist --preserve none."
        raise ValueError(f"no {what} is called {name!r}.{hint} Choose one of: {', '.join(kinds)}")
    given: dict[str, Any] = {}
    if strength:
        given["strength"] = _number(strength, f"the strength in {text!r}")
    for option in options:
        key, value = _option(option, kinds[name], name, text)
        if key in given:
            raise ValueError(f"{text!r} gives {key} twice; leave one of them out")
        given[key] = value
    return kinds[name](**given)


def _option(option: str, kind: type[Term], name: str, text: str) -> tuple[str, Any]:
    key, eq, value = option.partition("=")
    known = [f.name for f in dataclass_fields(kind) if f.name != "strength"]
    if not eq or key not in known:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"{text!r}: {option!r} is not an option of {name}.{hint} Write key=value with a key of: {', '.join(known) or 'none'}"
        )
    return key, _value(value)


def _import_term(name: str, what: str) -> Any:
    kind = import_custom(name)
    if not (isinstance(kind, type) and issubclass(kind, Term)):
        raise TypeError(f"{name} is no {what}: it must be a class as those of selfless.preserve or selfless.sparsify are (docs/methods.md)")
    return kind


def _spell(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{where} is {text!r}, which is not a number; write for example 1e-3") from None


class NotHere(ValueError):
    """The module of a custom class or network cannot be imported here."""


def import_custom(name: str) -> Any:
    """Import the object that `module:attribute` names; the working directory comes first, as with `python -m`."""
    module_name, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module was found; something that it imports was not
        raise NotHere(f"{name}: there is no module {error.name!r} in {here} or among those installed") from error
    try:
        return attrgetter(attribute)(module)
    except AttributeError:
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{name}: {module_name} has no {attribute!r}; it has {', '.join(there) or 'no functions'}") from None
