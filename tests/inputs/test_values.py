"""Checks of single values: huge numbers, and several problems at once."""

from __future__ import annotations

import pytest

from selfless import MAS, Run
from selfless.inputs import collecting, is_finite, raise_all, show
from selfless.preserve import EBLL, RWalk


@pytest.mark.parametrize(
    ("value", "expected"), [(1, True), (0.5, True), (float("inf"), False), (float("nan"), False), (10**400, False), (-(10**400), False)]
)
def test_a_number_is_finite_as_a_float(value: float, expected: bool) -> None:
    assert is_finite(value) is expected


def test_a_shown_value_is_short() -> None:
    assert show("a") == "'a'"
    assert len(show("a" * 500)) <= 80
    assert len(show(10**5000)) <= 80


def test_problems_are_raised_together() -> None:
    problems: list[Exception] = []
    raise_all(problems)
    for value in ("one", "two"):
        with collecting(problems):
            raise ValueError(value)
        if value == "one":
            with pytest.raises(ValueError, match=r"^one$"):
                raise_all(problems)
    with pytest.raises(ValueError, match=r"2 settings are wrong:\n- one\n- two"):
        raise_all(problems)


def test_a_run_names_every_wrong_setting() -> None:
    with pytest.raises(ValueError, match="4 settings are wrong") as caught:
        Run(preserve="mass:1", epochs=0, lr=10**400, tasks=10**9)  # type: ignore[arg-type]
    for words in ("no preserver is called 'mass'", "epochs is 0", "lr is 1000", "tasks is 1000000000; it must be below 10001"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EBLL(0.5, steps=10**9), "steps is 1000000000; it must be at most 1,000,000"),
        (lambda: RWalk(0.5, every=1e300), "every is 1e[+]300; it must be at most 1,000,000"),  # type: ignore[arg-type]
        (lambda: MAS(10**400), "MAS: strength is 10000.*it must be finite"),
    ],
)
def test_absurd_counts_and_numbers_are_refused(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]
