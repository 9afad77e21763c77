"""Results as a cache: skipped, resumed, locked, never half-written."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

import selfless
import selfless.engine.learner as learner_module
from selfless import EWC, MAS, SLNID, Run
from selfless.engine.learner import Learner
from selfless.files import locked, write_json
from selfless.runner import memory
from selfless.runner.local import _at_most, fleets
from selfless.runner.store import Store
from selfless.spec import Result

BASE: dict[str, Any] = {"model": "mlp-12", "preserve": MAS(0.1), "sparsify": SLNID(1e-2), "epochs": 2, "batch": 50, "lr": 0.05}


def test_results_are_recorded_and_not_trained_again(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, **BASE)
    events: list[Any] = []
    first = selfless.train(run, out=tmp_path, watch=lambda runs, event: events.append(event))
    assert isinstance(first, Result)
    assert len(events) == 3 * (2 + 1)
    folder = tmp_path / run.key
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint.safetensors", "lock", "log.jsonl", "metrics.json", "spec.json"]
    events.clear()
    again = selfless.train([run, run], out=tmp_path, watch=lambda runs, event: events.append(event))
    assert not events
    assert [r.as_dict() for r in again] == [first.as_dict()] * 2
    forced = selfless.train(run, out=tmp_path, force=True)
    assert_array_equal(forced.accuracy, first.accuracy)
    assert len(Store(tmp_path).all()) == 1
    assert len((folder / "log.jsonl").read_text().splitlines()) == 9


@pytest.mark.parametrize("workers", [1, 2])
def test_a_refused_run_leaves_no_folder(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    (tmp_path / "unfit.py").write_text("from torch import nn\n\ndef build(outputs, input_shape):\n    return nn.Conv2d(7, outputs, 1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    runs = [Run(stream=tasks_npz, seed=seed, **BASE | {"model": "unfit:build"}) for seed in range(2)]
    out = tmp_path / "out"
    with pytest.raises((ValueError, RuntimeError)):
        selfless.train(runs, out=out, workers=workers)
    assert not out.exists() or list(out.iterdir()) == []


def test_a_lock_that_was_removed_while_one_waited_is_taken_anew(tmp_path: Path) -> None:
    """The first removes the folder as it lets go; the second must not hold a file that a third would never find."""
    run, store = Run(**BASE), Store(tmp_path)
    path, waits, third = store.folder(run) / "lock", threading.Event(), threading.Event()
    found: list[Any] = []

    def second() -> None:
        with locked(path, waits.set) as file:
            found.append(os.path.samestat(os.fstat(file.fileno()), path.stat()))
            with ThreadPoolExecutor() as pool:
                done = pool.submit(lambda: locked(path, third.set).__enter__().close())
                found.append(third.wait(10))
                fcntl.flock(file, fcntl.LOCK_UN)
                done.result(10)

    with store.lock([run], lambda run: None):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(10)
    thread.join(30)
    assert found == [True, True]


def test_the_checkpoint_is_the_trained_network(tasks_npz: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from selfless.data import stream
    from selfless.models import build

    runs = [Run(stream=tasks_npz, seed=s, **BASE) for s in range(3)]
    results = selfless.train(runs, out=tmp_path, workers=1)
    for run, result in zip(runs, results, strict=True):
        tensors = load_file(tmp_path / run.key / "checkpoint.safetensors")
        tasks = stream(run.stream, seed=run.seed)
        model = build(run.model, outputs=tasks.outputs, input_shape=tasks.input_shape)
        model.load_state_dict({n.removeprefix("params."): t for n, t in tensors.items() if n.startswith("params.")})
        for u, task in enumerate(tasks.tasks):
            x, y = task.test.resident().batch(torch.arange(len(task.test)))
            head = task.heads[0]
            hit = model(x)[:, head.start : head.stop].argmax(1) == y - head.start
            assert hit.double().mean().item() == pytest.approx(result.accuracy[-1, u])


def test_numbers_without_checkpoints(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, **BASE)
    result = selfless.train(run, out=tmp_path, checkpoints=False)
    assert not list(tmp_path.rglob("*.safetensors"))
    assert selfless.train(run, out=tmp_path).about == result.about


def test_nothing_is_kept_without_out(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    selfless.train(Run(stream=tasks_npz, **BASE))
    assert not list(tmp_path.iterdir())


def test_workers_give_the_numbers_of_one_process(tasks_npz: str, tmp_path: Path) -> None:
    runs = [Run(stream=tasks_npz, seed=s, **(BASE | {"epochs": 1})) for s in range(2)]
    one, two = selfless.train(runs, out=tmp_path / "a", workers=1), selfless.train(runs, out=tmp_path / "b", workers=2)
    for a, b in zip(one, two, strict=True):
        assert a.run == b.run
        np.testing.assert_allclose(a.accuracy, b.accuracy, atol=0.026)


def test_a_workers_error_is_the_users_message(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no stream is called 'permuted-mnits'"):
        selfless.train([Run(stream="permuted-mnits", seed=s) for s in range(2)], out=tmp_path)


def test_fleets_hold_what_differs_in_numbers_only() -> None:
    runs = [Run(seed=s, lr=lr, sparsify=kind) for s in range(2) for lr in (0.1, 0.2) for kind in ("none", "slnid:1e-3", "slnid:1e-2")]
    assert [len(f) for f in fleets(runs)] == [12]
    assert [len(f) for f in fleets([*runs, Run(epochs=3), Run(sparsify="slni:1,sigma=3"), Run(model="mlp-64")])] == [14, 1]
    assert len(fleets([Run(stream="blurred-cifar-100", epochs=e) for e in (3, 4)])) == 2
    assert len(fleets([Run(preserve="mas:1"), Run(preserve="ewc:1"), Run(preserve="mas:2")])) == 2
    assert [len(f) for f in fleets(runs, most=5)] == [5, 5, 2]


def test_a_damaged_result_is_named(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, **(BASE | {"epochs": 1}))
    selfless.train(run, out=tmp_path)
    (tmp_path / run.key / "metrics.json").write_text("{")
    with pytest.raises(ValueError, match=r"metrics.json is not a result .* --force"):
        selfless.train(run, out=tmp_path)
    assert selfless.train(run, out=tmp_path, force=True).status == "done"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "selfless.cli", *words]


def flags(data: str) -> list[str]:
    return ["run", "--stream", data, "--model", "mlp-12", "--sparsify", "slnid:1e-2", "--epochs", "40", "--batch", "10", "--lr", "0.05"]


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 130), (signal.SIGINT, 130)])
def test_a_killed_command_goes_on_and_ends_with_the_same_numbers(tasks_npz: str, tmp_path: Path, how: signal.Signals, code: int) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = flags(tasks_npz)
    whole = subprocess.run(command(*words, "--out", str(tmp_path / "whole"), "--json"), capture_output=True, text=True, env=environment)
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen(
        command(*words, "--out", str(tmp_path / "cut")), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    deadline = time.monotonic() + 60
    while not (lines := [p.read_text().count("\n") for p in (tmp_path / "cut").glob("*/log.jsonl")]) or lines[0] < 7:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.005)
    process.send_signal(how)
    process.communicate()
    assert process.returncode == code
    assert not list((tmp_path / "cut").glob("*/metrics.json"))
    again = subprocess.run(command(*words, "--out", str(tmp_path / "cut"), "--json"), capture_output=True, text=True, env=environment)
    assert again.returncode == 0, again.stderr
    a, b = json.loads(whole.stdout)["runs"][0], json.loads(again.stdout)["runs"][0]
    for key in ("accuracy", "history", "capacity", "summary", "key"):
        assert a[key] == b[key]
    epochs = [p.read_text().count('"evaluated": false') for p in (tmp_path / "cut").glob("*/log.jsonl")]
    assert epochs[0] <= 3 * 40 + 1  # at most one epoch was trained twice


def test_two_processes_train_a_run_once(tasks_npz: str, tmp_path: Path) -> None:
    words = command(*flags(tasks_npz), "--out", str(tmp_path), "--json")
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [p.communicate() for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    first, second = (json.loads(out) for out, _ in outputs)
    assert first["runs"] == second["runs"]
    logs = [p.read_text().count('"evaluated": false') for p in tmp_path.glob("*/log.jsonl")]
    assert logs == [3 * 40]


# ------------------------------------------------------------------------------------------------- found by reviewers, kept fixed
def test_a_stopped_fleet_goes_on_whatever_else_is_done(tasks_npz: str, tmp_path: Path) -> None:
    """Its members are read from its file, not planned anew from the runs that are missing."""
    runs = [Run(stream=tasks_npz, **(BASE | {"lr": lr})) for lr in (0.05, 0.04, 0.03)]
    want = selfless.train(runs, out=tmp_path / "whole", workers=1)
    seen = 0

    def stop(members: Any, event: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        selfless.train(runs, out=tmp_path / "cut", workers=1, watch=stop)
    store = Store(tmp_path / "cut")
    assert [len(keys) for _, keys in store.unfinished()] == [3]
    selfless.train(runs[2], out=tmp_path / "cut")  # one of them is finished elsewhere meanwhile
    epochs: list[int] = []
    got = selfless.train(runs, out=tmp_path / "cut", workers=1, watch=lambda m, e: epochs.append(len(m)))
    assert epochs == [3] * (9 - 5)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.accuracy, b.accuracy, atol=0.026)
    assert not store.unfinished()


NET = """from torch import nn
def build(outputs, input_shape):
    print("hello")
    return nn.Sequential(nn.Flatten(), nn.Linear(36, {0}), nn.ReLU(), nn.Linear({0}, outputs))
