"""Terms: the base class of preservers and sparsifiers, with a name, a strength, a text form and sums.

slnid:1e-3            a term of this package at strength 1e-3
slnid:1e-3,sigma=4    with an option
slnid:auto            at the strength that is measured in the first task (`selfless.functional.scale`)
mine:Close:0.1        a custom class, `Close` of the module mine.py
lwf:1+mas:0.1         a sum: `LwF(1) + MAS(0.1)`, each part with its own strength and state; spaces around + are allowed

The order of a sum is part of its value: `lwf:1+mas:0.1` and `mas:0.1+lwf:1` are runs with different keys.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from selfless.inputs import check_recorded, describe_error, import_custom, is_finite, show, unknown_name

Strength: TypeAlias = float | Literal["auto"]


@dataclass(frozen=True)
class Term:
    """One method with its options, as a frozen value: runs with equal terms are equal. `strength` (λ) is a finite number ≥ 0.

    A term with an `auto_share` ρ also takes the strength "auto": λ is then ρ divided by the size of the term, measured in the first task.
    """

    strength: Strength
    name: ClassVar[str] = ""
    role: ClassVar[str] = ""  # "preserver" or "sparsifier": only terms of the same role can be summed
    later: ClassVar[Mapping[str, Any]] = {}  # options added after runs were recorded → the value in those; it is left out of the key
    auto_share: ClassVar[float | None] = None  # ρ of the strength "auto"; None: the term needs a number
    why_no_auto: ClassVar[str] = "no scale was measured for it"

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Name the nearest option where a keyword is not one: `MAS(strenght=1)`."""
        if not given.keys() <= {f.name for f in dataclass_fields(cls)}:
            taken = inspect.signature(cls.__init__).parameters  # a custom class may have its own __init__
            for name in given if not any(p.kind is p.VAR_KEYWORD for p in taken.values()) else ():
                if name not in taken:
                    raise TypeError(unknown_name(cls.__name__, "option", name, [p for p in taken if p != "self"]))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        value = self.strength
        label = type(self).__name__
        if value == "auto":
            if self.auto_share is None:
                default = next(f.default for f in dataclass_fields(self) if f.name == "strength")
                raise ValueError(
                    f"{label}: strength 'auto' is not possible, because {self.why_no_auto}; write a number, as {label}({default:g})"
                )
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{label}: strength must be a plain number or 'auto', not {show(value)} of type {type(value).__name__}")
        if not is_finite(value) or value < 0:
            raise ValueError(f"{label}: strength is {show(value)}; it must be finite and ≥ 0 (0 switches the term off)")
        object.__setattr__(self, "strength", float(value))

    @property
    def is_auto(self) -> bool:
        """True if the strength is "auto"."""
        return self.strength == "auto"

    @property
    def is_on(self) -> bool:
        """True unless the strength is 0."""
        return self.strength != 0

    @property
    def share(self) -> float:
        """ρ of the strength "auto"."""
        return self.auto_share or 0.0

    @property
    def fixed_strength(self) -> float:
        """The strength as a number; 0 for "auto", before it is measured."""
        return 0.0 if self.strength == "auto" else self.strength

    @property
    def parts(self) -> tuple[Any, ...]:
        """The terms of a `Sum`; for any other term, the term itself."""
        return (self,)

    def with_strength(self, strength: float) -> Term:
        """Return the same term at another strength. The parts of a `Sum` keep their ratio, and its largest part gets this strength."""
        return replace(self, strength=strength)

    def neutral(self) -> Term:
        """Return the same term at strength 0, which the members of a fleet have in common; a term with "auto" stays as it is."""
        same = copy.copy(self)  # `replace` would call `__post_init__`, which may refuse the strength 0
        object.__setattr__(same, "strength", "auto" if self.is_auto else 0.0)
        return same

    def __add__(self, other: object) -> Term:
        """Return the sum of two terms of the same role: `LwF(1) + MAS(0.1)`."""
        if not isinstance(other, Term):
            return NotImplemented
        found: Term = add([*self.parts, *other.parts])
        return found

    def conflict(self, other: Any) -> str | None:
        """Return the reason why `self` and `other` cannot be summed, with the remedy; None if they can."""
        return None

    @property
    def label(self) -> str:
        """Its class, for sentences: "MAS", or "LwF + MAS" for a sum."""
        return type(self).__name__

    @classmethod
    def is_custom(cls) -> bool:
        """Return True for a class from outside this package."""
        return not cls.__module__.startswith("selfless.")

    @classmethod
    def spelling(cls) -> str:
        """Return the name in records and on the command line: `name`, or module:Class of a custom class."""
        return f"{cls.__module__}:{cls.__qualname__}" if cls.is_custom() else cls.name

    def __str__(self) -> str:
        if self.name == "none":
            return self.name
        others = [f.name for f in dataclass_fields(self) if f.name != "strength" and getattr(self, f.name) != _default(f)]
        return ",".join([f"{self.spelling()}:{_spell(self.strength)}", *(f"{name}={_spell(getattr(self, name))}" for name in others)])


