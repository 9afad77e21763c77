"""Load a recorded run by its place: `selfless.load("results/KEY")`."""

from __future__ import annotations

from pathlib import Path

from selfless.runner.archive import NAME
from selfless.runner.store import Store
from selfless.spec import Result


def load(place: Path | str, key: str | None = None) -> Result:
    """Return the recorded result of one run, whose `model()` is the trained network.

    place   DIR/KEY, or DIR with `key`; DIR may also be its archive, DIR/runs.jsonl.xz, which holds results but no weights
    """
    path = Path(place).expanduser() if key is None else Path(place).expanduser() / key
    folder = folder_of(path)
    store = Store(folder)
    result = store.get(path.name)
    if result is not None:
        return result
    if inside := Store(path).keys():
        raise ValueError(f"{path} holds {len(inside)} runs; name one: {path / inside[-1]}")
    found = f"its newest runs: {', '.join(known[-3:])}" if (known := store.keys()) else "it holds no results"
    raise ValueError(f"{folder} has no run {path.name!r}; {found}")


def folder_of(path: Path | str) -> Path:
    """Return DIR of DIR/KEY or DIR/runs.jsonl.xz/KEY."""
    above = Path(path).expanduser().parent
    return above.parent if above.name == NAME else above
