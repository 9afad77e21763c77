"""`selfless reproduce NAME --quick` and `selfless tune` on real data: every experiment runs, is recorded, resumes, and is reported."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from selfless import Run
from selfless.cli import app
from selfless.data import MissingData, load
from selfless.experiments import NAMES, Experiment, experiment
from selfless.experiments import quick as quick_versions
from selfless.experiments.base import Cell, Place

runner = CliRunner()
OTHER_WIDTHS = {"fig-2-64", "fig-3a-128"}  # fig-2 and fig-3a with networks of another width: tests/experiments/test_declarations.py
DATA = {"mnist": "mnist", "cifar": "cifar-100", "tiny": "tiny-imagenet"}


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return one folder for all, also for the workers of pytest-xdist: what experiments share is trained once."""
    base = tmp_path_factory.getbasetemp()
    return (base if worker_id == "master" else base.parent) / "quick"


@pytest.fixture(autouse=True)
def fewer_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make quick versions quicker still: few images, each pair of methods once, and one cell that has something to choose from."""
    for stream, images in {"permuted-mnist": 40, "split-cifar-100": 2, "blurred-cifar-100": 2, "split-tiny-imagenet": 1}.items():
        monkeypatch.setitem(quick_versions.LIMIT, stream, images)
    monkeypatch.setattr(quick_versions, "STEPS", 2)
    monkeypatch.setattr("selfless.experiments.shrink", shrink_more)


Pair = tuple[str, str, str, str]


def shrink_more(whole: Experiment) -> Experiment:
    made = quick_versions.shrink(whole)
    left_out = repeated(made.cells, pairs_before(whole.name))
    claims = (claim for claim in made.claims if not any({part.a, part.b} & left_out for part in claim.parts))
    made = dataclasses.replace(made, cells=tuple(cell for cell in made.cells if cell.place not in left_out), claims=tuple(claims))
    chosen = next((cell for cell in made.cells if len(cell.candidates) > 1), None)
    cells = [cell if cell is chosen else dataclasses.replace(cell, candidates=cell.candidates[:1]) for cell in made.cells]
    return dataclasses.replace(made, cells=(*cells[:1], *(smaller(cell) for cell in cells[1:])))


@functools.cache
def pairs_before(name: str) -> frozenset[Pair]:
    """Return the pairs of methods in the experiments before this one."""
    before = NAMES[: NAMES.index(name)]
    return frozenset(pair_of(run) for other in before for cell in experiment(other).cells for run in cell.candidates[:1])


def pair_of(run: Run) -> Pair:
    return (run.preserve.name, run.sparsify.name, run.layers, run.augment)


def repeated(cells: Iterable[Cell], known: frozenset[Pair]) -> set[Place]:
    """Return the cells that would train a pair of methods once more: each pair is trained once, and each stream with two of them."""
    left_out, pairs, streams, keys = set(), set(known), Counter[str](), set()
    for cell in cells:
        for run in cell.candidates[:1]:
            pair = pair_of(run)
            if run.key in keys or pair not in pairs or streams[run.stream] < 2:
                pairs.add(pair)
                streams[run.stream] += run.key not in keys
                keys.add(run.key)
            else:
                left_out.add(cell.place)
    return left_out


def smaller(cell: Cell) -> Cell:
    """Replace the slowest networks: the first cell of an experiment shows that they run, and those whose cost depends on the network."""

    def replaced(run: Run) -> Run:
        slow = run.model == "vgg-slim" or (run.model == "alexnet-cifar" and run.preserve.name not in ("gpm", "sgp"))
        return dataclasses.replace(run, model="cnn-16", model_options={}) if slow else run

    runs = (replaced(run) for run in cell.candidates)
    return dataclasses.replace(cell, candidates=tuple(runs))


def need(name: str, profile: str = "ours") -> None:
    streams = {run.stream for cell in experiment(name, profile).cells for run in cell.candidates}
    for source in {DATA[word] for stream in streams for word in DATA if word in stream}:
        try:
            load(source, download=False)
        except MissingData:
            pytest.skip(f"{source} is not on this machine; set SELFLESS_DATA or run: selfless data fetch {source}")


def quick(name: str, out: Path, *more: str) -> dict[str, Any]:
    done = runner.invoke(app, ["reproduce", name, "--quick", "--out", str(out), "--device", "cpu", "--json", *more])
    assert done.exit_code == 0, done.output
    value: dict[str, Any] = json.loads(done.stdout)["experiments"][0]
    return value


# many runs, no run in `ours`, or a large network
LONG = (
    "fig-3b",
    "table-1",
    "table-3",
    "beyond",
    "rivals",
    "rivals-projection",
    "wide",
    "all-layers",
    "augmented",
    "tiny-variants",
    "rates",
)


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.whole if name in LONG else ()) for name in NAMES if name not in OTHER_WIDTHS]
)
def test_every_experiment_runs(name: str, out: Path) -> None:
    need(name)
    light = not any(word in name for word in ("3", "table-1", "rivals", "beyond", "wide"))
    made = experiment(name, quick=True)
    if not any(c.candidates for c in made.cells):  # table 2 without object sets
        refused = runner.invoke(app, ["reproduce", name, "--quick", "--out", str(out)])
        assert refused.exit_code == 1
        assert "nothing can be run" in refused.output
        assert made.pending
        return
    record = quick(name, out, "--seeds", "2" if light else "1")
    assert [(c["row"], c["column"]) for c in record["cells"]] == [c.place for c in made.cells]
    if name == "table-2":  # with what is here: tests/experiments/test_table_2.py
        return
    assert all(c["status"] == "done" and c["mean"] is not None for c in record["cells"])
    assert {c["verdict"] for c in record["claims"]} <= ({"holds", "fails", "undecided"} if light else {"undecided"})
    assert all(c["difference"] is None for c in record["cells"])  # it proves nothing beside published values
    assert any("limited to" in note for note in record["notes"])
    for choice in record["choices"]:
        means = [sum(c["scores"]) / len(c["scores"]) for c in choice["candidates"]]
        assert choice["by"].startswith("rule") or choice["chosen"] == means.index(max(means))
    if not light:
        return
    before = times(record, out)
    again = quick(name, out, "--seeds", "2")
    assert again["cells"] == record["cells"]
    assert times(record, out) == before, "something was trained again"


def times(record: dict[str, Any], out: Path) -> dict[str, int]:
    """Return when each result of an experiment was recorded. Another worker may record others at the same time."""
    reported = [run["key"] for cell in record["cells"] for run in cell["runs"]]
    tried = [key for choice in record["choices"] for candidate in choice["candidates"] for key in candidate["keys"]]
    files = [*(out / key / "metrics.json" for key in reported), *(out / "choosing" / key / "metrics.json" for key in tried)]
    return {str(file): file.stat().st_mtime_ns for file in files if file.exists()}


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("name", ["fig-2", "ewc", "rule-of-thumb"])
def test_the_authors_settings_run_too(name: str, out: Path) -> None:
    need(name, "paper")
    record = quick(name, out, "--seeds", "1", "--profile", "paper")
    assert all(c["on_test"] for c in record["cells"])
    assert (out / "experiments" / f"{name}-paper-quick.json").is_file()


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.real_data
@pytest.mark.parametrize("name", ["all-layers", "augmented", "rates", "table-1", "table-3", "fig-3a"])
def test_equal_chances_run_too(name: str, out: Path) -> None:
    need(name, "equal")
    record = quick(name, out, "--seeds", "1", "--profile", "equal", "--no-checkpoints")
    assert all(c["status"] == "done" for c in record["cells"])
    assert record["looks"] == [1]
    assert all(choice["rounds"] for choice in record["choices"] if choice["by"] == "held-out")


@pytest.mark.slow
@pytest.mark.real_data
def test_seeds_are_added_where_checkpoints_are_gone(tmp_path: Path) -> None:
    """The record has the values of those runs; without it there is one message with the remedy."""
    need("fig-4-bottom")
    first = quick("fig-4-bottom", tmp_path, "--seeds", "1")
    for checkpoint in tmp_path.rglob("checkpoint.safetensors"):
        checkpoint.unlink()
    second = quick("fig-4-bottom", tmp_path, "--seeds", "2")
    assert second["seeds"] == [0, 1]
    for one, two in zip(first["cells"], second["cells"], strict=True):
        assert two["runs"][0] == one["runs"][0]
        assert len(two["runs"][1]["detail"]) == len(two["runs"][0]["detail"]) > 1
    (record,) = (tmp_path / "experiments").iterdir()
    record.unlink()
    refused = runner.invoke(app, ["reproduce", "fig-4-bottom", "--quick", "--out", str(tmp_path), "--device", "cpu", "--seeds", "2"])
    assert refused.exit_code == 1
    assert "checkpoint.safetensors is missing" in refused.output
    assert "--force" in refused.output


@pytest.mark.slow
@pytest.mark.real_data
def test_the_report_of_what_was_reproduced(tmp_path: Path) -> None:
    need("fig-4-top")
    done = runner.invoke(app, ["reproduce", "fig-4-top", "table-2", "--quick", "--out", str(tmp_path), "--device", "cpu", "--seeds", "1"])
    assert done.exit_code == 0, done.output
    assert "free after task 1" in done.output
    assert "a quick version judges no claims" in done.output
    assert "of 0 claims" not in done.output
    page = runner.invoke(app, ["report", str(tmp_path)])
    assert page.exit_code == 0, page.output
    text = (tmp_path / "report.html").read_text()
    assert "Free first-layer weights after each task, by λ" in text
    assert "stale" not in text[text.index("<main>") :]
    assert "Other runs" not in text
    for form, word in (("md", "quick version judges no claims:"), ("csv", "experiment,profile,quick,kind"), ("latex", r"\begin{tabular}")):
        printed = runner.invoke(app, ["report", str(tmp_path), "--format", form])
        assert printed.exit_code == 0
        assert word in printed.stdout
    forced = runner.invoke(
        app, ["reproduce", "fig-4-top", "--quick", "--out", str(tmp_path), "--device", "cpu", "--seeds", "1", "--force", "--json"]
    )
    assert forced.exit_code == 0, forced.output


@pytest.mark.whole
def test_the_list_says_how_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFLESS_DATA", str(tmp_path))  # no object sets
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = runner.invoke(app, ["reproduce", "--list"])
    assert done.exit_code == 0, done.output
    for name in NAMES:
        assert name in done.output
    value = json.loads(runner.invoke(app, ["reproduce", "--list", "--json", "--seeds", "3"]).stdout)
    runs = {row["name"]: row["runs"] for row in value["experiments"]}
    assert runs["table-2"] == {"paper": 0, "ours": 0, "equal": 0}
    assert runs["fig-4-top"] == {"paper": 21, "ours": 21, "equal": 21}
    assert runs["rates"]["ours"] == 0 < runs["rates"]["equal"]  # which is in that profile alone
    assert value["total"]["ours"] < sum(r["ours"] for r in runs.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reproduce"], "say which experiment: fig-2"),
        (["reproduce", "fig2"], "Did you mean 'fig-2'"),
        (["reproduce", "fig-2", "--profile", "theirs"], "choose ours, equal"),
        (["tune", "--strengths", "much"], "numbers separated by commas"),
        (["tune", "--strengths", "0,1e-3"], "every strength must be a finite number above 0"),
        (["tune", "--sparsify", "slnd"], "Did you mean 'slnid'"),
    ],
)
def test_bad_input_is_one_message_with_the_remedy(words: list[str], message: str, tmp_path: Path) -> None:
    done = runner.invoke(app, [*words, "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert message in done.output
    assert "Traceback" not in done.output
    assert message in json.loads(runner.invoke(app, [*words, "--out", str(tmp_path), "--json"]).stdout)["error"]


def test_missing_data_stops_one_experiment_not_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> None:
        raise MissingData("cifar-100 is not here; run: selfless data fetch cifar-100")

    monkeypatch.setattr("selfless.engine.build.stream", nothing)
    for place in ("XDG_CACHE_HOME", "SELFLESS_DATA"):  # no object sets, whatever the user has
        monkeypatch.setenv(place, str(tmp_path))
    words = ["--quick", "--out", str(tmp_path), "--device", "cpu", "--json"]
    done = runner.invoke(app, ["reproduce", "fig-3a", "table-2", *words])
    value = json.loads(done.stdout)
    assert done.exit_code == 1
    assert [record["name"] for record in value["experiments"]] == ["table-2"]
    assert "selfless data fetch cifar-100" in value["problems"]["fig-3a"]
    alone = runner.invoke(app, ["reproduce", "fig-3a", *words])
    assert alone.exit_code == 1
    assert "selfless data fetch cifar-100" in json.loads(alone.stdout)["error"]


@pytest.mark.slow
@pytest.mark.real_data
def test_tune_finds_the_strength_that_keeps_the_first_task(tmp_path: Path) -> None:
    need("fig-2")
    words = [
        "tune",
        "--limit",
        "2000",
        "--epochs",
        "4",
        "--model",
        "mlp-32",
        "--strengths",
        "1e-6,1e-3,10",
        "--seeds",
        "1",
        "--workers",
        "1",
    ]
    words += ["--out", str(tmp_path), "--device", "cpu"]
    value = json.loads(runner.invoke(app, [*words, "--json"]).stdout)
    keeps = {row["strength"]: row["keeps"] for row in value["candidates"]}
    assert keeps[0.0]
    assert keeps[1e-6]
    assert not keeps[10.0]  # crushed by inhibition
    assert value["smallest"] == 1e-6
    assert value["largest"] == max(strength for strength, ok in keeps.items() if ok and strength)
    done = runner.invoke(app, words)
    assert f"Suggested: --sparsify slnid:{value['largest']:g}" in done.output
    assert all(path.parent.name for path in tmp_path.glob("*/metrics.json"))


@pytest.mark.slow
@pytest.mark.real_data
def test_tune_suggests_nothing_where_nothing_was_learnt(tmp_path: Path) -> None:
    need("fig-2")
    words = ["tune", "--limit", "100", "--epochs", "1", "--lr", "0", "--model", "mlp-8", "--strengths", "1e-3,1e-2", "--seeds", "1"]
    done = runner.invoke(app, [*words, "--workers", "1", "--out", str(tmp_path), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "Nothing to suggest" in done.output
    assert "Suggested" not in done.output
