"""The step: forward, loss, penalties, momentum, anchor, for all members of a fleet at once.

    loss_f = CE_f + λ_f Σ_l R(H_l,f)  (+ λ_Ω,f Σ Ω(θ − θ*)² when the anchor is explicit)
    v ← μ v + ∂loss/∂θ;   θ ← θ − lr_f v;   θ ← θ + cΩ/(1 + cΩ) · (θ* − θ)   (the implicit anchor)

The momentum is kept as u = lr_f v: the rates then enter once, as weights of the members' losses, and the update is the same few operations
for every member (u ← μ r u + ∂(lr_f loss_f)/∂θ, θ ← θ − u, with r the ratio of this step's rate to the last's).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfless.engine import rng
from selfless.engine.batches import FleetData
from selfless.engine.native.hardware import kernels
from selfless.engine.stack import Tensors, column, each
from selfless.preserve.capabilities import Anchored, Observes
from selfless.sparsify import Sparsifier

if TYPE_CHECKING:
    from selfless.engine.fleet import Fleet


class Step:
    """What a training step reads and writes besides the fleet's own tensors: the task's data and heads, clocks, sums."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, device, size = fleet, fleet.device, fleet.size
        self.clock = torch.zeros(2, dtype=torch.int64, device=device)
        self.cursor, self.step_number = self.clock[:1], self.clock[1:]  # views: samples seen in this epoch, steps in this task
        self.loss_sum = torch.zeros(size, device=device)
        self.hits = torch.zeros(size, device=device)
        self.order = torch.zeros(size, 0, dtype=torch.int64, device=device)
        self.noise_key, self.drop_key = fleet.seeds.clone(), fleet.seeds.clone()
        self.shares: list[Tensors] = [{} for _ in fleet.parts]  # of the implicit anchors, where no kernel computes them
        self.observes = any(isinstance(part.term, Observes) for part in fleet.parts)
        implicit = fleet.run.anchor == "implicit"
        self.explicit = [part.term.penalises and not (implicit and isinstance(part.term, Anchored)) for part in fleet.parts]
        self._advances: dict[int, Tensor] = {}
        self._warm_kernels: set[tuple[Sparsifier, int]] = set()
        self._task_gradient: Tensors = {}
        self.data: FleetData
        self.heads: tuple[range, ...] = ()
        self.past: tuple[range, ...] = ()  # the heads of earlier tasks
        self.allowed: Tensor | None = None

    def begin_task(self, data: FleetData, heads: tuple[range, ...], outputs: int, past: tuple[range, ...]) -> None:
        """Take the task's data and its heads."""
        self.data, self.heads, self.past, self.allowed = data, heads, past, None
        if len(heads) > 1:  # joint training: each sample is classified among the columns of its own head
            self.allowed = torch.zeros(outputs, outputs, dtype=torch.bool, device=self.fleet.device)
            for head in heads:
                self.allowed[head.start : head.stop, head.start : head.stop] = True
        self.order = torch.zeros(self.fleet.size, data.n, dtype=torch.int64, device=self.fleet.device)
        self.step_number.zero_()

    def begin_epoch(self, task: int, epoch: int) -> None:
        """Draw the epoch's order and keys; start the sums anew."""
        seeds = self.fleet.seeds
        self.order.copy_(self.data.order(seeds, task, epoch))
        self.noise_key.copy_(rng.stream_key(seeds, "augment", task, epoch))
        self.drop_key.copy_(rng.stream_key(seeds, "drop", task, epoch))
        self.cursor.zero_()
        self.loss_sum.zero_()
        self.hits.zero_()

    def changing(self) -> list[Tensor]:
        """The tensors that a step changes."""
        return [*(t for shares in self.shares for t in shares.values()), self.clock, self.loss_sum, self.hits]

    @property
    def head_columns(self) -> slice:
        """The task's output columns; all of them in joint training."""
        return slice(self.heads[0].start, self.heads[0].stop) if len(self.heads) == 1 else slice(0, None)

    def __call__(self, size: int) -> None:
        """Take one optimizer step on the next `size` samples of every member."""
        fleet = self.fleet
        x, y = self._batch(size)
        other: Tensors = {}
        for part in fleet.parts:
            part.open_gates(self.cursor, (self.data.n - 1) // fleet.run.batch * fleet.run.batch)
            if fleet.tasks:
                other |= part.dropped(fleet.params, self.drop_key, self.cursor)
        with self.precision():
            raw, found = fleet.stack.forward(fleet.params, fleet.buffers, x, self._pair_gradients(), other)
        if fleet.rates.advance(self.step_number):
            fleet.refresh_shares()
        value, given = self._task_loss(raw, y)
        penalty = self._penalty(x, raw, found)
        grads, gate_grads = self._gradients(value, given, penalty)
        with torch.no_grad():
            for part in fleet.parts:
                part.step_gates(gate_grads, fleet.lr)
            before = {n: p.detach().clone() for n, p in fleet.trained.items()} if self.observes else {}
            self._update(grads)
            for part in fleet.parts:
                part.project()
            for part in fleet.parts:
                part.observe(before, self._task_gradient)
            self.clock += self._advance(size)

    # ------------------------------------------------------------------------------------------------------------------- data
    def _advance(self, size: int) -> Tensor:
        if size not in self._advances:
            self._advances[size] = torch.tensor([size, 1], device=self.fleet.device)
        return self._advances[size]

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        augment = self.fleet.augment
        ready = self.data.next(self.order, self.cursor, size, self.dtype) if augment is None else None
        if ready is not None:
            return ready
        rows = self.cursor + torch.arange(size, device=self.fleet.device)
        x, y = self.data.batch(self.order.index_select(1, rows), augment, lambda k, _: self._noise(k, rows))
        return x.to(self.dtype), y

    def _noise(self, rows: int, places: Tensor) -> Tensor:
        """(rows, F·B) uniform numbers for augmentation: each member's own, by its place in the epoch."""
        key = torch.stack([rng.stream_key(self.noise_key, "row", k) for k in range(rows)])  # (rows, F)
        u = rng.uniform_at(key.flatten(), places).view(rows, self.fleet.size, -1)
        return u.flatten(1)

    def precision(self) -> AbstractContextManager[Any]:
        """Autocast for bf16 on a GPU, where the network is not native."""
        return torch.autocast("cuda", dtype=torch.bfloat16) if self._bf16 and not self.fleet.stack.native else nullcontext()

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations: a native network in bf16 keeps them in it, and its parameters and sums in float32."""
        return torch.bfloat16 if self._bf16 and self.fleet.stack.native else torch.float32

    @property
    def _bf16(self) -> bool:
        return self.fleet.run.precision == "bf16" and self.fleet.device.type == "cuda"

    # --------------------------------------------------------------------------------------------------------------- the loss
    def _task_loss(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits, ∂/∂logits) of Σ_f lr_f mean CE within the head, lr_f/B (softmax − 1_y); count losses and hits."""
        fast, lr = kernels(logits), self.fleet.lr
        if fast is not None and self.allowed is None:
            return logits, fast.cross_entropy(logits.detach().contiguous(), y, lr, self.heads[0], self.loss_sum, self.hits)
        if self.allowed is None:
            head = self.heads[0]
            logits, y = logits[..., head.start : head.stop], y - head.start
        with torch.no_grad():
            z = logits.float() if self.allowed is None else logits.float().masked_fill(~self.allowed[y], -torch.inf)
            label = y.unsqueeze(-1)
            top, best = z.max(-1, keepdim=True)
            e = (z - top).exp_()
            norm = e.sum(-1, keepdim=True)
            self.loss_sum += (norm.log() + top - z.gather(-1, label)).sum((1, 2))
            self.hits += (best == label).sum((1, 2))
            given = e.div_(norm).scatter_add_(-1, label, torch.full_like(norm, -1.0)).mul_((lr / y.shape[1])[:, None, None])
        return logits, given.to(logits.dtype)

    def _pair_gradients(self) -> dict[str, list[Any]]:
        """Layer → the gradients of pair forms that join the backward pass."""
        found: dict[str, list[Any]] = {}
        for slot in self.fleet.slots:
            for name, gradient in slot.by_layer.items():
                found.setdefault(name, []).append(gradient)
        return found

    def _penalty(self, x: Tensor, raw: Tensor, found: list[Tensor]) -> Tensor | None:
        """lr_f (λ_SSL Σ_l R + what the preservers add), summed over members; None where there is nothing."""
        fleet = self.fleet
        reads = any(self.explicit) or any(kind.reads != "activations" for slot in fleet.slots for kind, _ in slot.groups)
        live = fleet.stack.leaves(fleet.params) if reads else {}
        terms = self._sparsity(found, live)
        for k, part in enumerate(fleet.parts):
            if self.explicit[k] and fleet.tasks:
                terms.append((fleet.lr * fleet.rates.preserve[k] * each(part.term.penalty, part.state, live)).sum())
        total = torch.stack(terms).sum() if terms else None
        for k, part in enumerate(fleet.parts):
            rates = fleet.lr * fleet.rates.preserve[k]
            for more in (
                part.distillation(fleet.params, fleet.buffers, x, (raw, found), self.past, rates),
                part.gate_cost(rates),
            ):
                total = more if total is None else total if more is None else total + more
        return total

    def _sparsity(self, found: list[Tensor], live: Tensors) -> list[Tensor]:
        """lr_f λ_f R of the sparsifiers that are computed as such."""
        fleet, terms = self.fleet, list[Tensor]()
        for slot, lr_lambda in zip(fleet.slots, fleet.rates.lr_lambda, strict=True):
            for kind, members in slot.groups:
                if not slot.is_on(members):
                    continue
                for x, alpha in self._read(kind, members, found, live):
                    self._warm(kind, x)
                    terms.append(torch.dot(lr_lambda[members], each(kind.penalty, x, alpha)))
        return terms

    def _read(self, kind: Sparsifier, members: slice, found: list[Tensor], live: Tensors) -> list[tuple[Tensor, Tensor | None]]:
        """What a sparsifier reads of some members, with their α."""
        fleet = self.fleet
        if kind.reads == "activations":
            alpha = fleet.alpha if kind.discounted else {}
            named = zip(fleet.stack.layers, found, strict=True)
            return [(h[members], alpha[name][members] if name in alpha else None) for name, h in named]
        if kind.reads == "weights":
            every = fleet.params | live  # also frozen weights, which cost the same whatever is learned
            return [(every[fleet.stack.weight_before(name)][members], None) for name in fleet.stack.layers]
        return [(p[members], None) for p in live.values()]

    def _warm(self, kind: Sparsifier, x: Tensor) -> None:
        """Call the formula once outside the map, where it can keep its kernel (inside, it would make it anew every step)."""
        if len(x) > 1 and (kind, x.shape[-1]) not in self._warm_kernels:
            with torch.no_grad():
                kind.penalty(x[0].detach())
            self._warm_kernels.add((kind, x.shape[-1]))

    # ----------------------------------------------------------------------------------------------------- gradients and update
    def _gradients(self, value: Tensor, given: Tensor, penalty: Tensor | None) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients of parameters and of gates."""
        fleet, gates = self.fleet, list(self.fleet.stack.gates.values())
        extra = [penalty] if penalty is not None and penalty.requires_grad else []
        if self.observes:
            found = fleet.stack.gradients([value], [given], fleet.params, retain=bool(extra), more=gates)
            unscaled = {n: g / column(fleet.lr, g) for n, g in zip(fleet.trained, found, strict=False) if g is not None}
            self._task_gradient = {n: torch.where(torch.isfinite(g), g, 0.0) for n, g in unscaled.items()}  # a stopped member has rate 0
            if extra:
                more = fleet.stack.gradients(extra, [None], fleet.params, more=gates)
                found = [g if e is None else e if g is None else g + e for g, e in zip(found, more, strict=True)]
        else:
            found = fleet.stack.gradients([value, *extra], [given, *[None] * len(extra)], fleet.params, more=gates)
        return found[: len(fleet.trained)], found[len(fleet.trained) :]

    def refresh_shares(self) -> None:
        """How far the implicit anchors pull; in place where there is a tensor already, which a captured step reads."""
        fleet = self.fleet
        for k, part in enumerate(fleet.parts):
            if not fleet.anchored(part) or (kernels(fleet.lr) is not None and k == self._fused):
                continue  # the update kernel computes the share itself
            assert isinstance(part.term, Anchored)
            step, held = fleet.rates.step_lambda(k), self.shares[k]
            shares = part.term.anchor(part.state).shares({n: column(step, p) for n, p in fleet.trained.items()})
            for name, share in shares.items():
                held[name] = held[name].copy_(share) if name in held else share

    @property
    def _fused(self) -> int | None:
        """The number of the preserver whose anchor the update kernel takes: the first that is anchored."""
        return next((k for k, part in enumerate(self.fleet.parts) if self.fleet.anchored(part)), None)

    def _update(self, grads: list[Tensor | None]) -> None:
        """Momentum, the step, the implicit anchors."""
        fleet, run = self.fleet, self.fleet.run
        names = [n for n, g in zip(fleet.trained, grads, strict=True) if g is not None]
        found = [g for g in grads if g is not None]
        params, speed = [fleet.trained[n] for n in names], [fleet.momentum[n] for n in names]
        if run.weight_decay:
            found = [g + run.weight_decay * column(fleet.lr, p) * p for g, p in zip(found, params, strict=True)]
        if kernels(fleet.lr) is not None:
            self._update_in_kernel(names, params, speed, found)
        else:
            for u, g in zip(speed, found, strict=True):
                if fleet.rates.factors is None:
                    torch.add(g, u, alpha=run.momentum, out=u)
                else:
                    u.mul_(column(fleet.rates.ratio * run.momentum, u)).add_(g)
            torch._foreach_sub_(params, speed)
        for part, shares in zip(fleet.parts, self.shares, strict=True):
            if shares and fleet.anchored(part) and isinstance(part.term, Anchored):
                star = part.term.anchor(part.state).star
                torch._foreach_lerp_([fleet.trained[n] for n in shares], [star[n] for n in shares], list(shares.values()))

    def _update_in_kernel(self, names: list[str], params: list[Tensor], speed: list[Tensor], grads: list[Tensor]) -> None:
        """On a GPU: momentum, the step and one implicit anchor in one kernel a parameter."""
        fleet, fused = self.fleet, self._fused
        fast = kernels(fleet.lr)
        assert fast is not None
        term = None if fused is None else fleet.parts[fused].term
        anchor = term.anchor(fleet.parts[fused].state) if isinstance(term, Anchored) and fused is not None else None
        omega: Mapping[str, Tensor] = anchor.omega if anchor is not None else {}
        star: Mapping[str, Tensor] = anchor.star if anchor is not None else {}
        pull = fleet.rates.pull[fused or 0]
        for n, p, u, g in zip(names, params, speed, grads, strict=True):
            fast.update_(p, u, g.contiguous(), fleet.rates.ratio, fleet.run.momentum, omega.get(n), star.get(n), pull)
