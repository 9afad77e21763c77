"""The learning rates of a fleet, and the values computed from them: lr·λ of the sparsifiers, the pull of the implicit anchors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from selfless.engine.auto import AutoStrengths
from selfless.engine.inhibition import Slot
from selfless.engine.native.hardware import kernels
from selfless.spec import Run


class Rates:
    """Tensors (F,) that a step reads. They are written in place, because a CUDA graph contains their addresses."""

    def __init__(self, runs: Sequence[Run], slots: Sequence[Slot], device: torch.device) -> None:
        self.runs, self.slots, self.momentum, self.device = runs, slots, runs[0].momentum, device
        self.epochs = [r.epochs for r in runs]
        self.base = torch.tensor([r.lr for r in runs], device=device)
        self.lr = self.base.clone()
        self.ratio = torch.ones(len(runs), device=device)  # the rate of this step / the rate of the last step
        self.auto = AutoStrengths(slots, device)
        self.sparsify = [torch.tensor([kind.fixed_strength for kind in slot.kinds], device=device) for slot in slots]  # λ of this epoch
        self.grown = torch.tensor([0.0 if r.ramp else 1.0 for r in runs], device=device)  # the share of λ in this epoch
        self.lr_lambda = [self.lr * strength for strength in self.sparsify]
        parts = range(len(runs[0].preserve.parts))
        self.preserve = [torch.tensor([r.preserve.parts[k].fixed_strength for r in runs], device=device) for k in parts]
        self.pull = [torch.zeros(len(runs), device=device) for _ in parts]  # c = 2 lr λ_Ω/(1 − μ) of the implicit anchor
        self.factors: Tensor | None = None  # (F, steps) of a schedule that sets the rate of every step: cosine, step

    def changing(self) -> list[Tensor]:
        """Return the tensors that a step changes."""
        return [self.lr, self.ratio, *self.lr_lambda, *self.pull, *self.sparsify, *self.auto.tensors().values()]

    def begin_task(self, steps: int, schedule: str) -> None:
        """Start a task with the learning rates of the runs; an epoch has `steps` steps."""
        self.lr.copy_(self.base)
        self.factors = self._factors(steps, schedule) if schedule in ("cosine", "step") else None
        self.ratio.fill_(1.0)

    def _factors(self, steps: int, schedule: str) -> Tensor:
        """Return the factors of the learning rates, (F, most steps); 0 after the last epoch of a member.

        cosine   ½ (1 + cos πp), p the share of the member's steps that are done
        step     0.1 in the last tenth of its epochs (rounded down, at least one, never the first), 1 before
        """
        step = torch.arange(max(self.epochs) * steps, dtype=torch.float64)
        total = torch.tensor(self.epochs, dtype=torch.float64)[:, None] * steps
        last = torch.tensor([steps * max(1, epochs - max(1, epochs // 10)) for epochs in self.epochs])[:, None]
        values = 0.5 * (1 + torch.cos(math.pi * step / total)) if schedule == "cosine" else torch.where(step < last, 1.0, 0.1).double()
        return torch.where(step < total, values, 0.0).float().to(self.device)

    def ramp(self, epoch: int) -> bool:
        """Set λ of an epoch for runs whose λ grows over their first epochs; return True if there are any."""
        if not any(r.ramp for r in self.runs):
            return False
        shares = [min(1.0, epoch / r.ramp) if r.ramp else 1.0 for r in self.runs]
        self.grown.copy_(torch.tensor(shares))
        for slot, strength in zip(self.slots, self.sparsify, strict=True):
            strength.copy_(torch.tensor([kind.fixed_strength * share for kind, share in zip(slot.kinds, shares, strict=True)]))
        self.set_auto()
        return True

    def set_auto(self) -> None:
        """Set λ of the sparsifiers with strength "auto" to what their scales say now."""
        for k, share in self.auto.shares.items():
            self.sparsify[k].copy_(torch.where(share > 0, self.auto.strengths(k) * self.grown, self.sparsify[k]))

    def full(self, slot: int) -> Tensor:
        """λ of the sparsifiers in a slot (F,), without the ramp."""
        fixed = torch.tensor([kind.fixed_strength for kind in self.slots[slot].kinds], device=self.device)
        return fixed + self.auto.strengths(slot) if slot in self.auto.scales else fixed

    def step_lambda(self, part: int) -> Tensor:
        """lr λ_Ω/(1 − μ) of one preserver: how far a constant gradient of 1 in its penalty moves a parameter per step."""
        return self.lr * self.preserve[part] / (1 - self.momentum)

    @property
    def plain_step(self) -> Tensor:
        """How far a constant gradient of 1 moves a parameter per step, (F,): lr/(1 − μ) of SGD; of Adam, which rescales gradients, lr."""
        return self.lr / (1 - self.momentum) if self.runs[0].optimizer == "sgd" else self.lr

    def refresh(self) -> None:
        """Recompute the values that depend on the rates."""
        self.refresh_sparsity()
        for k, pull in enumerate(self.pull):
            pull.copy_(2 * self.step_lambda(k))

    def refresh_sparsity(self) -> None:
        """Recompute lr·λ of the sparsifiers."""
        for slot, lr_lambda, strength in zip(self.slots, self.lr_lambda, self.sparsify, strict=True):
            lr_lambda.copy_(self.lr * strength)
            slot.scale(lr_lambda)

    def advance(self, step_number: Tensor) -> bool:
        """Set the rates of this step by `factors`, if there are any. Return True if the caller must refresh what depends on the rates."""
        fast = kernels(self.lr)
        if self.factors is None:
            return False
        if fast is not None:
            to = (self.lr, self.ratio, self.lr_lambda[0], self.pull[0])
            fast.rates_(self.factors, step_number, self.base, self.sparsify[0], self.preserve[0], self.momentum, to)
            self.slots[0].scale(self.lr_lambda[0])
            for slot, lr_lambda, strength in zip(self.slots[1:], self.lr_lambda[1:], self.sparsify[1:], strict=True):
                lr_lambda.copy_(self.lr * strength)
                slot.scale(lr_lambda)
            for k, pull in enumerate(self.pull[1:], 1):
                pull.copy_(2 * self.step_lambda(k))
            return False
        now = self.factors.index_select(1, step_number).squeeze(1)
        last = self.factors.index_select(1, (step_number - 1).clamp(min=0)).squeeze(1)
        self.ratio.copy_(torch.where(last > 0, now / last, 0.0))
        self.lr.copy_(self.base * now)
        return True
