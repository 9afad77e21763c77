"""Runs of streams and networks that are objects: the same numbers as by name, a cache where that is honest, and clear words where not."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from selfless import MAS, Run, stream, train
from selfless.runner import Store
from tests.runner.small_runs import NET

SMALL: dict[str, Any] = {"model": "mlp-6", "preserve": MAS(0.1), "epochs": 1, "batch": 50, "lr": 0.05}


def build(outputs: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, outputs))


def pairs(tasks_npz: str) -> list[Any]:
    """The tasks of the file as torch data sets."""
    with np.load(tasks_npz.removeprefix("arrays:")) as file:
        a = {key: torch.from_numpy(file[key]) for key in file.files}
    train_of, test_of = (lambda t: a["task"] == t), (lambda t: a["task_test"] == t)
    return [
        (
            TensorDataset(a["x_train"][train_of(t)], a["y_train"][train_of(t)]),
            TensorDataset(a["x_test"][test_of(t)], a["y_test"][test_of(t)]),
        )
        for t in range(3)
    ]


def test_a_stream_object_trains_to_the_same_bits_as_its_name(tasks_npz: str) -> None:
    named = train(Run(stream=tasks_npz, **SMALL))
    tasks = pairs(tasks_npz)
    for result in (train(Run(stream=stream(tasks), **SMALL)), train(Run(stream=tasks, **SMALL)), train(Run(**SMALL), stream=tasks)):
        assert np.array_equal(result.accuracy, named.accuracy)
        assert result.history == named.history


def test_a_run_of_objects_is_a_value(tasks_npz: str) -> None:
    made = stream(pairs(tasks_npz), name="pets")
    run = Run(stream=made, **SMALL | {"model": build})
    assert run.stream.startswith("given:pets:")
    assert run.model == f"{__name__}:build"
    assert run == Run(stream=stream(pairs(tasks_npz), name="pets"), **SMALL | {"model": build})
    again = Run.from_dict(json.loads(json.dumps(run.as_dict())))
    assert (again, again.key, hash(again)) == (run, run.key, hash(run))
    assert Run(stream=stream(pairs(tasks_npz)[:2], name="pets"), **SMALL).key != Run(stream=made, **SMALL).key
    other = dataclasses.replace(run, seed=3)
    del run, made, again
    assert train(other).data.outputs == 6, "a run that was made of another one keeps the objects too"  # type: ignore[union-attr]


def test_recorded_runs_of_objects_are_not_trained_again(tasks_npz: str, tmp_path: Path) -> None:
    run, made = Run(**SMALL), stream(pairs(tasks_npz))
    first = train(run, stream=made, out=tmp_path)
    assert first.run.tasks is None, "the five tasks of permuted MNIST are not a wish"
    assert len(Store(tmp_path).all()) == 1
    events: list[Any] = []
    second = train(run, stream=pairs(tasks_npz), out=tmp_path, watch=lambda *event: events.append(event))
    assert events == []
    assert np.array_equal(first.accuracy, second.accuracy)
    changed = pairs(tasks_npz)
    changed[0][0].tensors[0][0] ^= 1
    train(run, stream=changed, out=tmp_path, watch=lambda *event: events.append(event))
    assert events != []


def test_a_list_of_runs_shares_one_stream_and_one_module(tasks_npz: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = build(6, (1, 6, 6))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    runs = [Run(**SMALL, seed=k) for k in range(2)]
    found = train(runs, stream=pairs(tasks_npz), model=module, out=tmp_path, workers=1)
    assert [r.run.seed for r in found] == [0, 1]
    assert found[0].about["fleet"] == 2
    assert np.array_equal(found[0].baseline, found[1].baseline), "every run starts from the weights of the module"
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    alone = train(runs[1], stream=pairs(tasks_npz), model=module)
    np.testing.assert_allclose(alone.accuracy, found[1].accuracy, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_worker_processes_get_the_stream_as_files(tasks_npz: str, tmp_path: Path) -> None:
    runs = [Run(**SMALL, seed=k) for k in range(2)]
    found = train(runs, stream=pairs(tasks_npz), out=tmp_path, workers=2)
    named = [train(run, stream=tasks_npz) for run in runs]
    assert all(np.array_equal(a.accuracy, b.accuracy) for a, b in zip(found, named, strict=True))
    assert [r.about["fleet"] for r in found] == [1, 1]


def test_a_network_that_cannot_travel_is_trained_here_and_said(tasks_npz: str) -> None:
    runs = [Run(stream=tasks_npz, **SMALL, seed=k) for k in range(2)]
    with pytest.warns(UserWarning, match="Sequential was passed as an object, which worker processes cannot build"):
        found = train(runs, model=build(6, (1, 6, 6)), workers=2)
    assert len(found) == 2


def test_what_cannot_be_named_is_trained_each_time_and_said(tasks_npz: str, tmp_path: Path) -> None:
    unnamed = Run(stream=tasks_npz, **SMALL | {"model": lambda outputs, input_shape: build(outputs, input_shape)})
    events: list[Any] = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="lambda cannot be imported by name, so it is trained each time"):
            result = train(unnamed, out=tmp_path, watch=lambda *event: events.append(event))
    assert len(events) == 2 * 6, "both calls trained"
    assert len(Store(tmp_path).all()) == 1
    named = train(Run(stream=tasks_npz, **SMALL | {"model": build}))
    assert np.array_equal(result.accuracy, named.accuracy)


def test_a_function_of_a_module_elsewhere_is_kept_with_its_file(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file that is written twice in a second would be read from its old bytes
    found = []
    for width in (4, 4, 5):
        (tmp_path / "lib" / "nets_elsewhere.py").write_text(NET.format(width))
        sys.modules.pop("nets_elsewhere", None)
        module = importlib.import_module("nets_elsewhere")
        found.append(train(Run(stream=tasks_npz, **SMALL | {"model": module.build}), out=tmp_path / "out"))
    assert [r.run.model for r in found] == ["nets_elsewhere:build"] * 3
    assert [r.about["parameters"] for r in found] == [178, 178, 221]
    assert found[0].about["seconds"] == found[1].about["seconds"], "the second was not trained"


def test_objects_that_changed_are_refused(tasks_npz: str) -> None:
    made = stream(pairs(tasks_npz), name="mutable")
    run = Run(stream=made, **SMALL)
    made.tasks[0].train.parts[0].images[0] ^= 1
    with pytest.raises(ValueError, match="changed since the run was created"):
        train(run)
    assert Run(stream=made, **SMALL).key != run.key


def test_wrong_objects_get_one_sentence() -> None:
    with pytest.raises(TypeError, match="stream is a int; it must be a name, a Stream, or a list of tasks"):
        Run(stream=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model is a float"):
        Run(model=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the list of tasks is empty"):
        train(Run(**SMALL), stream=[])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Run(stream="given:pets:0123456789abcdef")
    with pytest.raises(FileNotFoundError, match=r"pass it again: train\(run, stream=…\)"):
        train(run)


def test_a_network_with_other_outputs_than_the_tasks_and_its_remedy(tasks_npz: str) -> None:
    run = Run(stream=tasks_npz, **SMALL)
    with pytest.raises(ValueError, match=r"returns \(2, 8\) .*, or keep the other 2 for tasks to come: Run\(outputs=8\)"):
        train(run, model=build(8, (1, 6, 6)))
    assert train(run.replace(outputs=8), model=build(8, (1, 6, 6))).status == "done"
    with pytest.raises(ValueError, match=r"returns \(2, 4\) .*\(2, 6\).*; take the number from the argument outputs: def build\(outputs"):
        train(run, model=build(4, (1, 6, 6)))
    with (
        pytest.warns(UserWarning, match="the network lambda cannot be imported by name, .* and pass that: model="),
        pytest.raises(TypeError, match=r"^the network lambda returned int, not a torch\.nn\.Module; return the network"),
    ):
        train(run, model=lambda: 3)


class Functional(nn.Module):
    """A network that calls its activation as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(36, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.fc(x.flatten(1))))  # type: ignore[no-any-return]


def test_activations_as_functions_are_refused_only_where_they_are_needed(tasks_npz: str) -> None:
    run = Run(stream=tasks_npz, **SMALL)
    result = train(run, model=Functional())
    assert result.status == "done"
    assert "free_neurons" not in result.summary()
    for changes, name in (({"sparsify": "slnid"}, "slnid"), ({"preserve": "hat"}, "hat"), ({"preserve": "ebll"}, "ebll")):
        with pytest.raises(ValueError, match=rf"Functional has no hidden activation module, which {name}.* needs; use .*hidden = \('act1'"):
            train(run.replace(**changes), model=Functional())
