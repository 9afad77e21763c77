"""AlexNet with weights from a file: torchvision's network, a new head, and weights that do not fit."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.func import functional_call, vmap
from torch.testing import assert_close

from selfless.models import build
from tests.test_models import TINY, count, images

TORCHVISION = {  # the published layout of alexnet-owt-7be5be79.pth
    "features.0": (64, 3, 11, 11),
    "features.3": (192, 64, 5, 5),
    "features.6": (384, 192, 3, 3),
    "features.8": (256, 384, 3, 3),
    "features.10": (256, 256, 3, 3),
    "classifier.1": (4096, 9216),
    "classifier.4": (4096, 4096),
    "classifier.6": (1000, 4096),
}
IMAGENET = (3, 224, 224)


def torchvision_state(*parts: str) -> dict[str, torch.Tensor]:
    """Return a state-dict with the real shapes; each tensor is one expanded constant, so that the file is small."""
    shapes = {}
    for key, shape in TORCHVISION.items():
        if not parts or key.startswith(parts):
            shapes |= {f"{key}.weight": shape, f"{key}.bias": shape[:1]}
    return {key: torch.full((1,), 0.01 * (i + 1)).expand(shape) for i, (key, shape) in enumerate(shapes.items())}


@pytest.mark.slow
def test_alexnet_is_torchvisions_with_its_weights(tmp_path):
    torch.save(torchvision_state(), tmp_path / "alexnet.pth")
    model = build("alexnet", outputs=1000, input_shape=IMAGENET, seed=0, weights=tmp_path / "alexnet.pth")
    assert count(model) == 61_100_840
    assert (model.hidden, model.hidden_conv[-1]) == (("classifier.2", "classifier.5"), "features.11")
    state = model.state_dict()
    for key, value in torchvision_state().items():
        assert_close(state[key.replace("classifier.6", "head")], value)
    for shape in (IMAGENET, (3, 64, 64), (3, 63, 100)):
        assert model(images(shape, 1)).shape == (1, 1000)
    assert not any(isinstance(m, nn.Dropout) for m in model.modules())


@pytest.mark.slow
def test_alexnet_with_a_new_head_and_random_fc(tmp_path):
    torch.save(torchvision_state(), tmp_path / "alexnet.pth")
    plain = build("alexnet", outputs=5, input_shape=TINY, seed=3).state_dict()
    for fc, kept in (("pretrained", "head."), ("random", ("head.", "classifier."))):
        loaded = build("alexnet", outputs=5, input_shape=TINY, seed=3, weights=tmp_path / "alexnet.pth", fc=fc)
        for key, value in loaded.state_dict().items():
            assert torch.equal(value, plain[key]) is key.startswith(kept)


@pytest.mark.slow
def test_alexnet_convolutions_alone(tmp_path):
    convolutions = {key: value.contiguous() for key, value in torchvision_state("features").items()}
    save_file(convolutions, tmp_path / "conv.safetensors")
    np.savez(tmp_path / "conv.npz", **{key: value.numpy() for key, value in convolutions.items()})
    for file in ("conv.safetensors", "conv.npz"):
        model = build("alexnet", outputs=2, input_shape=TINY, weights=tmp_path / file, fc="random")
        assert_close({f"features.{k}": v for k, v in model.features.state_dict().items()}, convolutions)
    with pytest.raises(ValueError, match="pass fc='random'"):
        build("alexnet", outputs=2, input_shape=TINY, weights=tmp_path / "conv.npz")


@pytest.mark.slow
def test_alexnet_refuses_weights_that_do_not_fit(tmp_path):
    def refused(state, match, shape=TINY, **options):
        torch.save(state, tmp_path / "w.pth")
        with pytest.raises(ValueError, match=match):
            build("alexnet", outputs=2, input_shape=shape, weights=tmp_path / "w.pth", **options)

    refused(torchvision_state("features.0", "features.3"), "lacks features.6.weight", fc="random")
    refused(torchvision_state("features") | {"conv9": torch.zeros(1)}, "holds conv9", fc="random")
    refused(torchvision_state("features"), "3 channels", shape=(1, 64, 64), fc="random")
    refused([1, 2], "must map parameter names")
    refused(nn.Linear(1, 1), "holds more than tensors")
    with pytest.raises(FileNotFoundError, match="no weights at"):
        build("alexnet", outputs=2, input_shape=TINY, weights=tmp_path / "none.pth")
    (tmp_path / "w.bin").touch()
    with pytest.raises(ValueError, match="read from"):
        build("alexnet", outputs=2, input_shape=TINY, weights=tmp_path / "w.bin")


@pytest.mark.slow
@pytest.mark.real_data
def test_alexnet_imagenet_convolutions():
    path = Path(os.environ.get("SELFLESS_DATA", "")) / "alexnet" / "alexnet_imagenet_features.npz"
    if not path.is_file():
        pytest.skip("no alexnet/alexnet_imagenet_features.npz under SELFLESS_DATA")
    model = build("alexnet", outputs=10, input_shape=TINY, seed=0, weights=path, fc="random")
    with np.load(path, allow_pickle=False) as stored:
        for key in stored:
            assert_close(model.state_dict()[key], torch.from_numpy(stored[key]), rtol=0, atol=0)
        assert len(stored) == len(model.features.state_dict())
    vmapped = vmap(lambda x: functional_call(model, dict(model.named_parameters()), (x,)))(images(TINY)[:, None])
    assert_close(vmapped[:, 0], model(images(TINY)), rtol=1e-4, atol=1e-5)
