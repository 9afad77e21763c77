"""`selfless data` with object sets: fetch, list, verify, prepare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfless.cli.data import app
from selfless.data import OBJECTS, MissingData, prepare_objects
from selfless.data.sources.objects.preparing import prepared_dir

pytestmark = pytest.mark.usefixtures("small_objects")


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.output


def test_fetch_objects_says_what_to_place_by_hand(served: list[str], tmp_path: Path) -> None:
    root = str(tmp_path / "d")
    output = run("fetch", "objects", "--data-dir", root, code=1)
    for name in ("flowers", "svhn", "scenes"):
        assert f"{name}: {root}/objects/{name}" in output
    assert "cars (Stanford Cars) is not on this machine:" in output
    assert "not publicly downloadable; the set's own page" in output
    assert f"Put these files, or what is in them, into {root}/objects/cars:" in output
    assert "cars_test_annos_withlabels.mat" in output
    assert "no mirror answers (far.invalid)" in output
    assert "Traceback" not in output
    found = json.loads(run("fetch", "objects", "--data-dir", root, "--json", code=1))
    assert sorted(found["fetched"]) == ["flowers", "scenes", "svhn"]
    assert sorted(found["by_hand"]) == ["actions", "aircraft", "birds", "cars", "letters"]
    assert "cars_train.tgz" in run("fetch", "cars", "--data-dir", root, code=1)


def test_list_verify_and_prepare(three_sets: Path) -> None:
    found = {o["name"]: o for o in json.loads(run("list", "--json"))["objects"]}
    assert list(found) == list(OBJECTS)
    assert [name for name, o in found.items() if o["here"]] == ["scenes", "birds", "svhn"]
    assert found["birds"]["prepared"] == "no"
    assert "Stream: objects" in run("list")
    assert "birds: 4 + 4 (official: train_test_split.txt); 8 images in" in run("prepare", "birds")
    done = json.loads(run("prepare", "objects", "--json"))["prepared"]
    assert [(d["name"], d["images"] > 0) for d in done] == [("scenes", True), ("birds", False), ("svhn", True)]
    assert "prepared already" in run("prepare", "svhn")
    assert {o["name"]: o["prepared"] for o in json.loads(run("list", "--json"))["objects"]}["birds"] == "4 + 4"
    checks = {s["name"]: s for s in json.loads(run("verify", "--json"))["sets"]}
    assert [checks[name]["status"] for name in ("scenes", "birds", "svhn")] == ["reduced"] * 3
    assert "flowers" not in checks, "without a name, absent ones are not listed"
    run("verify", "flowers", code=1)
    run("verify", "birds")
    (folder,) = prepared_dir().glob("birds-*[!k]")
    data = bytearray((folder / "images.npy").read_bytes())
    data[-1] ^= 1
    (folder / "images.npy").write_bytes(data)
    assert "changed since it was prepared" in json.loads(run("verify", "birds", "--json", code=1))["sets"][0]["detail"]
    assert "did you mean 'birds'" in run("prepare", "brids", code=1)


def test_prepare_boxes_and_errors(three_sets: Path, tmp_path: Path) -> None:
    assert "4 + 4 (official" in run("prepare", "birds", "--boxes")
    assert prepare_objects("birds", boxes=True).fresh == (0, 0.0)
    assert "choose variant" in run("prepare", "birds", "--aircraft", "engine", code=1)
    with pytest.raises(MissingData, match=r"letters \(Chars74K, good images\) is not on this machine"):
        prepare_objects("letters")


def test_a_set_that_cannot_be_prepared_does_not_stop_the_others(three_sets: Path) -> None:
    (three_sets / "objects" / "scenes" / "TrainImages.txt").write_text("")
    output = run("prepare", "objects", code=1)
    assert "birds: 4 + 4 (official" in output
    assert "svhn: 5 + 4 (official" in output
    assert output.index("svhn: ") < output.index("error: not prepared: scenes\nscenes: ")
    assert "TrainImages.txt should list category/file and lists nothing; fetch it again" in output
    assert "Traceback" not in output
    found = json.loads(run("prepare", "objects", "--json", code=1))
    assert [d["name"] for d in found["prepared"]] == ["birds", "svhn"]
    assert list(found["failed"]) == ["scenes"]
    (three_sets / "objects" / "scenes" / "TestImages.txt").unlink()
    assert "does not hold TestImages.txt" in json.loads(run("prepare", "scenes", "birds", "--json", code=1))["failed"]["scenes"]
    assert "does not hold TestImages.txt" in json.loads(run("prepare", "scenes", "--json", code=1))["error"]


def test_prepare_where_nothing_is(tmp_path: Path) -> None:
    assert "none of the eight object sets is on this machine" in run("prepare", "objects", "--data-dir", str(tmp_path), code=1)
