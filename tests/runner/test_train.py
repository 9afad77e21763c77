"""`train`: results are recorded, looked up, and complete; workers give what one process gives."""

from __future__ import annotations

import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

import selfless
from selfless import Run
from selfless.runner.store import Store
from selfless.spec import Result
from tests.runner.small_runs import BASE


def test_what_is_not_a_run_is_refused() -> None:
    with pytest.raises(TypeError, match=r"train takes a Run or a list of runs, not 'epochs'; write selfless.train\(Run"):
        selfless.train({"epochs": 1})  # type: ignore[arg-type]


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


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("warm_workers")
def test_a_refused_run_leaves_no_folder(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    (tmp_path / "unfit.py").write_text("from torch import nn\n\ndef build(outputs, input_shape):\n    return nn.Conv2d(7, outputs, 1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    runs = [Run(stream=tasks_npz, seed=seed, **BASE | {"model": "unfit:build"}) for seed in range(2)]
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="unfit:build has no hidden activation module"):  # the user's message, also from a worker
        selfless.train(runs, out=out, workers=workers)
    assert not out.exists() or list(out.iterdir()) == []


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_missing_data_is_missing_data_also_when_a_worker_says_so(tmp_path: Path) -> None:
    from selfless.data import DataError

    runs = [Run(stream="objects:scenes", model="mlp-8", seed=s) for s in range(2)]
    with pytest.raises(DataError, match="scenes"):
        selfless.train(runs, out=tmp_path / "out", data_dir=tmp_path / "nothing", device="cpu", workers=2)


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
    for name, message in (
        ("few", r"must return a tensor of shape \(2, 6\)"),
        ("shape", "cannot run on images"),
        ("boom", "raised KeyError"),
    ):
        with pytest.raises(ValueError, match=message):
            selfless.train(Run(stream=tasks_npz, model=f"oddnets:{name}"))
    runs = [Run(stream=tasks_npz, **(BASE | {"model": "oddnets:normed", "lr": lr})) for lr in (1e30, 0.05)]
    with pytest.warns(RuntimeWarning, match=rf"^run {runs[0].key} \(.*, seed 0\) failed: the loss was not finite"):
        bad, good = selfless.train(runs, workers=1)
    assert (bad.status, good.status) == ("failed", "done")


def test_a_diverged_members_log_is_json(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, **(BASE | {"lr": 1e18}))
    with pytest.warns(RuntimeWarning, match=r"use a learning rate below 1e\+18"):
        assert selfless.train(run, out=tmp_path).status == "failed"
    with pytest.warns(RuntimeWarning, match="2 of 2 runs failed; the first: run"):  # recorded ones are not silent either
        result = selfless.train([run, run], out=tmp_path)[0]
    with pytest.raises(ValueError, match="has no trained network, because it failed: the loss was not finite"):
        result.model()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in next(tmp_path.glob("*/log.jsonl")).read_text().splitlines()]
    assert any(line.get("loss", 0) is None for line in lines)


def test_fleets_one_after_another_load_a_set_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The set stays loaded between two fleets, although nobody else holds it, and is let go at the end."""
    from selfless.data import Source, offer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("selfless.data.cache.fetch", lambda *_, **__: pytest.fail("the set is loaded a second time"))
    split = torch.randint(0, 255, (40, 1, 28, 28), dtype=torch.uint8), torch.arange(40) % 10
    sources = [Source("mnist", split, split, tuple("0123456789"))]
    loaded = weakref.ref(sources[0])
    offer(sources[0], data_dir=tmp_path)
    models: list[str] = []

    def watch(members: Any, event: Any) -> None:
        sources.clear()
        models.append(members[0].model)

    runs = [Run(model=f"mlp-{n}", tasks=2, epochs=1, batch=10) for n in (4, 6)]  # two networks: two fleets
    selfless.train(runs, out=tmp_path / "out", data_dir=tmp_path, device="cpu", workers=1, watch=watch)
    assert list(dict.fromkeys(models)) == ["mlp-4", "mlp-6"]
    gc.collect()
    assert loaded() is None


@pytest.mark.whole
@pytest.mark.filterwarnings("always")
def test_workers_give_the_numbers_and_the_warnings_of_one_process(tasks_npz: str, tmp_path: Path) -> None:
    runs = [Run(stream=tasks_npz, scenario="class", seed=s, **(BASE | {"epochs": 1, "preserve": "packnet:0.5"})) for s in range(2)]
    with pytest.warns(UserWarning, match="PackNet") as found:
        two = selfless.train(runs, out=tmp_path, workers=2)
    assert {warning.filename for warning in found} == {__file__}
    with pytest.warns(UserWarning, match="PackNet"):
        one = selfless.train(runs, workers=1)
    for a, b in zip(one, two, strict=True):
        assert a.run == b.run
        np.testing.assert_allclose(a.accuracy, b.accuracy, atol=0.026)


DEADLY = """
import os, signal
from pathlib import Path
from torch import nn
def build(outputs, input_shape):
    if os.getpid() != int(os.environ["PARENT"]) and len(list(Path({folder!r}).glob("death-*"))) < {deaths}:
        Path({folder!r}, f"death-{{os.getpid()}}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, outputs))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(("deaths", "status"), [(1, {"done"}), (10, {"failed"})])
@pytest.mark.usefixtures("warm_workers")
def test_the_runs_of_a_worker_that_dies_are_tried_once_more(
    tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int, status: set[str]
) -> None:
    """One death costs nothing but a warning; after the second the runs are recorded as failed, with the reason."""
    name = f"deadly_{deaths}"
    (tmp_path / f"{name}.py").write_text(DEADLY.format(folder=str(tmp_path), deaths=deaths))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PARENT", str(os.getpid()))
    runs = [Run(stream=tasks_npz, seed=s, **(BASE | {"model": f"{name}:build", "epochs": 1})) for s in range(2)]
    with pytest.warns(UserWarning, match=r"status -9 \(killed, perhaps for want of memory\); it is tried once more"):
        results = selfless.train(runs, out=tmp_path / "out", device="cpu", workers=2)
    assert {result.status for result in results} == status
    assert all(("twice" in result.error) == (status == {"failed"}) for result in results)
    assert [r.error for r in Store(tmp_path / "out").all()] == [r.error for r in results]
