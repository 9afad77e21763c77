"""The paper's networks by name: `build("mlp-128", outputs=10, input_shape=(1, 28, 28), seed=0)`.

Layer l is called `conv{l}` or `fc{l}`, its activation module `act{l}`, and the one output layer `head`. `Network.hidden` names the
activations of the fully connected layers, `Network.hidden_conv` those of the convolutions; sparsifiers act there. With several tasks, the
head of a task is a range of output columns, so that no layer is added between tasks. No module works in place: every network runs under
`torch.func.functional_call`, `vmap` over stacked parameters, and `torch.compile`. All start from PyTorch's default initialisation, except
vgg-slim.
"""

import difflib
import inspect
import math
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from selfless.activations import LWTA, Maxout
from selfless.inputs import import_custom
from selfless.network.given import PREFIX, find_factory, network_title
from selfless.network.hidden import hidden_activations

__all__ = ["Network", "build", "hidden_activations", "hidden_layers", "names"]

hidden_layers = hidden_activations  # its first name

MOST_UNITS = 1_000_000  # of a layer

Shape = tuple[int, int, int]  # (C, H, W)
Padding = Literal["same-valid", "same"]
Init = Literal["pretrained", "random"]
File = str | os.PathLike[str]


class Network(nn.Sequential):
    """Named modules in order, with the names of the activations of its hidden layers."""

    def __init__(self, layers: "OrderedDict[str, nn.Module]", *, hidden: Iterable[str] = (), hidden_conv: Iterable[str] = ()) -> None:
        super().__init__(layers)
        self.hidden: tuple[str, ...] = tuple(hidden)
        self.hidden_conv: tuple[str, ...] = tuple(hidden_conv)


def build(
    name: str, *, outputs: int, input_shape: Shape, seed: int | None = None, device: torch.device | str = "cpu", **options: Any
) -> nn.Module:
    """Return the network called `name` (see `names()`).

    outputs: columns of the output layer, over all tasks. input_shape: (C, H, W). seed: the same seed gives the same parameters on every
    machine and leaves the global random state unchanged. Without a seed, parameters are drawn from that state, as usual in PyTorch.
    device: "cpu", or "meta" for a network of shapes alone, without memory.
    """
    if outputs < 1 or len(input_shape) != 3 or min(input_shape) < 1:
        raise ValueError(f"a network needs outputs ≥ 1 and input_shape (C, H, W), not {outputs} and {input_shape}")
    is_custom = ":" in name
    factory = _custom_factory(name) if is_custom else _known_factory(name)
    arguments = _match_arguments(name, factory, {"outputs": outputs, "input_shape": input_shape}, options)
    with torch.random.fork_rng(devices=[]) if seed is not None else nullcontext(), torch.device(device):
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reset the generators of the GPUs
        try:
            model = factory(**arguments)
        except Exception as error:
            if not is_custom:
                raise
            raise ValueError(f"{network_title(name)} raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{network_title(name)} returned {type(model).__name__}, not a torch.nn.Module; return the network from the function"
        )
    for conv, attribute in ((False, "hidden"), (True, "hidden_conv")):
        layers = hidden_activations(model, conv=conv)
        if getattr(model, attribute, None) != layers:
            setattr(model, attribute, layers)
    return model


def names() -> dict[str, str]:
    """Return the names that `build` accepts, each with a one-line description. N stands for a number of units."""
    return {syntax: about for syntax, (_, about) in _NETWORKS.items()} | {
        "module:factory": "a custom network: factory(outputs=…, input_shape=…) in an importable module or a file in the working directory"
    }


# ---- networks ----------------------------------------------------------------------------------------------------------------
def _mlp(n: int, *, outputs: int, input_shape: Shape, layers: int = 2, bias: bool = True) -> Network:
    """d–N–…–N–outputs with ReLU, d = C·H·W, `layers` hidden layers."""
    return _perceptron(math.prod(input_shape), n, n, nn.ReLU, layers, outputs, bias)


def _mlp_lwta(n: int, *, outputs: int, input_shape: Shape, layers: int = 2, window: int = 2) -> Network:
    """d–N–…–N–outputs with LWTA in place of ReLU: the same parameters as `mlp-N`, with N/window active units per layer."""
    if window < 1 or n % window:
        raise ValueError(f"mlp-{n}-lwta: {n} units do not divide into windows of {window}")
    return _perceptron(math.prod(input_shape), n, n, lambda: LWTA(window), layers, outputs)


