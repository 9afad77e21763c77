"""Random changes of texts, bytes and JSON values, drawn from one seeded generator."""

from __future__ import annotations

import copy
import random
from typing import Any

WORDS = [
    *(
        "",
        "0",
        "-1",
        "1e400",
        "-inf",
        "nan",
        "1e-400",
        "0x10",
        "1_000",
        "9" * 400,
        "True",
        "null",
        "none",
        "auto",
        "~nouser",
        "../..",
        "/dev/null",
    ),
    *(
        "[/b]",
        "[bold]",
        "{{7*7}}",
        "<script>",
        "'; --",
        "%s%n",
        "\x00",
        "\x1b[2J",
        "é",
        "\u202e",
        "ﬀ",
        "🙂",
        " ",
        "\n",
        "a" * 300,
        "+",
        ",",
        ":",
        "=",
    ),
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**63, 10**400, 0.5, -0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "[/b]", "\x1b[2J", [], [[]], [None], {}, {"a": {}}, {"name": "mas"}, ["a", 1], "9" * 50),
]


def change_text(text: str, rng: random.Random) -> str:
    """Return the text with a few changes: characters removed, repeated, swapped or replaced by words of WORDS."""
    for _ in range(rng.randint(1, 3)):
        i, j = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        how = rng.randint(0, 4)
        if how == 0:
            text = text[:i] + text[j:]
        elif how == 1:
            text = text[:i] + rng.choice(WORDS) + text[i:]
        elif how == 2:
            text = text[:i] + rng.choice(WORDS) + text[j:]
        elif how == 3:
            text = text[:j] + text[i:]
        else:
            text = text[:i] + chr(rng.choice([rng.randint(32, 126), rng.randint(0, 0x2FF)])) + text[i + 1 :]
    return text[:5000]


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with a few flipped, replaced, removed or added, or cut off."""
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        if not found:
            return bytes(rng.randbytes(8))
        i = rng.choice([rng.randrange(len(found)), rng.randrange(min(len(found), 64))])
        how = rng.randint(0, 5)
        if how == 0:
            found[i] ^= 1 << rng.randint(0, 7)
        elif how == 1:
            found[i : i + 4] = rng.choice([b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff", rng.randbytes(4)])
        elif how == 2:
            del found[i:]
        elif how == 3:
            del found[i : i + rng.randint(1, 16)]
        elif how == 4:
            found[i:i] = rng.randbytes(rng.randint(1, 16))
        else:
            found[i] = rng.randrange(256)
    return bytes(found)


def change_json(value: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON value in which one to three inner values are replaced, removed or moved."""
    found = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        inner, path = found, []
        while isinstance(inner, dict | list) and inner and (not path or rng.random() < 0.7):
            key = rng.choice(list(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))
            path.append((inner, key))
            inner = inner[key]
        if not path:
            return rng.choice(VALUES)
        holder, key = path[-1]
        if rng.random() < 0.25:
            del holder[key]
        elif rng.random() < 0.2 and isinstance(holder[key], str):
            holder[key] = change_text(holder[key], rng)
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
    return found
