"""A record is checked when it is read: every part of it, and every recorded result passes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from selfless.inputs import check_experiment, check_result
from selfless.inputs.records import check_note
from selfless.report.records import read
from selfless.runner.archive import read_archive
from selfless.runner.store import Store

RESULTS = Path(__file__).resolve().parents[2] / "results"
EXPERIMENT = RESULTS / "reproduction/experiments/fig-2-ours.json"


@pytest.fixture(scope="module")
def result() -> Any:
    """A finished run: its values that may be null are numbers, so that each of them can be made wrong."""
    lines = map(json.loads, read_archive(RESULTS / "trials/sums/runs.jsonl.xz").values())
    return next(values for values in lines if values["status"] == "done")


def test_recorded_results_have_the_schema() -> None:
    for line in read_archive(RESULTS / "trials/sums/runs.jsonl.xz").values():
        check_result(json.loads(line))
    for path in sorted(RESULTS.glob("*/experiments/*.json")):
        check_experiment(json.loads(path.read_text(encoding="utf-8")))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value; of a list, those of its first entry."""
    yield path
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def changed(values: Any, path: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(values)
    if not path:
        return value
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found


FREE = {"run", "about", "data"}  # their inner values are checked elsewhere, or are only shown


@pytest.mark.parametrize("wrong", [float("nan"), [[[]]], True])
def test_a_wrong_value_is_named_with_its_place(result: Any, wrong: Any) -> None:
    for path in places(result):
        if path and path[0] not in FREE and path[0] != "key":
            with pytest.raises(ValueError, match=str(path[0])):
                check_result(changed(result, path, wrong))


def test_a_missing_key_is_named(result: Any) -> None:
    for key in ("run", "accuracy", "history", "status", "error", "about", "capacity", "baseline"):
        with pytest.raises(ValueError, match=f"{key} is missing"):
            check_result({name: value for name, value in result.items() if name != key})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["accuracy"].append(r["accuracy"][0][:1]), "accuracy is .* rows of equal length"),
        (lambda r: r["accuracy"].extend(r["accuracy"]), "rows and"),
        (lambda r: r["accuracy"][0].__setitem__(0, 1.5), "numbers from 0 to 1"),
        (lambda r: r["baseline"].append(0.5), "baseline has"),
        (lambda r: r.update(accuracy=[]), "accuracy is empty"),
    ],
)
def test_sizes_must_fit(result: Any, change: Any, words: str) -> None:
    broken = copy.deepcopy(result)
    change(broken)
    with pytest.raises(ValueError, match=words):
        check_result(broken)


def test_a_file_with_a_wrong_record_is_named(result: Any, tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    file = tmp_path / "key" / "metrics.json"
    for text in ("[]", "{", "null", "[" * 100_000, json.dumps(result | {"history": 3}), "\xff"):
        file.write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=r"metrics.json is not a result of this version"):
            Store(tmp_path).all()
    record = json.loads(EXPERIMENT.read_text(encoding="utf-8"))
    file = tmp_path / "fig.json"
    for change in ({"cells": 5}, {"claims": [{"text": 1}]}, {"cells": [{}]}, {"about": []}):
        file.write_text(json.dumps(record | change), encoding="utf-8")
        with pytest.raises(ValueError, match=rf"fig.json is not a record of this version \({next(iter(change))}"):
            read(file)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("image_shape", [1, 28], r"data.image_shape is \[1, 28\]; it must be three sizes"),
        ("mean", [0.1, 0.2], "data.mean has 2 numbers, and images have 1 channels"),
        ("std", [0.0], r"data.std is \[0.0\]; it must be positive"),
        (
            "tasks",
            [{"name": "a", "classes": ["x", "y"], "columns": [0, 3], "transform": ""}],
            r"data.tasks\[0\].columns is \[0, 3\]; .* of its 2 classes",
        ),
    ],
)
def test_a_description_of_data_fits_itself(result: Any, name: str, value: Any, message: str) -> None:
    plain = {"image_shape": [1, 28, 28], "input_shape": [1, 28, 28], "dtype": "uint8", "mean": [0.1], "std": [0.3], "outputs": 10}
    plain |= {"tasks": [{"name": "a", "classes": ["x", "y"], "columns": [0, 2], "transform": ""}]}
    data = (result.get("data") or plain) | {name: value}
    with pytest.raises(ValueError, match=message):
        check_result(result | {"data": data})


def test_a_note_and_an_experiment_fit_themselves() -> None:
    run = {"key": "k", "method": "m", "stream": "s", "model": "n", "seed": 0}
    event = {"task": 0, "tasks": 1, "name": "a", "epoch": 1, "epochs": 2, "loss": [], "accuracy": [], "average": [0.5], "evaluated": False}
    event |= {"resumed": False, "passing": True, "stage": "training", "share": 0.5, "speed": None, "seconds_left": None}
    note = {"host": "h", "process": 1, "updated": 1.0, "runs": [run], "event": event}
    check_note(note, of_fleet=True)
    with pytest.raises(ValueError, match=r"event.average must have a number for each run"):
        check_note(note | {"runs": [run, run]}, of_fleet=True)
    values = json.loads(EXPERIMENT.read_text(encoding="utf-8"))
    choice = values["choices"][0] | {"cells": [["only a row"]]}
    with pytest.raises(ValueError, match=r"choices\[0\].cells must be pairs of a row and a column"):
        check_experiment(values | {"choices": [choice]})
