"""The paper's networks, by name: `build("mlp-128", outputs=10, input_shape=(1, 28, 28), seed=0)`.

Every network names the activation modules of its hidden layers, where the sparsifiers act: `hidden` those of the fully connected
layers, `hidden_conv` those of the convolutions. Layer l is `conv{l}` or `fc{l}`, its activation `act{l}`. There is one output
layer, `head`; with several heads, a task's head is a range of its columns (the loss slices it), so nothing is added between tasks.
Nothing works in place: all of it runs under `torch.func.functional_call` with `vmap` over stacked parameters, and `torch.compile`.
"""

import difflib
import inspect
import math
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from selfless.activations import LWTA, Maxout
from selfless.terms import import_custom

__all__ = ["Network", "build", "hidden_layers", "names"]

Shape = tuple[int, int, int]
_NOT_ACTIVATIONS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Flatten, nn.Unflatten, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    *(nn.AdaptiveMaxPool2d, nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.modules.dropout._DropoutNd),
)


class Network(nn.Sequential):
    """Named modules in order, plus the names of the activations of its hidden layers."""

    def __init__(self, layers: "OrderedDict[str, nn.Module]", *, hidden: Iterable[str] = (), hidden_conv: Iterable[str] = ()) -> None:
        super().__init__(layers)
        self.hidden: tuple[str, ...] = tuple(hidden)
        self.hidden_conv: tuple[str, ...] = tuple(hidden_conv)


def build(name: str, *, outputs: int, input_shape: Shape, seed: int | None = None, **options: Any) -> nn.Module:
    """The network called `name` (see `names()`), on the CPU, with PyTorch's default initialisation (vgg-slim has its own).

    outputs: columns of the output layer, over all tasks; input_shape: (C, H, W). The same `seed` gives the same parameters on
    every machine and leaves the global random state as it was; without one they are drawn from that state, as PyTorch does.
    """
    if outputs < 1 or len(input_shape) != 3 or min(input_shape) < 1:
        raise ValueError(f"a network needs outputs ≥ 1 and input_shape (C, H, W), not {outputs} and {input_shape}")
    make = _own(name) if ":" in name else _named(name)
    arguments = _fitting(name, make, {"outputs": outputs, "input_shape": input_shape}, options)
    with torch.random.fork_rng(devices=[]) if seed is not None else nullcontext(), torch.device("cpu"):
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which also resets the GPUs' generators
        model = _made(name, make, arguments)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} returned {type(model).__name__}, not a torch.nn.Module")
    for conv, attribute in ((False, "hidden"), (True, "hidden_conv")):
        layers = hidden_layers(model, conv=conv)
        if getattr(model, attribute, None) != layers:
            setattr(model, attribute, layers)
    return model