def _mlp_maxout(n: int, *, outputs: int, input_shape: Shape, layers: int = 2, window: int = 2, released: bool = False) -> Network:
    """d–K–…–K–outputs with Maxout: each of the K units is the largest of w = `window` linear units.

    P(K) = wK(d+1) + (layers−1)·wK(K+1) + (K+1)·outputs is the number of parameters. K is chosen so that P(K) is nearest to that of `mlp-N`
    (w = 1). Example with d = 784, two layers, ten outputs: N = 128 (118,282) gives K = 69 (118,690), N = 64 (55,050) K = 33 (54,394).

    released   the network of the authors' code instead: N linear units become N/w, the next N/w become N/w², …
    """
    d = math.prod(input_shape)
    if released:
        if n % window**layers:
            raise ValueError(f"mlp-{n}-maxout, released: {n} units do not divide by {window} in each of {layers} layers")
        sizes = [(n // window**l, n // window ** (l + 1)) for l in range(layers)]
        return _stack(d, sizes, lambda: Maxout(window), outputs)

    def parameters(k: int, w: int) -> int:
        return w * k * (d + 1) + (layers - 1) * w * k * (k + 1) + (k + 1) * outputs

    k = min(range(1, n + 1), key=lambda k: abs(parameters(k, window) - parameters(n, 1)))
    return _perceptron(d, k, window * k, lambda: Maxout(window), layers, outputs)


def _perceptron(
    inputs: int, width: int, linear: int, activation: Callable[[], nn.Module], layers: int, outputs: int, bias: bool = True
) -> Network:
    """Hidden layers of `linear` linear units, which the activation reduces to `width` units."""
    if layers < 1:
        raise ValueError(f"an mlp needs at least one hidden layer, not layers={layers}")
    return _stack(inputs, [(linear, width)] * layers, activation, outputs, bias)


def _stack(inputs: int, sizes: Sequence[tuple[int, int]], activation: Callable[[], nn.Module], outputs: int, bias: bool = True) -> Network:
    """One hidden layer for each of `sizes`: (linear units, units after the activation)."""
    net = OrderedDict[str, nn.Module](flatten=nn.Flatten())
    for l, (linear, width) in enumerate(sizes, 1):
        net |= {f"fc{l}": nn.Linear(inputs, linear, bias), f"act{l}": activation()}
        inputs = width
    net["head"] = nn.Linear(inputs, outputs, bias)
    return Network(net, hidden=_activation_names(1, len(sizes)))


def _cnn(n: int, *, outputs: int, input_shape: Shape, padding: Padding = "same-valid", dropout: float = 0.0) -> Network:
    """The network of Zenke et al. 2017: conv 32, 32, max-pool, conv 64, 64, max-pool, FC N, head; 3×3 kernels and ReLU throughout.

    padding: "same-valid" pads only the first convolution of each pair, as in their Keras network: 32×32 images give 64×6×6 = 2304 inputs to
    the FC layer. "same" pads all. dropout: the rate after the FC layer, and half of it after each pool. Zenke et al. use 0.5, the paper 0.
    """
    if padding not in ("same-valid", "same"):
        raise ValueError(f"cnn: padding must be 'same-valid' or 'same', not {padding!r}")
    _check_dropout(dropout)
    channels, height, width = input_shape
    net, lost = OrderedDict[str, nn.Module](), 2 if padding == "same-valid" else 0
    for pair, filters in ((1, 32), (2, 64)):
        a, b = 2 * pair - 1, 2 * pair
        net |= {f"conv{a}": nn.Conv2d(channels, filters, 3, padding=1), f"act{a}": nn.ReLU()}
        net |= {f"conv{b}": nn.Conv2d(filters, filters, 3, padding=0 if lost else 1), f"act{b}": nn.ReLU()}
        net[f"pool{pair}"] = nn.MaxPool2d(2)
        if dropout:
            net[f"drop{pair}"] = nn.Dropout(dropout / 2)
        channels, height, width = filters, (height - lost) // 2, (width - lost) // 2
    _check_size("cnn", input_shape, height, width)
    net |= {"flatten": nn.Flatten(), "fc5": nn.Linear(channels * height * width, n), "act5": nn.ReLU()}
    if dropout:
        net["drop3"] = nn.Dropout(dropout)
    net["head"] = nn.Linear(n, outputs)
    return Network(net, hidden=_activation_names(5, 5), hidden_conv=_activation_names(1, 4))


def _alexnet_cifar(*, outputs: int, input_shape: Shape, batch_norm: bool = True, fc_units: int = 2048) -> Network:
    """The network of Serrà et al. 2018 for images of 32×32, as Saha et al. 2021 have it: conv 64 (4×4), 128 (3×3), 256 (2×2), each with
    dropout and max-pool, FC 2048, 2048, head. Dropout is 0.2 after the first two convolutions, else 0.5.

    batch_norm: adds `norm{l}` before each activation, and no layer has a bias. It has no running statistics: the statistics are those of
    the batch, in evaluation too. Without it, every layer has a bias (Serrà et al.).
    """
    channels, height, width = input_shape
    net, bias = OrderedDict[str, nn.Module](), not batch_norm
    for l, (filters, kernel, rate) in enumerate(((64, 4, 0.2), (128, 3, 0.2), (256, 2, 0.5)), 1):
        net[f"conv{l}"] = nn.Conv2d(channels, filters, kernel, bias=bias)
        if batch_norm:
            net[f"norm{l}"] = nn.BatchNorm2d(filters, track_running_stats=False)
        net |= {f"act{l}": nn.ReLU(), f"drop{l}": nn.Dropout(rate), f"pool{l}": nn.MaxPool2d(2)}
        channels, height, width = filters, (height - kernel + 1) // 2, (width - kernel + 1) // 2
    _check_size("alexnet-cifar", input_shape, height, width)
    net["flatten"], inputs = nn.Flatten(), channels * height * width
    for l in (4, 5):
        net[f"fc{l}"] = nn.Linear(inputs, fc_units, bias)
        if batch_norm:
            net[f"norm{l}"] = nn.BatchNorm1d(fc_units, track_running_stats=False)
        net |= {f"act{l}": nn.ReLU(), f"drop{l}": nn.Dropout(0.5)}
        inputs = fc_units
    net["head"] = nn.Linear(inputs, outputs, bias)
    return Network(net, hidden=_activation_names(4, 5), hidden_conv=_activation_names(1, 3))


def _vgg_slim(*, outputs: int, input_shape: Shape, pools: int = 4, batch_norm: bool = False, fc_units: int = 500) -> Network:
    """Table 4 of the paper: conv 64, pool, 128, pool, 256, pool, 256, pool, 512, 512, FC 500, 500, head; 3×3 kernels, padded, ReLU.

    pools: 3 leaves out the last pool, as the authors' code does. Images of 64×64 (56×56) give 512·4·4 (512·3·3) FC inputs, with three
    pools 512·8·8 (512·7·7). batch_norm: adds `norm{l}` before the activation of each convolution. Initialisation: He's (variance
    2/inputs, bias 0). With PyTorch's default, a sixth of that variance, the network learns nothing in the first epochs. The head starts
    at 0: with He's initialisation it would begin every task with large wrong outputs (docs/lab-notes.md).
    """
    if pools not in (3, 4):
        raise ValueError(f"vgg-slim has 4 pools (the paper's table 4) or 3 (the authors' code), not {pools}")
    channels, height, width = input_shape
    net = OrderedDict[str, nn.Module]()
    for l, filters in enumerate((64, 128, 256, 256, 512, 512), 1):
        net[f"conv{l}"] = nn.Conv2d(channels, filters, 3, padding=1)
        if batch_norm:
            net[f"norm{l}"] = nn.BatchNorm2d(filters)
        net[f"act{l}"] = nn.ReLU()
        if l <= pools:
            net[f"pool{l}"] = nn.MaxPool2d(2)
            height, width = height // 2, width // 2
        channels = filters
    _check_size("vgg-slim", input_shape, height, width)
    net |= {"flatten": nn.Flatten(), "fc7": nn.Linear(channels * height * width, fc_units), "act7": nn.ReLU()}
    head = nn.Linear(fc_units, outputs)
    net |= {"fc8": nn.Linear(fc_units, fc_units), "act8": nn.ReLU(), "head": head}
    for layer in net.values():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # every layer here has a bias
    nn.init.zeros_(head.weight)
    return Network(net, hidden=_activation_names(7, 8), hidden_conv=_activation_names(1, 6))


def _alexnet(
    *, outputs: int, input_shape: Shape, weights: File | None = None, fc: Init | None = None, dropout: float = 0.0, fc_units: int = 4096
) -> Network:
    """torchvision's AlexNet; its last layer (classifier.6) is called `head`.

    weights: a torchvision state-dict (.pth, .safetensors), or an .npz of the convolutions, which needs fc="random". A run may also give
    NAME@DIGEST, a file below the data folder (`selfless.data.weights`). fc: "pretrained" (the default with weights) also loads the hidden
    FC layers, and the head if outputs = 1000; "random" loads only the convolutions. dropout: torchvision's rate is 0.5. fc_units: units
    of the two hidden FC layers; values other than 4096 are for quick trials with fc="random".
    """
    if fc not in (None, "pretrained", "random"):
        raise ValueError(f"alexnet: fc must be 'pretrained' or 'random', not {fc!r}")
    if fc == "pretrained" and weights is None:
        raise ValueError("alexnet: fc='pretrained' needs weights=PATH, a torchvision AlexNet state-dict file")
    if fc_units < 1:
        raise ValueError(f"alexnet: fc_units must be at least 1, not {fc_units}")
    _check_dropout(dropout)
    if min(input_shape[1:]) < 63:
        raise ValueError(f"alexnet needs images of at least 63×63, not {input_shape[1]}×{input_shape[2]}")
    stored = None if weights is None else _read_state_dict(Path(weights))
    drop = [nn.Dropout(dropout) if dropout else nn.Identity() for _ in range(2)]
    features = nn.Sequential(
        *(nn.Conv2d(input_shape[0], 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
    )
    classifier = nn.Sequential(
        *(drop[0], nn.Linear(256 * 6 * 6, fc_units), nn.ReLU()),
        *(drop[1], nn.Linear(fc_units, fc_units), nn.ReLU()),
    )
    net = OrderedDict[str, nn.Module](features=features, avgpool=nn.AdaptiveAvgPool2d((6, 6)), flatten=nn.Flatten())
    net |= {"classifier": classifier, "head": nn.Linear(fc_units, outputs)}
    model = Network(net, hidden=("classifier.2", "classifier.5"), hidden_conv=[f"features.{l}" for l in (1, 4, 7, 9, 11)])
    if stored is not None:
        _load_alexnet(model, stored, str(weights), fc or "pretrained")
    return model


_NETWORKS: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "mlp-N": (_mlp, "two hidden layers of N units, ReLU; options layers, bias"),
    "mlp-N-maxout": (_mlp_maxout, "the same with Maxout, as many parameters as mlp-N; options layers, window, released"),
    "mlp-N-lwta": (_mlp_lwta, "the same with local winner-take-all; options layers, window"),
    "cnn-N": (_cnn, "Zenke et al.: conv 32-32-pool-64-64-pool, FC N; options padding, dropout"),
    "vgg-slim": (_vgg_slim, "the paper's Tiny ImageNet network, FC 500-500; options pools, batch_norm, fc_units"),
    "alexnet-cifar": (_alexnet_cifar, "AlexNet for 32×32 images (Serrà et al., Saha et al.), FC 2048-2048; options batch_norm, fc_units"),
    "alexnet": (_alexnet, "AlexNet, ImageNet weights from a file; options weights, fc, dropout, fc_units"),
}


def _activation_names(first: int, last: int) -> list[str]:
    return [f"act{l}" for l in range(first, last + 1)]


def _check_size(name: str, input_shape: Shape, height: int, width: int) -> None:
    if min(height, width) < 1:
        raise ValueError(f"{name}: images of {input_shape[1]}×{input_shape[2]} are too small: the pools reduce them to nothing")


def _check_dropout(rate: float) -> None:
    if not 0 <= rate < 1:
        raise ValueError(f"dropout must lie in [0, 1), not {rate}")


# ---- weights from files ------------------------------------------------------------------------------------------------------
def _load_alexnet(model: Network, state: Mapping[str, Tensor], path: str, fc: str) -> None:
    """Load the convolutions, and with fc="pretrained" the FC layers. Missing, unknown and misshapen entries raise a ValueError."""
    stored = {re.sub(r"^classifier\.6\.", "head.", key): value for key, value in state.items()}
    current, head = model.state_dict(), ["head.weight", "head.bias"]
    if unknown := stored.keys() - current.keys():
        raise ValueError(f"{path} is not a torchvision AlexNet state-dict: it holds {', '.join(sorted(unknown)[:4])}")
    wanted = [key for key in current if key.startswith("features.") or (fc == "pretrained" and key.startswith("classifier."))]
    if missing := [key for key in wanted if key not in stored]:
        remedy = "" if missing[0].startswith("features.") else "; it holds only the convolutions: pass fc='random'"
        raise ValueError(f"{path} lacks {', '.join(missing[:4])}{remedy}")
    for key in wanted:
        if stored[key].shape != current[key].shape:
            remedy = "; ImageNet weights need images of 3 channels" if key == "features.0.weight" else ""
            raise ValueError(f"{key} is {tuple(stored[key].shape)} in {path} but {tuple(current[key].shape)} in the network{remedy}")
    if fc == "pretrained" and all(key in stored and stored[key].shape == current[key].shape for key in head):
        wanted += head
    model.load_state_dict({key: stored[key] for key in wanted}, strict=False)


def _read_state_dict(path: Path) -> Mapping[str, Tensor]:
    """Read a state-dict from .npz, .safetensors or .pth. No code in the file is run."""
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}; put torchvision's alexnet-owt-7be5be79.pth there")
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {key: torch.from_numpy(arrays[key]) for key in arrays}
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    if path.suffix not in (".pth", ".pt"):
        raise ValueError(f"{path}: weights are read from .pth, .pt, .safetensors or .npz")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as a state-dict: it is damaged or holds more than tensors") from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} is not a state-dict: it must map parameter names to tensors")
    return state


# ---- from a name to a factory and its arguments ------------------------------------------------------------------------------
def _known_factory(name: str) -> Callable[..., nn.Module]:
    """Return the factory of a name in `names()`; the number in "mlp-128" becomes its first argument."""
    syntax, units = re.sub(r"\d+", "N", name), [int(digits) for digits in re.findall(r"\d+", name)]
    if syntax not in _NETWORKS or syntax.count("N") != len(units):
        close = difflib.get_close_matches(syntax, _NETWORKS, 1, 0.5)
        hint = f"did you mean {close[0].replace('N', str(units[0] if units else 128))}? " if close else ""
        raise ValueError(f"unknown network {name!r}; {hint}The networks are {', '.join(names())}; N is a number of units")
    if units and not 1 <= units[0] <= MOST_UNITS:
        raise ValueError(f"{name}: a layer needs at least one unit, and at most {MOST_UNITS:,}")
    factory = _NETWORKS[syntax][0]
    if not units:
        return factory

    def with_units(**arguments: Any) -> nn.Module:
        return factory(units[0], **arguments)

    signature = inspect.signature(factory)
    with_units.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return with_units


def _custom_factory(name: str) -> Callable[..., nn.Module]:
    """Import the factory of `module:factory`, or return the one that was passed as an object."""
    if name.startswith(PREFIX):
        if (given := find_factory(name)) is None:
            raise ValueError(f"{name} was passed as an object and is not in this process; pass it again: train(run, model=…)")
        return given
    if not all(name.partition(":")):
        raise ValueError(f"{name!r}: write a custom network as module:factory, for example mypkg.nets:build")
    factory = import_custom(name)
    if not callable(factory):
        raise TypeError(f"{name} is a {type(factory).__name__}; it must be a function or class that makes a network")
    return factory  # type: ignore[no-any-return]


def _match_arguments(name: str, factory: Callable[..., Any], standard: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the call: all options, and those of the standard ones (outputs, input_shape) that the factory accepts."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # a built-in function without a signature
        return standard | options
    accepted = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    arguments = standard | options
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in accepted:
                possible = [key for key in accepted if key not in standard]
                raise ValueError(f"{network_title(name)} has no option {option!r}; it has {', '.join(possible) or 'none'}")
        arguments = {key: value for key, value in arguments.items() if key in accepted}
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for parameter in required:
        if parameter not in accepted or parameter not in arguments:
            raise ValueError(
                f"{network_title(name)} needs {parameter!r}; it is called with outputs=, input_shape= and model_options: give it there, "
                f"as model_options={{{parameter!r}: …}}, or a default in its definition"
            )
    return arguments
