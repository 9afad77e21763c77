"""The published data themselves, where they are on this machine: counts and known values."""

from __future__ import annotations

import time

import pytest
import torch

from selfless.data import OBJECTS, MissingData, Source, load, stream, verify, verify_objects

pytestmark = pytest.mark.real_data


def here(name: str) -> Source:
    try:
        return load(name, download=False)
    except MissingData:
        pytest.skip(f"{name} is not on this machine; set SELFLESS_DATA or run: selfless data fetch {name}")


@pytest.mark.slow
def test_mnist() -> None:
    source = here("mnist")
    assert source.train[0].shape == (60000, 1, 28, 28)
    assert source.test[0].shape == (10000, 1, 28, 28)
    assert source.train[1][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert source.train[0].float().mean().item() / 255 == pytest.approx(0.1307, abs=1e-4)
    assert verify("mnist")[0].status == "ok"


@pytest.mark.slow
def test_permuted_mnist_is_ready_quickly() -> None:
    source = here("mnist")
    start = time.perf_counter()
    made = stream("permuted-mnist", tasks=5)
    resident = [task.train.resident() for task in made.tasks]
    assert time.perf_counter() - start < 5
    assert made.source is source
    x, _ = resident[1].batch(torch.arange(200))
    plain = source.train[0][:200].flatten(1).float() / 255
    torch.testing.assert_close(x.flatten(1), plain[:, made.tasks[1].train.pixels])


@pytest.mark.slow
def test_cifar_100() -> None:
    source = here("cifar-100")
    assert source.train[0].shape == (50000, 3, 32, 32)
    assert source.train[1].bincount().tolist() == [500] * 100
    assert source.test[1].bincount().tolist() == [100] * 100
    assert source.classes[0] == "apple"
    mean = source.train[0].float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(mean, torch.tensor(source.mean), atol=2e-4, rtol=0)
    made = stream("split-cifar-100", held_out=0.1)
    assert [len(t.train) for t in made.tasks] == [4500] * 10


def test_tiny_imagenet() -> None:
    source = here("tiny-imagenet")
    assert len(source.classes) == 200
    assert source.classes[0] == "Egyptian cat"
    counts = source.train[1].bincount()
    if counts.min() < 500:
        assert source.reduced is not None
        assert stream("split-tiny-imagenet").notes
    made = stream("split-tiny-imagenet")
    assert [len(t.classes) for t in made.tasks] == [20] * 10


@pytest.mark.parametrize("name", OBJECTS)
def test_object_sets(name: str) -> None:
    """Every image of a set that is here is found. If its numbers are not the published ones, the check says so."""
    if not OBJECTS[name].find():
        pytest.skip(f"no objects/{name} under SELFLESS_DATA; selfless data fetch {name}")
    check = verify_objects(name)
    assert check.usable, check.detail
    item = OBJECTS[name]
    if check.status == "ok" and item.train is not None:
        assert f"every image there, {item.train} + {item.test}" in check.detail