def _default(field: Field[Any]) -> Any:
    """Return the default of a field; MISSING, which equals no value, if it has none."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def one_number(value: Any, whose: str) -> Any:
    """Return the value of a penalty; raise ValueError if it is not a tensor with one number. `whose`: "Close.penalty", for the message."""
    shape = getattr(value, "shape", None)
    if shape is None or tuple(shape) != ():
        found = repr(value) if shape is None else f"a tensor of shape {tuple(shape)}"
        raise ValueError(f"{whose} returned {found}; it must return a tensor with one number: end with .mean() or .sum()")
    return value


@dataclass(frozen=True)
class Sum(Term):
    """Several terms of one role. Code that uses a term loops over `parts`; each part has its own strength and state."""

    strength: Strength = field(default=0.0, init=False, compare=False)  # the largest strength of the parts: 0 only if all are 0
    terms: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        is_auto = any(term.is_auto for term in self.terms)
        object.__setattr__(self, "strength", "auto" if is_auto else max(term.fixed_strength for term in self.terms))

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

    def with_strength(self, strength: float) -> Sum:
        if strength and not self.strength:
            raise ValueError(f"{self}: all parts have strength 0, so they have no ratio; give each part a strength")
        if self.is_auto:
            raise ValueError(f"{self}: a part with strength 'auto' has no ratio to the others; write numbers")
        largest = self.fixed_strength
        ratios = [term.fixed_strength / largest if largest else 0.0 for term in self.terms]
        return Sum(tuple(term.with_strength(strength * ratio) for term, ratio in zip(self.terms, ratios, strict=True)))

    def neutral(self) -> Sum:
        return Sum(tuple(term.neutral() for term in self.terms))

    def __str__(self) -> str:
        return "+".join(map(str, self.terms))


def add(terms: list[Any]) -> Any:
    """Return the sum of terms of one role. `none` is left out, and the sum of a single term is that term."""
    if len({term.role for term in terms}) > 1:
        raise TypeError(
            f"{' + '.join(map(str, terms))}: preservers and sparsifiers do not add up; give each by itself, as preserve= and sparsify="
        )
    active = [term for term in terms if term.name != "none"] or terms[:1]
    for i, one in enumerate(active):
        for other in active[i + 1 :]:
            reason = _kinship(one, other) or one.conflict(other) or other.conflict(one)
            if reason is not None:
                raise ValueError(f"{one.spelling()} + {other.spelling()} cannot be combined: {reason}")
    return active[0] if len(active) == 1 else Sum(tuple(active))


def _kinship(one: Term, other: Term) -> str | None:
    """Return the reason why a method and itself, or a variant of it, cannot be summed; None if they are not related."""
    if type(one) is type(other):
        return f"they are the same method. Write {one.spelling()} once, with the strength that you want"
    for child, parent in ((one, other), (other, one)):
        if isinstance(child, type(parent)):
            return f"{child.spelling()} is a variant of {parent.spelling()}. Use one of them, with the strength that you want"
    return None


def check_not_negative(term: Term, field: str) -> None:
    """Raise ValueError unless the field is a number ≥ 0."""
    value = getattr(term, field)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value) or value < 0:
        raise ValueError(f"{type(term).__name__}: {field} is {show(value)}; it must be a number ≥ 0")


def check_positive(term: Term, field: str) -> None:
    """Raise ValueError unless the field is None or a positive number."""
    value = getattr(term, field)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value) or value <= 0):
        raise ValueError(f"{type(term).__name__}: {field} is {show(value)}; it must be a positive number")


def check_count(term: Term, field: str, low: int = 0, high: int = 1_000_000) -> None:
    """Raise ValueError unless the field is a whole number from `low` to `high`; 2.0, as read from the command line, becomes 2."""
    value = getattr(term, field)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value) or value != int(value) or value < low:
        raise ValueError(f"{type(term).__name__}: {field} is {show(value)}; it must be a whole number ≥ {low}")
    if value > high:
        raise ValueError(f"{type(term).__name__}: {field} is {show(value)}; it must be at most {high:,}")
    object.__setattr__(term, field, int(value))


def check_choice(term: Term, field: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless the field is one of the choices."""
    value = getattr(term, field)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{type(term).__name__}: {field} is {show(value)}; choose one of {', '.join(map(repr, choices))}")


