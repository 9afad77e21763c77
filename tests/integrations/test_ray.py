"""`engine="ray"` on a real cluster of several nodes on this machine: equal to the local engine, and every run ends exactly once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import selfless
from selfless import Run
from selfless.cli import app
from selfless.experiments.base import Cell, Experiment
from selfless.runner.store import Store
from tests.integrations.ray_nodes import HOSTILE, small_cluster
from tests.runner.small_runs import BASE

pytest.importorskip("ray")
# Ray leaves sockets and processes to the garbage collector, and a study warns of each fault.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
LRS = (0.01, 0.02, 0.03, 0.04)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with small_cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of disturbing networks; another one in each test, as workers keep what they imported."""
    name = f"hostile_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def runs_of(stream: str, **changes: Any) -> list[Run]:
    return [Run(stream=stream, **(BASE | {"model": "mlp-8", "lr": lr} | changes)) for lr in LRS]


def ends(out: Path, runs: list[Run], marks: tuple[str, ...] = (".", "training-", "study-")) -> list[str]:
    """The status of every run; each is recorded once, and no file whose name begins with one of `marks` is left in the folder."""
    left = [p.name for p in out.rglob("*") if p.name.startswith(marks)]
    assert left == []
    assert sorted(Store(out).keys()) == sorted(run.key for run in runs)
    return [result.status for run in runs if (result := Store(out).get(run.key)) is not None]


def test_results_are_those_of_the_local_engine_to_the_bit(cluster: Any, tasks_npz: str, tmp_path: Path) -> None:
    runs, events = runs_of(tasks_npz), list[Any]()
    local = selfless.train(runs, out=tmp_path / "local", workers=2)
    there = selfless.train(runs, out=tmp_path / "ray", engine="ray", follow=lambda fleet, event: events.append((len(fleet), event)))
    for a, b in zip(local, there, strict=True):
        assert (a.run, a.about["fleet"]) == (b.run, b.about["fleet"])
        np.testing.assert_array_equal(a.accuracy, b.accuracy)
        assert a.history == b.history
        files = [tmp_path / engine / a.run.key / "checkpoint.safetensors" for engine in ("local", "ray")]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert ends(tmp_path / "ray", runs) == ["done"] * 4
    assert {size for size, event in events} == {2}, "progress comes back"
    for engine in ("local", "ray"):  # one cache: nothing is trained again
        again = selfless.train(runs, out=tmp_path / "ray", engine=engine, watch=lambda *_: pytest.fail("trained again"))
        assert [r.as_dict() for r in again] == [r.as_dict() for r in there]


def test_a_worker_that_is_killed_and_a_fleet_that_does_not_fit(cluster: Any, hostile: str, tasks_npz: str, tmp_path: Path) -> None:
    runs = [*runs_of(tasks_npz, model=f"{hostile}:crowded"), Run(stream=tasks_npz, **BASE | {"model": f"{hostile}:deadly"})]
    results = selfless.train(runs, out=tmp_path / "out", engine="ray")
    assert ends(tmp_path / "out", runs) == ["done"] * 5
    assert [r.about["fleet"] for r in results] == [1] * 5
    assert (tmp_path / "died").exists()


def test_one_run_that_kills_its_worker_does_not_spoil_the_others(cluster: Any, hostile: str, tasks_npz: str, tmp_path: Path) -> None:
    runs = runs_of(tasks_npz, model=f"{hostile}:poison")
    results = selfless.train(runs, out=tmp_path / "out", engine="ray")
    assert [r.status for r in results] == ["done", "done", "failed", "done"]
    assert ends(tmp_path / "out", runs) == ["done", "done", "failed", "done"]
    assert "its worker on" in results[2].error
    assert "twice" in results[2].error


