"""A short part of the fuzzer, and its judgement: it must find a traceback, a hang and a vague message."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz import cases, targets
from tests.fuzz.changes import change_bytes, change_json, change_text


@pytest.mark.slow
def test_no_odd_input_gives_a_traceback() -> None:
    """A second or two of every run of the tests; `make fuzz` is the long form."""
    tally = cases.run_cases(targets.TARGETS, first=0, cases=3, seconds=2.0)
    assert tally.found == []
    assert sum(tally.counts.values()) > 5


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("'int' object has no attribute 'x'"), ZeroDivisionError(), AssertionError()])
def test_the_fuzzer_finds_what_it_looks_for(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def target(world: object, rng: random.Random) -> None:
        raise error

    monkeypatch.setitem(targets.TARGETS, "case", target)
    assert type(error).__name__ in (cases.run_case(None, "case", 0) or "")  # type: ignore[arg-type]


def test_the_fuzzer_ends_a_case_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def target(world: object, rng: random.Random) -> None:
        while True:
            pass

    monkeypatch.setitem(targets.TARGETS, "case", target)
    monkeypatch.setattr(cases, "SECONDS", 0.05)
    assert "Hang" in (cases.run_case(None, "case", 0) or "")  # type: ignore[arg-type]


def test_changes_depend_on_the_seed_alone() -> None:
    for change, value in ((change_text, "mas:0.1"), (change_bytes, b"abc" * 9), (change_json, {"a": [1, {"b": 2}]})):
        first, again = (repr(change(value, random.Random(7))) for _ in range(2))  # type: ignore[operator]
        assert first == again


def test_the_cases_stay_in_their_folder() -> None:
    here = Path.cwd()
    with cases.world() as made:
        assert made.folder == Path.cwd()
        assert here not in made.folder.parents
    assert Path.cwd() == here
