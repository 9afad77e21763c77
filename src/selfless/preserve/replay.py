"""Replay: baselines that keep samples of old tasks. They use old data, which no other method here does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selfless.functional.shapes import wide
from selfless.preserve.base import MEMORY, Group, Preserver
from selfless.preserve.capabilities import Replays, Tensors
from selfless.terms import check_count, check_not_negative


@dataclass(frozen=True)
class Replay(Preserver, Replays):
    """Experience replay (Chaudhry et al., 2019): λ mean CE over `batch` samples, drawn in each step from a memory of old samples.

    The memory is a reservoir of `samples` samples of all old tasks; each sample of an old task is in it with the same probability. Uses old
    data. The paper fills the memory in every step of a single epoch and replays samples of the current task too. Here it is filled when a
    task ends, so that it holds old tasks alone. Replayed images are not augmented.
    """

    name: ClassVar[str] = "replay"
    is_weight: ClassVar[bool] = False
    groups: ClassVar[tuple[Group, ...]] = (MEMORY,)
    strength: float = 1.0
    samples: int = 200
    batch: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "samples", 1)
        check_count(self, "batch", 1)

    def replay_loss(self, outputs: Tensor, rows: Tensors, columns: Tensor) -> Tensor:
        """−log softmax(z)_y, with the softmax over `columns`."""
        log_p = wide(outputs).masked_fill(~columns, -torch.inf).log_softmax(-1)
        return -log_p.gather(-1, rows["label"].unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class DERpp(Replay):
    """Dark Experience Replay++ (Buzzega et al., 2020): λ mean (1/C ‖z − z*‖² + β CE) over samples from a memory, as `Replay` has it.

    z* are the stored logits of the sample in the C columns of its own task; λ and λβ are the paper's α and β. Uses old data. The paper
    stores logits while a task is trained, and draws two batches, one for each term. Here the memory is filled when a task ends, with the
    logits of the trained network, and one batch serves both terms.
    """

    name: ClassVar[str] = "der"
    keeps_logits: ClassVar[bool] = True
    strength: float = 1.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "beta")

    def replay_loss(self, outputs: Tensor, rows: Tensors, columns: Tensor) -> Tensor:
        """1/C Σ_c (z_c − z*_c)² + β CE, c the columns of the sample's own task."""
        own = self.own_columns(rows, outputs)
        gap = torch.where(own, wide(outputs) - rows["logits"], 0.0).square().sum(-1) / own.sum(-1)
        return gap + self.beta * super().replay_loss(outputs, rows, columns)
