"""What earlier versions wrote still loads: tests/samples/VERSION, made once by tests/samples/make.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_array_equal
from safetensors.torch import load_file

import selfless
from selfless.report import write
from selfless.runner import Store
from tests.samples.make import measure, network

SAMPLES = sorted(path for path in (Path(__file__).parent / "samples").iterdir() if (path / "expected.json").is_file())
KEEPERS = [(folder, text) for folder in SAMPLES for text in json.loads((folder / "expected.json").read_text())["keepers"]]


@pytest.fixture(params=SAMPLES, ids=lambda folder: folder.name)
def sample(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the samples of one version, which is the working directory."""
    folder = tmp_path / "sample"
    shutil.copytree(request.param, folder)
    monkeypatch.chdir(folder)
    return folder


def test_there_are_samples_of_the_first_version() -> None:
    assert "0.1.0" in [folder.name for folder in SAMPLES]


@pytest.mark.slow
def test_recorded_runs_are_read_and_not_trained_again(sample: Path) -> None:
    expected = json.loads((sample / "expected.json").read_text())
    recorded = Store(sample / "results").all()
    assert {r.run.key for r in recorded} == expected["accuracy"].keys(), "the key of a run does not change"
    before = {path: path.stat().st_mtime_ns for path in sample.glob("results/*/metrics.json")}
    for result in selfless.train([r.run for r in recorded], out=sample / "results", workers=1):
        assert_array_equal(result.accuracy, expected["accuracy"][result.run.key])
        assert result.model(0)(torch.zeros(1, 1, 2, 2)).isfinite().all()
    assert {path: path.stat().st_mtime_ns for path in sample.glob("results/*/metrics.json")} == before
    (packed,) = Store(sample / "packed").all()
    page = write([*recorded, packed], sample / "page.html")
    assert "ewc" in page.read_text(encoding="utf-8").lower()


@pytest.mark.parametrize(("folder", "text"), KEEPERS, ids=[f"{folder.name} {text}" for folder, text in KEEPERS])
def test_the_state_of_a_keeper_goes_on_as_it_did(folder: Path, text: str) -> None:
    stored = load_file(folder / f"keeper-{text.replace(':', '-')}.safetensors")
    model = network()
    model.load_state_dict({n.removeprefix("model."): t for n, t in stored.items() if n.startswith("model.")})
    keeper = selfless.attach(model, text, "slnid:1e-3")
    keeper.load_state_dict({n: t for n, t in stored.items() if not n.startswith("model.")})
    assert keeper.tasks == 1
    assert measure(keeper, model) == pytest.approx(json.loads((folder / "expected.json").read_text())["keepers"][text], rel=1e-3)
