"""The catalogue of published data sets, and the values every source shares."""

from __future__ import annotations

import urllib.parse

import pytest
import torch

from selfless.data import CATALOGUE, Source
from selfless.data.sources import File


def test_the_catalogue_is_well_formed() -> None:
    for entry in CATALOGUE.values():
        for file in entry.files:
            assert isinstance(file, File)
            assert len(file.sha256) == 64
            assert all(urllib.parse.urlsplit(url).path.endswith(file.name) for url in file.urls)
            assert len(file.content_sha256 or "0" * 64) == 64
        assert entry.classes % entry.classes_per_task == 0


def test_a_source_is_checked() -> None:
    x, y = torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1])
    for bad in ((x.double(), y), (x, y[:1]), (x, y.float()), (x, y + 1), (x[0], y)):
        with pytest.raises(ValueError, match="train"):
            Source("bad", bad, (x, y), ("a", "b"))