"""


def test_changed_data_and_changed_networks_are_trained_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.Generator(np.random.PCG64(0))
    x, y = rng.integers(0, 256, (80, 1, 6, 6)).astype(np.uint8), np.arange(80) % 4
    np.savez("my.npz", x_train=x, y_train=y, x_test=x, y_test=y, task=y // 2, task_test=y // 2)
    (tmp_path / "ournet.py").write_text(NET.format(8))
    run = Run(stream="arrays:my.npz", model="ournet:build", epochs=1, batch=20)
    first = selfless.train(run, out="out")
    assert selfless.train(run, out="out").about == first.about
    np.savez("my.npz", x_train=x[::-1], y_train=y, x_test=x, y_test=y, task=y // 2, task_test=y // 2)
    second = selfless.train(run, out="out")
    assert second.about["made_from"] != first.about["made_from"]
    (tmp_path / "ournet.py").write_text(NET.format(100))
    sys.modules.pop("ournet")
    third = selfless.train(run, out="out")
    assert third.about["parameters"] != second.about["parameters"]
    words = command(
        "run", "--stream", "arrays:my.npz", "--model", "ournet:build", "--epochs", "1", "--seeds", "2", "--out", "json", "--json"
    )
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["runs"]) == 2  # what the factory prints is not in the way


def test_unbalanced_streams_dropout_and_sampled_labels_do_not_share_a_fleet() -> None:
    assert [len(f) for f in fleets([Run(stream="split-mnist", seed=s) for s in range(2)])] == [1, 1]
    assert [len(f) for f in fleets([Run(stream="split-cifar-100", model="cnn-8", seed=s) for s in range(2)])] == [2]
    assert [len(f) for f in fleets([Run(preserve="ewc:1,fisher=sampled", seed=s) for s in range(2)])] == [1, 1]
    assert [len(f) for f in fleets([Run(model="cnn-8", model_options={"dropout": 0.5}, seed=s) for s in range(2)])] == [1, 1]


def test_a_damaged_training_file_is_said_and_left(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, **(BASE | {"epochs": 1}))
    place = Store(tmp_path).training([run])
    place.parent.mkdir(parents=True)
    place.write_bytes(b"nonsense")
    with pytest.warns(UserWarning, match="cannot be continued"):
        assert selfless.train(run, out=tmp_path).status == "done"


def test_force_trains_again_after_another_process(tasks_npz: str, tmp_path: Path) -> None:
    words = command(*flags(tasks_npz), "--out", str(tmp_path), "--json")
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True)]
    time.sleep(2.0)
    both.append(subprocess.Popen([*words, "--force"], stdout=subprocess.PIPE, text=True))
    outputs = [json.loads(p.communicate()[0]) for p in both]
    assert outputs[0]["runs"][0]["accuracy"] == outputs[1]["runs"][0]["accuracy"]
    log = next(tmp_path.glob("*/log.jsonl")).read_text()
    assert log.count('"evaluated": false') == 3 * 40


def test_networks_that_do_not_fit_are_named(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "oddnets.py").write_text(
        "from torch import nn\n"
        "def few(outputs, input_shape): return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 2))\n"
        "def shape(outputs, input_shape): return nn.Sequential(nn.Flatten(), nn.Linear(35, 8), nn.ReLU(), nn.Linear(8, outputs))\n"
        "def boom(outputs, input_shape): raise KeyError('boom')\n"
        "def normed(outputs, input_shape):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))\n"
    )
    for name, message in (("few", r"must give a tensor of shape \(2, 6\)"), ("shape", "cannot run on images"), ("boom", "raised KeyError")):
        with pytest.raises(ValueError, match=message):
            selfless.train(Run(stream=tasks_npz, model=f"oddnets:{name}"))
    runs = [Run(stream=tasks_npz, **(BASE | {"model": "oddnets:normed", "lr": lr})) for lr in (1e30, 0.05)]
    bad, good = selfless.train(runs, workers=1)
    assert (bad.status, good.status) == ("failed", "done")


def test_a_fleet_is_cut_to_what_fits(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Run(stream=tasks_npz, **(BASE | {"epochs": 1, "lr": 0.01 * (i + 1)})) for i in range(12)]
    sizes: list[int] = []
    monkeypatch.setattr(memory, "available", lambda device: 1_000_000)
    monkeypatch.setattr(memory, "_taken", lambda runs, make, device: 300_000 + 100_000 * len(runs))
    assert memory.most(runs, lambda runs: Learner(runs), "cpu") == 5  # 400,000 for one, 100,000 for each other, 80 % of the memory
    trained = selfless.train(runs, out=tmp_path, workers=1, watch=lambda fleet, event: sizes.append(len(fleet)))
    assert set(sizes) == {5, 2}
    assert [r.run for r in trained] == runs
    monkeypatch.setattr(memory, "available", lambda device: 100_000_000)
    assert memory.most(runs, lambda runs: Learner(runs), "cpu") == 12


def test_rehearsing_measures_a_step(tasks_npz: str) -> None:
    runs = [Run(stream=tasks_npz, model="mlp-2048", batch=50, lr=lr) for lr in (0.01, 0.02)]
    parameters = sum(p.numel() for p in Learner(runs[:1]).fleet.params.values())
    one, two = (memory._taken(runs[:n], Learner, "cpu") for n in (1, 2))
    assert two - one > 2 * 4 * parameters  # the other's parameters and momentum, at least
    assert one < two < 2.5 * one


def test_a_fleet_too_large_for_the_memory_is_halved(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Run(stream=tasks_npz, **(BASE | {"epochs": 1, "lr": 0.01 * (i + 1)})) for i in range(5)]
    learn = Learner.learn

    def limited(self: Learner) -> Any:
        if len(self.runs) > limit:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] … DefaultCPUAllocator: can't allocate memory")
        return learn(self)

    monkeypatch.setattr(Learner, "learn", limited)
    limit = 2
    results = selfless.train(runs, out=tmp_path, workers=1)
    assert [r.run for r in results] == runs
    assert {r.about["fleet"] for r in results} == {1, 2}
    assert not list(tmp_path.glob("*/training-*"))
    limit = 0
    with pytest.raises(ValueError, match=r"one run of mlp-\d+ at batch \d+ does not fit into the memory of cpu .* smaller --batch"):
        selfless.train(dataclasses.replace(runs[0], seed=9), out=tmp_path)


def test_a_large_fleet_is_not_saved_after_every_epoch(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[Path] = []
    real = learner_module.write_atomically

    def slow(path: Path, write: Any) -> None:
        saves.append(path)
        real(path, write)
        time.sleep(0.3)

    run = Run(stream=tasks_npz, **(BASE | {"epochs": 5}))
    monkeypatch.setattr(learner_module, "write_atomically", slow)
    Learner([run], checkpoint=tmp_path / "x.safetensors").learn()
    assert len(saves) == 1  # three tasks of five epochs take less than the six seconds that one save is to be spread over


def test_convolutions_train_one_by_one_on_a_cpu() -> None:
    runs = [Run(stream="split-cifar-100", model="cnn-16", seed=s) for s in range(3)]
    assert [len(f) for f in fleets(runs)] == [3]
    assert [len(f) for f in _at_most(runs, "cpu", None, None, 1)] == [1, 1, 1]


ODD = """
import torch
from torch import nn
class Stops(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, outputs))
    def forward(self, x):
        return self.body(x) if x.sum() > -1e9 else self.body(-x)
