"""The hidden activations of a run's network: the activation modules that its class names, or those after its hidden linear layers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from selfless.network.roles import NORMS, PLAIN, is_known_activation

_NOT_ACTIVATIONS = (
    *(*PLAIN, *NORMS, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)


def hidden_activations(model: nn.Module, *, conv: bool = False) -> tuple[str, ...]:
    """Return the names in `model.hidden` (with conv=True in `model.hidden_conv`), after checking them.

    For a model without that attribute, return the activation modules after each Linear (with conv=True: each convolution), except after
    the last Linear. Normalisation and dropout may be in between. A model that calls activations as functions has none.
    """
    attribute = "hidden_conv" if conv else "hidden"
    declared = getattr(model, attribute, None)
    if declared is None:
        return _find_hidden(model, conv)
    if isinstance(declared, str | nn.Module) or not isinstance(declared, Iterable):
        raise TypeError(
            f"{type(model).__name__}.{attribute} must be a tuple of module names, not {type(declared).__name__}; "
            "rename the attribute if it means something else"
        )
    modules = dict(model.named_modules())
    for layer in declared:
        if layer not in modules:
            raise ValueError(f"layer {layer!r} of {attribute} is not in the model; its modules are {', '.join(filter(None, modules))}")
        if isinstance(modules[layer], _NOT_ACTIVATIONS):
            kind = type(modules[layer]).__name__
            raise ValueError(f"{attribute} names {layer!r}, a {kind}; it must name activation modules, such as the ReLU after it")
    return tuple(declared)


def _find_hidden(model: nn.Module, conv: bool) -> tuple[str, ...]:
    """Find the activations described in `hidden_activations`, in the order in which the modules are defined."""
    leaves = [(key, m) for key, m in model.named_modules(remove_duplicate=False) if next(m.children(), None) is None]
    linears = [i for i, (_, m) in enumerate(leaves) if isinstance(m, nn.Linear)]
    found: dict[nn.Module, str] = {}
    expects_activation = False
    for i, (key, module) in enumerate(leaves):
        if isinstance(module, PLAIN):
            expects_activation = isinstance(module, nn.Linear) is not conv and i != max(linears, default=-1)
        elif expects_activation and is_known_activation(module):
            if module in found:
                raise ValueError(f"{found[module]!r} and {key!r} are the same activation module; give each layer its own module")
            found[module], expects_activation = key, False
    return tuple(found.values())
