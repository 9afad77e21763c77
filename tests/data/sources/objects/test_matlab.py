"""MATLAB files: what the sets need is read, everything else is refused, and the only error is `Altered`."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from selfless.data import Altered
from selfless.data.sources.objects import matlab
from tests.data.matfiles import MatWriter, mat

STRUCT = [{"class": np.array([[i]], dtype=np.uint8), "fname": f"{i:05d}.jpg", "none": []} for i in range(3)]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("small", [True, False])
def test_what_is_written_is_read(order: str, compress: bool, small: bool) -> None:
    numbers = {code: np.arange(24).reshape(2, 3, 4).astype(code) for code in ("f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")}
    data = MatWriter(order, compress=compress, small=small).write(
        **numbers, cell=["Škoda", "", np.array([[7.0]])], rows=STRUCT, skipped=[[]]
    )
    found = matlab.read(data, [*numbers, "cell", "rows"], "x")
    for code, array in numbers.items():
        assert found[code].dtype == np.dtype(code)
        assert_array_equal(found[code], array)
    assert found["cell"][:2] == ["Škoda", ""]
    assert_array_equal(found["cell"][2], [[7.0]])
    assert [row["fname"] for row in found["rows"]] == ["00000.jpg", "00001.jpg", "00002.jpg"]
    assert [int(row["class"][0, 0]) for row in found["rows"]] == [0, 1, 2]
    assert "skipped" not in found


def test_numbers_may_be_stored_in_fewer_bytes() -> None:
    """MATLAB writes doubles that are whole and small as bytes."""
    writer = MatWriter(compress=False)
    matrix = writer.wrap(6, (1, 3), "labels", writer.element(2, bytes([1, 2, 102])))
    found = matlab.read(writer.file([matrix]), ["labels"], "x")["labels"]
    assert found.dtype == np.float64
    assert_array_equal(found, [[1, 2, 102]])


def test_rows_of_characters_and_empty_cells() -> None:
    writer = MatWriter(compress=False)
    table = writer.wrap(4, (2, 3), "names", writer.element(16, b"abcd  "))  # columns first: a c . / b d .
    cell = writer.wrap(1, (1, 1), "empty", writer.element(14, b""))
    found = matlab.read(writer.file([table, cell]), ["names", "empty"], "x")
    assert found["names"] == "ac\nbd"
    assert found["empty"][0].size == 0


SAMPLE = mat(labels=np.arange(40.0)[None], rows=STRUCT, cell=["a", "b"])
PLAIN = MatWriter(compress=False).write(labels=np.arange(40.0)[None], rows=STRUCT, cell=["a", "b"])


@pytest.mark.parametrize("data", [SAMPLE, PLAIN])
def test_a_file_that_is_cut_off_anywhere_is_altered(data: bytes) -> None:
    for length in range(0, len(data) - 1, 3):
        with pytest.raises(Altered):
            matlab.read(data[:length], ["labels", "rows", "cell"], "x")


@settings(max_examples=300, deadline=None)
@example([(144, 8), (295, 68)])
@given(st.lists(st.tuples(st.integers(128, len(PLAIN) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_file_is_read_or_altered_and_nothing_else(changes: list[tuple[int, int]]) -> None:
    data = bytearray(PLAIN)
    for at, value in changes:
        data[at] = value
    try:
        found = matlab.read(bytes(data), ["labels", "rows", "cell"], "x")
    except Altered:
        return
    assert set(found) == {"labels", "rows", "cell"}


def _one(kind: int, shape: tuple[int, ...], body: bytes) -> bytes:
    writer = MatWriter(compress=False)
    return writer.file([writer.wrap(kind, shape, "x", body)])


NUMBERS = MatWriter().element(9, bytes(16))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not start like a MATLAB 5 file"),
        (b"MATLAB 7.3 MAT-file".ljust(512), r"7\.3 \(HDF5\)"),
        (b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(64), r"7\.3 \(HDF5\)"),
        (mat(y=np.zeros((1, 1))), "does not hold x"),
        (_one(6, (1, 3), NUMBERS), "should hold 3 numbers and holds 2"),
        (_one(6, (1, -2), NUMBERS), r"shape \(1, -2\)"),
        (_one(6 | 0x800, (1, 2), NUMBERS), "complex"),
        (_one(3, (1, 1), NUMBERS), "an object, which is never read"),
        (_one(17, (1, 1), NUMBERS), "an opaque value"),
        (_one(1, (1, 1 << 30), NUMBERS), "entries do not fit"),
        (_one(1, (1, 1), NUMBERS), "in the place of a matrix"),
        (_one(4, (1, 1), NUMBERS), "in the place of text"),
        (_one(4, (1 << 30, 1), MatWriter().element(16, b"abc")), "3 characters do not fill"),
        (_one(6, (1, 1), MatWriter().element(16, b"text")), "in the place of numbers"),
        (_one(2, (1, 1), MatWriter().element(5, struct.pack("<i", 7)) + MatWriter().element(1, b"12345678")), "field names"),
    ],
)
def test_refused(data: bytes, message: str) -> None:
    with pytest.raises(Altered, match=message):
        matlab.read(data, ["x"], "cars_meta.mat")


def test_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matlab, "LIMIT", 1 << 16)
    with pytest.raises(Altered, match="in one variable"):
        matlab.read(mat(x=np.zeros((1000, 1000))), ["x"], "bomb.mat")
    deep: object = "end"
    for _ in range(matlab.DEPTH + 2):
        deep = [deep]
    with pytest.raises(Altered, match="nested more than"):
        matlab.read(mat(x=deep), ["x"], "bomb.mat")
