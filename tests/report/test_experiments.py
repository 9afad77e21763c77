"""Recorded experiments as tables, figures and a page, from results that are made up so that every number is known."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from selfless import SLNID, Run
from selfless.experiments import NAMES, experiment, measures
from selfless.experiments.base import Claim, Experiment, at_least
from selfless.experiments.reproduce import declared, grids, judge_again, record_file, reproduce
from selfless.report import experiment_plots, write
from selfless.report import experiments as reporting
from selfless.report.figures.dots import dots
from selfless.runner import Store
from selfless.spec import Result
from tests.fabricated import A, B, score, small, trainer
from tests.fabricated import result as fabricated
from tests.report.page_reader import Reader

pytestmark = pytest.mark.slow


@pytest.fixture
def records(tmp_path: Path) -> list[reporting.Record]:
    reproduce(small(notes=("a note & more",)), seeds=3, out=tmp_path, train=trainer(score))
    return [reporting.marked(record) for record in reporting.load(tmp_path)]


def test_missing_and_stale_cells_are_marked(tmp_path: Path) -> None:
    made = small()
    reproduce(made, seeds=2, out=tmp_path, train=trainer(score))
    (record,) = reporting.load(tmp_path)

    def marks(found: reporting.Record) -> dict[str, list[str]]:
        return {c["row"]: c["marks"] for c in found["cells"]}

    assert marks(reporting.marked(record, declared(made, record["seeds"]))) == {
        "No-Reg": [],
        "SLNID": [],
        "joint": [],
        "later": ["not run"],
    }
    changed = dataclasses.replace(
        made,
        cells=tuple(dataclasses.replace(c, candidates=tuple(dataclasses.replace(r, epochs=11) for r in c.candidates)) for c in made.cells),
    )
    assert marks(reporting.marked(record, declared(changed, record["seeds"])))["SLNID"] == ["stale"]
    key = next(c for c in record["cells"] if c["row"] == "SLNID")["runs"][0]["key"]
    (tmp_path / key / "metrics.json").unlink()
    assert marks(reporting.marked(record, declared(made, record["seeds"])))["SLNID"] == ["missing"]


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "fig-2-ours.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match=r"fig-2-ours\.json is not a record of this version .* selfless reproduce"):
        reporting.load(tmp_path)


def test_tables_say_ours_published_difference_and_verdicts(records: list[reporting.Record]) -> None:
    record = records[0]
    cell = next(c for c in record["cells"] if c["row"] == "SLNID")
    value, gap = f"{cell['mean']:.2f} ± {cell['std']:.2f}", f"{cell['difference']:+.2f}".replace("-", "−")
    console = Console(width=120, file=io.StringIO(), color_system=None)
    console.print(reporting.terminal(record))
    screen = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (screen, reporting.markdown(records)):
        assert value in text
        assert gap in text
        assert "95.83" in text
        assert "SLNID ≥ No-Reg + 1" in text
        assert "fails" in text
        assert "of 3 candidates on held-out data, seeds 100, 101" in text
    assert "a note \\& more" in reporting.latex(records)
    assert "95.83" in reporting.latex(records)
    rows = list(csv.DictReader(io.StringIO(reporting.csv(records))))
    assert float(next(r for r in rows if r["kind"] == "cell" and r["row"] == "SLNID")["mean"]) == cell["mean"]
    assert [r["status"] for r in rows if r["kind"] == "claim"] == ["holds", "fails", "fails", "missing"]
    assert "A \\| small one" in reporting.markdown(records) or "A | small one." in reporting.markdown(records)


def test_the_page_links_to_every_run_and_to_nothing_else(records: list[reporting.Record], tmp_path: Path) -> None:
    path = write([], tmp_path / "report.html", experiments=records, date="today")
    page = Reader(path.read_text(encoding="utf-8"))
    text = re.sub(r"\s+", " ", " ".join(page.texts))
    assert "Of the paper's claims 1 of 4 hold, 2 fail, 1 not tested yet." in text
    assert "A | small one" in text
    assert "Trained with: mlp-128, 5 tasks, 10 epochs, batches of 200, lr 0.01, momentum 0.9, constant schedule, implicit anchor" in text
    keys = {run["key"] for cell in records[0]["cells"] for run in cell["runs"]}
    files = {link for link in page.links if link.endswith("metrics.json")}
    assert files == {f"{key}/metrics.json" for key in keys}
    assert all((tmp_path / file).is_file() for file in files)
    assert all(link.startswith(("#", "data:")) or link in files for link in page.links)
    assert all(link[1:] in page.ids for link in page.links if link.startswith("#"))
    assert len(page.ids) == len(set(page.ids))
    for word in ("published 95.83", "not run", "mas:0.1 + slnid:0.001", "hardware", "commit", "seed 100"):
        assert word in text


@pytest.mark.slow
def test_claims_of_our_own_are_counted_apart(records: list[reporting.Record], tmp_path: Path) -> None:
    own = [*small().claims[:2], Claim("Ours: SLNID is not behind", (at_least(A, B),), ours=True)]
    record = records[0] | judge_again(records[0], dataclasses.replace(small(), claims=tuple(own)))
    assert reporting.tally([record], ours=False) == {"holds": 1, "fails": 1, "undecided": 0, "missing": 0}
    assert reporting.tally([record], ours=True) == {"holds": 1, "fails": 0, "undecided": 0, "missing": 0}
    assert reporting.tally([record | {"source": "not in the paper"}], ours=True)["fails"] == 1
    text = re.sub(r"\s+", " ", " ".join(Reader(write([], tmp_path / "page.html", experiments=[record]).read_text(encoding="utf-8")).texts))
    assert "Of the paper's claims 1 of 2 hold, 1 fails." in text
    assert "Of our own claims 1 of 1 hold, 0 fail." in text
    assert "Ours: SLNID is not behind not the paper's" in text
    for claims, said in (([], "Nothing is claimed."), (record["claims"][2:], "Of our own claims 1 of 1 hold, 0 fail.")):
        assert said in write([], tmp_path / "page.html", experiments=[record | {"claims": claims}]).read_text(encoding="utf-8")


def test_settings_that_cells_share_are_told_once(records: list[reporting.Record]) -> None:
    common, apart = reporting.settings(records[0])
    assert {"mlp-128", "10 epochs", "lr 0.01", "implicit anchor", "last epoch"} <= set(common)
    assert apart[A] == apart[B] == ["permuted-mnist"]
    assert apart["joint", "MNIST"] == ["joint-permuted-mnist"]
    assert reporting.settings(records[0] | {"cells": []}) == ([], {})


@pytest.mark.slow
def test_other_runs_come_after_the_experiments(records: list[reporting.Record], tmp_path: Path) -> None:
    other = fabricated(Run(model="mlp-9", seed=3), 0.7)
    mixed: list[Result] = [*Store(tmp_path).all(), other]
    text = write(mixed, tmp_path / "report.html", experiments=records).read_text()
    assert text.index("A | small one") < text.index("Other runs in this folder") < text.index(other.run.key)
    rest = text[text.index("Other runs in this folder") :]
    assert not any(key in rest for key in reporting.keys(records))
    many = [fabricated(Run(preserve=f"mas:{n}"), 0.5 + n / 100) for n in range(1, 17)]  # more than a figure can tell apart
    text = write(many, tmp_path / "many.html").read_text()
    assert "The 14 methods with the highest averages; 2 more are in the tables." in text


def test_quick_versions_prove_nothing_and_say_so(tmp_path: Path) -> None:
    reproduce(small(quick=True), seeds=2, out=tmp_path, train=trainer(score))
    assert record_file(tmp_path, small(quick=True)).name == "fig-2-ours-quick.json"
    text = write([], tmp_path / "report.html", experiments=reporting.load(tmp_path)).read_text()
    assert "Quick versions only" in text
    assert "quick: its numbers mean nothing" in text


def test_many_columns_are_several_tables_in_a_terminal(records: list[reporting.Record]) -> None:
    """Each with all rows that have a cell in it, and nothing broken at 100 characters."""
    cells = [cell for cell in records[0]["cells"] if cell["mean"] is not None]
    wide = [cell | {"column": f"column {k}"} for k in range(9) for cell in (cells if k < 8 else cells[:1])]
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(reporting.terminal(records[0] | {"cells": wide}))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    heads = [re.findall(r"column \d", line) for line in lines if re.match(r"\s+column \d", line)]
    assert heads == [[f"column {k}" for k in some] for some in (range(4), range(4, 8), range(8, 9))]
    values = [f"{cell['mean']:.2f} ± {cell['std']:.2f}" for cell in cells]
    shown = [line for line in lines if any(value in line for value in values)]
    assert [line.count("±") for line in shown] == [4] * 2 * len(cells) + [1]


@pytest.mark.slow
def test_quick_versions_judge_no_claims(tmp_path: Path) -> None:
    """No verdict in any form; the same record, not quick, has them."""
    reproduce(small(quick=True), seeds=2, out=tmp_path, train=trainer(score))
    (quick,) = (reporting.marked(record) for record in reporting.load(tmp_path))

    def texts(record: reporting.Record) -> dict[str, str]:
        console = Console(width=120, file=io.StringIO(), color_system=None)
        console.print(reporting.terminal(record))
        page = write([], tmp_path / "report.html", experiments=[record]).read_text(encoding="utf-8")
        body = " ".join(Reader(page[page.index("<section class=") : page.index("</main>")]).texts)  # below the overview's headings
        screen: str = console.file.getvalue()  # type: ignore[attr-defined]
        return {"screen": screen, "page": body} | {form: getattr(reporting, form)([record]) for form in ("markdown", "latex", "csv")}

    whole = texts(quick | {"quick": False})
    for form, text in texts(quick).items():
        assert re.search(r"\b(holds|fails)\b", whole[form]), form
        assert not re.search(r"\b(holds|fails|undecided)\b|✓|✗", text), form
        assert text.lower().count("a quick version judges no claims") == (form != "csv"), form
        assert all(claim["text"] in text for claim in quick["claims"]), form
    assert sum(reporting.tally([quick]).values()) == 0


FIGURES = {experiment(name).figure: name for name in NAMES if name != "table-2"}  # one experiment for each kind of figure


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIGURES.values(), "table-2"])
def test_every_figure_is_drawn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell, with two candidates at most, on made-up results; what comes from checkpoints is made up too."""
    rng = np.random.default_rng(0)
    monkeypatch.setitem(measures.MEASURES, "quiet", measures.Measure("quiet", lambda m: 30.0, lambda m: list(rng.gamma(2, 0.2, 128))))
    monkeypatch.setitem(
        measures.MEASURES,
        "neurons",
        measures.Measure("neurons", lambda m: 9.0, lambda m: [float(m.result.run.tasks or 1) * i for i in range(64)], "count"),
    )
    monkeypatch.setitem(measures.MEASURES, "reuse", measures.Measure("reuse", lambda m: 50.0, lambda m: None))
    for place in ("XDG_CACHE_HOME", "SELFLESS_DATA"):  # no object sets, whatever the user has
        monkeypatch.setenv(place, str(tmp_path))
    whole = experiment(name)
    made = dataclasses.replace(whole, cells=tuple(dataclasses.replace(c, candidates=c.candidates[:2]) for c in whole.cells))
    record = reproduce(made, seeds=2, out=tmp_path, train=trainer(lambda run: 0.9 - 0.1 * (run.sparsify.strength == 0)))
    drawn = experiment_plots.figures(record)
    assert bool(drawn) is not bool(made.pending)
    page = Reader(write([], tmp_path / "report.html", experiments=[reporting.marked(record | {"folder": str(tmp_path)})]).read_text())
    assert sum(caption in page.texts for caption in drawn) == len(drawn)
    assert all(c["status"] in ("done", "pending") for c in record["cells"])


