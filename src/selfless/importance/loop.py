"""How much each parameter (Ω) and each neuron (α) matters to what was learned, exactly per sample, in one pass over the data.

    MAS   Ω = mean_m |∂‖f(x_m)‖²/∂θ|        α = mean_m |∂‖f(x_m)‖²/∂n|
    EWC   Ω = mean_m (∂ log p(y_m|x_m)/∂θ)²  α = mean_m |∂ log p(y_m|x_m)/∂n|,   n the pre-activation

References: Aljundi et al., *Memory Aware Synapses*, ECCV 2018; Kirkpatrick et al., *Overcoming catastrophic forgetting*, PNAS 2017.
`estimator="per-batch"` is the authors' estimate, Σ_batches |∂ Σ_{m∈batch} L_m/∂θ|ᵖ / M: cheaper to think of, smaller, noisier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selfless.importance.objectives import Fisher, FunctionNorm, LogLikelihood, Objective
from selfless.importance.persample import MEMORY, Recorder, vmapped
from selfless.network.calling import Forward, _Forward, check_batches, evaluating, labels_of, run_batch, to_device, unwrap
from selfless.network.layers import Layers, Tap, resolve

Estimator = Literal["per-sample", "per-batch"]


# ------------------------------------------------------------------------------------------------------------------ the pass
@dataclass(frozen=True)
class Importance:
    """What one pass gave: {parameter: Ω}, {layer: α}, over `samples` samples."""

    omega: dict[str, Tensor]
    alpha: dict[str, Tensor]
    samples: int


def mas(model: nn.Module, batches: Iterable[Any], estimator: Estimator = "per-sample", **options: Any) -> dict[str, Tensor]:
    """{parameter name: Ω}, Ω = mean_m |∂‖f(x_m)‖²/∂θ|. Options as in `measure` (forward, memory)."""
    return measure(model, batches, FunctionNorm(), estimator=estimator, **options).omega


def ewc(
    model: nn.Module,
    batches: Iterable[Any],
    estimator: Estimator = "per-sample",
    fisher: Fisher = "empirical",
    generator: torch.Generator | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """{parameter name: Ω}, Ω = mean_m (∂ log p(y_m|x_m)/∂θ)²; `fisher` says whose y (see `LogLikelihood`)."""
    return measure(model, batches, LogLikelihood(fisher, generator), estimator=estimator, **options).omega


def neurons(
    model: nn.Module, batches: Iterable[Any], layers: Layers, objective: Objective | None = None, **options: Any
) -> dict[str, Tensor]:
    """{layer name: α (N,)}, α = mean_m |∂L(x_m)/∂n|: at the input of an activation module, at the output of any other."""
    return measure(model, batches, objective or FunctionNorm(), taps=resolve(model, layers), parameters=False, **options).alpha


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    objective: Objective,
    *,
    spares: Objective | None = None,
    taps: dict[str, Tap] | None = None,
    parameters: bool = True,
    estimator: Estimator = "per-sample",
    forward: Forward | None = None,
    memory: int = MEMORY,
    lenient: bool = False,
    finite: bool = True,
) -> Importance:
    """Ω and α of one task in one pass. The model is put in eval mode meanwhile, and everything is left as it was found.

    spares     what α is the gradient of, where that is not `objective`: one more backward pass a batch
    batches    what a training loop has: a DataLoader, a list or a generator of x, (x, y, …) or dicts
    forward    forward(model, batch) → output, for models that take more than x (a task id, say); default: see `run_batch`
    memory     bytes that per-sample gradients may take at a time
    lenient    layers that these batches do not run through, or through which no gradient flows, are left out, instead of an error
    finite     raise on importances that are NaN or infinite
    """
    if estimator not in ("per-sample", "per-batch"):
        raise ValueError(f"estimator is {estimator!r}; choose 'per-sample' (exact) or 'per-batch' (the authors' estimate)")
    check_batches(batches)
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "importance needs gradients, which torch.inference_mode() forbids; leave it, or use torch.no_grad() around the rest"
        )
    model = unwrap(model)
    if spares is not None and not parameters:
        objective, spares = spares, None  # α is all there is to measure
    exact = parameters and estimator == "per-sample"
    apart = spares is not None and bool(taps)
    omega: dict[str, Tensor] = {}
    alpha: dict[str, Tensor] = {}
    samples = 0
    with evaluating(model), torch.enable_grad(), Recorder(model, taps or {}, memory, wanted=exact, lenient=lenient) as recorder:
        for batch in batches:
            batch = to_device(batch, model)
            recorder.listen()
            output = run_batch(model, batch, forward)
            pairs = objective.targets(output, labels_of(batch))
            for k, (target, weight) in enumerate(pairs):
                values, more = objective.value(output, target), k + 1 < len(pairs) or apart
                by_batch = parameters and not exact
                fallback = _fallback(model, batch, target, objective, forward, len(values), memory)
                o, a = recorder.reduce(values, objective.power, weight, fallback, retain=more or by_batch)
                if by_batch:
                    o = _batch_gradient(model, values, objective.power, weight, retain=more)
                _add(omega, o)
                _add(alpha, {} if apart else a)
            if spares is not None and apart:
                asked = spares.targets(output, labels_of(batch))
                for k, (target, weight) in enumerate(asked):
                    _add(alpha, recorder.neurons(spares.value(output, target), weight, retain=k + 1 < len(asked)))
            samples += len(output)
    if samples == 0:
        raise ValueError("there is no data to measure importance on: the batches are empty (a generator that was used up, perhaps?)")
    if parameters:
        omega = {n: _mean(omega, n, p, samples, finite) for n, p in model.named_parameters() if p.requires_grad}
    missing = set(taps or {}) - set(alpha)
    if missing and not lenient:
        raise ValueError(f"layer {sorted(missing)[0]!r} was never reached by the forward pass; name a layer that these batches run through")
    alpha = {name: alpha[name] / samples for name in (taps or {}) if name in alpha}
    for name, value in alpha.items():
        if finite and not bool(torch.isfinite(value).all()):
            raise ValueError(
                f"the importance of layer {name!r} is not finite: activations or outputs hold NaN or infinity. Did training diverge?"
            )
    return Importance(omega, alpha, samples)


def _mean(omega: dict[str, Tensor], name: str, parameter: Tensor, samples: int, finite: bool) -> Tensor:
    value = omega[name] / samples if name in omega else torch.zeros_like(parameter, dtype=_state_dtype(parameter))
    if finite and not bool(torch.isfinite(value).all()):
        raise ValueError(f"the importance of {name!r} is not finite: the model's output holds NaN or infinity. Did training diverge?")
    return value.detach()


def _state_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype


def _add(total: dict[str, Tensor], part: dict[str, Tensor]) -> None:
    for name, value in part.items():
        total[name] = total[name].add_(value) if name in total else value


def _batch_gradient(model: nn.Module, values: Tensor, power: int, weight: Tensor | None, retain: bool) -> dict[str, Tensor]:
    """|∂ Σ_m L_m/∂θ|ᵖ of one batch: what the authors' code, and most libraries, add up."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = values.sum() if weight is None else (values * (weight if power == 1 else weight.sqrt())).sum()
    grads = torch.autograd.grad(total, list(named.values()), retain_graph=retain, allow_unused=True)
    return {n: g.abs() if power == 1 else g.square() for n, g in zip(named, grads, strict=True) if g is not None}


def _fallback(
    model: nn.Module, batch: Any, target: Tensor | None, objective: Objective, forward: Forward | None, count: int, memory: int
) -> Callable[[list[str]], Iterator[dict[str, Tensor]]]:
    wrapper = _Forward(model, forward)

    def chunks(names: list[str]) -> Iterator[dict[str, Tensor]]:
        slots = _slots(wrapper, {model.get_parameter(n): n for n in names})

        def call(parameters: dict[str, Tensor], sample: Any, wanted: Tensor | None) -> Tensor:
            replaced = {slot: parameters[name] for slot, name in slots.items()}
            values = objective.value(torch.func.functional_call(wrapper, replaced, (sample,), tie_weights=False), wanted)
            if values.numel() != 1:
                raise ValueError("one sample gave several outputs: its batches do not split along their first axis")
            return values.sum()

        yield from vmapped(call, {n: model.get_parameter(n).detach() for n in names}, batch, target, count, memory)

    return chunks


def _slots(model: nn.Module, wanted: dict[Tensor, str]) -> dict[str, str]:
    """Every place a parameter stands in, once each → its name. A module registered twice has one set of places."""
    found = {}
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter in wanted:
                found[f"{prefix}.{key}" if prefix else key] = wanted[parameter]
    return found
