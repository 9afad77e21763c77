"""How much each parameter (Ω) and each neuron (α) matters to what was learned, exactly per sample, in one pass over the data.

    MAS   Ω = mean_m |∂‖f(x_m)‖²/∂θ|        α = mean_m |∂‖f(x_m)‖²/∂n|
    EWC   Ω = mean_m (∂ log p(y_m|x_m)/∂θ)²  α = mean_m |∂ log p(y_m|x_m)/∂n|,   n the pre-activation

References: Aljundi et al., *Memory Aware Synapses*, ECCV 2018; Kirkpatrick et al., *Overcoming catastrophic forgetting*, PNAS 2017.
`estimator="per-batch"` is the authors' estimate, Σ_batches |∂ Σ_{m∈batch} L_m/∂θ|ᵖ / M: cheaper to think of, smaller, noisier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless.layers import NORMS, WEIGHTED, Discovery, Layers, Tap, resolve
from selfless.persample import MEMORY, Recorder, vmapped

Estimator = Literal["per-sample", "per-batch"]
Fisher = Literal["empirical", "sampled", "exact"]
Forward = Callable[[nn.Module, Any], Any]


# ---------------------------------------------------------------------------------------------------------------- objectives
class Objective(Protocol):
    """L: what importance is the gradient of."""

    @property
    def power(self) -> int:
        """Ω = mean_m |∂L_m/∂θ|^power."""

    def targets(self, output: Tensor, labels: Tensor | None) -> list[tuple[Tensor | None, Tensor | None]]:
        """The (target, weight) pairs to differentiate, each (M,) or more: one, or one for every class."""

    def value(self, output: Tensor, target: Tensor | None) -> Tensor:
        """L_m, (M,)."""


@dataclass(frozen=True)
class FunctionNorm:
    """MAS: L = ‖f(x)‖², the squared length of the output. Needs no labels."""

    power: int = 1

    def targets(self, output: Tensor, labels: Tensor | None) -> list[tuple[Tensor | None, Tensor | None]]:
        return [(None, None)]

    def value(self, output: Tensor, target: Tensor | None) -> Tensor:
        return output.flatten(1).square().sum(1)


@dataclass(frozen=True)
class LogLikelihood:
    """EWC: L = log p(y|x), summed over positions for (M, T, C) outputs; labels of −100 do not count.

    `fisher` names whose y: "empirical" the data's labels, "sampled" one label drawn from the model, "exact" the expectation over
    all classes, Σ_c p_c (∂ log p_c)², at the price of one backward pass a class.
    """

    fisher: Fisher = "empirical"
    generator: torch.Generator | None = None
    power: int = 2

    def targets(self, output: Tensor, labels: Tensor | None) -> list[tuple[Tensor | None, Tensor | None]]:
        if self.fisher == "empirical":
            if labels is None:
                raise ValueError("EWC's empirical Fisher needs labels: yield (x, y) pairs or dicts with 'labels', or use fisher='sampled'")
            if labels.is_floating_point():
                raise ValueError(f"EWC's labels must be class numbers (integers), not {labels.dtype}")
            return [(labels, None)]
        p = output.detach().softmax(-1)
        if self.fisher == "sampled":
            flat = torch.multinomial(p.flatten(0, -2), 1, generator=self.generator)
            return [(flat.view(p.shape[:-1]), None)]
        if p.dim() != 2:
            raise ValueError(f"the exact Fisher needs outputs of shape (batch, classes), not {tuple(p.shape)}; use fisher='sampled'")
        return [(torch.full((len(p),), c, device=p.device), p[:, c]) for c in range(p.shape[1])]

    def value(self, output: Tensor, target: Tensor | None) -> Tensor:
        assert target is not None
        if (output.dim() > 2 and output.shape[:-1] != target.shape) or (output.dim() > 3 and output.shape[2:] == target.shape[1:]):
            output = output.movedim(1, -1)  # (M, C, H, W) with labels (M, H, W), as for F.cross_entropy
        losses = F.cross_entropy(output.flatten(0, -2), target.flatten().long(), reduction="none", ignore_index=-100)
        return -losses.view(len(output), -1).sum(1)


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


class _Forward(nn.Module):
    """A model and a way to call it, as one module: `torch.func.functional_call` needs a module."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model, self.call = model, forward

    def forward(self, batch: Any) -> Tensor:
        return run_batch(self.model, batch, self.call)


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


