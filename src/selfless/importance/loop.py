"""The loop that measures Ω and α: over batches and over the targets of the objective. A backend runs the network.

    Ω = 1/M Σ_m |∂L_m/∂θ|ᵖ        α = 1/M Σ_m |∂L_m/∂n|

`estimator="per-batch"` is the authors' estimate, Σ_batches |∂ Σ_{m∈batch} L_m/∂θ|ᵖ / M: noisier, smaller if p = 1, often larger if p = 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from selfless.distributed import Reduction
from selfless.distributed.shards import ShardedSums
from selfless.importance.objectives import Objective

Estimator = Literal["per-sample", "per-batch"]
Sums = dict[str, Tensor]
Pairs = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Importance:
    """Ω by parameter and α by layer, measured over `samples` samples."""

    omega: Sums
    alpha: Sums
    samples: int


class Backend(Protocol):
    """Runs a network and reduces its gradients: `importance.eager` for one model, `engine.importance` for a fleet."""

    def forward(self, batch: Any) -> tuple[Tensor, Any, int]:
        """Return the output, the labels and the number of samples of a batch."""

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
        """Add Σ_m w_m |∂L_m/∂θ|ᵖ of the last batch to `omega` and Σ_m w_m |∂L_m/∂n| to `alpha`; None: not wanted.

        `retain` keeps the graph for another pass.
        """


def accumulate(
    batches: Iterable[Any],
    backend: Backend,
    objective: Objective,
    alpha_objective: Objective | None = None,
    *,
    parameters: bool = True,
    neurons: bool = True,
    reduction: Reduction = Reduction(),  # noqa: B008
) -> Importance:
    """Return the means over all batches, and over all ranks of `reduction`.

    With an `alpha_objective`, α is its gradient, at the price of one more backward pass per batch.
    """
    if alpha_objective is not None and not parameters:
        objective, alpha_objective = alpha_objective, None  # only α is measured
    second = alpha_objective if neurons else None
    omega, alpha = reduction.sums(), dict[str, Tensor]()
    samples = 0
    for batch in reduction.batches(batches):
        output, labels, count = backend.forward(batch)
        if not count and not reduction.is_sharded:
            continue  # an empty batch adds nothing to the mean; with shards every rank has to take part in every pass
        # one backward pass per entry: (L, target, weight, gives Ω, gives α)
        passes = [(objective, *pair, parameters, second is None) for pair in objective.targets(output, labels)]
        passes += [(second, *pair, False, True) for pair in second.targets(output, labels)] if second is not None else []
        for k, (value, target, weight, gives_omega, gives_alpha) in enumerate(passes):
            more = k + 1 < len(passes)
            into = (omega if gives_omega else None), ((alpha if reduction.is_live else {}) if gives_alpha and neurons else None)
            backend.reduce(value, output, target, weight, omega=into[0], alpha=into[1], retain=more)
        samples += count if reduction.is_live else 0
    samples = reduction.finish(omega, alpha, samples)
    if samples == 0:
        raise ValueError("importance needs data, but the batches are empty; was the generator used before? Pass a new one or a DataLoader")
    for total in (*omega.values(), *alpha.values()):
        total /= samples  # in place: a second copy of Ω is as large as the model
    return Importance(omega, alpha, samples)


def add_sum(total: Sums, name: str, value: Tensor) -> None:
    """Add one value, which may be sparse, to `total` in place."""
    if isinstance(total, ShardedSums):
        total.add(name, value)
    elif name in total:
        total[name].add_(value)
    else:
        total[name] = value.to_dense() if value.is_sparse else value.clone()
