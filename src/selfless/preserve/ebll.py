"""Encoder-based lifelong learning: LwF that also keeps what each old task needs of the features."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor

from selfless.preserve.base import Group
from selfless.preserve.capabilities import Encodes, Features, State
from selfless.preserve.lwf import LwF
from selfless.terms import check_count, check_positive


@dataclass(frozen=True)
class EBLL(LwF, Encodes):
    """Encoder-based lifelong learning (Rannen Triki et al., ICCV 2017). With f what the head reads, f* the same of θ*, the network before
    the task, and W_t the encoder of an old task t,

        λ ( LwF's distillation + a/2 Σ_old t ‖σ(W_t f) − σ(W_t f*)‖² ),   averaged over the batch, a = `drift`
        W_t:  min b ‖r(f) − f‖² + task loss of the head on r(f),   r(f) = V σ(W_t f), b = `reconstruction`; when task t ends

    so that features may change where no old task looks. `code` is the length of σ(W f). The autoencoder is trained on the task's data by
    `steps` steps of Adam at `rate` (the paper: Adadelta), from weights that a seeded generator draws: the same in a loop, alone and in a
    fleet. It reads f / mean Σ|f|, so that a step moves what σ is taken of by `rate` at most, however many features there are. Features
    are the input of the last linear layer; the paper takes those of the last convolution. Two stages, as in the paper: `warmup` epochs for
    a new head alone (never the last), then everything. In a loop the task's batches must come with labels.
    """

    name: ClassVar[str] = "ebll"
    groups: ClassVar[tuple[Group, ...]] = (*LwF.groups, Group("encoder", like_parameter=False))
    warmup: int = 1
    drift: float = 0.1
    code: int = 100
    reconstruction: float = 1e-2
    steps: int = 300
    rate: float = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("drift", "reconstruction", "rate"):
            check_positive(self, field)
        for field in ("code", "steps"):
            check_count(self, field, 1)

    def code_drift(self, state: State, features: Tensor, teacher: Tensor) -> Tensor:
        """a/2 mean_m Σ_t ‖σ(W_t f_m) − σ(W_t f*_m)‖² for features (M, N)."""
        encoder = state["encoder"]["all"].flatten(0, 1)  # (tasks · code, N)
        now, then = (torch.sigmoid(f.to(encoder.dtype) @ encoder.mT) for f in (features, teacher))
        return self.drift / 2 * (now - then).square().sum(-1).mean()

    def fit(self, batches: Iterable[Features], task: int) -> Tensor:
        """Train the encoders (F, code, N) of a task, one for each member, on as many of `batches` as there are steps."""
        weights: list[Tensor] = []
        optimizer: torch.optim.Optimizer | None = None
        length = torch.ones(1)
        for features, loss in islice(batches, self.steps):
            if optimizer is None:
                length = _length(features)
                weights = self.draw_weights(features, length, task)
                optimizer = torch.optim.Adam(weights, lr=self.rate)
            with torch.enable_grad():
                encoder, decoder = weights
                made = torch.sigmoid((features / length) @ encoder.mT) @ decoder.mT
                total = self.reconstruction * (made - features).square().sum(-1).mean(-1).sum() + loss(made)
                for weight, gradient in zip(weights, torch.autograd.grad(total, weights), strict=True):
                    weight.grad = gradient
            optimizer.step()
        if not weights:
            raise ValueError("there is no data to train the task's encoder on: the batches are empty (a generator used up, perhaps?)")
        return (weights[0] / length).detach()

    def draw_weights(self, features: Tensor, length: Tensor, task: int) -> list[Tensor]:
        """Draw the encoder and the decoder that training starts from, the same for every member."""
        members, width = len(features), features.shape[-1]
        draw = torch.Generator().manual_seed(task)
        shapes = ((self.code, width), (width, self.code))
        drawn = [torch.randn(shape, generator=draw, dtype=torch.float64) / shape[1] ** 0.5 for shape in shapes]
        encoder, decoder = (w.to(features).expand(members, -1, -1) for w in drawn)
        return [(encoder * length).requires_grad_(), decoder.clone().requires_grad_()]

    def add_encoder(self, state: State, encoder: Tensor) -> State:
        """Return the state with one more task's encoder (code, N)."""
        held = state["encoder"].get("all")
        if held is not None and held.shape[1:] != encoder.shape:
            raise ValueError(
                f"the encoders of old tasks read {held.shape[2]} features, and the head of this task reads {encoder.shape[1]}; "
                "EBLL needs heads on the same features"
            )
        new = encoder.unsqueeze(0)
        return {**state, "encoder": {"all": new if held is None else torch.cat([held, new])}}


def _length(features: Tensor) -> Tensor:
    """mean_m Σ_i |f_i| of every member, (F, 1, 1)."""
    return features.detach().abs().sum(-1).mean(-1).clamp(min=torch.finfo(features.dtype).tiny).view(-1, 1, 1)
