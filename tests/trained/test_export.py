"""Files for other programs give the outputs of the network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import selfless
from selfless.trained import FORMATS, TrainedNetwork, export, network, predict

IMAGES = torch.randint(0, 256, (5, 1, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model(recorded: Path) -> TrainedNetwork:
    return selfless.load(recorded).model(task=1)


def test_safetensors_holds_the_plain_network_and_how_to_use_it(model: TrainedNetwork, tmp_path: Path) -> None:
    assert export(model, tmp_path / "model.safetensors", "safetensors") == 0
    tensors = load_file(tmp_path / "model.safetensors")
    plain = selfless.models.build("mlp-12", outputs=6, input_shape=(1, 6, 6))
    plain.load_state_dict(tensors)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        about = {key: json.loads(value) for key, value in file.metadata().items()}
    first, last = about["columns"]
    assert torch.equal(plain(IMAGES.float() * (1 / 255))[:, first:last], model(IMAGES))
    assert about["classes"] == list(model.classes) == ["2", "3"]
    assert selfless.data.DataDescription.from_dict(about["data"]) == model.data


@pytest.mark.slow
def test_torch_export_takes_any_number_of_images(model: TrainedNetwork, tmp_path: Path) -> None:
    assert export(model, tmp_path / "model.pt2", "torch-export") < 1e-5
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(IMAGES), model(IMAGES))


@pytest.mark.slow
def test_onnx_takes_any_number_of_images(model: TrainedNetwork, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    from onnx.reference import ReferenceEvaluator

    assert export(model, tmp_path / "model.onnx", "onnx") < 1e-5
    (logits,) = ReferenceEvaluator(str(tmp_path / "model.onnx")).run(None, {"images": IMAGES.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(IMAGES))


def test_a_missing_package_is_named(model: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ValueError, match=r"ONNX files need the package onnx: pip install 'selfless-learning\[onnx\]'"):
        export(model, tmp_path / "model.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_other_outputs_is_refused(model: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(module: TrainedNetwork, x: torch.Tensor, path: Path) -> None:
        wrong = network.TrainedNetwork(selfless.models.build("mlp-12", outputs=6, input_shape=(1, 6, 6)), module.data, module.columns)
        FORMATS["safetensors"][1](wrong, x, path)

    monkeypatch.setitem(FORMATS, "wrong", (".x", write_half, FORMATS["safetensors"][2]))
    with pytest.raises(ValueError, match="the wrong file gives other outputs than the network"):
        export(model, tmp_path / "model.x", "wrong")
    assert list(tmp_path.iterdir()) == []


def test_a_plain_module_is_no_network_of_a_run(tmp_path: Path) -> None:
    for use in (lambda: export(torch.nn.Linear(2, 2), tmp_path / "a.onnx", "onnx"), lambda: predict(torch.nn.Linear(2, 2), ["a.png"])):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"takes the network of a run, result\.model\(\) .*, not a Linear"):
            use()