@pytest.mark.parametrize("command", ["tune", "reproduce"])
def test_commands_train_on_the_cluster(cluster: Any, command: str, tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and numbers are those of the local engine."""
    run = Run(stream=tasks_npz, **BASE)
    small = Experiment("small", "A small one", "figure 0", "bars", (Cell("MAS", "small", (run,)),), ())
    monkeypatch.setattr("selfless.experiments.experiment", lambda *_, **__: small)
    fields = ["--stream", tasks_npz, "--model", "mlp-8", "--epochs", "1", "--strengths", "1e-3,1e-2"]
    more = {"tune": fields, "reproduce": ["small"]}[command]
    for engine in ("ray", "local"):
        flags = ["--seeds", "2", "--workers", "1", "--json", "--out", str(tmp_path / engine), "--engine", engine]
        done = CliRunner().invoke(app, [command, *more, *flags])
        assert done.exit_code == 0, done.output
    there, here = (Store(tmp_path / engine) for engine in ("ray", "local"))
    assert sorted(there.keys()) == sorted(here.keys())
    assert len(there.keys()) == {"tune": 6, "reproduce": 2}[command]  # tune also trains without a sparsifier
    for key in there.keys():  # noqa: SIM118
        a, b = there.get(key), here.get(key)
        assert a is not None
        assert b is not None
        np.testing.assert_allclose(a.accuracy, b.accuracy, atol=0.02)  # other fleets: equal up to rounding


@contextmanager
def unshared(folder: Path) -> Iterator[Path]:
    """A marker that no node sees, as if the folder of results were on a disk of the driver alone."""
    folder.mkdir(parents=True, exist_ok=True)
    yield folder / "nowhere" / "marker"


def test_results_come_back_without_a_shared_folder(cluster: Any, tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfless.runner.cluster.marked", unshared)
    runs = runs_of(tasks_npz)
    there = selfless.train(runs, out=tmp_path / "ray", engine="ray")
    assert ends(tmp_path / "ray", runs) == ["done"] * 4
    files = sorted(p.name for p in (tmp_path / "ray" / runs[0].key).iterdir())
    assert files == ["checkpoint.safetensors", "lock", "log.jsonl", "metrics.json", "spec.json"]
    assert [r.about["checkpoint"] for r in there] == [Store(tmp_path / "ray").get(r.run.key).about["checkpoint"] for r in there]  # type: ignore[union-attr]
    assert there[0].model(0) is not None


def test_a_node_without_the_data_and_one_with_a_full_disk_are_left_out(cluster: Any, tasks_npz: str, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden.npz"
    hidden.write_bytes(Path(tasks_npz.removeprefix("arrays:")).read_bytes())
    with pytest.warns(UserWarning, match=r"is left out for arrays:.*hidden\.npz"):
        selfless.train(runs_of(f"arrays:{hidden}"), out=tmp_path / "out", engine="ray")
    assert ends(tmp_path / "out", runs_of(f"arrays:{hidden}")) == ["done"] * 4
    with pytest.warns(UserWarning, match=r"node .* is left out: .*No space left on device"):
        selfless.train(runs_of(tasks_npz), out=tmp_path / "full" / "out", engine="ray")
    assert ends(tmp_path / "full" / "out", runs_of(tasks_npz)) == ["done"] * 4


def test_an_interrupted_study_goes_on_with_the_local_engine(cluster: Any, tasks_npz: str, tmp_path: Path) -> None:
    runs, seen = runs_of(tasks_npz, epochs=4), list[int]()

    def interrupt(*_: Any) -> None:
        seen.append(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        selfless.train(runs, out=tmp_path / "out", engine="ray", watch=interrupt)
    assert len(seen) == 1
    there = selfless.train(runs, out=tmp_path / "out", workers=2)  # the same fleets, whether or not their state was saved
    assert ends(tmp_path / "out", runs) == ["done"] * 4
    whole = selfless.train(runs, out=tmp_path / "whole", workers=2)
    for a, b in zip(there, whole, strict=True):
        np.testing.assert_array_equal(a.accuracy, b.accuracy)


def test_a_killed_driver_loses_nothing_that_was_recorded(cluster: Any, hostile: str, tasks_npz: str, tmp_path: Path) -> None:
    """Seed 0 ends; seed 1 waits until the driver is dead. Then the local engine goes on: seed 0 is not trained again."""
    out = tmp_path / "out"
    flags = ["--stream", tasks_npz, "--model", f"{hostile}:gated", "--batch", "50", "--epochs", "2", "--seeds", "2", "--out", str(out)]
    command = [sys.executable, "-m", "selfless", "run", *flags, "--engine", "ray", "--address", cluster.address]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        while not (recorded := list(out.glob("*/metrics.json"))):
            assert driver.poll() is None, "the study ended by itself"
            time.sleep(0.05)
        driver.send_signal(signal.SIGKILL)
    before = recorded[0].read_bytes()
    (tmp_path / "open").touch()
    runs = [Run(stream=tasks_npz, model=f"{hostile}:gated", batch=50, epochs=2, seed=seed) for seed in range(2)]
    results = selfless.train(runs, out=out, workers=1)  # waits for the lock of a worker that Ray has not stopped yet
    assert ends(out, runs) == ["done", "done"]
    assert recorded[0].read_bytes() == before
    assert json.loads(before)["key"] == results[0].run.key


def test_the_fleets_of_a_node_that_is_lost_train_elsewhere(cluster: Any, hostile: str, tasks_npz: str, tmp_path: Path) -> None:
    """Both nodes have a fleet when one of them is removed; no fleet ends before that. The last test: the node does not come back."""
    runs = [Run(stream=tasks_npz, **BASE | {"model": f"{hostile}:gated", "seed": seed}) for seed in (1, 2)]
    begun = set[str]()

    def remove(fleet: Any, event: Any) -> None:
        begun.update(run.key for run in fleet)
        if len(begun) == 2 and not (tmp_path / "open").exists():
            cluster.remove_node(cluster.plain, allow_graceful=False)
            (tmp_path / "open").touch()

    selfless.train(runs, out=tmp_path / "out", engine="ray", follow=remove)
    # A worker outlives its node for a moment: a temporary file that it was writing is removed by the next study.
    assert ends(tmp_path / "out", runs, ("training-", "study-")) == ["done", "done"]
    hidden = tmp_path / "hidden.npz"  # the node that is left cannot read it
    hidden.write_bytes(Path(tasks_npz.removeprefix("arrays:")).read_bytes())
    nowhere = selfless.train(runs_of(f"arrays:{hidden}"), out=tmp_path / "nowhere", engine="ray")
    assert ends(tmp_path / "nowhere", [result.run for result in nowhere]) == ["failed"] * 4
    assert all(re.search(r"no node can train it: node .*hidden\.npz", result.error) for result in nowhere)
