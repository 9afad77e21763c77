"""Classify picture files with a trained network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from selfless.data.images import decode_image
from selfless.trained.network import TrainedNetwork, check_network

AT_ONCE = 64  # pictures in one forward pass


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one picture, as (name, probability), the best first.

    size, taken   the (height, width) of the picture, and those that the network takes; if they differ, the picture was scaled to cover
                  the second and cropped at the centre, as in training
    """

    path: Path
    classes: tuple[tuple[str, float], ...]
    size: tuple[int, int]
    taken: tuple[int, int]

    @property
    def is_fitted(self) -> bool:
        """True if the picture has another size than the network takes."""
        return self.size != self.taken


def predict(model: TrainedNetwork, paths: Sequence[Path | str], *, top: int = 3) -> list[Prediction]:
    """Return softmax f(x) of every picture, its `top` largest entries."""
    check_network(model, "predict")
    if model.data.dtype != "uint8":
        raise ValueError("this network was trained on arrays of floats, not on pictures; call it on a tensor: result.model()(x)")
    if top < 1:
        raise ValueError(f"top is {top}; it is how many classes to show of each picture, at least 1")
    return list(_predict([Path(path) for path in paths], model, top))


def _predict(paths: Sequence[Path], model: TrainedNetwork, top: int) -> Iterator[Prediction]:
    shape = model.data.image_shape
    for start in range(0, len(paths), AT_ONCE):
        some = paths[start : start + AT_ONCE]
        images = np.stack([decode_image(_read(path), shape, str(path)) for path in some])
        with torch.no_grad():
            chances, columns = model(torch.from_numpy(images)).softmax(1).topk(min(top, len(model.classes)))
        for path, row, places in zip(some, chances.tolist(), columns.tolist(), strict=True):
            with Image.open(path) as image:
                size = (image.height, image.width)
            yield Prediction(path, tuple((model.classes[c], p) for c, p in zip(places, row, strict=True)), size, shape[1:])


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"{path} is not there; give the path of a picture")
    return path.read_bytes()
