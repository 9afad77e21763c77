"""The end of a training step, for all members of a fleet at once: momentum, parameters, implicit anchors.

    v ← μ v + ∂loss/∂θ;   θ ← θ − lr_f v;   θ ← θ + cΩ/(1 + cΩ) · (θ* − θ)   (the implicit anchor)

The code stores the momentum as u = lr_f v. The learning rates then enter only once, as weights of the members' losses, and the update is
the same for every member: u ← μ r u + ∂(lr_f loss_f)/∂θ, θ ← θ − u, where r is the rate of this step divided by that of the last.
Adam and AdamW divide the gradient by lr_f again (`selfless.engine.adam`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfless.engine.adam import adam_step, entry_rates
from selfless.engine.native.hardware import kernels
from selfless.engine.stack import Tensors, column
from selfless.preserve.capabilities import Anchored

if TYPE_CHECKING:
    from selfless.engine.fleet import Fleet


class Update:
    """Called with the gradients of Σ_f lr_f loss_f, None where one is zero, and the number of steps of this task so far."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.shares: list[Tensors] = []  # cΩ/(1 + cΩ) of each preserver, if no kernel computes it
        self.forget_shares()

    def __call__(self, grads: list[Tensor | None], step_number: Tensor) -> None:
        fleet, run = self.fleet, self.fleet.run
        names = [n for n, g in zip(fleet.trained, grads, strict=True) if g is not None]
        found = [g for g in grads if g is not None]
        params, speed = [fleet.trained[n] for n in names], [fleet.momentum[n] for n in names]
        if run.optimizer == "adamw" and run.weight_decay:
            for p in params:
                p.mul_(column(1 - run.weight_decay * fleet.lr, p))
        elif run.weight_decay:
            found = [g + run.weight_decay * column(fleet.lr, p) * p for g, p in zip(found, params, strict=True)]
        if fleet.second:
            self._by_adam(names, params, speed, found, step_number + 1)
            return
        if kernels(fleet.lr) is not None:
            self._in_kernel(names, params, speed, found)
        else:
            for u, g in zip(speed, found, strict=True):
                if fleet.rates.factors is None:
                    torch.add(g, u, alpha=run.momentum, out=u)
                else:
                    u.mul_(column(fleet.rates.ratio * run.momentum, u)).add_(g)
            torch._foreach_sub_(params, speed)
        for part, shares in zip(fleet.parts, self.shares, strict=True):
            if shares and fleet.anchored(part) and isinstance(part.term, Anchored):
                self._pull(shares, part.term.anchor(part.state).star)

    def _pull(self, shares: Mapping[str, Tensor], star: Mapping[str, Tensor]) -> None:
        """Move θ by its share of the way to θ*."""
        torch._foreach_lerp_([self.fleet.trained[n] for n in shares], [star[n] for n in shares], list(shares.values()))

    def _in_kernel(self, names: list[str], params: list[Tensor], speed: list[Tensor], grads: list[Tensor]) -> None:
        """Update momentum and parameters, apply one implicit anchor and reset held entries, in one GPU kernel per parameter."""
        fleet, fused = self.fleet, self._fused
        fast = kernels(fleet.lr)
        assert fast is not None
        term = None if fused is None else fleet.parts[fused].term
        anchor = term.anchor(fleet.parts[fused].state) if isinstance(term, Anchored) and fused is not None else None
        omega: Mapping[str, Tensor] = anchor.omega if anchor is not None else {}
        star: Mapping[str, Tensor] = anchor.star if anchor is not None else {}
        pull, held = fleet.rates.pull[fused or 0], fleet.parts[0].held or {}
        for n, p, u, g in zip(names, params, speed, grads, strict=True):
            fast.update_(p, u, g.contiguous(), fleet.rates.ratio, fleet.run.momentum, omega.get(n), star.get(n), pull, held.get(n))

    def _by_adam(self, names: list[str], params: list[Tensor], first: list[Tensor], grads: list[Tensor], t: Tensor) -> None:
        """Take step t of Adam or AdamW, then apply the implicit anchors with the step size of each entry, as the keeper does."""
        fleet = self.fleet
        unscaled = [torch.where(column(fleet.lr, g) > 0, g / column(fleet.lr, g), 0.0) for g in grads]  # gradients contain the rate
        adam_step(params, first, [fleet.second[n] for n in names], unscaled, fleet.lr, t, fleet.run.momentum)
        for part, strength in zip(fleet.parts, fleet.rates.preserve, strict=True):
            if fleet.anchored(part) and isinstance(part.term, Anchored):
                anchor = part.term.anchor(part.state)
                self._pull(anchor.shares({n: entry_rates(fleet.lr * strength, fleet.second[n], t) for n in names}), anchor.star)

    # ------------------------------------------------------------------------------------------------- shares and held entries
    @property
    def _fused(self) -> int | None:
        """The number of the first anchored preserver, whose anchor the update kernel applies; None if there is none."""
        return next((k for k, part in enumerate(self.fleet.parts) if self.fleet.anchored(part)), None)

    def refresh_shares(self) -> None:
        """Recompute the shares of the implicit anchors. An existing tensor is written in place, because a captured step reads it."""
        fleet = self.fleet
        for k, part in enumerate(fleet.parts):
            if not fleet.anchored(part) or fleet.second or (kernels(fleet.lr) is not None and k == self._fused):
                continue  # the update kernel computes the share itself; with Adam the shares change in every step
            assert isinstance(part.term, Anchored)
            step, tensors = fleet.rates.step_lambda(k), self.shares[k]
            shares = part.term.anchor(part.state).shares({n: column(step, p) for n, p in fleet.trained.items()})
            for name, share in shares.items():
                tensors[name] = tensors[name].copy_(share) if name in tensors else share

    def forget_shares(self) -> None:
        """Forget the shares, at the end of a task: Ω is another one."""
        self.shares = [{} for _ in self.fleet.parts]

    def hold_entries(self) -> None:
        """Let the update kernel reset the parameters of the only preserver, if there is such a kernel."""
        if len(self.fleet.parts) == 1 and kernels(self.fleet.lr) is not None and not self.fleet.second:
            self.fleet.parts[0].hold_in_update()

    def changing(self) -> list[Tensor]:
        """Return the tensors of the shares, which a step along a schedule changes."""
        return [share for shares in self.shares for share in shares.values()]
