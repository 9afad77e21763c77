"""`selfless reproduce table-2` with the object sets and weights that are here: small ones in their published layout."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import selfless
from selfless.cli import app
from selfless.data import OBJECTS, prepare_objects, verify_objects
from selfless.data.sources.objects.preparing import Prepared
from selfless.experiments import experiment
from selfless.experiments.quick import LIMIT
from selfless.experiments.reproduce import reproduce
from selfless.experiments.table_2 import COLUMN, PUBLISHED, UNDROPPED, Here, here, table_2
from selfless.files import write_json
from selfless.models import build
from selfless.runner import TrainOptions
from selfless.runner.store import Store, made_from
from selfless.spec import Result, Run
from tests.data import object_layouts as made

pytestmark = pytest.mark.usefixtures("isolated", "small_objects")
runner = CliRunner()
FULL, CONVOLUTIONS = "alexnet-owt-7be5be79.pth@7be5be791159", "alexnet_imagenet_features.npz@0123456789ab"
ALL = tuple(OBJECTS)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with two sets, and random convolutions in the layout of the ImageNet weights."""
    root = tmp_path / "data"
    monkeypatch.setenv("SELFLESS_DATA", str(root))
    for name in ("birds", "scenes"):
        made.put(root, name)
    state = build("alexnet", outputs=1, input_shape=(3, 64, 64), seed=0, fc_units=1).features.state_dict()
    (root / "alexnet").mkdir()
    np.savez(root / "alexnet" / "alexnet_imagenet_features.npz", **{f"features.{name}": t.numpy() for name, t in state.items()})
    return root


def quick(out: Path, *more: str) -> dict[str, Any]:
    done = runner.invoke(app, ["reproduce", "table-2", "--quick", "--seeds", "1", "--out", str(out), "--device", "cpu", "--json", *more])
    assert done.exit_code == 0, done.output
    record: dict[str, Any] = json.loads(done.stdout)["experiments"][0]
    return record


def recorded(run: Run, out: Path, **about: Any) -> Result:
    """Make up a result and record it as the store does."""
    tasks = run.tasks or 1
    matrix = np.full((tasks, tasks), 0.5)
    aside = matrix if run.held_out else None
    result = Result(run, matrix, matrix[0], [[] for _ in matrix], [{} for _ in matrix], held_out=aside, about={"seconds": 1.0, **about})
    write_json(out / run.key / "metrics.json", result.as_dict())
    return result


@pytest.mark.whole
def test_quick_runs_every_row_that_can_be_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMIT, "objects", 1)
    whole = Prepared.images  # 224 × 224 pixels, which are slow on a CPU: take the middle
    monkeypatch.setattr(Prepared, "images", lambda self: whole(self)[..., 80:144, 80:144])
    monkeypatch.setattr("selfless.data.object_stream.SHAPE", (3, 64, 64))
    monkeypatch.setattr("selfless.experiments.quick.STEPS", 2)
    record = quick(tmp_path / "out")
    column = "2 of 8, fc random: scenes (part), birds (part)"
    of = {(c["row"], c["column"]): c for c in record["cells"]}
    assert {row: of[row, COLUMN]["published"] for row in PUBLISHED} == PUBLISHED
    assert all(of[row, COLUMN]["status"] == "pending" and of[row, COLUMN]["mean"] is None for row in PUBLISHED)
    ran = {row for row, where in of if where == column}
    assert ran == {*PUBLISHED} - {"SLNID, fc pretrained"}
    for row in ran:
        cell = of[row, column]
        assert cell["status"] == "done", cell["error"]
        assert cell["published"] is None
        assert cell["run"]["stream"] == "objects:scenes,birds"
        assert cell["run"]["model_options"]["dropout"] == 0.0  # the layers start at random
        assert cell["run"]["model_options"]["weights"].startswith("alexnet_imagenet_features.npz@")
    assert str(tmp_path) not in json.dumps(record)  # no path of this machine
    kept = {path.parent.parent.name for path in (tmp_path / "out").rglob("checkpoint.safetensors")}
    assert kept == {"out"}  # none of the runs that strengths were chosen by
    assert list((tmp_path / "out" / "choosing").rglob("metrics.json"))
    assert any("convolutions alone" in note for note in record["notes"])
    assert any("scenes is not the published set" in note for note in record["notes"])
    assert record["pending"].startswith("8 objects: not run. not here: flowers, cars, aircraft, actions, letters, svhn")
    assert [c["verdict"] for c in record["claims"]] == ["missing", "missing", "undecided"]
    assert all(c["text"].startswith("On a part of the paper's experiment (2 of 8, fc random)") for c in record["claims"][2:])
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("metrics.json")}
    assert quick(tmp_path / "out")["cells"] == record["cells"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("metrics.json")} == files, "something was trained again"


