"""The pages about reliability and testing have the records of `make kills`, `fuzz`, `soak`, `mutants` and `coverage`."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_has_the_recorded_counts() -> None:
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    kills, fuzz = (json.loads((ROOT / f"results/reliability/{name}.json").read_text()) for name in ("kills", "fuzz"))
    for kind, ended in kills["kills"].items():
        assert f"| {kind} | {' | '.join(str(ended.get(how, 0)) for how in ('SIGKILL', 'SIGTERM', 'SIGINT'))} |" in page
    assert f"| all | {fuzz['cases']:,} |" in page
    assert sum(fuzz["by_kind"].values()) == fuzz["cases"]
    assert kills["problems"] == []


def test_the_page_has_the_recorded_growth() -> None:
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    parts = json.loads((ROOT / "results/reliability/soak.json").read_text(encoding="utf-8"))
    for part in parts.values():
        for process in (values for values in part.values() if isinstance(values, dict)):
            assert process["grown"] == []
            pairs = [", ".join(str(value) for value in process[name]) for name in ("megabytes", "files", "threads")]
            assert f"| {process['samples']} | {' | '.join(pairs)} |" in page


def test_the_page_has_the_recorded_faults() -> None:
    page = (ROOT / "docs/lab-notes/testing.md").read_text(encoding="utf-8")
    record = json.loads((ROOT / "results/reliability/mutants.json").read_text(encoding="utf-8"))
    for room, one in record["rooms"].items():
        share = 100 * one["found"] / (one["tried"] - one["undecided"])
        counts = [f"{one[name]:,}" for name in ("planned", "tried", "found", "undecided")]
        assert f"| {room} | {' | '.join(counts)} | {share:.0f} % |" in page


def test_the_page_has_the_recorded_coverage() -> None:
    page = " ".join((ROOT / "docs/lab-notes/testing.md").read_text(encoding="utf-8").split())
    found = json.loads((ROOT / "results/reliability/coverage.json").read_text(encoding="utf-8"))
    all_, missed = (found[f"{start}statements"] + found[f"{start}branches"] for start in ("", "missing_"))
    assert round(100 * (1 - missed / all_), 2) == found["percent"]
    assert f"reaches {found['percent']:.1f} % of the" in " ".join((ROOT / "docs/reliability.md").read_text(encoding="utf-8").split())
    assert f"**{found['percent']:.1f} %** of {found['statements']:,} statements and {found['branches']:,} branches" in page
