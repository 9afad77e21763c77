"""Objectives: the function L whose gradient is the importance."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from selfless.functional.shapes import classes_last, has_known_classes
from selfless.network.calling import IGNORED, check_labels, check_shape, class_numbers, labels_of

Fisher = Literal["empirical", "sampled", "exact"]
Loss = Callable[[Any, Any], Tensor]  # (output, batch) → one loss per sample, (M,)


class Objective(Protocol):
    """L, one value per sample. Ω = mean_m |∂L_m/∂θ|ᵖ and α = mean_m |∂L_m/∂n|.

    Two more attributes are optional and False by default: `draws_targets` (`targets` draws random numbers) and `by_layer` (L is a sum over
    layers, and no gradient flows from one layer into another).
    """

    @property
    def power(self) -> int:
        """p of Ω."""

    def targets(self, output: Tensor, labels: Any) -> list[tuple[Any, Tensor | None]]:
        """Return the (target, weight) pairs to differentiate, tensors of M rows or None: one pair, or one per class."""

    def value(self, output: Tensor, target: Any) -> Tensor:
        """Return L_m, (M,)."""


def draws_targets(objective: Objective) -> bool:
    """Return True if the objective draws random numbers, which the members of a fleet would share."""
    return bool(getattr(objective, "draws_targets", False))


def is_by_layer(objective: Objective) -> bool:
    """Return True if the objective is a sum over layers, each with its input held fixed."""
    return bool(getattr(objective, "by_layer", False))


@dataclass(frozen=True)
class FunctionNorm:
    """MAS: L = ‖f(x)‖², the squared norm of the output. It needs no labels."""

    power: int = 1

    def targets(self, output: Tensor, labels: Tensor | None) -> list[tuple[Tensor | None, Tensor | None]]:
        return [(None, None)]

    def value(self, output: Tensor, target: Tensor | None) -> Tensor:
        return output.reshape(len(output), -1).square().sum(1)


@dataclass(frozen=True)
class LayerNorms(FunctionNorm):
    """MAS in its local form: L = Σ_l ‖y_l‖², where y_l is the output of layer l with its input held fixed (`importance.layerwise`)."""

    by_layer: ClassVar[bool] = True


@dataclass(frozen=True)
class LogLikelihood:
    """EWC: L = log p(y|x), summed over positions for outputs (M, T, C). Labels of −100 are ignored.

    `fisher` says where y comes from: "empirical": the labels of the data; "sampled": one label drawn from the model; "exact": the
    expectation over all classes, Σ_c p_c (∂ log p_c)², which takes one backward pass per class.
    """

    fisher: Fisher = "empirical"
    generator: torch.Generator | None = None
    power: int = 2

    @property
    def draws_targets(self) -> bool:
        return self.fisher == "sampled"

    def targets(self, output: Tensor, labels: Tensor | None) -> list[tuple[Tensor | None, Tensor | None]]:
        """Return the labels of `fisher`: one pair, or for the exact Fisher one pair (class, p_c) per class."""
        if self.fisher == "empirical":
            if labels is None:
                raise ValueError(
                    "the empirical Fisher needs labels: yield (x, y) pairs or dicts with 'labels', pass loss=, or use fisher='sampled'"
                )
            return [(class_numbers(labels, "pass the loss: consolidate(…, loss=lambda output, batch: <one loss per sample>)"), None)]
        if self.fisher == "sampled" and not has_known_classes(output, labels):
            warnings.warn(
                f"fisher='sampled' takes the last axis of the outputs {tuple(output.shape)} as the classes; if they are on axis 1, yield "
                "(x, y) pairs, whose labels have the shape of the other axes",
                stacklevel=2,
            )
        p = (output if labels is None or self.fisher == "exact" else classes_last(output, labels)).detach().softmax(-1)
        if self.fisher == "sampled":
            drawn = torch.multinomial(p.flatten(0, -2), 1, generator=self.generator).view(p.shape[:-1])
            if labels is not None and labels.shape == drawn.shape:
                drawn = drawn.masked_fill(labels.eq(IGNORED), IGNORED)
            return [(drawn, None)]
        if p.dim() != 2:
            raise ValueError(f"the exact Fisher needs outputs of shape (batch, classes), not {tuple(p.shape)}; use fisher='sampled'")
        return [(torch.full((len(p),), c, device=p.device), p[:, c]) for c in range(p.shape[1])]

    def value(self, output: Tensor, target: Tensor | None) -> Tensor:
        """log p(y_m|x_m), summed over positions, (M,)."""
        assert target is not None
        output = classes_last(output, target)
        losses = F.cross_entropy(output.flatten(0, -2), target.flatten().long(), reduction="none", ignore_index=IGNORED)
        return -losses.view(len(output), -1).sum(1)

    def check_target(self, output: Tensor, target: Tensor) -> None:
        """Raise ValueError for a label of the data that is no column of the output."""
        if self.fisher == "empirical":
            output = classes_last(output, target)
            check_shape(target, output)
            check_labels(target, output.shape[-1])


@dataclass(frozen=True)
class OwnLoss:
    """EWC with the user's own loss: L = loss(output, batch), one value per sample. It takes the place of −log p(y|x)."""

    function: Loss
    power: int = 2

    def targets(self, output: Tensor, labels: Any) -> list[tuple[Any, Tensor | None]]:
        return [(labels, None)]  # the whole batch: `selfless.importance.eager` passes it instead of labels

    def value(self, output: Tensor, target: Any) -> Tensor:
        """loss(output, batch), (M,)."""
        values = self.function(output, target)
        if not isinstance(values, Tensor) or values.shape != output.shape[:1]:
            found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"loss= must return one loss per sample, a tensor of shape {tuple(output.shape[:1])}, but it returned {found}; use "
                "reduction='none' in it, and sum over all axes but the first"
            )
        return values


def with_loss(objective: Objective, loss: Loss | None) -> Objective:
    """Return the objective with the user's loss in place of log p(y|x); an objective without labels, such as that of MAS, stays."""
    if loss is None or not isinstance(objective, LogLikelihood):
        return objective
    if not callable(loss):
        raise TypeError(f"loss= takes a function of (output, batch) that returns one loss per sample, not {loss!r}")
    if objective.fisher != "empirical":
        raise ValueError(f"loss= takes the labels of the data, but fisher={objective.fisher!r} draws them from the model; leave one out")
    return OwnLoss(loss, objective.power)


def next_token_loss(output: Tensor, batch: Any) -> Tensor:
    """L_m = −Σ_t log p(y_{t+1} | x_1 … x_t), for causal language models whose labels are not shifted; labels of −100 are ignored.

    output: (M, T, words). The labels (M, T) are `labels` of a dict, as Hugging Face has them, or the second item of a tuple.
    """
    labels = labels_of(batch)
    if labels is None or output.dim() != 3 or labels.shape != output.shape[:2]:
        found = "none" if labels is None else str(tuple(labels.shape))
        raise ValueError(
            f"next_token_loss needs an output (samples, tokens, words) and labels (samples, tokens), not {tuple(output.shape)} and "
            f"{found}; yield dicts with 'labels', or (tokens, labels)"
        )
    return F.cross_entropy(output[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none").sum(1)
