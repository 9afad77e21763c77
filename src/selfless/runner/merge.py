"""Join folders of results: the parts of one study, trained on different machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfless.runner.archive import NAME, write_archive
from selfless.runner.store import Store


@dataclass(frozen=True)
class Merged:
    """The counts of `merge_results`: runs written, runs that were in several folders, and runs among these whose numbers differ."""

    path: Path
    runs: int
    repeated: int
    differing: int


def merge_results(folders: Sequence[Path], out: Path) -> Merged:
    """Write the runs of all folders into one archive below `out`; if two contain the same run, the first counts."""
    found: dict[str, dict[str, object]] = {}
    repeated, differing = set[str](), set[str]()
    for folder in folders:
        results = Store(folder).all()
        if not results:
            raise ValueError(f"{folder} holds no results to merge; check the path, or train something first: selfless run --out {folder}")
        for result in results:
            key, values = result.run.key, json.loads(json.dumps(result.as_dict()))
            if key not in found:
                found[key] = values
            elif found[key] is not values:
                repeated.add(key)
                differing |= {key} if found[key]["accuracy"] != values["accuracy"] else set()
    path = Path(out) / NAME
    write_archive(path, found.values())
    return Merged(path, len(found), len(repeated), len(differing))
