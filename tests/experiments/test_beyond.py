"""The experiment `beyond`: equal budgets, held-out data, and rows by name."""

from __future__ import annotations

from selfless.experiments import experiment
from selfless.experiments.beyond import CASES, select


def test_every_row_of_a_column_has_the_same_number_of_candidates() -> None:
    for column in CASES.values():
        cells = [cell for cell in experiment("beyond").cells if cell.column == column and cell.row != "joint"]
        assert len({len(set(cell.candidates)) for cell in cells}) == 1
        assert len({cell.choice for cell in cells}) == 1
        assert all(cell.choice.by == "held-out" and len(cell.choice.rounds) == 1 for cell in cells)


def test_choosing_and_reporting_use_other_seeds() -> None:
    choices = {cell.choice for cell in experiment("beyond").cells}
    assert choices
    assert not {seed for choice in choices for seed in choice.all_seeds} & set(range(10))


def test_joint_training_is_that_of_table_1() -> None:
    """The same settings, so that the same runs are the bound of both."""
    known = {run for cell in experiment("table-1").cells for run in cell.candidates}
    joint = {run for cell in experiment("beyond").cells if cell.row == "joint" for run in cell.candidates}
    assert {run.stream for run in joint & known} == {"joint-permuted-mnist", "joint-split-cifar-100"}


def test_rows_are_selected_by_case_and_by_name() -> None:
    made = experiment("beyond")
    assert select(made, []) == list(made.cells)
    found = select(made, ["cifar:LwF + DeCov", "pmnist"])
    assert {cell.column.removesuffix(" lost") for cell in found} == {"CIFAR 256", "pMNIST 128"}
    assert {cell.row for cell in found if cell.column == "CIFAR 256"} == {"LwF + DeCov"}
    assert select(made, ["nothing"]) == []
