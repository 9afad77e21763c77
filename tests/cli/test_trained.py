"""`selfless predict`, `selfless export` and `selfless run --continue`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import selfless
from selfless.cli import app
from tests.cli.small_commands import small

runner = CliRunner()


@pytest.fixture(scope="module")
def place(stream: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    done = runner.invoke(app, small(stream, out, "--preserve", "packnet", "--json"))
    return out / str(json.loads(done.stdout)["runs"][0]["key"])


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.new("L", (9, 6), 100).save(tmp_path / "grey.png")
    return tmp_path / "grey.png"


def test_predict_prints_classes_and_the_size(place: Path, picture: Path) -> None:
    done = runner.invoke(app, ["predict", str(place), str(picture), "--task", "2"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{picture}: ")
    assert done.stdout.count(" %") == 2  # the classes of the task
    assert "(9×6, scaled and cropped to 6×6)" in done.stdout


def test_predict_as_json(place: Path, picture: Path) -> None:
    done = runner.invoke(app, ["predict", str(place), str(picture), "--task", "task 1", "--top", "1", "--json"])
    found = json.loads(done.stdout)
    assert (found["key"], found["task"]) == (place.name, "task 1")
    (one,) = found["pictures"]
    assert one["fitted_to"] == [6, 6]
    assert [best["name"] in ("2", "3") for best in one["classes"]] == [True]


def test_a_method_with_a_network_for_each_task_needs_the_task(place: Path, picture: Path) -> None:
    done = runner.invoke(app, ["predict", str(place), str(picture)])
    assert done.exit_code == 1
    assert "PackNet keeps a network for each task" in done.stderr
    done = runner.invoke(app, ["predict", str(place), str(picture), "--task", "4"])
    assert "its tasks: 1 (task 0), 2 (task 1), 3 (task 2)" in done.stderr


def test_tasks_with_their_own_heads_are_noted(stream: str, picture: Path, tmp_path: Path) -> None:
    run = selfless.Run(stream=stream, model="mlp-12", epochs=1)
    selfless.train(run, out=tmp_path)
    done = runner.invoke(app, ["predict", str(tmp_path / run.key), str(picture)])
    assert done.exit_code == 0, done.output
    assert "classes of different tasks compare badly" in done.stderr


def test_export_writes_beside_the_record(place: Path) -> None:
    done = runner.invoke(app, ["export", str(place), "--task", "2", "--json"])
    found = json.loads(done.stdout)
    assert (Path(found["file"]), found["classes"]) == (place / "model-task-2.safetensors", ["2", "3"])
    assert Path(found["file"]).is_file()
    done = runner.invoke(app, ["export", str(place), "--format", "tar"])
    assert (done.exit_code, "choose one of safetensors, onnx, torch-export" in done.stderr) == (1, True)


def test_run_continue(stream: str, place: Path, tmp_path: Path) -> None:
    words = ["run", "--continue", str(place), "--stream", stream, "--tasks", "1", "--epochs", "1", "--device", "cpu"]
    found = json.loads(runner.invoke(app, [*words, "--json"]).stdout)
    (run,) = found["runs"]
    assert Path(found["out"]) == place.parent  # beside its parent
    assert run["run"]["parent"].startswith(place.name)
    assert (run["run"]["preserve"]["name"], run["run"]["lr"], run["run"]["epochs"]) == ("packnet", 0.05, 1)
    assert [task["columns"] for task in run["data"]["tasks"]] == [[0, 2], [2, 4], [4, 6], [6, 8]]
    shown = runner.invoke(app, words)
    assert "1 of 1 run recorded" in shown.stderr
    assert run["key"] in shown.stdout.replace("\n", "")
    done = runner.invoke(app, ["run", "--continue", str(place), "--out", str(tmp_path)])
    assert (done.exit_code, "--continue needs the new tasks: --stream" in done.stderr) == (1, True)


@pytest.mark.slow
def test_unknown_accuracies_are_shown_as_such(stream: str, tmp_path: Path) -> None:
    whole = dict(np.load(stream.removeprefix("arrays:")))
    np.savez(tmp_path / "old.npz", **whole)
    first = selfless.train(selfless.Run(stream=f"arrays:{tmp_path}/old.npz", model="mlp-12", epochs=1, tasks=2), out=tmp_path / "out")
    (tmp_path / "old.npz").unlink()
    words = ["run", "--continue", str(tmp_path / "out" / first.run.key), "--stream", stream, "--tasks", "1"]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "unknown" in done.stdout
    assert "nan" not in done.stdout.lower()
    for more in (["report"], ["report", "--format", "md"], ["capacity"]):
        done = runner.invoke(app, [*more, str(tmp_path / "out")])
        assert done.exit_code == 0, done.output


def named_tasks(names: list[str], folder: Path, preserve: str = "mas") -> Path:
    """Record a run over tasks of the classes off and on with these names; return its folder."""
    x = np.random.default_rng(0).integers(0, 256, (20, 1, 6, 6), dtype=np.uint8)
    half = (x, np.arange(20) % 2)
    stream = selfless.stream([(half, half)] * len(names), names=names, classes=["off", "on"])
    run = selfless.Run(stream=stream, model="mlp-4", preserve=preserve, epochs=1, batch=20)
    selfless.train(run, out=folder)
    return folder / run.key


def test_a_number_that_is_also_a_name_is_not_guessed(picture: Path, tmp_path: Path) -> None:
    place = named_tasks(["0", "1", "3"], tmp_path)

    def predict(task: str) -> tuple[int, str]:
        done = runner.invoke(app, ["predict", str(place), str(picture), "--task", task])
        return done.exit_code, done.stderr

    status, text = predict("1")
    assert status == 1
    assert "--task 1 is the number of the task '0', and the name of task 2; write --task number:1 or --task name:1" in text
    for task, note in (("0", "task 1 of 3: 0"), ("2", "task 2 of 3: 1"), ("3", "task 3 of 3: 3")):
        assert predict(task) == (0, f"note: {note}\n"), task
    for task, note in (("number:1", "task 1 of 3: 0"), ("name:1", "task 2 of 3: 1")):
        assert predict(task) == (0, f"note: {note}\n"), task
    assert "has no task 'name:7'; its tasks: 1 (0), 2 (1), 3 (3)" in predict("name:7")[1]


def test_classes_of_one_name_in_several_tasks_are_told_apart(picture: Path, tmp_path: Path) -> None:
    place = named_tasks(["day", "night"], tmp_path)
    found = json.loads(runner.invoke(app, ["predict", str(place), str(picture), "--top", "4", "--json"]).stdout)
    assert {one["name"] for one in found["pictures"][0]["classes"]} == {"off (day)", "on (day)", "off (night)", "on (night)"}
    found = json.loads(runner.invoke(app, ["predict", str(place), str(picture), "--task", "night", "--json"]).stdout)
    assert (found["task"], found["task_number"]) == ("night", 2)
    assert {one["name"] for one in found["pictures"][0]["classes"]} == {"off", "on"}


def test_a_file_that_is_no_picture(place: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("no picture")
    done = runner.invoke(app, ["predict", str(place), str(tmp_path / "bad.png"), "--task", "1"])
    assert done.exit_code == 1
    assert "bad.png is not a readable image: it is in no format that Pillow knows; give a PNG or JPEG file" in done.stderr
    assert "<" not in done.stderr


def test_capacity_of_a_run_that_is_not_there_and_of_one_without_importances(tmp_path: Path) -> None:
    place = named_tasks(["day"], tmp_path, "none")
    done = runner.invoke(app, ["capacity", str(tmp_path / "nokey")])
    assert (done.exit_code, f"has no run 'nokey'; its newest runs: {place.name}" in done.stderr.replace("\n", " ")) == (1, True)
    shown = " ".join(runner.invoke(app, ["capacity", str(place)]).stdout.split())
    assert "not measured; no preserver measures their importance" in shown