T = TypeVar("T", bound=Term)


def parse(text: str, kinds: Mapping[str, type[T]], what: str) -> T:
    """Read `name[:strength[,option=value…]]`, a custom `module:Class[:strength…]`, or a sum of these joined by +."""
    parts = parse_all(text, kinds, what)
    return parts[0] if len(parts) == 1 else add(parts)


def parse_all(text: str, kinds: Mapping[str, type[T]], what: str) -> list[T]:
    """Read the terms of a sum."""
    return [_parse_one(part, kinds, what) for part in re.split(r"\s*\+\s*(?=[A-Za-z_])", text.strip())]  # 1e+3 is a number


def _parse_one(text: str, kinds: Mapping[str, type[T]], what: str) -> T:
    """Read one term; `what` is "preserver" or "sparsifier", for messages."""
    head, *options = text.strip().split(",")
    name, _, strength = head.partition(":")
    if name not in kinds and strength[:1].isidentifier() and strength != "auto":
        attribute, _, strength = strength.partition(":")
        name = f"{name}:{attribute}"
        kinds = {name: _import_term(name, what)}
    if name not in kinds:
        close = difflib.get_close_matches(name.lower(), kinds, n=1, cutoff=0.7)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        if name.lower() == "joint":  # the upper bound in every table, but not a method
            hint = " Joint training is a stream: selfless run --stream joint-permuted-mnist --preserve none; or joint- before another."
        if kind := _kind_of(name):
            field = "sparsify" if kind.role == "sparsifier" else "preserve"
            spelled = text.strip().replace(name, kind.spelling(), 1)
            hint = f" {name} is a {kind.role}: --{field} {spelled}, or {field}={spelled!r}."
        if name == "recommended":  # depends on the case, which a term does not know
            hint = " Use selfless run --preserve recommended, attach(model, 'recommended') or Run(**selfless.recommend(…).settings)."
        raise ValueError(f"no {what} is called {name!r}.{hint} Choose one of: {', '.join(kinds)}; one of your own is module:Class")
    values: dict[str, Any] = {}
    if strength:
        values["strength"] = strength if strength == "auto" else _parse_number(strength, f"the strength in {text!r}")
    for option in options:
        key, value = _parse_option(option, kinds[name], name, text)
        if key in values:
            raise ValueError(f"{text!r} gives {key} twice; remove one of them")
        values[key] = value
    try:
        return kinds[name](**values)
    except Exception as error:
        if kinds[name].is_custom() and not isinstance(error, ValueError | TypeError):
            raise ValueError(f"{text!r}: {describe_error(error)}") from error
        raise


