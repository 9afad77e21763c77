"""Encoder-based lifelong learning: LwF that also protects the part of the features that each old task needs."""

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
    """Encoder-based lifelong learning (Rannen Triki et al., ICCV 2017).

        λ ( LwF's distillation + a/2 Σ_old t ‖σ(W_t f) − σ(W_t f*)‖² ),   averaged over the batch, a = `drift`
        at the end of task t:  W_t, V = argmin b ‖r(f) − f‖² + task loss of the head on r(f),   r(f) = V σ(W_t f), b = `reconstruction`

    f are the features that the head reads, f* those of θ*, the network before the task, and W_t is the encoder of an old task t. Features
    may change in directions that no encoder reads. `code` is the length of σ(W f). The autoencoder is trained on the task's data with
    `steps` steps of Adam at `rate` (the paper uses Adadelta). Its first weights come from a seeded generator and are the same in a loop,
    alone and in a fleet. It reads f / mean Σ|f|, so that one step changes the argument of σ by at most `rate` for any number of features.
    Features are the input of the last linear layer; in the paper, the output of the last convolution. There are two stages, as in the
    paper: `warmup` epochs train a new head alone (never the last epoch), then all parameters are trained. Batches need labels.
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
        """Train the encoders (F, code, N) of a task, one per member, with one step for each of the first `steps` batches."""
        weights: list[Tensor] = []
        optimizer: torch.optim.Optimizer | None = None
        scale = torch.ones(1)
        for features, loss in islice(batches, self.steps):
            if optimizer is None:
                scale = _feature_scale(features)
                weights = self.draw_weights(features, scale, task)
                optimizer = torch.optim.Adam(weights, lr=self.rate)
            with torch.enable_grad():
                encoder, decoder = weights
                decoded = torch.sigmoid((features / scale) @ encoder.mT) @ decoder.mT
                total = self.reconstruction * (decoded - features).square().sum(-1).mean(-1).sum() + loss(decoded)
                for weight, gradient in zip(weights, torch.autograd.grad(total, weights), strict=True):
                    weight.grad = gradient
            optimizer.step()
        if not weights:
            raise ValueError("the encoder needs data, but the batches are empty; was the generator used before? Pass a DataLoader")
        return (weights[0] / scale).detach()

    def draw_weights(self, features: Tensor, scale: Tensor, task: int) -> list[Tensor]:
        """Return the first [encoder, decoder] of every member, the same for all."""
        members, width = len(features), features.shape[-1]
        generator = torch.Generator().manual_seed(task)
        shapes = ((self.code, width), (width, self.code))
        normal = [torch.randn(shape, generator=generator, dtype=torch.float64) / shape[1] ** 0.5 for shape in shapes]
        encoder, decoder = (w.to(features).expand(members, -1, -1) for w in normal)
        return [(encoder * scale).requires_grad_(), decoder.clone().requires_grad_()]

    def add_encoder(self, state: State, encoder: Tensor) -> State:
        """Return the state with one more task's encoder (code, N)."""
        old = state["encoder"].get("all")
        if old is not None and old.shape[1:] != encoder.shape:
            raise ValueError(
                f"the encoders of old tasks read {old.shape[2]} features, but the head of this task reads {encoder.shape[1]}; "
                "EBLL needs all heads on the same features"
            )
        new = encoder.unsqueeze(0)
        return {**state, "encoder": {"all": new if old is None else torch.cat([old, new])}}


def _feature_scale(features: Tensor) -> Tensor:
    """mean_m Σ_i |f_i| of every member, (F, 1, 1)."""
    return features.detach().abs().sum(-1).mean(-1).clamp(min=torch.finfo(features.dtype).tiny).view(-1, 1, 1)
