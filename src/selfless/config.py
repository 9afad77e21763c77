"""From a TOML file and command-line flags to runs. Flags win over the file, the file over the defaults; unknown keys are errors."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

SESSION = ("seeds", "out", "device", "workers", "data_dir", "budget")  # how to run, beside what to run


@dataclass(frozen=True)
class Plan:
    """The runs a command asks for, and how to run them."""

    runs: list[Any]
    session: dict[str, Any]


def plan(config: Path | None, flags: Mapping[str, Any]) -> Plan:
    """`flags` holds what was given on the command line (None: not given)."""
    from selfless.spec import Run

    values = _read(config) if config is not None else {}
    known = [f.name for f in fields(Run)]
    for key in values:
        if key not in (*known, *SESSION):
            close = difflib.get_close_matches(key, (*known, *SESSION), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{config}: unknown key {key!r}.{hint} Known keys: {', '.join((*known, *SESSION))}")
    for name in ("stream_options", "model_options"):
        given = flags.get(name) or {}
        if name in values or given:
            values[name] = {**values.get(name, {}), **given}
    values |= {k: v for k, v in flags.items() if v is not None and k not in ("stream_options", "model_options")}
    for name in ("preserve", "sparsify"):
        if isinstance(values.get(name), Mapping) and "name" not in values[name]:
            raise ValueError(f'{config}: [{name}] needs a name, as in {name} = "mas:0.1" or {name} = {{name = "mas", strength = 0.1}}')
    session = {k: values.pop(k) for k in SESSION if k in values}
    workers = session.get("workers")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers is {workers!r}; it must be a whole number ≥ 1")
    first = Run.from_dict(values)
    count = session.pop("seeds", 1)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"seeds is {count!r}; it must be a whole number ≥ 1: how many seeds to run, from {first.seed} up")
    runs = [Run.from_dict({**values, "seed": first.seed + i}) for i in range(count)]
    return Plan(runs, session)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; --config takes a TOML file such as: model = 'mlp-64'") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None


def options(pairs: Sequence[str] | None, flag: str) -> dict[str, Any]:
    """["p=0.5", "head=all"] → {"p": 0.5, "head": "all"}: TOML values, or plain text where they are none."""
    found: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"{flag} {pair!r}: write key=value, as in {flag} classes_per_task=5")
        try:
            found[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = text
    return found


def size(text: str | int | None) -> int | None:
    """ "2GB", "500 MiB" or a number of bytes."""
    if text is None or (isinstance(text, (int, float)) and not isinstance(text, bool) and text > 0):
        return None if text is None else int(text)
    text = str(text)
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
    plain = text.strip().lower().replace(" ", "")
    number = plain.rstrip("abcdefghijklmnopqrstuvwxyz")
    try:
        if float(number) <= 0:
            raise ValueError
        return int(float(number) * units[plain[len(number) :]])
    except (KeyError, ValueError):
        raise ValueError(f"{text!r} is not a size; write for example 2GB or 500MiB") from None
