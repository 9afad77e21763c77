"""A list of runs is checked whole before the first step, and all problems are listed together."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from selfless import Run, train
from selfless.data import DataError, holding
from selfless.runner.checks import check_runs, problems
from selfless.runner.options import TrainOptions

OPTIONS = TrainOptions(device="cpu")


@pytest.fixture
def good(tasks_npz: str) -> Run:
    return Run(stream=tasks_npz, model="mlp-8", epochs=1, batch=50)


def test_the_last_wrong_run_is_found_before_the_first_trains(good: Run, tmp_path: Path) -> None:
    """Every problem is listed with its runs and the remedy, and nothing is trained."""
    runs = [good.replace(seed=seed) for seed in range(3)]
    wrong = [
        good.replace(stream="permuted-mnst", seed=7),
        good.replace(stream="permuted-mnst", seed=8, preserve="ewc"),
        good.replace(model="mpl-8"),
        good.replace(tasks=9),
        good.replace(model_options={"deep": 3}),
        good.replace(preserve="hat:0.5", optimizer="adam"),
    ]
    events: list[Any] = []
    with pytest.raises(ValueError, match="6 of 9 runs cannot be trained, so nothing was trained") as caught:
        train([*runs, *wrong], out=tmp_path / "out", watch=lambda runs, event: events.append(event))
    for words in (
        "- 2 methods, mas:0.1 and others, on permuted-mnst with mlp-8, seeds 7, 8: no stream is called 'permuted-mnst'",
        "did you mean mlp-8",
        "has 3 tasks, so tasks must be from 1 to 3, not 9",
        "mlp-8 has no option 'deep'",
        "use --optimizer sgd",
    ):
        assert words in str(caught.value)
    assert events == []
    assert not (tmp_path / "out").exists()


def test_one_problem_of_all_runs_is_raised_as_it_is(good: Run) -> None:
    with pytest.raises(ValueError, match=r"^no stream is called 'permuted-mnst'"):
        check_runs([good.replace(stream="permuted-mnst", seed=seed) for seed in range(3)], OPTIONS)


def test_missing_data_of_some_runs_is_a_problem_of_data(good: Run) -> None:
    with pytest.raises(DataError, match=r"(?s)1 of 2 runs cannot be trained.*given:nowhere"):
        check_runs([good, good.replace(stream="given:nowhere:0")], OPTIONS)


def test_a_network_that_cannot_fit_is_refused_without_being_built(good: Run) -> None:
    (problem,) = problems([good.replace(model="mlp-1000000")], OPTIONS)
    assert "mlp-1000000 has 1,000,0" in str(problem.error)
    assert "use a smaller network" in str(problem.error)


def test_a_folder_that_is_a_file_or_read_only_is_refused(good: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    for out, words in ((tmp_path / "file" / "out", "is a file; choose another folder"), (closed / "out", "permission denied")):
        (problem,) = problems([good], dataclasses.replace(OPTIONS, out=out))
        assert words in str(problem.error)


def test_equal_runs_are_checked_once(good: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 runs that differ in numbers build one network; with their data loaded, this takes less than 0.2 s of this process."""
    from selfless.runner import checks

    built: list[Run] = []
    original = checks.build_fleet
    monkeypatch.setattr(checks, "build_fleet", lambda runs, *more: (built.extend(runs), original(runs, *more))[1])
    runs = [good.replace(seed=i, lr=0.01 * (i + 1), preserve=f"mas:{i + 1}", sparsify=f"slnid:{i + 1}") for i in range(48)]
    with holding():
        check_runs(runs[:1], OPTIONS)
        started = time.process_time()
        check_runs(runs, OPTIONS)
        assert time.process_time() - started < 0.2
    assert len(built) == 2


def test_a_sparsifier_without_layers_is_found(good: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checks_plain.py").write_text(
        "from torch import nn\ndef build(outputs, input_shape): return nn.Sequential(nn.Flatten(), nn.Linear(36, outputs))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = good.replace(model="checks_plain:build", preserve="none")
    assert problems([run], OPTIONS) == []
    (problem,) = problems([run, run.replace(sparsify="slnid:1e-3")], OPTIONS)
    assert "has no hidden activation module" in str(problem.error)
