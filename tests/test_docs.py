"""Every Python snippet of README.md and docs/ runs (unless it says no-run), and every file they link to exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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


def test_nothing_speaks_of_notes_that_readers_do_not_have() -> None:
    texts = [*PAGES, *(ROOT / "src").rglob("*.py")]
    assert [text.name for text in texts if "method notes" in text.read_text(encoding="utf-8")] == []


RECORDED = ROOT / "results/reproduction"
SPREAD = r"[\d.]+ ± [\d.]+"
INTERVAL = r"[+−][\d.]+ \[[+−][\d.]+, [+−][\d.]+\]"


def test_the_tables_are_those_of_the_recorded_experiments() -> None:
    """`make tables` after every change of the records or of how they are told."""
    from typer.testing import CliRunner

    from selfless.cli import app

    for form, suffix in (("md", "md"), ("csv", "csv"), ("latex", "tex")):
        made = CliRunner().invoke(app, ["report", str(RECORDED), "--format", form])
        assert made.stdout == (RECORDED / f"tables.{suffix}").read_text(encoding="utf-8"), f"run make tables: tables.{suffix} is old"


def test_the_times_of_experiments_are_the_recorded_ones() -> None:
    page = (ROOT / "docs/experiments.md").read_text(encoding="utf-8")
    records = [json.loads(path.read_text(encoding="utf-8")) for path in (RECORDED / "experiments").glob("*-ours.json")]
    rows = {f"| `{r['name']}` | {r['about']['runs']} | {r['about']['seconds']:.0f} s |" for r in records}
    assert rows == set(re.findall(r"^\| `[\w-]+` \| \d+ \| \d+ s \|$", page, re.M))


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_figures_of_the_reproduction_are_the_recorded_ones(page: str) -> None:
    """Every "a ± b" and every "+a [+b, +c]" stands in the tables drawn from the records."""
    tables = (RECORDED / "tables.md").read_text(encoding="utf-8")
    found = re.findall(f"{SPREAD}|{INTERVAL}", (ROOT / page).read_text(encoding="utf-8"))
    assert found
    assert [figure for figure in found if figure not in tables] == []


def test_the_verdicts_on_the_results_page_are_the_recorded_ones() -> None:
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    for profile in ("ours", "paper"):
        paths = [path for path in (RECORDED / "experiments").glob(f"*-{profile}.json") if not path.name.startswith("rivals")]
        records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        verdicts = [claim["verdict"] for record in records for claim in record["claims"] if not claim["ours"]]
        counted = " | ".join(str(verdicts.count(verdict)) for verdict in ("holds", "fails", "undecided"))
        assert re.search(rf"^\| `{profile}`[^|]*\| {re.escape(counted)} \|$", page, re.M), f"{profile}: {counted}"


def test_every_reported_run_is_there_and_gives_the_reported_value() -> None:
    from selfless.runner.store import Store

    results = {result.run.key: result for result in Store(RECORDED).all()}
    reported = set()
    for path in (RECORDED / "experiments").glob("*.json"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for run in cell["runs"]:
                reported.add(run["key"])
                if cell["value"] == "average":
                    assert 100 * results[run["key"]].average == pytest.approx(run["value"], abs=1e-9)
    assert reported == results.keys()


def test_figures_in_the_performance_page_are_the_recorded_ones() -> None:
    """Each is formatted from results/bench/ and must stand on the page; the marks must be those of the files."""
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    cpu, gpu, steps, peers = (
        json.loads((ROOT / "results/bench" / name).read_text(encoding="utf-8"))
        for name in ("cpu/bench.json", "h200/bench.json", "h200/steps.json", "peers-cpu/bench.json")
    )
    wanted = []
    sixty, *cifar = gpu["sequence"]
    wanted.append(f"**{sixty['seconds']:.2f} s** {mark(sixty)}")
    for tf32, bf16 in ((cifar[0], cifar[1]), (cifar[2], cifar[3])):
        wanted.append(f"**{bf16['seconds_a_run']:.2f} s** {mark(bf16)} / {tf32['seconds_a_run']:.2f} s {mark(tf32)}")
    wanted.append(f"**{next(r for r in steps['steps'] if r['target'])['times_eager']:.0f}×** ✓")
    wanted.append(f"**{100 * next(r for r in gpu['penalty'] if r['target'])['share']:.1f} %** ✓")
    shares = {r["n"]: f"{100 * r['share']:.1f} %" for r in gpu["penalty"] if r["kind"] == "share"}
    wanted += [shares[128] + " at N = 128", shares[256] + " at 256", shares[512] + " at 512", shares[1024] + " at 1,024"]
    wanted += [shares[2048] + " at 2,048", shares[4096] + " at 4,096", shares[8192] + " at\n8,192", shares[16384] + " at 16,384"]
    passes = [f"**{r['target']['value']:.2f}×**" for r in steps["importance"]]
    wanted += [f"{passes[0]} / {passes[1]} ✓", f"{passes[2]} / {passes[3]} ✓"]
    for n in (128, 512, 2048, 4096, 16384):
        formula, share = (next(r for r in cpu["penalty"] if r["n"] == n and r["kind"] == kind) for kind in ("formula", "share"))
        wanted.append(
            f"| {n:,} | {significant(1e3 * formula['seconds'])} ms | {significant(formula['times_dense'])} | {100 * share['share']:.1f} % |"
        )
        wanted.append(f"{100 * share['share_eager']:.1f} % |")
    by_name = {r["what"].removesuffix(", a task-epoch"): r for r in peers["peers"]}
    rows = {
        "Avalanche MAS, its PermutedMNIST": ["Avalanche MAS, its PermutedMNIST"],
        "Avalanche MAS, fed from memory": ["Avalanche MAS, fed from memory"],
        "selfless MAS (exact Ω), one run": ["selfless MAS, one run"],
        "selfless MAS + SLNID, one run": ["selfless MAS + SLNID, one run"],
    }
    for kind in ("selfless MAS", "selfless MAS + SLNID", "selfless MAS in bf16"):
        fleet = f"{kind}, a run in a fleet of 8"
        rows[fleet] = [f"{fleet}, one process", f"{fleet}, 2 workers"]
    plain = page.replace("**", "")
    for title, names in rows.items():
        best = min((by_name[name] for name in names), key=lambda r: r["seconds"])
        ratios = f"{best['times_its_permuted_mnist']:.1f} | {best['times_from_memory']:.1f} |"
        assert f"| {title} | {best['seconds']:.2f} | {ratios}" in plain, (title, best["seconds"], ratios)
    missing = [figure for figure in wanted if figure not in page]
    assert not missing, missing


def mark(row: dict[str, Any]) -> str:
    return "✓" if row["target"]["met"] else "✗"


def significant(x: float) -> str:
    """Two decimals below 10, one above."""
    return f"{x:.2f}" if x < 10 else f"{x:.1f}"


def test_the_rate_of_preparing_images_is_the_recorded_one() -> None:
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    best = json.loads((ROOT / "results/bench/prepare-cpu/bench.json").read_text(encoding="utf-8"))["prepare"][0]
    assert f"{best['seconds']:.1f} s ({best['rate']}, the best of three rounds" in page