def control(outputs, input_shape):
    return Stops(outputs)
def dropping(outputs, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, outputs))
"""


@pytest.mark.parametrize("name", ["control", "dropping"])
def test_networks_that_cannot_share_a_fleet_train_alone(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "loners.py").write_text(ODD)
    monkeypatch.chdir(tmp_path)
    runs = [Run(stream=tasks_npz, **(BASE | {"model": f"loners:{name}", "lr": lr})) for lr in (0.05, 0.06, 0.07)]
    together = selfless.train(runs, workers=1)
    assert {r.about["fleet"] for r in together} == {1}
    assert_array_equal(together[1].accuracy, selfless.train(runs[1]).accuracy)
    with pytest.raises(ValueError, match=f"loners:{name} .*train its runs one by one"):
        Learner(runs)
    monkeypatch.setattr(memory, "available", lambda device: 1_000_000)  # too little for many: then they are rehearsed by two
    assert memory.most([dataclasses.replace(runs[0], lr=0.01 * i) for i in range(20)], Learner, "cpu") == 1


def stopping(after: int) -> Any:
    seen = 0

    def watch(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == after:
            raise KeyboardInterrupt

    return watch


def test_one_of_a_stopped_fleet_may_be_trained_meanwhile(tasks_npz: str, tmp_path: Path) -> None:
    runs = [Run(stream=tasks_npz, **(BASE | {"lr": lr})) for lr in (0.05, 0.06)]
    with pytest.raises(KeyboardInterrupt):
        selfless.train(runs, out=tmp_path, workers=1, watch=stopping(5))
    selfless.train(runs[0], out=tmp_path)
    assert list(tmp_path.glob("*/training-*"))  # the other's progress is still there
    events: list[Any] = []
    results = selfless.train(runs, out=tmp_path, workers=1, watch=lambda fleet, event: events.append(event))
    assert len(events) == 9 - 5  # three tasks of two epochs and an evaluation each
    assert_array_equal(results[1].accuracy, selfless.train(runs[1]).accuracy)
    assert not list(tmp_path.glob("*/training-*"))


def test_a_stopped_run_does_not_go_on_with_another_network(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "changing.py").write_text(NET.format(8))
    run = Run(stream=tasks_npz, **(BASE | {"model": "changing:build"}))
    with pytest.raises(KeyboardInterrupt):
        selfless.train(run, out="out", watch=stopping(5))
    (tmp_path / "changing.py").write_text(NET.format(8).replace("nn.ReLU()", "nn.Tanh()"))
    sys.modules.pop("changing")
    events: list[Any] = []
    with pytest.warns(UserWarning, match="its data or network has changed since"):
        result = selfless.train(run, out="out", watch=lambda fleet, event: events.append(event))
    assert len(events) == 9
    assert_array_equal(result.accuracy, selfless.train(run).accuracy)


def test_a_diverged_members_log_is_json(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, **(BASE | {"lr": 1e18}))
    assert selfless.train(run, out=tmp_path).status == "failed"
    lines = [json.loads(line, parse_constant=pytest.fail) for line in next(tmp_path.glob("*/log.jsonl")).read_text().splitlines()]
    assert any(line.get("loss", 0) is None for line in lines)


def test_missing_data_is_missing_data_also_when_a_worker_says_so(tmp_path: Path) -> None:
    from selfless.data import DataError

    runs = [Run(stream="objects:scenes", model="mlp-8", seed=s) for s in range(2)]
    with pytest.raises(DataError, match="scenes"):
        selfless.train(runs, out=tmp_path / "out", data_dir=tmp_path / "nothing", device="cpu", workers=2)


def test_fleets_one_after_another_load_a_set_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from selfless.data import source

    read: list[str] = []

    def made(item: source.Entry, places: tuple[Path, ...]) -> source.Source:
        read.append(item.name)
        split = torch.randint(0, 255, (40, 1, 28, 28), dtype=torch.uint8), torch.arange(40) % 10
        return source.Source("mnist", split, split, tuple("0123456789"))

    monkeypatch.setattr(source, "located", lambda item, places: (tmp_path,))
    monkeypatch.setattr(source, "_first_whole", made)
    runs = [Run(model=f"mlp-{n}", tasks=2, epochs=1, batch=10) for n in (4, 6)]  # two networks: two fleets
    selfless.train(runs, out=tmp_path / "out", data_dir=tmp_path, device="cpu", workers=1)
    assert read == ["mnist"]


def test_a_lock_whose_folder_goes_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mkdir finds the folder there, looks what it is, and it is gone: another process has tidied up. Then it is made again."""
    real, failed = Path.mkdir, []

    def once(path: Path, *args: Any, **how: Any) -> None:
        if not failed:
            failed.append(path)
            raise FileExistsError(17, "File exists", str(path))
        real(path, *args, **how)

    monkeypatch.setattr(Path, "mkdir", once)
    with locked(tmp_path / "run" / "lock", lambda: None):
        assert failed
        assert (tmp_path / "run" / "lock").exists()
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(FileExistsError), locked(tmp_path / "file" / "lock", lambda: None):
        pass


