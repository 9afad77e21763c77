"""Checks of single values, and messages about several wrong ones at once."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterable, Iterator
from typing import Any


def is_finite(value: Any) -> bool:
    """Return whether a number is neither NaN nor infinite, nor too large for a float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def show(value: Any) -> str:
    """Return a value as a message shows it: at most 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write whole numbers of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}…"


def unknown_name(kind: str, noun: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a keyword that a class does not take: the nearest one that it takes, or all of them."""
    close = difflib.get_close_matches(name, known := sorted(known), n=1)
    return f"{kind} has no {noun} {name!r}; " + (f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}")


@contextlib.contextmanager
def collecting(problems: list[Exception]) -> Iterator[None]:
    """Inside `with`: a wrong value ends the block and is added to the list, so that the values after it are checked, too."""
    try:
        yield
    except (ValueError, TypeError) as error:
        problems.append(error)


def raise_all(problems: list[Exception]) -> None:
    """Raise the only problem as it is, or one error that lists all of them; do nothing if there is none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ValueError("\n".join([f"{len(problems)} settings are wrong:", *(f"- {problem}" for problem in problems)]))
