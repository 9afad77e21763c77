"""Write MATLAB 5 files for the tests: numbers, text, cells (lists) and structs (lists of dicts)."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

TYPES = {"i1": 1, "u1": 2, "i2": 3, "u2": 4, "i4": 5, "u4": 6, "f4": 7, "f8": 9, "i8": 12, "u8": 13}
CLASSES = {"f8": 6, "f4": 7, "i1": 8, "u1": 9, "i2": 10, "u2": 11, "i4": 12, "u4": 13, "i8": 14, "u8": 15}


class MatWriter:
    def __init__(self, order: str = "<", *, compress: bool = True, small: bool = True) -> None:
        self.order, self.compress, self.small = order, compress, small

    def element(self, kind: int, data: bytes) -> bytes:
        if self.small and 0 < len(data) <= 4 and kind != 14:
            return struct.pack(f"{self.order}I", len(data) << 16 | kind) + data.ljust(4, b"\0")
        return struct.pack(f"{self.order}II", kind, len(data)) + data + bytes(-len(data) % 8)

    def matrix(self, value: Any, name: str = "") -> bytes:
        if isinstance(value, str):
            kind, shape, body = 4, (1, len(value)), self.element(4, value.encode(f"utf-16-{'le' if self.order == '<' else 'be'}"))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            fields = list(value[0])
            names = b"".join(field.encode().ljust(32, b"\0") for field in fields)
            entries = b"".join(self.matrix(entry[field]) for entry in value for field in fields)
            width = self.element(5, struct.pack(f"{self.order}i", 32))
            kind, shape, body = 2, (1, len(value)), width + self.element(1, names) + entries
        elif isinstance(value, list):
            kind, shape, body = 1, (1, len(value)), b"".join(self.matrix(entry) for entry in value)
        else:
            array = np.asarray(value)
            array = array.reshape(1, -1) if array.ndim < 2 else array
            code = array.dtype.kind + str(array.dtype.itemsize)
            stored = array.astype(f"{self.order}{code}").tobytes(order="F")
            kind, shape, body = CLASSES[code], array.shape, self.element(TYPES[code], stored)
        return self.wrap(kind, shape, name, body)

    def wrap(self, kind: int, shape: tuple[int, ...], name: str, body: bytes) -> bytes:
        """Return a matrix of any class with the given body."""
        flags = self.element(6, struct.pack(f"{self.order}II", kind, 0))
        head = flags + self.element(5, struct.pack(f"{self.order}{len(shape)}i", *shape)) + self.element(1, name.encode())
        return self.element(14, head + body)

    def file(self, matrices: list[bytes]) -> bytes:
        mark = b"IM" if self.order == "<" else b"MI"
        head = b"MATLAB 5.0 MAT-file, made by a test".ljust(116) + bytes(8) + struct.pack(f"{self.order}H", 0x0100) + mark
        for one in matrices:
            packed = zlib.compress(one)
            head += struct.pack(f"{self.order}II", 15, len(packed)) + packed if self.compress else one
        return head

    def write(self, **variables: Any) -> bytes:
        return self.file([self.matrix(value, name) for name, value in variables.items()])


def mat(**variables: Any) -> bytes:
    """Write a file as MATLAB does: little-endian, compressed, small elements packed."""
    return MatWriter().write(**variables)
