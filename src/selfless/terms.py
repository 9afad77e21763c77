"""What preservers and sparsifiers have in common: a name, a strength, and a spelling on the command line (`slnid:1e-3`)."""

from __future__ import annotations

import difflib
import importlib
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from operator import attrgetter
from typing import Any, ClassVar, TypeVar


@dataclass(frozen=True)
class Term:
    """A frozen value: equal terms name equal runs. `strength` is a finite number ≥ 0."""

    strength: float
    name: ClassVar[str] = ""
    later: ClassVar[tuple[str, ...]] = ()  # fields that came later: at their default they are left out of a run's name

    def __post_init__(self) -> None:
        value = self.strength
        label = type(self).__name__
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{label}: strength must be a plain number, not {value!r} of type {type(value).__name__}")
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{label}: strength is {value}; it must be finite and ≥ 0 (0 switches the term off)")
        object.__setattr__(self, "strength", float(value))

    @classmethod
    def ours(cls) -> bool:
        """Whether it is one of this package."""
        return cls.__module__.startswith("selfless.")

    @classmethod
    def spelling(cls) -> str:
        """What names it in records and on the command line: its `name`, or module:Class of one's own."""
        return cls.name if cls.ours() else f"{cls.__module__}:{cls.__qualname__}"

    def __str__(self) -> str:
        if self.name == "none":
            return self.name
        default = type(self)()  # type: ignore[call-arg]
        others = [f.name for f in dataclass_fields(self) if f.name != "strength" and getattr(self, f.name) != getattr(default, f.name)]
        return ",".join([f"{self.spelling()}:{self.strength:g}", *(f"{name}={_spelt(getattr(self, name))}" for name in others)])


def check_positive(term: Term, field: str) -> None:
    """A field that is None or a positive number."""
    value = getattr(term, field)
    if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise ValueError(f"{type(term).__name__}: {field} is {value!r}; it must be a positive number")


def check_count(term: Term, field: str, low: int = 0) -> None:
    """A field that is a whole number; one that was read from the command line as 2.0 becomes 2."""
    value = getattr(term, field)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value != int(value) or value < low:
        raise ValueError(f"{type(term).__name__}: {field} is {value!r}; it must be a whole number ≥ {low}")
    object.__setattr__(term, field, int(value))


def check_choice(term: Term, field: str, choices: tuple[str, ...]) -> None:
    value = getattr(term, field)
    if value not in choices:
        raise ValueError(f"{type(term).__name__}: {field} is {value!r}; choose one of {', '.join(map(repr, choices))}")


T = TypeVar("T", bound=Term)


def parse(text: str, kinds: Mapping[str, type[T]], what: str) -> T:
    """`name[:strength[,option=value…]]` → the term: `mas:0.1`, `slnid:1e-3,discount=max`, `none`; one's own: `module:Class:0.1`."""
    head, *options = text.strip().split(",")
    name, _, strength = head.partition(":")
    if name not in kinds and strength[:1].isalpha():
        attribute, _, strength = strength.partition(":")
        name = f"{name}:{attribute}"
        kinds = {name: _own(name, what)}
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
        key, eq, value = option.partition("=")
        known = [f.name for f in dataclass_fields(kinds[name]) if f.name != "strength"]
        if not eq or key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"{text!r}: {option!r} is not an option of {name}.{hint} Write key=value with a key of: {', '.join(known) or 'none'}"
            )
        if key in given:
            raise ValueError(f"{text!r} gives {key} twice; leave one of them out")
        given[key] = _value(value)
    return kinds[name](**given)


def _own(name: str, what: str) -> Any:
    kind = import_custom(name)
    if not (isinstance(kind, type) and issubclass(kind, Term)):
        raise TypeError(f"{name} is no {what}: it must be a class as those of selfless.preserve or selfless.sparsify are (docs/methods.md)")
    return kind


def _spelt(value: Any) -> str:
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