def _parse_option(option: str, kind: type[Term], name: str, text: str) -> tuple[str, Any]:
    """Read `key=value`, where the key is an option of the class `kind`. A whole number stays one if its default is one."""
    key, eq, value = option.partition("=")
    known = [f.name for f in dataclass_fields(kind) if f.name != "strength"]
    if not eq or key not in known:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"{text!r}: {option!r} is not an option of {name}.{hint} Write key=value with a key of: {', '.join(known) or 'none'}"
        )
    default = next(f.default for f in dataclass_fields(kind) if f.name == key)
    found = _parse_value(value)
    if isinstance(default, bool) and not isinstance(found, bool):
        raise ValueError(f"{text!r}: {key} is true or false, not {value!r}")
    if kind.is_custom() and isinstance(default, int | float) and isinstance(found, str):
        raise ValueError(f"{text!r}: {key} is a number, not {value!r}")
    is_whole = type(default) is int and isinstance(found, float) and found.is_integer()
    return key, int(found) if is_whole else found


def _kind_of(name: str) -> type[Term] | None:
    """Return the class of a term of that name, also one of the user's own that was imported; None if there is none."""
    kinds = list(Term.__subclasses__())
    for kind in kinds:  # it grows
        if kind.__dict__.get("name") == name and isinstance(kind.role, str):
            return kind
        kinds += kind.__subclasses__()
    return None


def _import_term(name: str, what: str) -> Any:
    """Import the custom class `module:Class`; it must be a `Term`."""
    kind = import_custom(name)
    if not (isinstance(kind, type) and issubclass(kind, Term)):
        raise TypeError(f"{name} is not a {what}: it must be a subclass of Preserver or Sparsifier (docs/write-your-own.md has examples)")
    return kind


def _spell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)  # it is read back as the same number
    return str(value)


def _parse_value(text: str) -> Any:
    """Return True, False, None, a number or the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        return text


def _parse_number(text: str, where: str) -> float:
    """Return the text as a number; `where` names it in the error."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{where} is {text!r}, which is not a number; write for example 1e-3 or auto, and options after a comma") from None


# ------------------------------------------------------------------------------------------------------------------ as JSON
def term_dict(term: Term) -> dict[str, Any]:
    """Return a term as JSON values. An option in `later` at its first value is left out."""
    if len(term.parts) > 1:
        return {"sum": [term_dict(part) for part in term.parts]}
    shown = [f for f in dataclass_fields(term) if f.name not in term.later or getattr(term, f.name) != term.later[f.name]]
    return {"name": term.spelling()} | {f.name: getattr(term, f.name) for f in shown}


def term_from_dict(values: Mapping[str, Any] | str, kinds: Mapping[str, type[Term]], field: str, recorded: bool) -> Term:
    """Return the term that `term_dict` describes; the parts of a sum may also be text. `field` is named in messages.

    recorded   an option that is missing has the value of the time before it existed (`later`); otherwise it has its default
    """
    if isinstance(values, str):
        return parse(values, kinds, field)
    if isinstance(values, Mapping) and values.get("sum") and isinstance(values["sum"], list):
        total: Term = add([one for part in values["sum"] for one in term_from_dict(part, kinds, field, recorded).parts])
        return total
    if not isinstance(values, Mapping) or "name" not in values:
        raise ValueError(
            f'[{field}] needs a name, as in {field} = "mas:0.1" or {field} = {{name = "mas", strength = 0.1}}; '
            f'a sum is {field} = "lwf:1+mas:0.1" or {field} = {{sum = ["lwf:1", "mas:0.1"]}}'
        )
    options = dict(values)
    name = str(options.pop("name"))
    if recorded and ":" in name:
        check_recorded(":".join(name.split(":")[:2]))
    kind = type(parse(name, kinds, field))
    known = [f.name for f in dataclass_fields(kind)]
    unknown = [k for k in options if k not in known]
    if unknown:
        raise ValueError(f"{field}: {kind.spelling()} has no option {unknown[0]!r}; it has {', '.join(known)}")
    return kind(**(dict(kind.later) if recorded else {}) | options)
