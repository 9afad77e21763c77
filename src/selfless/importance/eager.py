"""Importance in any model: exact per sample in one pass over the data.

    MAS   Ω = mean_m |∂‖f(x_m)‖²/∂θ|        α = mean_m |∂‖f(x_m)‖²/∂n|
    EWC   Ω = mean_m (∂ log p(y_m|x_m)/∂θ)²  α = mean_m |∂ log p(y_m|x_m)/∂n|

n is the pre-activation of a neuron. `_Eager` is the backend of the loop in `selfless.importance.loop` for one model.
References: Aljundi et al., *Memory Aware Synapses*, ECCV 2018; Kirkpatrick et al., *Overcoming catastrophic forgetting*, PNAS 2017.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from selfless.distributed import ALONE, Ranks, reduction_for
from selfless.distributed.shards import local, reshard
from selfless.functional.shapes import is_finite
from selfless.importance.closed import power_of
from selfless.importance.fallback import vmap_chunks
from selfless.importance.layerwise import Layerwise
from selfless.importance.loop import Estimator, Importance, Pairs, Sums, accumulate, add_sum
from selfless.importance.objectives import Fisher, FunctionNorm, LogLikelihood, Loss, Objective, OwnLoss, is_by_layer, with_loss
from selfless.importance.reducer import MEMORY, Reducer
from selfless.network.calling import CalledModel, Forward, check_batches, evaluating, labels_of, run_batch, to_device, token_mask, unwrap
from selfless.network.layers import Layers, Tap, resolve


def mas(model: nn.Module, batches: Iterable[Any], estimator: Estimator = "per-sample", **options: Any) -> dict[str, Tensor]:
    """Return {parameter name: Ω}, Ω = mean_m |∂‖f(x_m)‖²/∂θ|. Options as in `measure` (forward, memory)."""
    return measure(model, batches, FunctionNorm(), estimator=estimator, **options).omega


def ewc(
    model: nn.Module,
    batches: Iterable[Any],
    estimator: Estimator = "per-sample",
    fisher: Fisher = "empirical",
    generator: torch.Generator | None = None,
    loss: Loss | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Return {parameter name: Ω}, Ω = mean_m (∂ log p(y_m|x_m)/∂θ)²; `fisher` says where y comes from (see `LogLikelihood`).

    `loss(output, batch)` returns one loss per sample, (M,), and takes the place of −log p(y|x).
    """
    return measure(model, batches, with_loss(LogLikelihood(fisher, generator), loss), estimator=estimator, **options).omega