# --------------------------------------------------------------------------------------------------------- models and batches
def check_batches(batches: Any) -> None:
    """Refuse what is one batch, or none, in place of an iterable of them."""
    if isinstance(batches, Tensor):
        raise TypeError("batches must be an iterable of batches, not one tensor; wrap a single batch as [x]")
    if (
        isinstance(batches, tuple)
        and len(batches) == 2
        and all(isinstance(b, Tensor) for b in batches)
        and batches[1].dim() < batches[0].dim()
    ):
        raise TypeError("batches must be an iterable of batches, not one (x, y); wrap a single batch as [(x, y)]")
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches must be an iterable of batches, not {batches!r}; pass the task's DataLoader")


def run_batch(model: nn.Module, batch: Any, forward: Forward | None = None) -> Tensor:
    """The output on a batch: model(x) for x or (x, y, …), model(**batch) for a dict; `.logits` is taken where there is one."""
    if forward is not None:
        output = forward(model, batch)
    else:
        try:
            output = model(**batch) if isinstance(batch, dict) else model(batch[0] if isinstance(batch, (tuple, list)) else batch)
        except Exception as error:
            called = "model(**batch)" if isinstance(batch, dict) else "model(x), x being the batch or its first item"
            error.add_note(f"selfless called {called}; to call the model otherwise pass forward=lambda model, batch: …")
            raise
    if not isinstance(output, Tensor):
        output = output["logits"] if isinstance(output, dict) else getattr(output, "logits", None)
        if not isinstance(output, Tensor):
            raise TypeError("the model's output is neither a tensor nor has .logits; pass forward=lambda model, batch: <the output tensor>")
    if output.dim() < 2:
        output = output.unsqueeze(-1) if output.dim() == 1 else output.view(1, 1)
    return output


def called_with(model: nn.Module, parameters: Mapping[str, Tensor], batch: Any, forward: Forward | None = None) -> Tensor:
    """`run_batch` with other values of (some) parameters, in their own precision."""
    own = dict(model.named_parameters())
    replaced = {f"model.{n}": t.to(own[n].dtype) for n, t in parameters.items() if n in own}
    output: Tensor = torch.func.functional_call(_Forward(model, forward), replaced, (batch,))
    return output


class Layerwise:
    """A forward of its own kind: (M, Σ_l N_l), what every linear layer and convolution gives after its activation, each with its input
    held fixed. The gradient of ‖·‖² is then each layer's own: MAS in its local form. The last layer's is what `forward` returns of it.
    """

    def __init__(self, forward: Forward | None = None) -> None:
        self.forward = forward

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        watch, given, handles = Discovery(model), dict[str, Tensor](), []
        for name, module in model.named_modules():
            if isinstance(module, WEIGHTED):
                handles.append(module.register_forward_pre_hook(lambda _m, args: tuple(_held(a) for a in args)))
                handles.append(module.register_forward_hook(lambda _m, _a, n, name=name: given.update({name: n})))
            elif any(p.requires_grad for p in module.parameters(recurse=False)) and not isinstance(module, NORMS):
                raise ValueError(
                    "the local form of MAS knows linear layers, convolutions and norms; "
                    f"{name or type(model).__name__!r} has parameters of its own: use MAS there"
                )
        watch.start()
        try:
            output = run_batch(model, batch, self.forward)
        finally:
            watch.stop()
            for handle in handles:
                handle.remove()
        parts = [output]
        for name, n in list(given.items())[:-1]:  # the last one is what `output` is of
            h, activation = watch.seen.get(name, (n, None))
            parts.append(h if activation is None else activation(h))
        return torch.cat([part.flatten(1) for part in parts], 1)


def _held(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def labels_of(batch: Any) -> Tensor | None:
    """The labels in a batch: the second item of a tuple, 'labels' or 'label' of a dict."""
    if isinstance(batch, dict):
        found = batch.get("labels", batch.get("label"))
    else:
        found = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    return found if isinstance(found, Tensor) else None


def to_device(batch: Any, model: nn.Module) -> Any:
    """The batch on the model's device; dict-likes (a tokenizer's BatchEncoding) become dicts."""
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if hasattr(batch, "keys") and hasattr(batch, "__getitem__"):
        batch = {key: batch[key] for key in batch.keys()}  # noqa: SIM118
    return torch.utils._pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile(model)`; any other model as it is."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and eager calls, each module's own mode restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    compiled = {module: module._compiled_call_impl for module in modes if getattr(module, "_compiled_call_impl", None) is not None}
    model.eval()
    for module in compiled:
        module._compiled_call_impl = None
    device = next((p.device.type for p in model.parameters()), "cpu")
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, call in compiled.items():
            module._compiled_call_impl = call
