"""Schemas of the files that runs and experiments write: what was read is checked before anything uses it.

A schema is a type, a tuple of them (one of these), a list with one schema (of every entry), a dictionary (a table with these keys; a key
that ends with "?" may be missing), or a function that returns what is wrong, or nothing. Keys that a schema does not name are allowed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from selfless.inputs.values import is_finite, show

Schema = Any
NUMERIC = (float, int)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # they could change a terminal
WORDS = {
    str: "text without control characters",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "a table",
    list: "a list",
    type(None): "null",
}


def check(value: Any, schema: Schema, where: str = "") -> None:
    """Raise ValueError, with the place in the file, unless the value has this schema."""
    if isinstance(schema, dict):
        _check_table(value, schema, where)
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise _wrong(where, value, "a list")
        for i, one in enumerate(value):
            check(one, schema[0], f"{where}[{i}]")
    elif isinstance(schema, type | tuple):
        kinds = schema if isinstance(schema, tuple) else (schema,)
        if not any(_is(value, kind) for kind in kinds):
            raise _wrong(where, value, " or ".join(WORDS[kind] for kind in kinds))
    elif reason := schema(value):
        raise _wrong(where, value, reason)


def _is(value: Any, kind: type) -> bool:
    """True if a JSON value has this type: a bool is no number, and a number is finite."""
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)
    if kind is str:
        return isinstance(value, str) and CONTROL.search(value) is None
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _check_table(value: Any, schema: dict[str, Schema], where: str) -> None:
    if not isinstance(value, dict):
        raise _wrong(where, value, "a table")
    for key, inner in schema.items():
        name, dot = key.removesuffix("?"), "." * bool(where)
        if name in value:
            check(value[name], inner, f"{where}{dot}{name}")
        elif name == key:
            raise ValueError(f"{where}{dot}{name} is missing")


def _wrong(where: str, value: Any, reason: str) -> ValueError:
    return ValueError(f"{where or 'its content'} is {show(value)}; it must be {reason}")


# --------------------------------------------------------------------------------------------------------------- small schemas
def one_of(*choices: str) -> Callable[[Any], str | None]:
    """A text that is one of these."""
    return lambda value: None if isinstance(value, str) and value in choices else f"one of {', '.join(choices)}"


def count(value: Any) -> str | None:
    """A whole number ≥ 0."""
    return None if _is(value, int) and 0 <= value < 2**63 else "a whole number ≥ 0"


def numbers(value: Any) -> str | None:
    """A table of numbers or nulls."""
    if isinstance(value, dict):
        for v in value.values():  # a record holds thousands of these: no function is called for a number
            if v is not None and (type(v) is not float or not isfinite(v)) and not (type(v) is int and is_finite(v)):
                return "a table of numbers"
        return None
    return "a table of numbers"


def matrix(value: Any) -> str | None:
    """Rows of equal length, of accuracies from 0 to 1 or nulls."""
    is_good = isinstance(value, list) and all(isinstance(row, list) and len(row) == len(value[0]) for row in value)
    is_good = is_good and all(v is None or (type(v) in NUMERIC and 0 <= v <= 1) for row in value for v in row)
    return None if is_good else "rows of equal length with numbers from 0 to 1"


def _history(value: Any) -> str | None:
    """For each task a list of epochs, each a table of numbers."""
    is_nested = isinstance(value, list) and all(isinstance(task, list) for task in value)
    is_good = is_nested and not any(map(numbers, itertools.chain.from_iterable(value)))
    return None if is_good else "a list of tasks, each a list of epochs with their numbers"


def _detail(value: Any) -> str | None:
    """Numbers, in lists and tables of any depth up to that of JSON files of ours."""
    return None if _is_plain(value, 6) else "numbers in lists"


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(one, depth - 1) for one in inner)
    return isinstance(value, str) or _is_number_or_null(value)


def _is_number_or_null(value: Any) -> bool:
    return value is None or (type(value) in (float, int) and is_finite(value))


NULL = type(None)
NUMBER = (float, NULL)
SHAPE = [int]

RUN: Schema = {
    "stream": str,
    "model": str,
    "preserve": (str, dict),
    "sparsify": (str, dict),
    "seed": int,
    **dict.fromkeys(("tasks?", "outputs?"), (int, NULL)),
    **dict.fromkeys(("epochs?", "batch?", "ramp?"), count),
    **dict.fromkeys(("lr?", "momentum?", "weight_decay?", "held_out?"), float),
    **dict.fromkeys(("stream_options?", "model_options?"), dict),
    **{f"{name}?": str for name in "optimizer schedule anchor alpha layers select augment precision scenario parent".split()},
}
RESULT: Schema = {
    "run": RUN,
    "status": one_of("done", "failed"),
    "error": str,
    "summary?": numbers,
    "accuracy": matrix,
    "baseline": [NUMBER],
    "history": _history,
    "capacity": [
        {
            "tasks?": count,
            "threshold?": NUMBER,
            "free_parameters?": NUMBER,
            "free_neurons?": NUMBER,
            "parameters?": numbers,
            "neurons?": numbers,
        }
    ],
    "about": {
        "seconds?": NUMBER,
        "run_steps_per_second?": NUMBER,
        "fleet?": count,
        "parameters?": count,
        "hardware?": str,
        "made_from?": str,
        "strengths?": numbers,
        "notes?": (list, NULL),
        "tasks?": (list, NULL),
    },
}
DATA: Schema = {
    "image_shape": SHAPE,
    "input_shape": SHAPE,
    "dtype": one_of("uint8", "float32"),
    "mean": (list, NULL),
    "std": (list, NULL),
    "outputs": count,
    "tasks": [{"name": str, "columns": [count], "classes": [str], "transform": str}],
}
PLACE = [str]
EXPERIMENT: Schema = {
    **dict.fromkeys(("name", "title", "source", "figure", "pending"), str),
    "profile": str,
    "quick": bool,
    "seeds": [int],
    "cells": [
        {
            **dict.fromkeys(("row", "column", "value", "heading", "unit", "status", "error", "method"), str),
            **dict.fromkeys(("published", "mean", "std", "difference"), NUMBER),
            "run": lambda run: None if run is None else check(run, RUN, "run"),
            "on_test": bool,
            "runs": [{"seed": int, "key": str, "status": str, "error": str, "value": NUMBER, "detail": _detail}],
        }
    ],
    "choices": [
        {
            "cells": [PLACE],
            "by": str,
            "seeds": [int],
            "chosen": (int, NULL),
            "edges": [str],
            "candidates": [{"method": str, "scores": [NUMBER], "keys": [str]}],
        }
    ],
    "claims": [
        {
            "text": str,
            "verdict": one_of("holds", "fails", "undecided", "missing"),
            "parts": [
                {
                    **dict.fromkeys(("text", "relation"), str),
                    **dict.fromkeys(("published", "mean", "low", "high"), NUMBER),
                    "seeds": count,
                    "verdict": one_of("holds", "fails", "undecided", "missing"),
                }
            ],
        }
    ],
    "notes": [str],
    "about": {"runs": count, "failed": count, "seconds": float, "hardware": [str], "commit": [str]},
}


def check_outcome(values: Any) -> None:
    """Raise ValueError unless the values say how a run ended: the part of a metrics.json that `selfless watch` shows."""
    check(values, {"status": RESULT["status"], "error": str, "summary": numbers})


def check_result(values: Any) -> None:
    """Raise ValueError unless the values are those of a metrics.json: the schema, and sizes that fit each other."""
    check(values, RESULT)
    tasks = len(values["accuracy"][0]) if values["accuracy"] else 0
    if len(values["baseline"]) not in (tasks, 0) and tasks:
        raise ValueError(f"baseline has {len(values['baseline'])} numbers, and accuracy has {tasks} columns")
    if values["status"] == "done" and not tasks:
        raise ValueError("accuracy is empty, and status is 'done'")
    if len(values["accuracy"]) > max(tasks, 1):
        raise ValueError(f"accuracy has {len(values['accuracy'])} rows and {tasks} columns")
    for name in ("accuracy_all", "held_out"):
        if values.get(name) is not None:
            check(values[name], matrix, name)
    if values.get("data") is not None:
        check(values["data"], DATA, "data")
        _check_data(values["data"])
    if "key" in values:
        check(values["key"], str, "key")


def _check_data(data: dict[str, Any]) -> None:
    """Raise ValueError unless shapes have three sizes, columns fit their classes, and normalisation fits the channels."""
    for name in ("image_shape", "input_shape"):
        if len(data[name]) != 3 or min(data[name]) < 1:
            raise ValueError(f"data.{name} is {show(data[name])}; it must be three sizes (channels, height, width)")
    for name in ("mean", "std"):
        check(data[name] or [], [float], f"data.{name}")
        if data[name] is not None and len(data[name]) not in (1, data["image_shape"][0]):
            raise ValueError(f"data.{name} has {len(data[name])} numbers, and images have {data['image_shape'][0]} channels")
    if any(one <= 0 for one in data["std"] or ()):
        raise ValueError(f"data.std is {show(data['std'])}; it must be positive")
    for t, task in enumerate(data["tasks"]):
        columns: Sequence[int] = task["columns"]
        size = len(task["classes"])
        if len(columns) != 2 or columns[1] > data["outputs"] or columns[1] - columns[0] != size:
            raise ValueError(f"data.tasks[{t}].columns is {show(columns)}; it must be [first, last + 1] of its {size} classes")


NOTE: Schema = {
    "host": str,
    "process": count,
    "processes?": str,
    "updated": float,
    "started?": float,
    "ended?": str,
    "runs": [{"key": str, "method": str, "stream": str, "model": str, "seed": int}],
}
EVENT: Schema = {
    **dict.fromkeys(("task", "tasks", "epoch", "epochs"), count),
    **dict.fromkeys(("name", "stage"), str),
    **{name: [NUMBER] for name in ("loss", "accuracy", "average")},
    **dict.fromkeys(("evaluated", "resumed", "passing"), bool),
    "share": float,
    **dict.fromkeys(("speed", "seconds_left"), NUMBER),
}


def check_note(values: Any, of_fleet: bool) -> None:
    """Raise ValueError unless the values are those of a note of a study, or of a fleet with its last event."""
    check(values, NOTE | ({"event": EVENT} if of_fleet else {"started": float}))
    if of_fleet and values["event"]["average"] and len(values["event"]["average"]) != len(values["runs"]):
        raise ValueError("event.average must have a number for each run")


def seal(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with "sha256", a checksum of all others."""
    return values | {"sha256": _checksum(values)}


def check_seal(values: Any) -> None:
    """Raise ValueError if the values have a checksum and it is not theirs. Records of before the checksum have none."""
    if isinstance(values, dict) and "sha256" in values and values["sha256"] != _checksum(values):
        raise ValueError("its checksum is wrong: it was damaged, or edited by hand")


def _checksum(values: dict[str, Any]) -> str:
    others = {key: value for key, value in values.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def check_experiment(values: Any) -> None:
    """Raise ValueError unless the values are those of a record of an experiment."""
    check(values, EXPERIMENT)
    for c, choice in enumerate(values["choices"]):
        if any(len(place) != 2 for place in choice["cells"]):
            raise ValueError(f"choices[{c}].cells must be pairs of a row and a column")
