"""Fields of a settings value such as `Run`: a dataclass field with its help and its checks, from which commands make their flags."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

from selfless.inputs import is_finite, show, unknown_name

Kind = TypeVar("Kind")

if TYPE_CHECKING:
    Held = TypeVar("Held", covariant=True)
    Taken = TypeVar("Taken", contravariant=True)

    class Converted(Generic[Held, Taken]):
        """The type of a field that takes a `Taken` and holds a `Held`, for type checkers: Run(preserve="mas:0.1").preserve is a term."""

        def __get__(self, value: object, kind: object = None) -> Held: ...
        def __set__(self, value: object, taken: Taken) -> None: ...


@dataclass(frozen=True)
class Option:
    """The description of a field of `Run`: its help, its panel in the help, and the values it accepts."""

    help: str
    panel: Literal["What", "Training"]
    kind: type  # int, float, str, Term (text on the command line) or dict (a repeatable flag key=value)
    default: str  # as the help shows it
    choices: tuple[str, ...] = ()
    low: int = 0  # numbers: the smallest value
    below: int | None = None  # numbers: the value must be smaller than this; it also refuses counts that would never end
    optional: bool = False  # may be None
    flag: str = ""  # the flag, if it differs from the name of the field

    def check(self, name: str, value: Any) -> Any:
        """Return the value in the type of the field. Raise an error that names the field and the values it accepts."""
        if self.optional and value is None:
            return None
        if self.choices and (not isinstance(value, str) or value not in self.choices):
            raise ValueError(f"{name} is {show(value)}; choose one of {', '.join(self.choices)}")
        if self.kind is dict:
            if not isinstance(value, Mapping):
                raise TypeError(f"{name} is {show(value)}; it must be a table of options, such as {{classes_per_task = 5}}")
            return dict(value)
        if self.kind is int:
            if isinstance(value, bool) or not isinstance(value, int | numbers.Integral) or value < self.low:
                raise ValueError(f"{name} is {show(value)}; it must be a whole number ≥ {self.low}")
            value = int(value)
        if self.kind is float:
            if isinstance(value, bool) or not isinstance(value, float | numbers.Real) or not is_finite(value) or value < self.low:
                raise ValueError(f"{name} is {show(value)}; it must be a number ≥ {self.low}")
            value = float(value)
        if self.below is not None and value >= self.below:
            raise ValueError(f"{name} is {show(value)}; it must be below {self.below}")
        if self.kind is str and not isinstance(value, str):
            raise TypeError(f"{name} is {show(value)}; it must be text")
        return value


def naming_unknown(kind: type[Kind]) -> type[Kind]:
    """Return the dataclass with an `__init__` that names the nearest field where a keyword is not a field."""
    known, make = {f.name for f in fields(kind)}, kind.__init__  # type: ignore[arg-type]

    @functools.wraps(make)
    def init(self: Any, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                raise TypeError(unknown_name(kind.__name__, "field", name, known))
        make(self, *args, **given)

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


def option(default: Any, panel: Literal["What", "Training"], help: str, *, kind: type | None = None, shown: str = "", **more: Any) -> Any:
    """Return a dataclass field with an `Option`. `kind` defaults to the type of the default value, `shown` to its text."""
    description = Option(help, panel, kind or type(default), shown or str(default), optional=default is None, **more)
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"option": description})
    return field(default=default, metadata={"option": description})


def chosen_from(values: Any, panel: Literal["What", "Training"], help: str) -> Any:
    """Return a dataclass field that accepts the values of a Literal type; the first value is the default."""
    choices = get_args(values)
    return option(choices[0], panel, help, choices=choices)
