"""The sparsifier's term of the loss in a training loop, λ Σ_l R, and the errors if activations or weights are missing."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from selfless import functional
from selfless.distributed import ALONE, Ranks
from selfless.keeper.activations import BEFORE_COMPILING, Collector
from selfless.keeper.log import Log
from selfless.keeper.notices import Notices
from selfless.keeper.sparsifiers import Sparsifiers
from selfless.network.roles import neuron_rows
from selfless.sparsify import Sparsifier, size_of


def inhibition(
    terms: Sparsifiers,
    collector: Collector,
    found: Mapping[str, Tensor],
    alpha: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    training: bool,
    log: Log,
    ranks: Ranks = ALONE,
) -> list[Tensor]:
    """Return λ R of every layer `found` in training, and λ R over weights or over all parameters."""
    costs = weight_costs(terms, collector, parameters, log, training)
    if training and terms.reading("activations"):
        check_layers(collector)
        _check_found(collector, found)
        sizes = layer_sizes(terms, found, alpha, ranks)
        for number, by_layer in sizes.items():
            terms.follow(number, by_layer)
        costs += layer_costs(terms, found, sizes, log)
    return costs


def layer_sizes(terms: Sparsifiers, found: Mapping[str, Tensor], alpha: Mapping[str, Tensor], ranks: Ranks) -> dict[int, Tensor]:
    """Return R(h) of each layer, (layers,), for each sparsifier that reads activations, by its number; h are those of all ranks.

    The gradient is that which `selfless.distributed.ranks` asks for. Ranks need the same layers in the same order.
    """
    sizes = {}
    for number, term in terms.reading("activations").items():
        if term.is_mean:
            own = _penalties(term, found, alpha)
            sizes[number] = own if ranks.is_alone else torch.stack(ranks.global_mean(own.unbind(), [len(h) for h in found.values()]))
        else:
            sizes[number] = _penalties(term, {name: ranks.global_rows(h) for name, h in found.items()}, alpha)
    return sizes


def _penalties(term: Sparsifier, found: Mapping[str, Tensor], alpha: Mapping[str, Tensor]) -> Tensor:
    """Return R of each layer h (M, N), (layers,)."""
    forms = [term.pair_form(h.shape[1], alpha.get(name)) for name, h in found.items()]
    known = [form for form in forms if form is not None]
    if len(known) < len(forms):
        return torch.stack([size_of(term, h, alpha.get(name)) for name, h in found.items()])
    return functional.pair_values(known, [functional.samples(h) for h in found.values()])


def layer_costs(terms: Sparsifiers, found: Mapping[str, Tensor], sizes: Mapping[int, Tensor], log: Log) -> list[Tensor]:
    """Return λ Σ_l R(h_l) of each sparsifier that reads activations, for layers with these R."""
    for number, by_layer in sizes.items():
        log.add("inhibition", by_layer, terms.strength(number), list(found))
    for name, h in found.items():
        log.add_activity([name], h.detach().unsqueeze(0))
    return [terms.strength(number) * by_layer.sum() for number, by_layer in sizes.items()]


def weight_costs(terms: Sparsifiers, collector: Collector, parameters: Mapping[str, Tensor], log: Log, training: bool) -> list[Tensor]:
    """Return λ R of the sparsifiers that read weights or parameters."""
    costs = []
    for number, term in terms.reading("weights", "parameters").items():
        check_layers(collector)
        read = list(parameters.values()) if term.reads == "parameters" else _weights(collector)
        size = add_up([size_of(term, x) for x in read])
        if training:
            terms.follow(number, size)
        costs.append(terms.strength(number) * size)
        log.add("inhibition", costs[-1])
    return costs


def add_up(parts: list[Tensor]) -> Tensor:
    """Return the sum of scalars."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def as_leaf_sum(cost: Tensor | None, like: Tensor, is_hooked: bool) -> Tensor:
    """Return the cost as a tensor with a gradient: 0 if there is none. If hooks will be added to it, it is another node than `cost`."""
    if cost is not None and cost.requires_grad and not is_hooked:
        return cost
    like = like if cost is None else cost
    dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
    zero = torch.zeros((), device=like.device, dtype=dtype, requires_grad=torch.is_grad_enabled())
    return zero + (0 if cost is None else cost)


def check_layers(collector: Collector) -> None:
    """Raise RuntimeError if a layer that was named has no activation after it."""
    if collector.silent:
        raise RuntimeError(
            f"found no activation right after layer {collector.silent!r} (or after a norm that follows it); "
            "name the activation module itself, or use one of torch's activation functions"
        )


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
    if not found and collector.reached:
        raise RuntimeError(
            "keeper.penalty() was called again, but the attached model has had no forward pass in training mode and with gradients on "
            "since the last call or step. Call it once for each model(x), and attach to the model that you train, not to a copy of it"
        )
    if not found:
        names = ", ".join(list(collector.taps)[:3])
        raise RuntimeError(
            f"found no forward pass since the last penalty() or step, so the activations of no layer ({names}) were read. Call penalty() "
            "once after model(x), in training mode and with gradients on; passes in eval mode, under no_grad or in reentrant "
            "checkpoints do not count. If you call parts of the model, as model.head(model.body(x)), use activation modules. A layer "
            "must return a tensor, not a tuple, and the forward pass must use it. In a compiled model "
            f"only activation modules can be read, and only if it was not run before attach(): {BEFORE_COMPILING}"
        )
    unreached = [name for name in collector.taps if name not in collector.reached]
    if unreached and not collector.auto:
        raise RuntimeError(f"layer {unreached[0]!r} was never reached by a forward pass; remove it from layers= or use it in the model")


def check_step(total: Tensor, found: Mapping[str, Tensor], has_explicit_anchor: bool, log: Log, notices: Notices) -> None:
    """Raise ValueError for a penalty that is not finite, and warn of layers that stay silent. This waits for the device."""
    counts = log.active()
    values = torch.cat([total.detach().reshape(1), *(count.to(total.device, total.dtype) for _, count, _ in counts)]).tolist()
    if not math.isfinite(values[0]):
        explain_infinite(found, has_explicit_anchor)
    layers = [name for names, _, _ in counts for name in names]
    notices.check_activity({name: count / len(found[name]) for name, count in zip(layers, values[1:], strict=True) if name in found})


def explain_infinite(found: Mapping[str, Tensor], has_explicit_anchor: bool) -> None:
    """Raise ValueError for a penalty that is not finite. In float16 an overflow is normal: a GradScaler then skips the step."""
    for name, h in found.items():
        if h.dtype == torch.float16:
            return
        if not bool(torch.isfinite(h).all()):
            raise ValueError(
                f"layer {name!r} has NaN or infinite activations; lower the learning rate or λ, clip gradients or check the data"
            )
    remedy = "keeper.anchor_with(optimizer), which is stable at any strength, or " if has_explicit_anchor else ""
    raise ValueError(f"the penalty is not finite, but the activations are; try {remedy}a lower strength or learning rate")
