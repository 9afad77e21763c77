"""Equal chances: the same budget for every row, grids that grow and are refined around the best, and rounds of choosing."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from selfless import MAS, SLNID, Run
from selfless.experiments import NAMES, experiment
from selfless.experiments.base import EQUAL, Cell, Experiment
from selfless.experiments.choosing import choose, later_trials, next_trials
from selfless.experiments.grids import beyond, reachable
from selfless.experiments.record import list_choices
from selfless.experiments.reproduce import declared, reproduce
from selfless.preserve import PackNet
from selfless.spec import Result
from tests.fabricated import result

ANCHORS, STRENGTHS = (0.01, 0.03, 0.1), (1e-4, 3e-4, 1e-3)
GRID = tuple(Run(preserve=MAS(a), sparsify=SLNID(s)) for a in ANCHORS for s in STRENGTHS)


def peak(anchor: float, strength: float, luck: Callable[[Run], float] = lambda run: 0.0) -> Callable[[Run], float]:
    """Return a held-out accuracy that falls from (anchor, strength) by the logarithmic distance."""

    def score(run: Run) -> float:
        far = abs(math.log10(run.preserve.strength / anchor)) + abs(math.log10(run.sparsify.strength / strength))
        return 0.9 - 0.05 * far + luck(run)

    return score


def chosen(cell: Cell, score: Callable[[Run], float]) -> tuple[Run, dict[Run, Result], list[list[Run]]]:
    """(the chosen candidate, all results, the runs of each round) with a fake trainer."""
    results: dict[Run, Result] = {}
    rounds = []
    while runs := next_trials(cell, results):
        assert not set(runs) & results.keys(), "a run was asked for twice"
        rounds.append(runs)
        results |= {run: result(run, 0.5, held_out=score(run)) for run in runs}
    found = choose(cell, results)
    assert found.index is not None
    return found.candidates[found.index], results, rounds


def test_rounds_inside_the_grid() -> None:
    """Nine candidates by one seed, the best four by one more, the best two by three more; test data is never used."""
    best, _, rounds = chosen(Cell("SLNID", "x", GRID, choice=EQUAL), peak(0.03, 3e-4))
    assert (best.preserve.strength, best.sparsify.strength) == (0.03, 3e-4)
    assert [len(runs) for runs in rounds] == [9, 4, 6]  # half decades already: nothing to refine
    assert {run.seed for run in rounds[0]} == {100}
    assert collections.Counter(run.seed for runs in rounds[1:] for run in runs) == {101: 4, 102: 2, 103: 2, 104: 2}
    assert all(run.held_out == 0.1 for runs in rounds for run in runs)


@pytest.mark.parametrize("where", [(0.01, 1e-4), (0.03, 1e-4), (0.01, 3e-4), (0.03, 3e-4)])
def test_decades_are_refined_around_the_best(where: tuple[float, float]) -> None:
    """Up to four half decades are added next to the best decade; a best between two decades in one number is found."""
    decades = tuple(Run(preserve=MAS(a), sparsify=SLNID(s)) for a in (1e-3, 1e-2, 1e-1) for s in (1e-5, 1e-4, 1e-3))
    cell = Cell("SLNID", "x", decades, choice=EQUAL)
    best, results, rounds = chosen(cell, peak(*where))
    assert [len(runs) for runs in rounds] == [9, 4, 4, 6]
    assert later_trials(cell) == 4 + 4 + 6
    far = abs(math.log10(best.preserve.strength / where[0])) + abs(math.log10(best.sparsify.strength / where[1]))
    assert far < 0.01 or (where == (0.03, 3e-4) and far < 0.55)  # both numbers between decades: one of them is half a decade off
    assert set(choose(cell, results).candidates) <= set(reachable(decades, EQUAL))


def test_an_axis_of_two_values_has_no_inside() -> None:
    """Its best stands at an end whichever it is, so one value is always added."""
    pair = tuple(Run(preserve=MAS(a)) for a in (1.0, 10.0))
    cell = Cell("No-Reg", "x", pair, choice=EQUAL)
    results: dict[Run, Result] = {}
    while runs := next_trials(cell, results):
        results |= {run: result(run, 0.5, held_out=0.9 - abs(math.log10(run.preserve.strength / 3.0))) for run in runs}
    found = choose(cell, results)
    assert found.index is not None
    assert found.candidates[found.index].preserve.strength == 3.0
    assert sorted(run.preserve.strength for run in found.candidates) in ([0.1, 0.3, 1.0, 3.0, 10.0], [1.0, 3.0, 10.0, 30.0, 100.0])
    assert len(results) == len(pair) + later_trials(cell)


def test_the_mean_of_all_five_seeds_decides() -> None:
    """A candidate that is lucky with the first seed is a finalist, and loses by the others."""
    score = peak(0.03, 3e-4, lambda run: 0.04 if run.seed == 100 and run.sparsify.strength == 1e-3 and run.preserve.strength == 0.03 else 0)
    best, results, _ = chosen(Cell("SLNID", "x", GRID, choice=EQUAL), score)
    assert best.sparsify.strength == 3e-4
    first = max((run for run in results if run.seed == 100), key=score)
    assert first.sparsify.strength == 1e-3


@pytest.mark.parametrize(("where", "added"), [((0.3, 3e-4), 3), ((1.0, 3e-4), 6), ((0.03, 3e-5), 3), ((0.3, 3e-3), 7)])
def test_a_grid_grows_until_the_best_is_inside(where: tuple[float, float], added: int) -> None:
    """The best is outside by one value (one more column is needed to see that it is inside), by two, below, or at a corner."""
    best, results, _ = chosen(Cell("SLNID", "x", GRID, choice=EQUAL), peak(*where))
    assert (best.preserve.strength, best.sparsify.strength) == where
    first = {(run.preserve.strength, run.sparsify.strength) for run in results if run.seed == 100}
    assert len(first) >= 9 + added
    assert max(a for a, _ in first) > where[0] > min(a for a, _ in first)
    assert max(s for _, s in first) > where[1] > min(s for _, s in first)
    assert len([run for run in results if run.seed != 100]) >= 10


def test_the_limit_is_kept_and_said() -> None:
    cell = Cell("SLNID", "x", GRID, choice=EQUAL)
    best, results, _ = chosen(cell, peak(1e6, 3e-4))
    assert best.preserve.strength == 10.0  # 0.3, 1, 3, 10: four values beyond 0.1
    assert choose(cell, results).edges == ("λ_Ω = 10 is an end of its grid after the most extensions allowed",)
    made = Experiment("fig-2", "x", "figure 2", "bars", (cell,), profile="equal")
    record = list_choices(made, {cell.place: choose(cell, results)}, results)[0]
    assert (record["declared"], record["extend"], record["rounds"]) == (9, 4, [[4, [101]], [2, [102, 103, 104]]])
    assert len(record["candidates"]) == 9 + 4 * 3
    assert {len(c["scores"]) for c in record["candidates"]} == {1, 2, 5}
    assert all(len(c["scores"]) == len(c["keys"]) for c in record["candidates"])
    assert dataclasses.replace(best, seed=3).key in declared(made, range(5))  # an added candidate is not stale
    assert set(choose(cell, results).candidates) <= set(reachable(GRID, EQUAL))


def test_values_beyond_an_end() -> None:
    assert (beyond((0.1, 0.3, 1.0), up=True), beyond((0.1, 0.3, 1.0), up=False)) == (3.0, 0.03)
    assert (beyond((0.01, 0.1), up=True), beyond((1e3, 1e4), up=False)) == (1.0, 1e2)
    assert beyond((0.3, 0.75, 2.0), up=True) == 10.0  # values that are no half decades lead to the next one


def test_a_share_stays_below_one() -> None:
    assert beyond((0.75, 0.85), up=True, share=True) == 0.91  # 1 − s: 0.25, 0.15, 0.09
    assert beyond((0.75, 0.85), up=False, share=True) == 0.5833
    assert beyond((0.5, 0.9), up=False, share=True) == 0.1667  # 1 − s would be 2.5: a third instead
    shares = tuple(Run(preserve=PackNet(s)) for s in (0.75, 0.85))
    reached = sorted(run.preserve.strength for run in reachable(shares, EQUAL))
    assert len(reached) == 2 + 2 * EQUAL.extend
    assert 0 < reached[0] < reached[-1] < 1


def test_failed_candidates_neither_win_nor_extend() -> None:
    def trained(run: Run) -> Result:
        return result(run, 0.5, held_out=peak(0.3, 3e-4)(run), status="failed" if run.preserve.strength >= 0.1 else "done")

    cell, results = Cell("SLNID", "x", GRID, choice=EQUAL), {}
    while runs := next_trials(cell, results):
        results |= {run: trained(run) for run in runs}
    found = choose(cell, results)
    assert found.index is not None
    assert found.candidates[found.index].preserve.strength == 0.03
    assert choose(cell, {run: dataclasses.replace(r, status="failed") for run, r in results.items()}).index is None


def test_rows_have_equal_budgets_by_counting_runs(tmp_path: Path) -> None:
    """Whatever their scores, rows of equal grids train as many runs if their best is inside; the reported seeds are apart."""
    trained: list[Run] = []

    def train(runs: Sequence[Run], place: Path, what: str) -> list[Result]:
        trained.extend(runs)
        return [result(run, 0.5, held_out=peak(0.01, 1e-5 if "decov" in run.method else 1e-6)(run)) for run in runs]

    made = experiment("fig-2", "equal")
    rows = ("SLNID", "DeCov", "L1-Rep")
    cells = tuple(cell for cell in made.cells if cell.row in rows and cell.value == "average")
    reproduce(dataclasses.replace(made, cells=cells, claims=()), seeds=3, out=tmp_path, train=train)
    counts = collections.Counter((run.sparsify.name, run.held_out > 0) for run in trained)
    assert set(counts.values()) == {3 * 8 + 4 + 4 + 2 * 3, 3}
    assert {run.seed for run in trained if run.held_out} == {100, 101, 102, 103, 104}
    assert {run.seed for run in trained if not run.held_out} == {0, 1, 2}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "table-2"])
def test_every_table_gives_its_rows_the_same_grid(name: str) -> None:
    """In a column, rows with a penalty have equally many candidates, and rows without one have all of their anchors."""
    by_column: dict[str, dict[str, tuple[Run, ...]]] = {}
    for cell in experiment(name, "equal").cells:
        if len(cell.candidates) > 1 and cell.choice == EQUAL and not cell.row.startswith("joint"):
            kind = " w/o MAS" if "w/o" in cell.row else ", augmented" if "augmented" in cell.row else ""
            by_column.setdefault(cell.column + kind, {})[cell.row] = cell.candidates
    for column, rows in by_column.items():
        if all(run.preserve.name == "none" for runs in rows.values() for run in runs):
            assert len({len(runs) for runs in rows.values()}) == 1
            continue
        penalised = {row: runs for row, runs in rows.items() if runs[0].sparsify.is_on and row not in ("Finetune", "PackNet")}
        assert len({len(runs) for runs in penalised.values()}) <= 1, column
        if len({runs[0].preserve.name for runs in rows.values()}) == 1:
            grids = {frozenset(run.preserve.strength for run in runs) for runs in rows.values()}
            assert len(grids) == 1, column
            assert len({frozenset(run.sparsify.strength for run in runs) for runs in penalised.values()}) <= 1, column


def test_reported_runs_of_tiny_imagenet_use_all_training_images() -> None:
    made = experiment("fig-3b", "equal")
    assert {run.held_out for cell in made.cells for run in cell.candidates} == {0.0}
    assert {run.held_out for cell in experiment("fig-3b", "ours").cells for run in cell.candidates} == {0.1}  # as recorded


def test_variants_share_runs_and_choose_alike() -> None:
    """Rows that are compared with the paper's layers are the same runs; with a rate of its own, each row has every rate and schedule."""
    shared = {cell.place: cell for name in ("fig-3a", "fig-3a-128", "fig-3b") for cell in experiment(name, "equal").cells}
    for name in ("all-layers", "tiny-variants"):
        same = [cell for cell in experiment(name, "equal").cells if cell.row in ("No-Reg", "SLNID")]
        assert same
        assert all((cell.candidates, cell.choice) == (shared[cell.place].candidates, shared[cell.place].choice) for cell in same)
    for cell in experiment("rates", "equal").cells:
        strengths = [(run.preserve.strength, run.sparsify.strength) for run in cell.candidates]
        settings = collections.Counter((run.lr, run.schedule) for run in cell.candidates)
        assert len(settings) == 6
        assert set(settings.values()) == {len(set(strengths))}
    for name in ("all-layers", "augmented", "tiny-variants", "rates"):
        assert experiment(name, "ours").pending
        assert not any(cell.candidates for cell in experiment(name, "ours").cells)


