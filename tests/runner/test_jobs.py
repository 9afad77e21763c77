"""Fleets as jobs, with workers that are plain functions: what is repeated, split, adopted and recorded, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import selfless
from selfless import Run
from selfless.runner.cluster import train_on_cluster
from selfless.runner.jobs import record_failure, train_jobs
from selfless.runner.options import TrainOptions
from selfless.runner.plan import spread
from selfless.runner.store import Store
from tests.runner.small_runs import BASE


class Deadly:
    """Workers that record a failure for every run they 'train', and die from a run with the learning rate `poison`."""

    def __init__(self, store: Store, poison: float) -> None:
        self.store, self.poison = store, poison
        self.sizes: list[int] = []

    def run(
        self,
        jobs: Sequence[Mapping[str, Any]],
        receive: Callable[[int, dict[str, Any]], None],
        replace: Callable[[int, int | str], bool],
    ) -> None:
        for number, job in enumerate(jobs):
            runs, again = [Run.from_dict(values) for values in job["runs"]], True
            while again:
                self.sizes.append(len(runs))
                again = any(run.lr == self.poison for run in runs) and replace(number, -9)
            if all(run.lr != self.poison for run in runs):
                for run in runs:
                    record_failure(run, "trained", self.store)


@pytest.mark.filterwarnings("ignore:.*worker process ended")
@pytest.mark.parametrize(("count", "sizes"), [(1, [1, 1]), (4, [4, 4, 2, 2, 2, 1, 1, 1]), (3, [3, 3, 2, 1, 1])])
def test_a_fleet_that_kills_its_worker_is_halved_until_one_run_is_left(tmp_path: Path, count: int, sizes: list[int]) -> None:
    runs = [Run(lr=0.01 * (i + 1), epochs=1) for i in range(count)]
    store, poisoned = Store(tmp_path), runs[-1]
    workers = Deadly(store, poisoned.lr)
    failed = train_jobs([runs], workers, store, TrainOptions(out=tmp_path, device="cpu"))
    assert workers.sizes == sizes
    assert list(failed) == [poisoned]
    assert failed[poisoned].error == "its worker process ended with status -9 (killed, perhaps for want of memory), twice"
    assert sorted(store.keys()) == sorted(run.key for run in runs), "each run ends exactly once"


def test_files_of_another_machine_are_recorded_once(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, **BASE | {"epochs": 1})
    there, here = Store(tmp_path / "there"), Store(tmp_path / "here")
    selfless.train(run, out=there.out)
    files = there.files_of(run)
    assert here.adopt(run, files)
    before = {path.name: path.stat().st_mtime_ns for path in here.folder(run).iterdir()}
    assert not here.adopt(run, files), "the second answer changes nothing"
    assert {path.name: path.stat().st_mtime_ns for path in here.folder(run).iterdir() if path.name != "lock"}.items() <= before.items()
    assert here.files_of(run) == files
    assert here.adopt(run, files, again=True)
    assert not here.adopt(run, {}, again=True), "no metrics, no result"
    assert here.files_of(run) == files


@pytest.mark.parametrize("by_share", [True, False])
def test_groups_are_spread_over_all_devices(by_share: bool) -> None:
    groups = [[Run(model=f"mlp-{width}", seed=seed) for seed in range(count)] for width, count in ((8, 50), (16, 10), (32, 4))]
    parts = spread(groups, [50, 3, 50], 8, by_share=by_share)
    assert [run for part in parts for run in part] == [run for group in groups for run in group]
    sizes = [[len(part) for part in parts if part[0].model == group[0].model] for group in groups]
    assert max(sizes[1]) <= 3, "no fleet is larger than fits"
    assert [len(of_group) for of_group in sizes] == ([7, 4, 1] if by_share else [8, 8, 4])
    assert all(max(of_group) - min(of_group) <= 1 for of_group in sizes)


def test_objects_do_not_travel(tasks_npz: str, tmp_path: Path) -> None:
    import numpy as np

    x, y = np.zeros((8, 1, 6, 6), np.uint8), np.arange(8) % 2
    run = Run(stream=selfless.stream([((x, y), (x, y))]), **BASE)
    with pytest.raises(ValueError, match="passed as an object, which other machines cannot read; put the data into a file"):
        train_on_cluster([], [run], Store(tmp_path), TrainOptions(out=tmp_path, engine="ray"))


def test_without_ray_one_line_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RuntimeError, match=r"pip install 'selfless-learning\[ray\]'"):
        train_on_cluster([], [Run()], Store(tmp_path), TrainOptions(out=tmp_path, engine="ray"))
    assert list(tmp_path.iterdir()) == [], "the marker is removed"
