"""Pictures are classified as the images of the data set are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import selfless
from selfless.data import DataError, stream
from selfless.trained import predict


@pytest.fixture(scope="module")
def pictures(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The first test images of task 1 as files, and one of them four times as large."""
    folder, run = tmp_path_factory.mktemp("pictures"), selfless.load(recorded).run
    images = stream(run.stream).evaluate[1].test.resident().x[:3, 0].numpy()
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i}.png")
    Image.fromarray(np.kron(images[0], np.ones((4, 4), dtype=np.uint8))).save(folder / "large.png")
    return sorted(folder.iterdir())


def test_probabilities_are_those_of_the_network(recorded: Path, pictures: list[Path]) -> None:
    result = selfless.load(recorded)
    images = stream(result.run.stream).evaluate[1].test.resident().x[:3]
    model = result.model(task=1)
    for one, row in zip(predict(model, pictures[:3], top=5), model(images).softmax(1).tolist(), strict=True):
        assert not one.is_fitted
        assert dict(one.classes) == dict(zip(("2", "3"), row, strict=True))
        chances = [chance for _, chance in one.classes]
        assert chances == sorted(chances, reverse=True)


def test_another_size_is_fitted_and_said(recorded: Path, pictures: list[Path]) -> None:
    plain, large = predict(selfless.load(recorded).model(task=1), [pictures[0], pictures[3]], top=1)
    assert (large.size, large.taken, large.is_fitted) == ((24, 24), (6, 6), True)
    assert large.classes[0][0] == plain.classes[0][0]
    assert len(large.classes) == 1


def test_what_is_no_picture_is_said(recorded: Path, tmp_path: Path) -> None:
    model = selfless.load(recorded).model(task=1)
    with pytest.raises(ValueError, match=r"none.png is not there"):
        predict(model, [tmp_path / "none.png"])
    (tmp_path / "text.png").write_text("text")
    with pytest.raises(DataError, match=r"text.png is not a readable image"):
        predict(model, [tmp_path / "text.png"])


def test_a_network_of_floats_takes_no_pictures(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    np.savez(tmp_path / "floats.npz", x_train=x, y_train=np.arange(20) % 2)
    run = selfless.Run(stream=f"arrays:{tmp_path}/floats.npz", model="mlp-4", epochs=1, stream_options={"classes_per_task": 2})
    model = selfless.train(run).model()
    assert model(torch.from_numpy(x)[:, None, None]).shape == (20, 2)
    with pytest.raises(ValueError, match="trained on arrays of floats, not on pictures"):
        predict(model, [])