def neurons(
    model: nn.Module, batches: Iterable[Any], layers: Layers, objective: Objective | None = None, **options: Any
) -> dict[str, Tensor]:
    """Return {layer name: α (N,)}, α = mean_m |∂L(x_m)/∂n|. n is the input of an activation module, or the output of any other module."""
    return measure(model, batches, objective or FunctionNorm(), taps=resolve(model, layers), parameters=False, **options).alpha


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    objective: Objective,
    *,
    alpha_objective: Objective | None = None,
    taps: dict[str, Tap] | None = None,
    parameters: bool = True,
    estimator: Estimator = "per-sample",
    forward: Forward | None = None,
    memory: int = MEMORY,
    lenient: bool = False,
    finite: bool = True,
    ranks: Ranks = ALONE,
    spares: Objective | None = None,
) -> Importance:
    """Measure Ω and α of one task in one pass. The model is in eval mode during the pass and has its old mode afterwards.

    batches           a DataLoader, a list or a generator of x, (x, y, …) or dicts
    objective         L, whose gradient Ω is
    alpha_objective   L for α, if it is not `objective`; costs one more backward pass per batch
    taps              the layers to measure α of
    parameters        measure Ω too
    estimator         "per-sample" (exact) or "per-batch" (the authors' estimate)
    forward           forward(model, batch) → output, for models that take more than x (such as a task id); default: `run_batch`
    memory            bytes that per-sample gradients may take at a time; on a CPU those of layers never take more than 8 MB
    lenient           leave out layers that do not run or get no gradient, instead of raising an error
    finite            raise an error if an importance is NaN or infinite
    ranks             the processes whose samples count, `selfless.distributed.find_ranks()`; each of them must call this function
    spares            the old name of `alpha_objective`
    """
    if spares is not None:
        warnings.warn("measure(spares=…) is now measure(alpha_objective=…)", DeprecationWarning, stacklevel=2)
        alpha_objective = spares
    if estimator not in ("per-sample", "per-batch"):
        raise ValueError(f"estimator is {estimator!r}; choose 'per-sample' (exact) or 'per-batch' (the authors' estimate)")
    check_batches(batches, forward)
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "importance needs gradients, but torch.inference_mode() is on; call this outside of it, or use torch.no_grad() instead"
        )
    model, taps = unwrap(model), taps or {}
    forward = Layerwise(forward) if is_by_layer(objective) else forward
    exact = parameters and estimator == "per-sample"
    reshard(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    reduction = reduction_for(ranks, trained)
    if reduction.is_sharded and parameters and not exact:
        raise ValueError("estimator='per-batch' needs the gradient of the whole model at once, which FSDP2 shards; use 'per-sample'")
    with evaluating(model), torch.enable_grad(), Reducer(model, taps, memory, exact, lenient, reduction) as reducer:
        backend = _Eager(model, reducer, forward, memory, exact, isinstance(objective, OwnLoss))
        found = accumulate(batches, backend, objective, alpha_objective, parameters=parameters, neurons=bool(taps), reduction=reduction)
    missing = set(taps) - set(found.alpha)
    if missing and not lenient:
        raise ValueError(f"layer {sorted(missing)[0]!r} was never reached by the forward pass; name a layer that runs on these batches")
    omega = {n: _omega_or_zeros(found.omega, n, local(p)) for n, p in trained.items()} if parameters else {}
    alpha = {name: found.alpha[name] for name in taps if name in found.alpha}
    if finite:
        _check_finite(omega, alpha)
    return Importance(omega, alpha, found.samples)


class _Eager:
    """The backend of `accumulate` for one model: exact sums per sample, or the gradient of the whole batch."""

    def __init__(self, model: nn.Module, reducer: Reducer, forward: Forward | None, memory: int, exact: bool, own_loss: bool) -> None:
        self.model, self.reducer, self.call, self.memory, self.exact = model, reducer, forward, memory, exact
        self.own_loss = own_loss  # True: the user's loss gets the output in its own shape, and the whole batch
        self.batch: Any = None

    def forward(self, batch: Any) -> tuple[Tensor, Any, int]:
        """Run the model on a batch; return its output, the labels (for the user's own loss: the batch) and the number of samples."""
        self.batch = to_device(batch, self.model)
        self.reducer.listen(token_mask(self.batch) if self.call is None else None)
        output = run_batch(self.model, self.batch, self.call, keep_shape=self.own_loss)
        return output, self.batch if self.own_loss else labels_of(self.batch), len(output)

    def reduce(
        self,
        objective: Objective,
        output: Tensor,
        target: Any,
        weight: Tensor | None,
        *,
        omega: Sums | None,
        alpha: Sums | None,
        retain: bool,
    ) -> None:
        """Add the sums of `Backend.reduce`, exact per sample or from the gradient of the batch."""
        if isinstance(objective, LogLikelihood):
            objective.check_target(output, target)
        values, power = objective.value(output, target), objective.power
        if omega is None:
            self.reducer.neurons(values, weight, retain, alpha={} if alpha is None else alpha)
        elif self.exact:
            called = CalledModel(self.model, self.call, keep_shape=self.own_loss)
            chunks = vmap_chunks(called, self.batch, target, objective, len(values), self.memory)
            self.reducer.reduce(values, power, weight, chunks, retain, omega=omega, alpha=alpha)
        else:
            if alpha is not None:
                self.reducer.neurons(values, weight, retain=True, alpha=alpha)
            for name, value in _batch_gradient(self.model, values, power, weight, retain):
                add_sum(omega, name, value)


def _batch_gradient(model: nn.Module, values: Tensor, power: int, weight: Tensor | None, retain: bool) -> Pairs:
    """|∂ Σ_m L_m/∂θ|ᵖ of one batch: the estimate in the authors' code and in most libraries."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = values.sum() if weight is None else (values * (weight if power == 1 else weight.sqrt())).sum()
    grads = torch.autograd.grad(total, list(named.values()), retain_graph=retain, allow_unused=True)
    return ((n, power_of(g, power)) for n, g in zip(named, grads, strict=True) if g is not None)


def _omega_or_zeros(omega: Sums, name: str, parameter: Tensor) -> Tensor:
    """Return Ω of a parameter; zeros if the output does not depend on it."""
    half = parameter.dtype in (torch.float16, torch.bfloat16)
    return omega[name].detach() if name in omega else torch.zeros_like(parameter, dtype=torch.float32 if half else None).detach()


def _check_finite(omega: Sums, alpha: Sums) -> None:
    """Raise ValueError for an importance that is NaN or infinite."""
    for name, value in omega.items():
        if not is_finite(value):
            raise ValueError(
                f"the importance of {name!r} is not finite: the output has NaN or infinity. Did training diverge? Has the data NaN?"
            )
    for name, value in alpha.items():
        if not is_finite(value):
            raise ValueError(
                f"the importance of layer {name!r} is not finite: activations have NaN or infinity. Did training diverge? Has the data NaN?"
            )