def test_rows_of_table_2_have_nine_candidates_and_every_pair_is_compared() -> None:
    from selfless.experiments.table_2 import Here, table_2

    found = Here(("flowers", "birds", "cars", "letters"), ("cars",), {}, "alexnet_imagenet_features.npz@0123456789ab")
    made = table_2("equal", found)
    rows = {cell.row: cell for cell in made.cells if cell.candidates}
    assert {row: len(cell.candidates) for row, cell in rows.items() if row != "Finetune"} == dict.fromkeys(rows.keys() - {"Finetune"}, 9)
    assert all(cell.choice == EQUAL for cell in rows.values())  # all tasks decide
    assert {run.preserve.strength for run in rows["EWC"].candidates} >= {1e3, 1e4, 1e5, 1e6, 1e7}
    assert {run.preserve.strength for run in rows["SI"].candidates} >= {1e2, 1e3, 1e4, 1e5, 1e6}
    assert all(run.preserve.warmup == 1 and run.preserve.damped for row in ("LwF", "EBLL") for run in rows[row].candidates)  # type: ignore[attr-defined]
    compared = {frozenset((part.a[0], part.b[0])) for claim in made.claims for part in claim.parts if part.b and part.a[1] == found.column}
    assert compared == {frozenset((a, b)) for a in rows for b in rows if a != b}
