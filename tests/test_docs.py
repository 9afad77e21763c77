"""Every Python snippet of README.md and docs/ runs (unless it says no-run), and every file they link to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(code, id=f"{page.name}:{number}")
    for page in PAGES
    for number, (info, code) in enumerate(re.findall(r"^```python([^\n]*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M))
    if "no-run" not in info
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_figures_in_the_results_page_are_the_recorded_ones() -> None:
    """Each row of the table is recomputed from results/."""
    from selfless.metrics import spread
    from selfless.preserve import PRESERVERS
    from selfless.runner.store import Store
    from selfless.sparsify import SPARSIFIERS
    from selfless.terms import parse

    recorded: dict[tuple[str, object, object], list[float]] = {}
    for result in Store(ROOT / "results" / "permuted-mnist").all():
        recorded.setdefault((result.run.model, result.run.preserve, result.run.sparsify), []).append(100 * result.average)
    rows = re.findall(
        r"^\| (mlp-\d+) \| (\S+) \([^)]*\) \| (\S+) \| \**([\d.]+) ± ([\d.]+)\**", (ROOT / "docs/results.md").read_text(), re.M
    )
    assert len(rows) == len(recorded) == 12
    for model, preserve, sparsify, mean, std in rows:
        values = recorded[model, parse(preserve, PRESERVERS, "preserver"), parse(sparsify, SPARSIFIERS, "sparsifier")]
        assert len(values) == 5
        assert (f"{spread(values)[0]:.2f}", f"{spread(values)[1]:.2f}") == (mean, std)
