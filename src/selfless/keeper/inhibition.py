"""The sparsifier's term of the loss in a training loop, λ Σ_l R, and the errors if activations or weights are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from selfless.keeper.activations import Collector
from selfless.network.roles import neuron_rows
from selfless.sparsify import Sparsifier


def inhibition(
    terms: Sequence[Sparsifier],
    collector: Collector,
    found: Mapping[str, Tensor],
    alpha: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    training: bool,
) -> list[Tensor]:
    """Return λ Σ_l R of every sparsifier: over the activations `found`, over weights, or over all parameters."""
    costs = []
    for term in terms:
        if term.strength > 0 and (training or term.reads != "activations"):
            costs.append(term.strength * _sum(term, collector, found, alpha, parameters))
    return costs


def _sum(
    term: Sparsifier, collector: Collector, found: Mapping[str, Tensor], alpha: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> Tensor:
    """Σ R, without the strength."""
    if collector.silent:
        raise RuntimeError(
            f"found no activation right after layer {collector.silent!r} (or after a norm that follows it); "
            "name the activation module itself, or use one of torch's activation functions"
        )
    if term.reads == "parameters":
        return torch.stack([term.penalty(p) for p in parameters.values()]).sum()
    if term.reads == "weights":
        return torch.stack([term.penalty(weight) for weight in _weights(collector)]).sum()
    _check_found(collector, found)
    return torch.stack([term.penalty(h, alpha.get(name)) for name, h in found.items()]).sum()


def _weights(collector: Collector) -> list[Tensor]:
    """Return the weights of the Linear or convolution of each layer."""
    layers = [(name, tap.weighted) for name, tap in collector.taps.items() if tap.complete or not collector.auto]
    missing = [name for name, module in layers if module is None]
    if missing:
        raise ValueError(f"the weights before layer {missing[0]!r} are not known; name the Linear or convolution itself as the layer")
    return [neuron_rows(module) for _, module in layers if module is not None]


def _check_found(collector: Collector, found: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError if the activations of a layer are missing."""
    if not collector.taps:
        raise RuntimeError(
            "the forward pass has no activation function of torch right after any hidden layer; "
            "use activation modules and name them: layers=['act1', …]"
        )
    if not found:
        raise RuntimeError(
            "keeper.penalty() found no forward pass since the last call. Call it once after model(x), in training mode and with "
            "gradients on. Passes in eval mode, under no_grad or in reentrant checkpoints do not count. If the model was compiled "
            "after attach(), only activation modules can be read."
        )
    unreached = [name for name in collector.taps if name not in collector.reached]
    if unreached and not collector.auto:
        raise RuntimeError(f"layer {unreached[0]!r} was never reached by a forward pass; remove it from layers= or use it in the model")


def explain_infinite(found: Mapping[str, Tensor], has_explicit_anchor: bool) -> None:
    """Raise ValueError for a penalty that is not finite. In float16 an overflow is normal: a GradScaler then skips the step."""
    for name, h in found.items():
        if h.dtype == torch.float16:
            return
        if not bool(torch.isfinite(h).all()):
            raise ValueError(f"layer {name!r} has NaN or infinite activations; lower the learning rate, clip gradients or check the data")
    remedy = "keeper.anchor_with(optimizer), which is stable at any strength, or " if has_explicit_anchor else ""
    raise ValueError(f"the penalty is not finite, but the activations are; try {remedy}a lower strength or learning rate")
