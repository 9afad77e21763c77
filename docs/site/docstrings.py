"""An extension of griffe: docstrings with aligned lists become Markdown, so that the site shows them as tables.

stream        the stream of all runs          | `stream` | the stream of all runs |
model         the network of all runs,   →    | `model`  | the network of all runs, whose weights … |
              whose weights …
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROW = re.compile(r"^(\S+(?: \S+)*)  +(\S.*)$")


class AlignedLists(griffe.Extension):
    """Rewrite the docstring of every object."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Return a docstring with its aligned lists as tables; an equation stays a block of code, prose stays prose."""
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n\s*\n", text.strip("\n")))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    rows = [match.groups() for line in lines if (match := ROW.match(line))]
    if not rows or not ROW.match(lines[0]) or (lines[0].endswith((".", ":")) and len(rows) == 1):
        return _escape(text)
    table: list[list[str]] = []
    for line in lines:
        match = ROW.match(line)
        if match:
            table.append([match[1], match[2]])
        elif line.startswith("  "):
            table[-1][1] += " " + line.strip()
        else:
            return _escape(text)
    cells = [(name.replace("|", "\\|"), _escape(meaning).replace("|", "\\|")) for name, meaning in table]
    return "\n".join(["| name | meaning |", "| --- | --- |", *(f"| `{name}` | {meaning} |" for name, meaning in cells)])


def _escape(text: str) -> str:
    """Return prose in which θ* and Ω_t are themselves, not marks of Markdown; code and equations stay as they are."""
    if text.startswith("    "):
        return text
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([*_<])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)