def test_a_folder_that_cannot_be_made_is_an_error_and_not_tried_for_ever(tmp_path: Path) -> None:
    (tmp_path / "results").symlink_to(tmp_path / "gone" / "results")
    with pytest.raises(FileExistsError, match="cannot make the folder"), locked(tmp_path / "results" / "key" / "lock", lambda: None):
        pass


def test_what_has_changed_has_other_names() -> None:
    """vgg-slim began with other weights, resized crops were mirrored otherwise; runs of then are not runs of now. All other names stay."""
    assert '"network":3' in Run(model="vgg-slim").canonical()
    assert '"augmentation":2' in Run(augment="resized").canonical()
    assert not {"network", "augmentation"} & set(json.loads(Run(model="mlp-128", augment="crop-flip").canonical()))


def test_json_has_a_line_for_each_row(tmp_path: Path) -> None:
    value = {"matrix": [[1.5, 2], [None, True]], "of": {"name": 'a "b"', 3: [1, [2]]}, "empty": {}, "none": [], "flat": (1, 2)}
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(value))
    assert "  [1.5, 2],\n  [null, true]\n" in text
    assert ' "flat": [1, 2]\n' in text
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"rows": [[float("nan")]]})
    assert (tmp_path / "x.json").read_text() == text


def test_a_field_that_came_later_changes_no_names() -> None:
    """EWC's `alpha`: left out of a run's name at its default, told otherwise, and read back either way."""
    plain, function = Run(preserve=EWC(10.0)), Run(preserve="ewc:10,alpha=function")
    assert plain.key == "2d8f13d7be42f9db"  # as before there was one
    assert "alpha" not in plain.as_dict()["preserve"]
    assert function.as_dict()["preserve"]["alpha"] == "function"
    assert function.key != plain.key
    for run in (plain, function):
        assert Run.from_dict(run.as_dict()) == run