@pytest.mark.slow
def test_networks_are_kept_unless_told_otherwise(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def train(runs: Any, options: TrainOptions, **_: Any) -> list[Result]:
        assert options.out is not None
        asked.append((options.out.name, options.checkpoints))
        return [recorded(run, options.out) for run in runs]

    monkeypatch.setattr("selfless.cli.reproduce.train_with_progress", train)
    quick(tmp_path / "out")
    quick(tmp_path / "out", "--no-checkpoints")
    assert asked == [("choosing", False), ("out", True), ("choosing", False), ("out", False)]


def test_the_report_where_the_data_is_not(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record says what it was made of: on another machine nothing is stale, and nothing is compared with the published column."""
    out = tmp_path / "out"
    found = experiment("table-2", prepare=True)
    reproduce(found, seeds=2, out=out, train=lambda runs, place, _: [recorded(run, place) for run in runs])
    monkeypatch.delenv("SELFLESS_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    done = runner.invoke(app, ["report", str(out), "--format", "md"])
    assert done.exit_code == 0, done.output
    assert "2 of 8, fc random: scenes (part), birds (part)" in done.stdout
    assert "stale" not in done.stdout
    assert "written differently" not in done.stdout


@pytest.mark.slow
def test_the_list_counts_the_runs_of_what_is_here(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfless.experiments.NAMES", ("fig-4-top", "table-2"))  # counting the runs of the others takes a while

    def runs(*more: str) -> dict[str, Any]:
        rows = json.loads(runner.invoke(app, ["reproduce", "--list", "--json", "--seeds", "3", *more]).stdout)["experiments"]
        return next(row for row in rows if row["name"] == "table-2")

    found = runs()
    assert 30 < found["runs"]["ours"] < 50  # a few minutes of one H200
    assert "not here: flowers" in found["pending"]
    monkeypatch.delenv("SELFLESS_DATA")
    nothing = runs()
    assert nothing["runs"] == {"ours": 0, "equal": 0, "paper": 0}
    assert "nothing is run" in nothing["pending"]
    assert runs("--data-dir", str(data))["runs"] == found["runs"]


def test_a_set_that_cannot_be_read_is_missing_with_the_reason(data: Path) -> None:
    (data / "objects" / "birds" / "CUB_200_2011" / "images.txt").write_text("1 gone.jpg\n")
    assert here(data).sets == ("scenes", "birds")  # by name only
    found = here(data, prepare=True)
    assert (found.sets, found.partly) == (("scenes",), ("scenes",))
    assert "birds" in found.missing["birds"]
    one = table_2("ours", found)
    assert any(note.startswith("birds: ") for note in one.notes)
    assert "birds cannot be read: " in one.pending
    assert "birds" not in one.pending[one.pending.index("not here: ") :].partition(" (")[0]
    assert {run.tasks for cell in one.cells for run in cell.candidates} == {1}


def test_the_published_column_takes_the_published_experiment() -> None:
    def filled(found: Here, profile: Any = "ours") -> dict[str, set[str]]:
        cells = [cell for cell in table_2(profile, found).cells if cell.candidates]
        return {column: {c.row for c in cells if c.column == column} for column in dict.fromkeys(c.column for c in cells)}

    rows = set(PUBLISHED)
    whole = Here(ALL, weights=FULL)
    for unknown in ("alexnet.pth@7be5be791159", "alexnet-owt-7be5be79.pth@000000000000", "alexnet.safetensors@0123456789ab"):
        own = Here(ALL, weights=unknown)
        assert COLUMN not in filled(own)
        assert f"{unknown} are not known to be torchvision's" in table_2("ours", own).pending
    assert filled(whole) == {COLUMN: {*rows, UNDROPPED}}
    assert filled(whole, "paper") == {COLUMN: rows}
    assert table_2("ours", whole).pending == ""
    assert filled(Here(ALL, ("cars",), weights=FULL)).keys() == {
        "8 of 8: flowers, scenes, birds, cars (part), aircraft, actions, letters, svhn"
    }
    assert filled(Here(ALL, weights=CONVOLUTIONS)).keys() == {f"8 of 8, fc random: {', '.join(ALL)}"}
    three = filled(Here(("flowers", "birds", "cars"), ("cars",), weights=FULL))
    assert three == {"3 of 8: flowers, birds, cars (part)": {*rows, UNDROPPED}}
    assert filled(Here(ALL)) == filled(Here((), weights=FULL)) == {}


@pytest.mark.parametrize("profile", ["ours", "paper"])
def test_the_rows_are_the_papers(profile: Any) -> None:
    cells = {cell.row: cell for cell in table_2(profile, Here(ALL, weights=FULL)).cells if cell.candidates}
    for row, cell in cells.items():
        for run in cell.candidates:
            slnid = row.startswith("SLNID")
            assert (run.sparsify.name == "slnid") is slnid
            assert run.model_options["dropout"] == (0.0 if slnid or row == UNDROPPED else 0.5)
            assert run.model_options["fc"] == ("random" if row.endswith("random") else "pretrained")
            assert run.preserve.name == ("mas" if slnid or row == UNDROPPED else "none" if row == "Finetune" else row.lower())
            assert run.stream == f"objects:{','.join(ALL)}"
            if profile == "paper":
                assert (run.lr, run.batch, run.epochs, run.momentum, run.select) == (8e-4, 150, 100, 0.9, "best-on-test")
    assert [run.preserve.strength for run in cells["MAS"].candidates] == ([1.0] if profile == "paper" else [0.01, 0.1, 1.0])


# ------------------------------------------------------------------------------------------------------- what a run was made from
def test_another_set_behind_the_same_name_is_told_apart(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tinynet_table_2.py").write_text(
        "from torch import nn\n"
        "def build(outputs, input_shape):\n"
        "    pool = nn.AvgPool2d(32)\n"
        "    return nn.Sequential(pool, nn.Flatten(), nn.Linear(147, 4), nn.ReLU(), nn.Linear(4, outputs))\n"
    )
    run = Run(stream="objects:birds,scenes", model="tinynet_table_2:build", epochs=1, batch=4)
    first = selfless.train(run, out="out")
    assert first.about["made_from"] == made_from(run)
    assert selfless.train(run, out="out").about == first.about
    assert (
        made_from(dataclasses.replace(run, tasks=1))
        != made_from(run)
        != made_from(dataclasses.replace(run, stream_options={"boxes": True}))
    )
    elsewhere = tmp_path / "elsewhere"
    for name in ("birds", "scenes"):
        made.put(elsewhere, name)
    assert made_from(run, elsewhere) == made_from(run), "the same images in another folder are the same data"
    listed = made.scenes()["TrainImages.txt"].decode().splitlines()
    (elsewhere / "objects" / "scenes" / "TrainImages.txt").write_text("\n".join(listed[1:]) + "\n")
    assert made_from(run, elsewhere) != made_from(run)
    second = selfless.train(run, out="out", data_dir=elsewhere)
    assert second.about["made_from"] != first.about["made_from"]
    before = prepare_objects("scenes", data_dir=data).digest
    made.put(data, "scenes", made.scenes() | {"Images/bar/bar0.jpg": made.jpeg(99, made.SIZE)})
    assert prepare_objects("scenes", data_dir=data).digest != before


def test_without_the_sets_a_recorded_result_is_taken(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(stream="objects:birds", model="alexnet")
    recorded(run, tmp_path / "out", made_from="of another copy")
    assert Store(tmp_path / "out").load(run) is None
    monkeypatch.delenv("SELFLESS_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    found = Store(tmp_path / "out").load(run)
    assert found is not None
    assert found.about["made_from"] == "of another copy"


def test_a_prepared_copy_in_part_is_called_so(data: Path) -> None:
    """Also if its files are gone and only the prepared images were copied here."""
    prepare_objects("birds", data_dir=data)
    shutil.rmtree(data / "objects" / "birds")
    check = verify_objects("birds", data_dir=data)
    assert check.status == "reduced"
    assert check.detail.startswith("4 of 5994 training images, 4 of 5794 test images, 2 of 200 classes")
    assert "the files they were made of are gone" in check.detail
    assert here(data).partly == ("birds",)  # scenes is not prepared yet: not known
    made.put(data, "actions")
    assert here(data, prepare=True).column.endswith("scenes (part), birds (part), actions (part)")
