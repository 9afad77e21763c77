"""The list of faults: every place that an operator of mutmut changes, as an edit of the source. Needs `mutmut`.

mutmut itself copies every changed function into the module, behind a switch, and leaves out functions with decorators and code outside of
functions. Here a fault is an edit of the file, so properties, constants and fields of dataclasses are changed, too.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

ALIASES = {"Callable", "Mapping", "Sequence", "Iterable", "Iterator", "Union", "Literal", "tuple", "dict", "list", "TypeVar", "Annotated"}

# Arguments that cannot be seen where the tests run: strict= of zip is an assertion about the code itself, device= needs a second device,
# encoding= another locale, and stacklevel= is the line that a warning points at.
ONLY_THERE = {"strict", "device", "encoding", "stacklevel"}
CODECS = {"utf-8", "ascii"}


def faults(source: Path, patterns: Sequence[str]) -> list[dict[str, Any]]:
    """Return `{id, file, line, lines, start, end, new, old, operator}` for every fault; `start` and `end` count characters of the file."""
    found = []
    for path in sorted(path for pattern in patterns for path in source.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        file, spans = str(path.relative_to(source)), _statements(ast.parse(text))
        texts, seen, alike = text.splitlines(), set(), Counter[str]()
        for fault in _in_text(text):
            edit = fault["start"], fault["end"], fault["new"]
            if edit in seen:
                continue
            seen.add(edit)
            words = json.dumps([file, texts[fault["line"] - 1].strip(), fault["old"], fault["new"], fault["operator"]])
            alike[words] += 1
            name = hashlib.sha256(f"{words}{alike[words]}".encode()).hexdigest()[:12]  # the same after changes elsewhere in the file
            found.append({"id": name, "file": file, "lines": spans.get(fault["line"], [fault["line"]] * 2), **fault})
    return found


def _in_text(text: str) -> Iterator[dict[str, Any]]:
    wrapper = MetadataWrapper(cst.parse_module(text))
    visitor = _Visitor()
    wrapper.visit(visitor)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, new, name, place in visitor.found:
        start, end = (starts[p.line - 1] + p.column for p in (place.start, place.end))
        code = wrapper.module.code_for_node(new).strip()
        if isinstance(node, cst.BaseExpression) and node.lpar:  # the position is that of what is inside the parentheses
            code = wrapper.module.code_for_node(new.with_changes(lpar=[], rpar=[])).strip() if hasattr(new, "lpar") else code
        yield {"line": place.start.line, "start": start, "end": end, "old": text[start:end], "new": code, "operator": name}


class _Visitor(cst.CSTVisitor):
    """Collects every change that an operator makes, outside of what does not run: types, texts for people, `__all__`."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, Any, str, Any]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _skipped(node):
            return False
        place = self.get_metadata(PositionProvider, node, None)
        if place is not None and not _text_for_people(node):
            for kind, operator in mutation_operators:
                if isinstance(node, kind):
                    changes = [new for new in operator(node) if not _is_same(node, new)]
                    self.found += [(node, new, operator.__name__.removeprefix("operator_"), place) for new in changes]
        return True


def _skipped(node: cst.CSTNode) -> bool:
    match node:
        case cst.Annotation() | cst.Decorator() | cst.Import() | cst.ImportFrom() | cst.TypeAlias():
            return True
        case cst.Call(func=cst.Name(value="isinstance" | "len" | "cast" | "TypeVar" | "NewType")):
            return True  # mutmut leaves out the first two; the others are of interest for types alone
        case cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()):
            return True  # docstrings
        case cst.If(test=cst.Name(value="TYPE_CHECKING") | cst.UnaryOperation(expression=cst.Name(value="TYPE_CHECKING"))):
            return True
        case cst.Arg(keyword=cst.Name(value=name)) if name in ONLY_THERE:
            return True
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value="__all__"))]):
            return True
        case cst.Assign(value=cst.Subscript(value=cst.Name(value=name))):
            return name in ALIASES
        case cst.Assign(value=cst.Call(func=cst.Name(value="TypeVar" | "NewType"))):
            return True
        case cst.Assign(value=cst.BinaryOperation(operator=cst.BitOr(), right=cst.Name(value="None"))):
            return True  # the name of a type
    return False


def _is_same(node: cst.CSTNode, new: Any) -> bool:
    """Whether a change cannot be seen, by one of the rules that docs/lab-notes/testing.md states."""
    match node, new:
        case cst.Call(args=old), cst.Call(args=changed):
            named = {a.keyword.value: a for a in old if a.keyword is not None}
            kept = {a.keyword.value: a for a in changed if a.keyword is not None}
            if any(name in ONLY_THERE and not (name in kept and kept[name].deep_equals(a)) for name, a in named.items()):
                return True
            is_error = isinstance(node.func, cst.Name) and node.func.value.endswith(("Error", "Exception", "Warning"))
            return is_error and len(old) == 1  # its words alone
        case cst.Float() | cst.Integer(), cst.Float() | cst.Integer():
            return bool(ast.literal_eval(node.value) == ast.literal_eval(new.value))  # 1e30 + 1
        case cst.SimpleString(value=a), cst.SimpleString(value=b):
            return a.strip("\"'").lower() in CODECS and a.lower() == b.lower()
    return False


def _text_for_people(node: cst.CSTNode) -> bool:
    """Whether this is a literal with a space in it: a part of a message, whose words the tests need not repeat."""
    return isinstance(node, cst.SimpleString) and " " in node.value


def _statements(tree: ast.Module) -> dict[int, list[int]]:
    """For every line, the first and last line of its statement, or of its head if other statements are inside."""
    spans: dict[int, list[int]] = {}
    for node in ast.walk(tree):  # outer statements before inner ones
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = (node.end_lineno or node.lineno) if not body else max(body[0].lineno - 1, node.lineno)
            for line in range(node.lineno, end + 1):
                spans[line] = [node.lineno, end]
    return spans
