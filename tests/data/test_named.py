"""Streams by name: options, suggestions, limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from selfless.data import CATALOGUE, Entry, Source, Stream, permuted, stream, stream_names
from selfless.data.streams import KINDS


def test_streams_by_name(tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    root = put_mnist(tmp_path / "d")
    made = stream("permuted-mnist", tasks=3, seed=1, held_out=0.1, data_dir=root)
    assert (made.name, len(made.tasks), made.input_shape, made.seed) == ("permuted-mnist", 3, (1, 28, 28), 1)
    assert stream("joint-split-mnist", data_dir=root).name == "joint-split-mnist"
    assert len(stream("split-mnist", data_dir=root, classes_per_task=5).tasks) == 2
    assert "blurred-cifar-100" in stream_names()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("permuted-mnits", "did you mean 'permuted-mnist'"),
        ("npz:my/tasks.npz", "did you mean 'arrays:my/tasks.npz'"),
        ("split-cifar100", "did you mean 'split-cifar-100'"),
        ("mnist", "known: permuted-mnist"),
        ("folders:", "needs a path after the colon: folders:my/tasks"),
    ],
)
def test_unknown_names_are_met_with_a_suggestion(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(name)


def test_a_limit_by_name(tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    made = stream("permuted-mnist", data_dir=put_mnist(tmp_path), download=False, limit=3)
    assert [len(task.train) for task in made.tasks] == [3] * 5


def test_a_mean_and_a_standard_deviation_by_name(tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    root = put_mnist(tmp_path)
    plain = stream("permuted-mnist", data_dir=root, seed=1).tasks[1]
    scaled = stream("permuted-mnist", data_dir=root, seed=1, mean=0.1307, std=0.3081).tasks[1]
    x, y = plain.train.resident("cpu").batch(torch.arange(5))
    x_scaled, y_scaled = scaled.train.resident("cpu").batch(torch.arange(5))
    torch.testing.assert_close(x_scaled, (x - 0.1307) / 0.3081)
    assert torch.equal(y, y_scaled)


@pytest.mark.parametrize(
    "options",
    [{"mean": 0.1}, {"std": 0.3}, {"mean": 0.1, "std": 0}, {"mean": [0.1, 0.2], "std": [0.3, 0.3]}, {"mean": float("nan"), "std": 1}],
)
def test_a_wrong_mean_or_standard_deviation_is_refused(tmp_path: Path, put_mnist: Callable[[Path], Path], options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"mnist: mean .* and std .* must be one number each"):
        stream("permuted-mnist", data_dir=put_mnist(tmp_path), **options)


@pytest.mark.parametrize("mean", ["a", "0.13", True, [[1]], [None], {"red": 1}])
def test_a_mean_that_is_no_number_is_named(tmp_path: Path, put_mnist: Callable[[Path], Path], mean: Any) -> None:
    with pytest.raises(ValueError, match=r"mean is .*; it must be one number per channel"):
        stream("permuted-mnist", data_dir=put_mnist(tmp_path), mean=mean, std=1.0)


@pytest.mark.parametrize("number", [0.5, 1, np.float32(0.5), torch.tensor(0.5), [0.5], (0.5,), np.array([0.5])])
def test_a_mean_may_be_any_number(tmp_path: Path, put_mnist: Callable[[Path], Path], number: Any) -> None:
    made = stream("permuted-mnist", data_dir=put_mnist(tmp_path), mean=number, std=number)
    assert made.tasks[0].train.mean == made.tasks[0].train.std == (float(np.ravel(number)[0]),)


def test_unknown_options_and_odd_numbers(tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    root = put_mnist(tmp_path / "d")
    with pytest.raises(ValueError, match=r"no option 'angle'.*it has limit, mean, std\)"):
        stream("permuted-mnist", data_dir=root, angle=3)
    with pytest.raises(ValueError, match="at least one task"):
        stream("permuted-mnist", data_dir=root, tasks=0)
    with pytest.raises(ValueError, match="from 0 up"):
        stream("split-mnist", data_dir=root, seed=-1)


def test_a_new_kind_and_a_new_source_need_one_row_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the docstrings of `named` and `sources` promise: a row in a table, and names, options and errors follow."""

    def doubled(source: Source, *, tasks: int = 2, seed: int = 0, held_out: float = 0.0) -> Stream:
        return permuted(source, tasks=2 * tasks, seed=seed, held_out=held_out)

    class Toy(Entry):
        def is_in(self, folder: Path) -> bool:
            return True

        def read(self, place: Path) -> Source:
            half = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.arange(4)
            return Source(self.name, half, half, tuple("abcd"), classes_per_task=self.classes_per_task)

    monkeypatch.setitem(KINDS, "doubled", doubled)
    monkeypatch.setitem(CATALOGUE, "toy", Toy("toy", "a toy", "", (), 4, 4, 4, (1, 2, 2), 2))
    assert len(stream("doubled-toy", tasks=3, data_dir=tmp_path).tasks) == 6
    assert len(stream("split-toy", data_dir=tmp_path).tasks) == 2
    assert {"doubled-toy", "doubled-mnist", "split-toy"} <= set(stream_names())
    with pytest.raises(ValueError, match=r"no option 'angle'.*it has limit, mean, std\)"):
        stream("doubled-toy", data_dir=tmp_path, angle=3)