def test_a_record_chosen_from_another_grid_is_marked(tmp_path: Path) -> None:
    made = small()
    reproduce(made, seeds=3, out=tmp_path, train=trainer(score))
    (record,) = reporting.load(tmp_path)

    def marks(now: Experiment) -> set[str]:
        found = reporting.marked(record, declared(now, range(3)), grids(now))
        return {c["row"] for c in found["cells"] if "other grid" in c["marks"]}

    wider = dataclasses.replace(made.cells[1], candidates=(*made.cells[1].candidates, Run(sparsify=SLNID(1e-1))))
    assert marks(made) == set()
    assert marks(dataclasses.replace(made, cells=(made.cells[0], wider, *made.cells[2:]))) == {"SLNID"}


def test_figures_are_written_as_files(tmp_path: Path) -> None:
    reproduce(small(), seeds=3, out=tmp_path, train=trainer(score))
    written = experiment_plots.save(reporting.load(tmp_path), tmp_path / "figures")
    assert {path.name for path in written} == {"fig-2-ours.png", "fig-2-ours.pdf"}
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert written[1].read_bytes().startswith(b"%PDF")


def test_an_axis_says_what_its_values_are() -> None:
    cell = {"row": "A", "published": None, "mean": 1.0, "std": 0.1}
    cells = [
        cell | {"column": "accuracy", "unit": "%", "heading": "average"},
        cell | {"column": "lost", "unit": "points", "heading": "lost"},
    ]
    labels = [figure.axes[0].get_xlabel() for figure in dots({"title": "", "cells": cells}).values()]
    assert labels == ["accuracy (%)", "lost (points)"]
