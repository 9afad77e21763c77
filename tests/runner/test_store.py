"""The store without training: records, logs, states of fleets, and what killed processes left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from selfless import MAS, Run
from selfless.files import locked, write_atomically, write_tensors
from selfless.runner.store import Store
from tests.fabricated import result

RUNS = [Run(stream="split-mnist", preserve=MAS(0.1), seed=seed) for seed in range(3)]


def fill(store: Store, run: Run, average: float = 0.5) -> None:
    store.record(result(run, average), lambda: {"params.w": torch.arange(2.0)})


def names(store: Store, run: Run) -> set[str]:
    return {path.name for path in store.folder(run).iterdir()} if store.folder(run).is_dir() else set()


def leave_state(store: Store, runs: list[Run]) -> Path:
    """Write the state of a stopped fleet, and its note."""
    path = store.training(runs)
    write_tensors(path, {"params.w": torch.zeros(1)}, {"keys": json.dumps([run.key for run in runs])})
    path.with_suffix(".json").write_text("{}")
    return path


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    store, (run, other, _) = Store(tmp_path), RUNS
    assert store.get(run.key) is None
    assert not store.has(run.key)
    fill(store, run, 0.75)
    found = store.get(run.key)
    assert found is not None
    assert found.run == run
    assert found.weights == store.folder(run) / "checkpoint.safetensors"
    assert found.about["checkpoint"]
    assert load_file(store.folder(run) / "checkpoint.safetensors")["params.w"].tolist() == [0, 1]
    assert json.loads((store.folder(run) / "spec.json").read_text()) == run.as_dict()
    assert names(store, run) == {"spec.json", "metrics.json", "checkpoint.safetensors"}
    assert store.has(run.key)
    assert not store.has(other.key)
    fill(store, other)
    assert store.keys() == [run.key, other.key]


def test_a_run_of_another_machine_is_recorded_with_the_same_files(tmp_path: Path) -> None:
    (run, other, _), there, here = RUNS, Store(tmp_path / "there"), Store(tmp_path / "here")
    fill(there, run)
    there.log(run, {"task": 1})
    files = there.files_of(run)
    assert list(files)[-1] == "metrics.json"
    assert here.adopt(run, files)
    assert here.files_of(run) == files == {path.name: path.read_bytes() for path in there.folder(run).iterdir()}
    assert not here.adopt(run, files)
    assert here.adopt(run, files, again=True)
    assert not here.adopt(other, {"spec.json": b"{}"})
    assert not here.has(other.key)


def test_a_store_knows_the_folder_of_its_data(tmp_path: Path) -> None:
    assert Store(tmp_path).data_dir is None
    assert Store(tmp_path, "").data_dir is None
    assert Store(tmp_path, tmp_path / "data").data_dir == tmp_path / "data"


def test_without_checkpoints_no_tensor_is_made(tmp_path: Path) -> None:
    store = Store(tmp_path, checkpoints=False)
    store.record(result(RUNS[0], 0.5), lambda: pytest.fail("nobody asked for tensors"))
    found = store.get(RUNS[0].key)
    assert found is not None
    assert not isinstance(found.weights, Path)
    assert names(store, RUNS[0]) == {"spec.json", "metrics.json"}


def test_a_record_that_was_changed_is_named(tmp_path: Path) -> None:
    store, run = Store(tmp_path), RUNS[0]
    fill(store, run)
    path = store.folder(run) / "metrics.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"status": "failed"}))
    with pytest.raises(ValueError, match=r"metrics\.json is not a result of this version .*selfless run --force"):
        store.get(run.key)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"metrics\.json is not a result"):
        store.all()


def test_a_log_is_that_of_the_checkpoint_again(tmp_path: Path) -> None:
    """Written lines stay as they are, a missing one is filled in, later and half-written ones go."""
    store, run = Store(tmp_path), RUNS[0]

    def line(task: int, epoch: int, **more: object) -> dict[str, object]:
        return {"task": task, "epoch": epoch, "evaluated": False, **more}

    store.log(run, line(1, 1, speed=7))
    store.log(run, line(1, 3, speed=9))
    path = store.folder(run) / "log.jsonl"
    path.write_bytes(path.read_bytes() + b'[1]\n{"task": 1}\n{"task": 1, "epo')
    expected = [line(1, 1), line(1, 2), line(1, 2) | {"evaluated": True}]
    store.restore_log(run, expected)
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line(1, 1, speed=7), *expected[1:]]
    store.restore_log(RUNS[1], expected)  # there is no log yet
    assert len((store.folder(RUNS[1]) / "log.jsonl").read_text().splitlines()) == 3


def test_clearing_leaves_the_lock_and_the_state_of_a_fleet(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for run in RUNS[:2]:
        fill(store, run)
    state = leave_state(store, RUNS[:2])
    (store.folder(RUNS[0]) / "lock").touch()
    store.clear(RUNS[0])
    assert names(store, RUNS[0]) == {"lock", state.name, state.with_suffix(".json").name}
    assert not store.has(RUNS[0].key)
    assert store.has(RUNS[1].key)


def test_a_cleared_run_is_not_read_from_the_archive(tmp_path: Path) -> None:
    store, run = Store(tmp_path, checkpoints=False), RUNS[0]
    fill(store, run)
    store.pack(remove=True)
    assert names(store, run) == set()
    assert store.has(run.key)
    store.clear(run)
    assert not store.has(run.key)
    assert store.get(run.key) is None
    assert Store(tmp_path).has(run.key)


def test_the_state_of_a_fleet_depends_on_its_members_and_their_order(tmp_path: Path) -> None:
    store = Store(tmp_path)
    paths = {store.training(runs) for runs in (RUNS, RUNS[:2], RUNS[1::-1])}
    assert len(paths) == 3
    assert {path.parent for path in paths} == {store.folder(RUNS[0]), store.folder(RUNS[1])}
    assert store.training(RUNS) == Store(tmp_path).training(list(RUNS))


def test_states_of_recorded_fleets_are_removed_and_others_stay(tmp_path: Path) -> None:
    store = Store(tmp_path)
    done, open_ = leave_state(store, RUNS[:2]), leave_state(store, RUNS[1:])
    (store.folder(RUNS[0]) / "training-odd.safetensors").write_bytes(b"odd")  # is left: a command that trains says so
    write_tensors(store.folder(RUNS[0]) / "training-bare.safetensors", {"params.w": torch.zeros(1)}, {"other": "[]"})  # so is this one
    assert [(path, len(keys)) for path, keys in store.unfinished()] == sorted([(done, 2), (open_, 2)])
    for run in RUNS[:2]:
        fill(store, run)
    store.sweep()
    assert not done.exists()
    assert not done.with_suffix(".json").exists()
    assert open_.exists()
    assert open_.with_suffix(".json").exists()


def test_tidying_removes_what_killed_processes_left(tmp_path: Path) -> None:
    store, (run, held, untold) = Store(tmp_path), RUNS
    for one in RUNS:
        fill(store, one)
    own: list[str] = []
    write_atomically(tmp_path / "x", lambda temporary: own.append(temporary.name))
    (tmp_path / "x").unlink()
    left = f".metrics.json.{own[0].split('.')[2].rpartition('-')[0]}-{ended_process()}.abc"
    for folder in (tmp_path, *(store.folder(one) for one in RUNS)):
        (folder / left).touch()
    (store.folder(run) / "training-1.json").write_text("{}")
    with locked(store.folder(held) / "lock", lambda: None):
        store.tidy([run, held])
        assert left in names(store, held)  # another process has it
    assert not (tmp_path / left).exists()
    assert names(store, run) == {"spec.json", "metrics.json", "checkpoint.safetensors", "lock"}
    assert left in names(store, untold)
    (store.folder(untold) / left).unlink()
    (store.folder(untold) / "training-1.json").write_text("{}")  # a note alone
    store.tidy([untold])
    assert "training-1.json" not in names(store, untold)


def test_locks_leave_no_empty_folder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, RUNS[0])
    with store.lock(RUNS[::-1], lambda run: pytest.fail("nobody else holds it")):
        assert all((store.folder(run) / "lock").is_file() for run in RUNS)
        with pytest.raises(BlockingIOError), store.lock([RUNS[1]], _stop):
            pass
    assert [store.folder(run).is_dir() for run in RUNS] == [True, False, False]


def _stop(run: Run) -> None:
    assert run == RUNS[1]
    raise BlockingIOError