def _made(name: str, make: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if ":" not in name:
        return make(**arguments)
    try:
        return make(**arguments)
    except Exception as error:
        raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error


def names() -> dict[str, str]:
    """What `build` understands, each with one line about it; N is a number of units."""
    return {syntax: about for syntax, (_, about) in _NETWORKS.items()} | {
        "module:factory": "your own: factory(outputs=…, input_shape=…) in an importable module or a file here"
    }


def hidden_layers(model: nn.Module, *, conv: bool = False) -> tuple[str, ...]:
    """The names in `model.hidden` (`model.hidden_conv`), checked; for a model without them, those of every activation module
    that follows a Linear (a convolution), normalisation and dropout between them allowed, except after the last Linear."""
    attribute = "hidden_conv" if conv else "hidden"
    declared = getattr(model, attribute, None)
    if declared is None:
        return _find_hidden(model, conv)
    if isinstance(declared, str | nn.Module) or not isinstance(declared, Iterable):
        raise TypeError(
            f"{type(model).__name__}.{attribute} must be a tuple of module names, not {type(declared).__name__}; "
            "rename it if it means something else"
        )
    known = dict(model.named_modules())
    for layer in declared:
        if layer not in known:
            raise ValueError(f"layer {layer!r} of {attribute} is not in the model; its modules are {', '.join(filter(None, known))}")
        if isinstance(known[layer], _NOT_ACTIVATIONS):
            raise ValueError(
                f"{attribute} names {layer!r}, a {type(known[layer]).__name__}; it must name activation modules, such as the ReLU after it"
            )
    return tuple(declared)


# ---- the networks ------------------------------------------------------------------------------------------------------------


def _mlp(n: int, *, outputs: int, input_shape: Shape, layers: int = 2) -> Network:
    """d–N–…–N–outputs with ReLU, d = C·H·W, `layers` hidden layers."""
    return _perceptron(math.prod(input_shape), n, n, nn.ReLU, layers, outputs)


def _mlp_lwta(n: int, *, outputs: int, input_shape: Shape, layers: int = 2, window: int = 2) -> Network:
    """d–N–…–N–outputs with LWTA in place of ReLU: the same N units and the same parameters; N/window of them are active."""
    if window < 1 or n % window:
        raise ValueError(f"mlp-{n}-lwta: {n} units do not divide into windows of {window}")
    return _perceptron(math.prod(input_shape), n, n, lambda: LWTA(window), layers, outputs)


def _mlp_maxout(n: int, *, outputs: int, input_shape: Shape, layers: int = 2, window: int = 2) -> Network:
    """d–K–…–K–outputs with Maxout: each of K units is the largest of `window` linear ones. K is the width whose number of
    parameters,  P(K) = wK(d+1) + (layers−1)·wK(K+1) + (K+1)·outputs,  is nearest to that of the ReLU network `mlp-N` (w = 1).
    With d = 784, two layers and ten outputs, N = 128 (118,282) becomes K = 69 (118,690) and N = 64 (55,050) K = 33 (54,394).
    """
    d = math.prod(input_shape)

    def parameters(k: int, w: int) -> int:
        return w * k * (d + 1) + (layers - 1) * w * k * (k + 1) + (k + 1) * outputs

    k = min(range(1, n + 1), key=lambda k: abs(parameters(k, window) - parameters(n, 1)))
    return _perceptron(d, k, window * k, lambda: Maxout(window), layers, outputs)


def _perceptron(inputs: int, width: int, linear: int, activation: Callable[[], nn.Module], layers: int, outputs: int) -> Network:
    """Layers of `linear` units that the activation turns into `width`."""
    if layers < 1:
        raise ValueError(f"an mlp needs at least one hidden layer, not layers={layers}")
    net = OrderedDict[str, nn.Module](flatten=nn.Flatten())
    for l in range(1, layers + 1):
        net |= {f"fc{l}": nn.Linear(inputs, linear), f"act{l}": activation()}
        inputs = width
    net["head"] = nn.Linear(inputs, outputs)
    return Network(net, hidden=_acts(1, layers))


def _cnn(
    n: int,
    *,
    outputs: int,
    input_shape: Shape,
    padding: Literal["same-valid", "same"] = "same-valid",
    dropout: float = 0.0,
) -> Network:
    """Zenke et al. 2017: conv 32, 32, max-pool, conv 64, 64, max-pool, FC N, head; 3×3 and ReLU throughout.

    As in their Keras network the first convolution of a pair pads ("same") and the second does not ("valid"): 32×32 becomes
    64×6×6 = 2304 inputs to the FC layer; padding="same" pads all. `dropout` is the rate after the FC layer, half of it after each
    pool (theirs: 0.5); none by default, as in the paper.
    """
    if padding not in ("same-valid", "same"):
        raise ValueError(f"cnn: padding must be 'same-valid' or 'same', not {padding!r}")
    _rate(dropout)
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
    _enough("cnn", input_shape, height, width)
    net |= {"flatten": nn.Flatten(), "fc5": nn.Linear(channels * height * width, n), "act5": nn.ReLU()}
    if dropout:
        net["drop3"] = nn.Dropout(dropout)
    net["head"] = nn.Linear(n, outputs)
    return Network(net, hidden=_acts(5, 5), hidden_conv=_acts(1, 4))


def _vgg_slim(*, outputs: int, input_shape: Shape, pools: int = 4, batch_norm: bool = False, fc_units: int = 500) -> Network:
    """Table 4 of the paper: conv 64, pool, 128, pool, 256, pool, 256, pool, 512, 512, FC 500, 500, head; 3×3, padded, ReLU.

    pools=3 leaves out the last pool, as the authors' code does. FC inputs at 64×64 (56×56): 512·4·4 (512·3·3), with three pools
    512·8·8 (512·7·7). batch_norm adds a normalisation `norm{l}` before each convolution's activation. Weights start as He's (variance
    2/inputs, biases 0): from PyTorch's default, a sixth of that, nine layers learn nothing in the first epochs. The head starts at 0: as
    He's it begins every task with large and wrong outputs (docs/lab-notes.md).
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
    _enough("vgg-slim", input_shape, height, width)
    net |= {"flatten": nn.Flatten(), "fc7": nn.Linear(channels * height * width, fc_units), "act7": nn.ReLU()}
    head = nn.Linear(fc_units, outputs)
    net |= {"fc8": nn.Linear(fc_units, fc_units), "act8": nn.ReLU(), "head": head}
    for layer in net.values():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # they have one
    nn.init.zeros_(head.weight)
    return Network(net, hidden=_acts(7, 8), hidden_conv=_acts(1, 6))


def _alexnet(
    *,
    outputs: int,
    input_shape: Shape,
    weights: str | os.PathLike[str] | None = None,
    fc: Literal["pretrained", "random"] | None = None,
    dropout: float = 0.0,
    fc_units: int = 4096,
) -> Network:
    """torchvision's AlexNet, its last layer (classifier.6) called `head`; no dropout unless asked (torchvision's: 0.5).

    weights: a torchvision state-dict (.pth, .safetensors), or an .npz of the convolutions alone, which needs fc="random". In a run
    also NAME@DIGEST, a file below the data folder (`selfless.data.weights`).
    fc: "pretrained" (default with weights) takes the two hidden FC layers from the file, "random" the convolutions alone. The
    head is new, except that fc="pretrained" also takes ImageNet's where it has as many rows as `outputs` (1000).
    fc_units: of the two hidden FC layers; other than 4096 for trials, with fc="random".
    """
    if fc not in (None, "pretrained", "random"):
        raise ValueError(f"alexnet: fc must be 'pretrained' or 'random', not {fc!r}")
    if fc == "pretrained" and weights is None:
        raise ValueError("alexnet: fc='pretrained' needs weights=PATH, a torchvision AlexNet state-dict file")
    if fc_units < 1:
        raise ValueError(f"alexnet: fc_units must be at least 1, not {fc_units}")
    _rate(dropout)
    if min(input_shape[1:]) < 63:
        raise ValueError(f"alexnet needs images of at least 63×63, not {input_shape[1]}×{input_shape[2]}")
    stored = None if weights is None else _read_weights(Path(weights))
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
    model = Network(
        net,
        hidden=("classifier.2", "classifier.5"),
        hidden_conv=[f"features.{l}" for l in (1, 4, 7, 9, 11)],
    )
    if stored is not None:
        _load_alexnet(model, stored, str(weights), fc or "pretrained")
    return model


_NETWORKS: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "mlp-N": (_mlp, "two hidden layers of N units, ReLU; option layers"),
    "mlp-N-maxout": (_mlp_maxout, "the same with Maxout, as many parameters as mlp-N; options layers, window"),
    "mlp-N-lwta": (_mlp_lwta, "the same with local winner-take-all; options layers, window"),
    "cnn-N": (_cnn, "Zenke et al.: conv 32-32-pool-64-64-pool, FC N; options padding, dropout"),
    "vgg-slim": (_vgg_slim, "the paper's Tiny ImageNet network, FC 500-500; options pools, batch_norm, fc_units"),
    "alexnet": (_alexnet, "AlexNet, ImageNet weights from a file; options weights, fc, dropout, fc_units"),
}


# ---- their weights, names and arguments --------------------------------------------------------------------------------------


def _load_alexnet(model: Network, state: Mapping[str, Tensor], path: str, fc: str) -> None:
    """Strictly: every convolution (and hidden FC layer) of the model is in the file, and nothing in it goes unrecognised."""
    stored = {re.sub(r"^classifier\.6\.", "head.", key): value for key, value in state.items()}
    own = model.state_dict()
    if unknown := stored.keys() - own.keys():
        raise ValueError(f"{path} is no torchvision AlexNet state-dict: it holds {', '.join(sorted(unknown)[:4])}")
    wanted = [key for key in own if key.startswith("features.") or (fc == "pretrained" and key.startswith("classifier."))]
    if missing := [key for key in wanted if key not in stored]:
        remedy = "" if missing[0].startswith("features.") else "; it holds the convolutions alone: pass fc='random'"
        raise ValueError(f"{path} lacks {', '.join(missing[:4])}{remedy}")
    for key in wanted:
        if stored[key].shape != own[key].shape:
            raise ValueError(
                f"{key} is {tuple(stored[key].shape)} in {path} but {tuple(own[key].shape)} here"
                + ("; ImageNet weights need images of 3 channels" if key == "features.0.weight" else "")
            )
    if fc == "pretrained" and all(key in stored and stored[key].shape == own[key].shape for key in _HEAD):
        wanted += _HEAD
    model.load_state_dict({key: stored[key] for key in wanted}, strict=False)


_HEAD = ["head.weight", "head.bias"]


def _read_weights(path: Path) -> Mapping[str, Tensor]:
    """A state-dict from .npz, .safetensors or .pth, without running anything that the file may hold."""
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}; torchvision's alexnet-owt-7be5be79.pth is what belongs there")
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


def _named(name: str) -> Callable[..., nn.Module]:
    syntax, units = re.sub(r"\d+", "N", name), [int(digits) for digits in re.findall(r"\d+", name)]
    if syntax not in _NETWORKS or syntax.count("N") != len(units):
        close = difflib.get_close_matches(syntax, _NETWORKS, 1, 0.5)
        hint = f"did you mean {close[0].replace('N', str(units[0] if units else 128))}? " if close else ""
        raise ValueError(f"unknown network {name!r}; {hint}The networks are {', '.join(names())}; N is a number of units")
    if units and units[0] < 1:
        raise ValueError(f"{name}: a layer needs at least one unit")
    make = _NETWORKS[syntax][0]
    if not units:
        return make

    def sized(**arguments: Any) -> nn.Module:
        return make(units[0], **arguments)

    signature = inspect.signature(make)
    sized.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return sized


def _own(name: str) -> Callable[..., nn.Module]:
    """The factory of `module:factory`."""
    if not all(name.partition(":")):
        raise ValueError(f"{name!r}: one's own network is written module:factory, for example mypkg.nets:build")
    factory = import_custom(name)
    if not callable(factory):
        raise TypeError(f"{name} is a {type(factory).__name__}; it must be a function or class that makes a network")
    return factory  # type: ignore[no-any-return]


def _fitting(name: str, make: Callable[..., Any], given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments to call `make` with: all options, and of what is given those that it takes."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # a built-in without a signature
        return given | options
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = [p.name for p in by_name]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        given = {key: value for key, value in given.items() if key in takes}
        for option in options:
            if option not in takes:
                ours = [key for key in takes if key not in ("outputs", "input_shape")]
                raise ValueError(f"{name} has no option {option!r}; it has {', '.join(ours) or 'none'}")
    needs = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for parameter in needs:
        if parameter not in takes or parameter not in given | options:
            raise ValueError(f"{name} needs {parameter!r}; it is called with outputs=, input_shape= and the options given")
    return given | options


_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Softplus, nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid, nn.Threshold),
    *(nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Tanhshrink, nn.GLU, Maxout, LWTA),
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _find_hidden(model: nn.Module, conv: bool) -> tuple[str, ...]:
    """See `hidden_layers`: by the order in which the modules are defined."""
    leaves = [(key, m) for key, m in model.named_modules(remove_duplicate=False) if next(m.children(), None) is None]
    linears = [i for i, (_, m) in enumerate(leaves) if isinstance(m, nn.Linear)]
    found: dict[nn.Module, str] = {}
    before = False  # is there a layer of the wanted kind whose activation is still to come?
    for i, (key, module) in enumerate(leaves):
        if isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
            before = isinstance(module, nn.Linear) is not conv and i != max(linears, default=-1)
        elif before and isinstance(module, _ACTIVATIONS):
            if module in found:
                raise ValueError(f"{found[module]!r} and {key!r} are one activation module after two layers; give each layer its own")
            found[module], before = key, False
    if not found and not conv and len(linears) > 1:
        raise ValueError(
            f"{type(model).__name__} has hidden Linear layers but no activation modules defined right after them, where a run "
            "would read them; use modules such as nn.ReLU in place of functions and name them in the class: hidden = ('act1', 'act2'), or "
            "hidden = () for none"
        )
    return tuple(found.values())


def _acts(first: int, last: int) -> list[str]:
    return [f"act{l}" for l in range(first, last + 1)]


def _enough(name: str, input_shape: Shape, height: int, width: int) -> None:
    if min(height, width) < 1:
        raise ValueError(f"{name}: images of {input_shape[1]}×{input_shape[2]} are too small, nothing is left of them")


def _rate(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must lie in [0, 1), not {dropout}")
