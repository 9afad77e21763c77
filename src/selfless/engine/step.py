"""The training step: forward pass, loss, penalties and their gradients, for all members of a fleet at once.

    loss_f = CE_f + λ_f Σ_l R(H_l,f)  (+ λ_Ω,f Σ Ω(θ − θ*)² when the anchor is explicit)

The learning rates enter as weights of the members' losses: the gradients are those of Σ_f lr_f loss_f. What follows them, momentum and
implicit anchor, is in `selfless.engine.update`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfless.engine import rng
from selfless.engine.batches import FleetData
from selfless.engine.inhibition import inhibition_off, penalties
from selfless.engine.lanes import Ahead
from selfless.engine.memory import draw_rows, replay_cost
from selfless.engine.native.hardware import kernels
from selfless.engine.stack import Tensors, add_weighted, by_member, column, each
from selfless.engine.update import Update
from selfless.functional import measures_curvature
from selfless.preserve.base import cost_of
from selfless.preserve.capabilities import Anchored, Encodes, Gated, Observes, Proximal, Replays
from selfless.sparsify import Sparsifier, size_of

if TYPE_CHECKING:
    from selfless.engine.fleet import Fleet
    from selfless.engine.part import Part


class Step:
    """A training step, with the tensors it needs besides those of the fleet: the data and heads of the task, clocks, sums."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, device, size = fleet, fleet.device, fleet.size
        self.clock = torch.zeros(2, dtype=torch.int64, device=device)
        self.cursor, self.step_number = self.clock[:1], self.clock[1:]  # views: samples so far in this epoch, steps so far in this task
        self.loss_sum = torch.zeros(size, device=device)
        self.hits = torch.zeros(size, device=device)
        self.order = torch.zeros(size, 0, dtype=torch.int64, device=device)
        self.noise_key, self.drop_key, self.memory_key = (fleet.seeds.clone() for _ in range(3))
        self.noise_keys = torch.zeros(3, size, dtype=torch.int64, device=device)  # the first rows, for the kernel that crops and flips
        self.update = Update(fleet)
        self.observes = any(isinstance(part.term, Observes) for part in fleet.parts)
        self.copies = self.observes or any(part.projects_steps for part in fleet.parts)  # True if a step needs θ before it
        implicit = fleet.run.anchor == "implicit"
        self.explicit = [part.term.penalises and not (implicit and isinstance(part.term, Anchored)) for part in fleet.parts]
        self.ahead, self._advances = Ahead(), dict[int, Tensor]()
        self._cached_kernels: set[tuple[Sparsifier, int]] = set()
        self._task_gradient: Tensors = {}
        self.data: FleetData
        self.heads: tuple[range, ...] = ()
        self.past: tuple[range, ...] = ()  # the heads of earlier tasks
        self.allowed: Tensor | None = None  # label → the columns of its head, for joint training

    def begin_task(self, data: FleetData, heads: tuple[range, ...], outputs: int, past: tuple[range, ...]) -> None:
        """Set the data and the heads of a task; `past` are the heads of earlier tasks."""
        self.ahead.drop()  # it reads the data of the last task
        self.data, self.heads, self.past, self.allowed = data, heads, past, None
        if len(heads) > 1:  # joint training: each sample is classified among the columns of its own head
            self.allowed = torch.zeros(outputs, outputs, dtype=torch.bool, device=self.fleet.device)
            for head in heads:
                self.allowed[head.start : head.stop, head.start : head.stop] = True
        self.order = torch.zeros(self.fleet.size, data.n, dtype=torch.int64, device=self.fleet.device)
        self.step_number.zero_()

    def begin_epoch(self, task: int, epoch: int) -> None:
        """Set the order of samples and the keys of an epoch; reset the sums."""
        drawn = self.ahead.take(task, epoch) or self._draw(task, epoch)
        for tensor, value in zip((self.order, self.noise_key, self.noise_keys, self.drop_key, self.memory_key), drawn, strict=True):
            tensor.copy_(value)
        for counter in (self.cursor, self.loss_sum, self.hits):
            counter.zero_()

    def prepare_epoch(self, task: int, epoch: int) -> None:
        """Draw the numbers of a later epoch beside the steps of this one, which are launched already; a GPU alone can do this."""
        self.ahead.start(self.order, task, epoch, lambda: self._draw(task, epoch))

    def _draw(self, task: int, epoch: int) -> list[Tensor]:
        """Return the order of samples of an epoch and its keys: of augmentation, of its rows, of dropped nodes, of replayed samples."""
        keys = rng.epoch_keys([run.seed for run in self.fleet.runs], len(self.noise_keys), task, epoch, self.fleet.device)
        return [self.data.order_by(keys[1]), keys[0], keys[4:], keys[2], keys[3]]

    def changing(self) -> list[Tensor]:
        """Return the tensors that a step changes."""
        return [*self.update.changing(), self.clock, self.loss_sum, self.hits]

    @property
    def head_columns(self) -> slice:
        """The output columns of the task; all columns in joint training."""
        return slice(self.heads[0].start, self.heads[0].stop) if len(self.heads) == 1 else slice(0, None)

    def measures(self, number: int) -> bool:
        """Return True if step `number` of a task, or of its phase, counted from 0, measures the curvature of a distillation."""
        return bool(self.past) and any(part.is_damped for part in self.fleet.parts) and measures_curvature(number)

    def __call__(self, size: int, measures: bool = False) -> None:
        """Take one optimizer step on the next `size` samples of every member. `measures`: measure the curvature of distillation first."""
        fleet = self.fleet
        x, y = self.batch(size)
        other: Tensors = {}
        for part in fleet.parts:
            part.open_gates(self.cursor, (self.data.n - 1) // fleet.run.batch * fleet.run.batch)
            if fleet.tasks:
                other |= part.dropped_parameters(fleet.params, self.drop_key, self.cursor)
        with self.precision():
            logits, hidden = fleet.stack.forward(fleet.params, fleet.buffers, x, self._inhibition(), other, self._read_layers)
        if fleet.rates.advance(self.step_number):
            fleet.refresh_shares()
        if fleet.rates.auto.is_open:  # after the rates: a member whose rate is 0 does not train
            self._measure_scales(hidden)
        head_logits, logit_grads = self.task_loss(logits, y)
        costs = {
            k: d
            for k, p in enumerate(fleet.parts)
            if (d := p.distillation(fleet.params, fleet.buffers, x, (logits, hidden), self.past)) is not None
        }
        own = self._measure_curvature(costs) if measures else {}
        penalty = self._penalty(hidden, {k: cost for k, cost in costs.items() if k not in own})
        grads, gate_grads = self._gradients(head_logits, logit_grads, penalty)
        for k, found in own.items():
            weights = self._distillation_weights(k)
            grads = [add_weighted(g, d, weights) for g, d in zip(grads, found, strict=True)]
        with torch.no_grad():
            for part in fleet.parts:
                part.step_gates(gate_grads, fleet.lr)
            before = {n: p.detach().clone() for n, p in fleet.trained.items()} if self.copies else {}
            self.update(grads, self.step_number)
            for part, strength in zip(fleet.parts, fleet.rates.preserve, strict=True):
                if isinstance(part.term, Proximal):
                    part.proximal_step(fleet.rates.plain_step, strength)
            for part in fleet.parts:
                part.project_step(before)
            for part in fleet.parts:
                part.project()
            for part in fleet.parts:
                part.observe(before, self._task_gradient, fleet.lr)
            self.clock += self._advance(size)

    # ------------------------------------------------------------------------------------------------------------------- data
    def _advance(self, size: int) -> Tensor:
        """Return what a step on `size` samples adds to the clock."""
        if size not in self._advances:
            self._advances[size] = torch.tensor([size, 1], device=self.fleet.device)
        return self._advances[size]

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the next `size` samples of every member, x (F, B, …) and y (F, B)."""
        augment = self.fleet.augment
        ready = self.data.next(self.order, self.cursor, size, self.dtype, augment, self.noise_keys)
        if ready is not None:
            return ready
        rows = self.cursor + torch.arange(size, device=self.fleet.device)
        x, y = self.data.batch(self.order.index_select(1, rows), augment, lambda k, _: self._noise(k, rows))
        return x.to(self.dtype), y

    def _noise(self, rows: int, places: Tensor) -> Tensor:
        """Return uniform numbers for augmentation, (rows, F·B); each depends on the member and the position in the epoch."""
        key = rng.row_keys(self.noise_key, rows)
        u = rng.uniform_at(key.flatten(), places).view(rows, self.fleet.size, -1)
        return u.flatten(1)

    def precision(self) -> AbstractContextManager[Any]:
        """Return the autocast context: bf16 on a GPU for a network that is not native, else none."""
        return torch.autocast("cuda", dtype=torch.bfloat16) if self._bf16 and not self.fleet.stack.native else nullcontext()

    @property
    def dtype(self) -> torch.dtype:
        """The type of the activations: bfloat16 in a native network at precision bf16. Parameters and sums are float32."""
        return torch.bfloat16 if self._bf16 and self.fleet.stack.native else torch.float32

    @property
    def _bf16(self) -> bool:
        return self.fleet.run.precision == "bf16" and self.fleet.device.type == "cuda"

    # --------------------------------------------------------------------------------------------------------------- the loss
    def task_loss(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits, their gradient) for Σ_f lr_f mean CE within the head. The gradient is lr_f/B (softmax − 1_y).

        Also add to the sums of losses and of correct predictions.
        """
        fast, lr = kernels(logits), self.fleet.lr
        if fast is not None and self.allowed is None:
            return logits, fast.cross_entropy(logits.detach().contiguous(), y, lr, self.heads[0], self.loss_sum, self.hits)
        if self.allowed is None:
            head = self.heads[0]
            logits, y = logits[..., head.start : head.stop], y - head.start
        with torch.no_grad():
            z = logits.float() if self.allowed is None else logits.float().masked_fill(~self.allowed[y], -torch.inf)
            label = y.unsqueeze(-1)
            self.hits += (z.argmax(-1) == y).sum(1)
            log_p = z.log_softmax(-1)
            self.loss_sum -= log_p.gather(-1, label).sum((1, 2))
            ones = torch.ones_like(label, dtype=log_p.dtype)
            grads = log_p.exp_().scatter_add_(-1, label, -ones).mul_(column(lr / y.shape[1], log_p))
        return logits, grads.to(logits.dtype)

    def _inhibition(self) -> dict[str, list[Any]]:
        """Return {layer: the gradients of sparsifiers to add in the backward pass}."""
        found: dict[str, list[Any]] = {}
        for slot in self.fleet.slots:
            for name, gradient in slot.gradients():
                found.setdefault(name, []).append(gradient)
        return found

    @property
    def _read_layers(self) -> tuple[str, ...]:
        """The layers whose outputs are in a term of the loss."""
        fleet = self.fleet
        groups = [(slot, kind, members) for slot in fleet.slots for kind, members in slot.groups]
        if any(kind.reads == "activations" and slot.is_on(members) for slot, kind, members in groups):
            return fleet.stack.layers
        return fleet.stack.layers[-1:] if any(isinstance(part.term, Encodes) for part in fleet.parts) else ()

    def _measure_curvature(self, costs: Mapping[int, Tensor]) -> dict[int, list[Tensor | None]]:
        """Measure κ of each damped distillation. Return ∂D/∂θ of each, by the number of its preserver."""
        fleet, found = self.fleet, dict[int, list[Tensor | None]]()
        for k, cost in costs.items():
            if fleet.parts[k].is_damped:
                with inhibition_off(fleet.slots):
                    found[k] = fleet.stack.gradients([cost.sum()], [None], fleet.params, retain=True)
                with torch.no_grad():
                    fleet.parts[k].measure_curvature(cost, found[k], fleet.lr > 0)
        return found

    def _distillation_weights(self, part: int) -> Tensor:
        """lr λ', with the damped strength λ' of every member, (F,)."""
        rates = self.fleet.rates
        return rates.lr * rates.preserve[part] * self.fleet.parts[part].damping(rates.step_lambda(part))

    def _penalty(self, hidden: list[Tensor], distillations: Mapping[int, Tensor]) -> Tensor | None:
        """Return Σ_f lr_f (λ_SSL Σ_l R + the terms of the preservers); None if there are no terms."""
        fleet = self.fleet
        reads_parameters = any(self.explicit) or any(kind.reads != "activations" for slot in fleet.slots for kind, _ in slot.groups)
        leaves = fleet.stack.leaves(fleet.params) if reads_parameters else {}
        terms = self._sparsity(hidden, leaves)
        held = [(k, part) for k, part in enumerate(fleet.parts) if self.explicit[k] and fleet.tasks]
        terms += [(fleet.lr * fleet.rates.preserve[k] * each(partial(cost_of, p.term), p.state, leaves)).sum() for k, p in held]
        terms += [torch.dot(self._distillation_weights(k), cost) for k, cost in distillations.items()]
        for k, part in enumerate(fleet.parts):
            if isinstance(part.term, Gated | Replays):
                rates = fleet.lr * fleet.rates.preserve[k]
                terms += [cost for cost in (part.gate_cost(rates), self._replay_cost(part, rates)) if cost is not None]
        return torch.stack(terms).sum() if terms else None

    def _replay_cost(self, part: Part, rates: Tensor) -> Tensor | None:
        """Return Σ_f rate_f · the loss on a batch of old samples; None without a memory. Old samples are not inhibited."""
        fleet, rows = self.fleet, draw_rows(part, self.memory_key, self.cursor)
        if not rows or not isinstance(part.term, Replays):
            return None
        with self.precision():
            outputs, _ = fleet.stack.forward(fleet.params, fleet.buffers, rows["input.x"].to(self.dtype), differentiable=())
        return replay_cost(part.term, outputs, rows, self.head_columns, rates)

    def _sparsity(self, hidden: list[Tensor], leaves: Tensors) -> list[Tensor]:
        """Return lr_f λ_f R of the sparsifiers whose gradient is not added in the backward pass."""
        fleet, terms = self.fleet, list[Tensor]()
        for slot, lr_lambda in zip(fleet.slots, fleet.rates.lr_lambda, strict=True):
            for kind, members in slot.groups:
                if not slot.is_on(members):
                    continue
                for x, alpha in self._read(kind, members, hidden, leaves):
                    self._cache_kernel(kind, x)
                    terms.append(torch.dot(lr_lambda[members], penalties(kind, x, alpha)))
        return terms

    @torch.no_grad()
    def _measure_scales(self, hidden: list[Tensor]) -> None:
        """Pass R of this step to the scales of strengths "auto", and set λ to what they say."""
        rates = self.fleet.rates
        for k in rates.auto.scales:
            rates.auto.follow(k, self.sizes(k, [h.detach() for h in hidden], auto=True), self.fleet.lr > 0)
        rates.set_auto()
        rates.refresh_sparsity()

    def sizes(self, k: int, hidden: list[Tensor], auto: bool = False) -> Tensor:
        """Return R of the k-th sparsifier of every member (F,); 0 if it is off. `auto`: of those with strength "auto" alone."""
        slot, sizes = self.fleet.slots[k], torch.zeros_like(self.fleet.rates.sparsify[k])
        for kind, members in slot.neighbours:
            if kind.is_auto or (slot.is_on(members) and not auto):
                found = self._read(kind, members, hidden, self.fleet.params)
                for x, _ in found:
                    self._cache_kernel(kind, x)
                sizes[members] = torch.stack([by_member(partial(size_of, kind), x, alpha) for x, alpha in found]).sum(0)
        return sizes

    def _read(self, kind: Sparsifier, members: slice, hidden: list[Tensor], leaves: Tensors) -> list[tuple[Tensor, Tensor | None]]:
        """Return the tensors that a sparsifier reads of these members, with their α."""
        fleet = self.fleet
        if kind.reads == "activations":
            named = zip(fleet.stack.layers, hidden, strict=True)
            return [(h[members], fleet.alpha[name][members] if name in fleet.alpha else None) for name, h in named]
        if kind.reads == "weights":
            weights = fleet.params | leaves  # includes frozen weights, whose penalty is constant
            return [(weights[fleet.stack.weight_before(name)][members], None) for name in fleet.stack.layers]
        return [(p[members], None) for p in leaves.values()]

    def _cache_kernel(self, kind: Sparsifier, x: Tensor) -> None:
        """Call the formula once outside of vmap, so that its kernel is cached. Under vmap it would be computed in every step."""
        if len(x) > 1 and (kind, x.shape[-1]) not in self._cached_kernels:
            with torch.no_grad():
                size_of(kind, x[0].detach())
            self._cached_kernels.add((kind, x.shape[-1]))

    def _gradients(self, logits: Tensor, logit_grads: Tensor, penalty: Tensor | None) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of the parameters and of the gates."""
        fleet, gates = self.fleet, list(self.fleet.stack.gates.values())
        extra = [penalty] if penalty is not None and penalty.requires_grad else []
        if self.observes:
            found = fleet.stack.gradients([logits], [logit_grads], fleet.params, retain=bool(extra), more=gates)
            unscaled = {n: g / column(fleet.lr, g) for n, g in zip(fleet.trained, found, strict=False) if g is not None}
            self._task_gradient = {n: torch.where(torch.isfinite(g), g, 0.0) for n, g in unscaled.items()}  # the rate may be 0
            if extra:
                more = fleet.stack.gradients(extra, [None], fleet.params, more=gates)
                found = [g if e is None else e if g is None else g + e for g, e in zip(found, more, strict=True)]
        else:
            found = fleet.stack.gradients([logits, *extra], [logit_grads, *[None] * len(extra)], fleet.params, more=gates)
        return found[: len(fleet.trained)], found[len(fleet.trained) :]
