"""Candidates: scored on held-out data alone, the best one taken, failures never."""

from __future__ import annotations

import dataclasses

import pytest

from selfless import MAS, SLNID, NoSparsifier, Run
from selfless.experiments.base import Cell, Choice
from selfless.experiments.choosing import choose, first_tasks, trials
from selfless.experiments.grids import edges
from selfless.spec import Result
from tests.fabricated import result

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)
CANDIDATES = (Run(sparsify=NoSparsifier()), *(Run(sparsify=SLNID(s)) for s in STRENGTHS))


def scored(cell: Cell, held_out: dict[float, float], test: float = 0.5, failed: tuple[float, ...] = ()) -> dict[Run, Result]:
    """Held-out accuracy by strength; the same test accuracy for all."""
    return {
        run: result(run, test, held_out=held_out[run.sparsify.strength], status="failed" if run.sparsify.strength in failed else "done")
        for run in trials(cell)
    }


def test_the_test_data_has_no_say() -> None:
    cell = Cell("SLNID", "x", CANDIDATES, choice=Choice("held-out", (100, 101)))
    runs = trials(cell)
    assert {run.seed for run in runs} == {100, 101}
    assert {run.held_out for run in runs} == {0.1}
    assert {run.tasks for run in runs} == {5}
    known = {0.0: 0.90, 1e-4: 0.91, 1e-3: 0.95, 1e-2: 0.93, 1e-1: 0.2}
    found = choose(cell, scored(cell, known))
    assert found.index == 2
    assert found.edges == ()
    misleading = {run: result(run, 0.99 if run.sparsify.strength == 1e-1 else 0.1, held_out=known[run.sparsify.strength]) for run in runs}
    assert choose(cell, misleading).index == 2


def test_the_first_tasks_may_decide() -> None:
    cell = Cell("SLNID", "x", CANDIDATES, choice=Choice("held-out", (100,), tasks=2))
    assert {(run.tasks, run.held_out, run.seed) for run in trials(cell)} == {(2, 0.1, 100)}
    known = {0.0: 0.90, 1e-4: 0.91, 1e-3: 0.95, 1e-2: 0.93, 1e-1: 0.2}
    assert choose(cell, scored(cell, known)).index == 2
    few = Cell("SLNID", "x", tuple(dataclasses.replace(run, tasks=1) for run in CANDIDATES), choice=cell.choice)
    assert {run.tasks for run in trials(few)} == {1}  # never more than there are
    assert (first_tasks(cell), first_tasks(few), first_tasks(dataclasses.replace(cell, choice=Choice()))) == (2, None, None)


def test_a_failed_candidate_is_never_chosen_and_an_edge_is_said() -> None:
    cell = Cell("SLNID", "x", CANDIDATES)
    known = {0.0: 0.90, 1e-4: 0.91, 1e-3: 0.95, 1e-2: 0.93, 1e-1: 0.94}
    found = choose(cell, scored(cell, known, failed=(1e-3,)))
    assert found.index == 4
    assert found.edges == ("λ = 0.1 is an end of its grid",)
    assert choose(cell, scored(cell, known, failed=(0.0, *STRENGTHS))).index is None


def test_the_authors_choice_is_on_the_runs_that_are_reported() -> None:
    cell = Cell("SLNID", "x", CANDIDATES, choice=Choice("test", (0, 1)))
    assert trials(cell) == [dataclasses.replace(run, seed=s) for run in CANDIDATES for s in (0, 1)]
    found = choose(cell, {run: result(run, run.sparsify.strength) for run in trials(cell)})
    assert found.index == 4


def test_the_rule_of_thumb_in_both_readings() -> None:
    first_task = {0.0: 0.970, 1e-4: 0.969, 1e-3: 0.972, 1e-2: 0.966, 1e-1: 0.80}
    for by, want in (("rule-smallest", 1), ("rule-largest", 3)):
        cell = Cell("rule", "x", CANDIDATES, choice=Choice(by, (7,)))  # type: ignore[arg-type]
        assert {(run.tasks, run.held_out, run.seed) for run in trials(cell)} == {(1, 0.1, 7)}
        assert choose(cell, scored(cell, first_task)).index == want
        none_kept = {0.0: 0.97, 1e-4: 0.9, 1e-3: 0.8, 1e-2: 0.7, 1e-1: 0.6}
        assert choose(cell, scored(cell, none_kept)).index == 1  # the weakest, where none keeps the accuracy
    without = Cell("rule", "x", CANDIDATES[1:], choice=Choice("rule-largest", (7,)))
    with pytest.raises(ValueError, match="give one candidate the sparsifier 'none'"):
        choose(without, scored(without, first_task))


def test_nothing_to_choose_needs_no_runs() -> None:
    assert trials(Cell("a", "x", CANDIDATES[:1])) == []
    assert choose(Cell("a", "x", CANDIDATES[:1]), {}).index == 0
    assert choose(Cell("a", "x"), {}).index is None


def test_an_older_record_is_said_to_be_one() -> None:
    cell = Cell("SLNID", "x", CANDIDATES)
    old = {run: dataclasses.replace(r, held_out=None) for run, r in scored(cell, dict.fromkeys((0.0, *STRENGTHS), 0.5)).items()}
    with pytest.raises(ValueError, match=r"has no held-out accuracy: .* Train it again with --force"):
        choose(cell, old)


def test_edges_of_every_number() -> None:
    grid = [Run(preserve=MAS(a), lr=lr) for a in (1.0, 2.0, 3.0) for lr in (0.1, 0.2)]
    assert edges(grid, 0) == ("λ_Ω = 1 is an end of its grid", "lr = 0.1 is an end of its grid")
    assert edges(grid, 2) == ("lr = 0.1 is an end of its grid",)  # of two rates each is an end
