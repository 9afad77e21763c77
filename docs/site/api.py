"""The pages of the API: each section of docs/api.md that lists public names gets a page with the docstrings of these names.

The sections of docs/api.md are the only list. Its tables say what is public, its snippets are the examples, and tests run them.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"
VALUES = ("Preservers", "Sparsifiers", "Activations")  # users construct these and call no method of theirs


@dataclass(frozen=True)
class Section:
    """A section of docs/api.md: its title, the public names in its tables, its snippets."""

    title: str
    names: tuple[str, ...]
    snippets: tuple[str, ...]

    @property
    def slug(self) -> str:
        return re.sub(r"[^\w\- ]", "", self.title.strip().lower()).replace(" ", "-")


def sections(text: str, public: set[str]) -> list[Section]:
    """Return the sections of the page. Its names are in the first column of a table that begins with `name` or `module`."""
    found: list[Section] = []
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        tables = re.findall(r"^\| (?:name|module) \|.*\n\|[ -|]*\n((?:\|.*\n?)*)", body, re.M)
        cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
        named = dict.fromkeys(name for cell in cells for name in re.findall(r"`(?:selfless\.)?(\w+)", cell) if name in public)
        snippets = re.findall(r"^```python[^\n]*\n(.*?)^```", body, re.S | re.M)
        found.append(Section(title, tuple(named), tuple(snippets)))
    return found


def public_names() -> list[str]:
    """Return the names of the package that are no dunder names."""
    import selfless

    return [name for name in selfless.__all__ if not name.startswith("__")]


def used_names(code: str) -> set[str]:
    """Return the names that a snippet uses: as a variable or as an attribute. An import alone is no use."""
    nodes = list(ast.walk(ast.parse(code)))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


def pages() -> Iterator[tuple[str, str]]:
    """Yield the source path and the Markdown of every page: one for each section, and one for each module."""
    import selfless

    for section in sections(PAGE.read_text(encoding="utf-8"), set(public_names())):
        modules = [name for name in section.names if inspect.ismodule(getattr(selfless, name))]
        for name in modules:
            yield f"api/{name}.md", module_page(name)
        if section.names and not modules:
            yield f"api/{section.slug}.md", page(section)


def page(section: Section) -> str:
    """Return the page of a section: its examples, then the docstring and signature of each name."""
    lines = [f"# {section.title}: every name", "", f"[The overview](../api.md#{section.slug}) says in a line what each name is.", ""]
    for number, code in enumerate(section.snippets):
        lines += [*([] if number else ["## Example", ""]), "```python", code.rstrip(), "```", ""]
    values = section.title in VALUES
    for name in section.names:
        lines += [f"::: selfless.{name}", *(["    options:", "      members: false"] if values else []), ""]
    return "\n".join(lines)


def module_page(name: str) -> str:
    """Return the page of a module: the functions and classes in its `__all__` that have no page yet."""
    import selfless

    module = getattr(selfless, name)
    listed = getattr(module, "__all__", [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__])
    known = [getattr(selfless, public) for public in public_names()]
    values = {n: getattr(module, n) for n in listed if not n.startswith("_")}
    members = sorted(n for n, value in values.items() if callable(value) and inspect.getdoc(value) and value not in known)
    options = ["    options:", "      show_root_heading: false", "      show_root_toc_entry: false", f"      members: {members}"]
    title = [f"# selfless.{name}", "", "[Examples](../api.md#modules) are on the page of the API.", ""]
    return "\n".join([*title, f"::: selfless.{name}", *options, ""])
