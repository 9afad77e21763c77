"""The one loop that measures Ω and α: over batches, over the targets of the objective, with an eager or a stacked backend.

    Ω = 1/M Σ_m |∂L_m/∂θ|ᵖ        α = 1/M Σ_m |∂L_m/∂n|

`estimator="per-batch"` is the authors' estimate, Σ_batches |∂ Σ_{m∈batch} L_m/∂θ|ᵖ / M: smaller and noisier.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from selfless.importance.objectives import Objective

Estimator = Literal["per-sample", "per-batch"]
Sums = dict[str, Tensor]


@dataclass(frozen=True)
class Importance:
    """Ω by parameter and α by layer, measured over `samples` samples."""

    omega: Sums
    alpha: Sums
    samples: int


class Backend(Protocol):
    """Runs a network and reduces its gradients: `importance.eager` for one model, `engine.importance` for a fleet."""

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | None, int]:
        """Return the output, the labels and the number of samples of a batch."""

    def reduce(
        self,
        objective: Objective,
        output: Tensor,
        target: Tensor | None,
        weight: Tensor | None,
        *,
        parameters: bool,
        neurons: bool,
        retain: bool,
    ) -> tuple[Sums, Sums]:
        """Return (Σ_m w_m |∂L_m/∂θ|ᵖ, Σ_m w_m |∂L_m/∂n|) of the last batch, each if wanted; `retain` keeps the graph."""


def accumulate(
    batches: Iterable[Any],
    backend: Backend,
    objective: Objective,
    alpha_objective: Objective | None = None,
    *,
    parameters: bool = True,
    neurons: bool = True,
) -> Importance:
    """Return the means over all batches. α is a gradient of `alpha_objective`, if given, at one more backward pass a batch."""
    if alpha_objective is not None and not parameters:
        objective, alpha_objective = alpha_objective, None  # only α is wanted
    apart = alpha_objective if neurons else None
    omega: Sums = {}
    alpha: Sums = {}
    samples = 0
    for batch in batches:
        output, labels, count = backend.forward(batch)
        requests = [(objective, *pair, parameters, apart is None) for pair in objective.targets(output, labels)]
        requests += [(apart, *pair, False, True) for pair in apart.targets(output, labels)] if apart is not None else []
        for k, (what, target, weight, own, seen) in enumerate(requests):
            more = k + 1 < len(requests)
            found = backend.reduce(what, output, target, weight, parameters=own, neurons=seen and neurons, retain=more)
            _add(omega, found[0])
            _add(alpha, found[1])
        samples += count
    if samples == 0:
        raise ValueError("there is no data to measure importance on: the batches are empty (a generator that was used up, perhaps?)")
    return Importance({n: t / samples for n, t in omega.items()}, {n: t / samples for n, t in alpha.items()}, samples)


def _add(total: Sums, part: Sums) -> None:
    for name, value in part.items():
        total[name] = total[name].add_(value) if name in total else value.clone()
