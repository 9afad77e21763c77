"""Write a trained network into a file for other programs: safetensors, ONNX or torch.export.

A file is read again, and the outputs for a few random images are compared with those of the network, before it counts as written. An ONNX
or torch.export file takes images as the data set has them, any number at once, and returns the logits of the task's classes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfless.files import save_tensors, write_atomically
from selfless.trained.network import TrainedNetwork, check_network

IMAGES = 3  # random images whose outputs are compared
INSTALL = "pip install 'selfless-learning[onnx]'"


def export(model: TrainedNetwork, path: Path | str, form: str) -> float:
    """Write the network as `form`, one of FORMATS; return the largest difference between its outputs and those of the file, read again."""
    if form not in FORMATS:
        raise ValueError(f"there is no format {form!r}; choose one of {', '.join(FORMATS)}")
    check_network(model, "export")
    write, read = FORMATS[form][1:]
    file, difference = Path(path), float("nan")
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((IMAGES, *model.data.image_shape), generator=generator)
    x = (x * 255).to(torch.uint8) if model.data.dtype == "uint8" else x
    with torch.no_grad():
        expected = model(x)

    def write_and_check(temporary: Path) -> None:
        nonlocal difference
        with _quietly():
            write(model, x, temporary)
            found, wanted = read(model, x[1:], temporary), expected[1:]  # fewer images: the file must take any number
        difference = float((found - wanted).abs().max()) if found.shape == wanted.shape else float("inf")
        if not torch.allclose(found, wanted, rtol=1e-3, atol=1e-4):
            raise ValueError(f"the {form} file gives other outputs than the network: they differ by {difference:.2g}; it was not written")

    write_atomically(file, write_and_check)
    return difference


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence what torch says about its own exporters; errors are raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# ------------------------------------------------------------------------------------------------------------------ safetensors
def _write_safetensors(model: TrainedNetwork, x: Tensor, path: Path) -> None:
    """Write the state dict of the plain network; the metadata say how to prepare images and what the columns mean."""
    about = {"data": json.dumps(model.data.as_dict()), "columns": json.dumps([model.columns.start, model.columns.stop])}
    about["classes"] = json.dumps(model.classes)
    save_tensors(path, {n: t.detach().cpu().contiguous().clone() for n, t in model.network.state_dict().items()}, about)


def _read_safetensors(model: TrainedNetwork, x: Tensor, path: Path) -> Tensor:
    from safetensors.torch import load_file

    again = copy.deepcopy(model)
    for tensor in again.network.state_dict().values():
        tensor.zero_()
    again.network.load_state_dict(load_file(path))
    return _call(again, x)


# ---------------------------------------------------------------------------------------------------------- ONNX, torch.export
def _write_program(model: TrainedNetwork, x: Tensor, path: Path) -> None:
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("images")},))
    with open(path, "wb") as file:  # a path must end in .pt2, and a temporary file does not
        torch.export.save(program, file)


def _read_program(model: TrainedNetwork, x: Tensor, path: Path) -> Tensor:
    with open(path, "rb") as file:
        return _call(torch.export.load(file).module(), x)


def _write_onnx(model: TrainedNetwork, x: Tensor, path: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(f"ONNX files need the package {error.name}: {INSTALL}") from None
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"]}
    shapes = ({0: torch.export.Dim("images")},)
    program = torch.onnx.export(model, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
    assert program is not None
    program.save(path)


def _read_onnx(model: TrainedNetwork, x: Tensor, path: Path) -> Tensor:
    import onnx
    from onnx.reference import ReferenceEvaluator

    onnx.checker.check_model(str(path))
    (found,) = ReferenceEvaluator(onnx.load(path)).run(None, {"images": x.numpy()})
    return torch.from_numpy(found)


def _call(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(x)
    return found


Write = Callable[[TrainedNetwork, Tensor, Path], None]
Read = Callable[[TrainedNetwork, Tensor, Path], Tensor]
FORMATS: dict[str, tuple[str, Write, Read]] = {  # format → (the ending of its files, write, outputs of the file read again)
    "safetensors": (".safetensors", _write_safetensors, _read_safetensors),
    "onnx": (".onnx", _write_onnx, _read_onnx),
    "torch-export": (".pt2", _write_program, _read_program),
}
