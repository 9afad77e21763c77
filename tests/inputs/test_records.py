"""A record is checked when it is read: every part of it, and every recorded result passes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from selfless.inputs import check_experiment, check_result
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
