"""Read MATLAB files of version 5 with numpy alone: numbers, text, cells and structs, compressed or not.

A file is a header of 128 bytes and a list of elements. An element is a tag (type, size) and its bytes. Only data is read: objects,
functions and opaque values are refused, and every size is checked against the bytes that are there.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Collection
from typing import Any

import numpy as np

from selfless.data.errors import Altered

HEADER = 128
LIMIT = 1 << 31  # bytes of one decompressed variable at most; SVHN's largest has 225 MB
DEPTH = 12  # of nested cells and structs at most
MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}  # element type → numpy
TEXTS = {1: "latin-1", 2: "utf-8", 16: "utf-8", 4: "utf-16", 17: "utf-16", 18: "utf-32"}  # element type → encoding
CELL, STRUCT, CHAR = 1, 2, 4
ARRAYS = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}  # class → numpy
REFUSED = {3: "an object", 5: "a sparse matrix", 16: "a function", 17: "an opaque value"}

Value = Any  # ndarray | str | list[Value] (a cell) | list[dict[str, Value]] (a struct)


def read(data: bytes, wanted: Collection[str], what: str) -> dict[str, Value]:
    """Return the wanted variables. Raise Altered if one is missing or not whole.

    Numbers become arrays of their MATLAB shape, text str, a cell a list, a struct a list of dicts. Lists are in MATLAB's order,
    columns first.
    """
    if len(data) < HEADER or data[126:128] not in (b"IM", b"MI"):
        seven = data[:10] == b"MATLAB 7.3"
        why = (
            "is a MATLAB 7.3 (HDF5) file, not the published one; save it with -v7"
            if seven
            else "does not start like a MATLAB 5 file; fetch it again"
        )
        raise Altered(f"{what} {why}")
    if data[:10] == b"MATLAB 7.3":
        raise Altered(f"{what} is a MATLAB 7.3 (HDF5) file, not the published one; save it with -v7")
    order = "<" if data[126:128] == b"IM" else ">"
    found: dict[str, Value] = {}
    try:
        _Reader(data, order, what).read_variables(found, frozenset(wanted))
    except (struct.error, zlib.error, ValueError, IndexError, OverflowError) as error:
        raise Altered(f"{what} is damaged or half-written ({error}); delete it and fetch it again") from error
    if missing := sorted(set(wanted) - set(found)):
        raise Altered(f"{what} does not hold {', '.join(missing)}; it holds {', '.join(found) or 'nothing that is needed'}; fetch it again")
    return found


class _Reader:
    """A cursor over one buffer of elements."""

    def __init__(self, data: bytes | memoryview, order: str, what: str, at: int = HEADER) -> None:
        self.data, self.order, self.what, self.at = memoryview(data), order, what, at

    def read_element(self) -> tuple[int, memoryview]:
        """Return (type, bytes) of the next element, and move the cursor behind its padding."""
        kind, size = struct.unpack_from(f"{self.order}II", self.data, self.at)
        if kind >> 16:  # a small element: size and type share the first word, up to four bytes follow
            kind, size, start, step = kind & 0xFFFF, kind >> 16, self.at + 4, 8
            if size > 4:
                raise Altered(f"{self.what}: a small element of {size} bytes; fetch it again")
        else:
            start, step = self.at + 8, 8 + size + (0 if kind == COMPRESSED else -size % 8)
        if start + size > len(self.data):
            raise Altered(f"{self.what} is cut off: {start + size - len(self.data)} bytes are missing; delete it and fetch it again")
        self.at += step
        return kind, self.data[start : start + size]

    def read_variables(self, found: dict[str, Value], wanted: frozenset[str]) -> None:
        """Add every wanted variable to `found`."""
        while self.at < len(self.data):
            kind, content = self.read_element()
            if kind == COMPRESSED:
                machine = zlib.decompressobj()
                plain = machine.decompress(content, LIMIT)
                if not machine.eof:
                    why = f"more than {LIMIT >> 30} GiB in one variable" if machine.unconsumed_tail else "cut off"
                    raise Altered(f"{self.what} is damaged ({why}); delete it and fetch it again")
                _Reader(plain, self.order, self.what, 0).read_variables(found, wanted)
            elif kind == MATRIX:
                inner = _Reader(content, self.order, self.what, 0)
                flags, shape, name = inner.read_head()
                if name in wanted:
                    found[name] = inner.read_body(flags, shape, 0)

    def read_head(self) -> tuple[int, tuple[int, ...], str]:
        """Return (class and flags, shape, name) of a matrix."""
        flags = int(np.frombuffer(self.read_element()[1], f"{self.order}u4")[0])
        shape = tuple(int(n) for n in np.frombuffer(self.read_element()[1], f"{self.order}i4"))
        if len(shape) < 2 or min(shape) < 0:
            raise Altered(f"{self.what}: a matrix of shape {shape}; fetch it again")
        return flags, shape, bytes(self.read_element()[1]).decode("latin-1")

    def read_matrix(self, depth: int) -> Value:
        """Return the next element, which must be a matrix."""
        kind, content = self.read_element()
        if kind != MATRIX:
            raise Altered(f"{self.what}: an element of type {kind} in the place of a matrix; fetch it again")
        if not len(content):  # how MATLAB writes []
            return np.zeros((0, 0))
        inner = _Reader(content, self.order, self.what, 0)
        flags, shape, _ = inner.read_head()
        return inner.read_body(flags, shape, depth)

    def read_body(self, flags: int, shape: tuple[int, ...], depth: int) -> Value:
        """Return the value of a matrix: an array, text, a cell or a struct."""
        kind, count = flags & 0xFF, math.prod(shape)
        if depth > DEPTH:
            raise Altered(f"{self.what} is nested more than {DEPTH} deep: refused")
        if kind in ARRAYS:
            if flags & 0x800:
                raise Altered(f"{self.what} holds complex numbers, which no published set here has; fetch it again")
            numbers = self.read_numbers(count)
            try:
                with np.errstate(all="raise"):
                    return numbers.astype(f"{ARRAYS[kind]}", copy=False).reshape(shape, order="F")
            except FloatingPointError:
                raise Altered(f"{self.what} holds numbers that do not fit their type; fetch it again") from None
        if kind == CHAR:
            return self.read_text(shape)
        if kind == CELL:
            self.check_room(count)
            return [self.read_matrix(depth + 1) for _ in range(count)]
        if kind == STRUCT:
            width = int(np.frombuffer(self.read_element()[1], f"{self.order}i4")[0])
            packed = bytes(self.read_element()[1])
            if width < 1 or len(packed) % width:
                raise Altered(f"{self.what}: field names of {width} bytes do not divide {len(packed)}; fetch it again")
            names = [packed[i : i + width].split(b"\0")[0].decode("latin-1") for i in range(0, len(packed), width)]
            self.check_room(count * len(names))
            return [{name: self.read_matrix(depth + 1) for name in names} for _ in range(count)]
        raise Altered(f"{self.what} holds {REFUSED.get(kind, f'a value of class {kind}')}, which is never read; fetch the published file")

    def check_room(self, count: int) -> None:
        """Raise Altered if `count` entries of a cell or struct cannot fit: each needs a tag of 8 bytes."""
        if count * 8 > len(self.data) - self.at:
            raise Altered(f"{self.what} is cut off: {count} entries do not fit into {len(self.data) - self.at} bytes; fetch it again")

    def read_numbers(self, count: int) -> np.ndarray[Any, Any]:
        """Return the next element as `count` numbers."""
        kind, content = self.read_element()
        if kind not in NUMBERS:
            raise Altered(f"{self.what}: an element of type {kind} in the place of numbers; fetch it again")
        values = np.frombuffer(content, f"{self.order}{NUMBERS[kind]}")
        if len(values) != count:
            raise Altered(f"{self.what} should hold {count} numbers and holds {len(values)}; delete it and fetch it again")
        return values

    def read_text(self, shape: tuple[int, ...]) -> str:
        """Return text; the rows of a matrix of characters become lines."""
        kind, content = self.read_element()
        if kind not in TEXTS:
            raise Altered(f"{self.what}: an element of type {kind} in the place of text; fetch it again")
        wide = TEXTS[kind] in ("utf-16", "utf-32")
        letters = bytes(content).decode(TEXTS[kind] + (("-le" if self.order == "<" else "-be") if wide else ""))
        if shape[0] <= 1:
            return letters
        if shape[0] > len(letters):
            raise Altered(f"{self.what}: {len(letters)} characters do not fill {shape[0]} rows; fetch it again")
        return "\n".join(letters[row :: shape[0]].rstrip() for row in range(shape[0]))
