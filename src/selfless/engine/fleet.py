"""The step: forward, loss, penalties, momentum, anchor, for all members of a fleet at once.

    loss_f = CE_f + λ_f Σ_l R(H_l,f)  (+ λ_Ω,f Σ Ω(θ − θ*)² when the anchor is explicit)
    v ← μ v + ∂loss/∂θ;   θ ← θ − lr_f v;   θ ← θ + cΩ/(1 + cΩ) · (θ* − θ)   (the implicit anchor)

The momentum is kept as u = lr_f v: the rates then enter once, as weights of the members' losses, and the update is the same few operations
for every member (u ← μ r u + ∂(lr_f loss_f)/∂θ, θ ← θ − u, with r the ratio of this step's rate to the last's).

Members differ in numbers (seed, strengths, σ, lr, epochs, ramp) and in the sparsifier; everything else is common. Each member's loss
depends on its own parameters alone, so the gradient of the sum is every member's gradient. A member that has had its epochs has the rate 0
and stays as it is. All that a step reads and writes are tensors of this object, which is what lets a GPU record it once and replay it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle, groupby
from typing import Any

import torch
from torch import Tensor

from selfless.data import Augment
from selfless.engine import rng
from selfless.engine.batches import FleetData
from selfless.engine.cuda_graph import record
from selfless.engine.hooks import Hooks
from selfless.engine.inhibition import Inhibitions
from selfless.engine.native import kernels
from selfless.engine.stack import Stack, Tensors, column, each
from selfless.preserve import Quadratic, State
from selfless.sparsify import Sparsifier
from selfless.spec import Run

AUGMENT = {"none": None, "flip": Augment(flip=True), "crop-flip": Augment(crop=4, flip=True), "resized": Augment(resized=56, flip=True)}


class Fleet:
    """Stacked parameters, momentum, Ω, θ*, α and the numbers of each member."""

    def __init__(self, runs: Sequence[Run], stack: Stack, params: Tensors, buffers: Tensors, device: torch.device) -> None:
        self.runs, self.stack, self.device = list(runs), stack, device
        self.run = runs[0]  # what all members have in common is read here
        self.size = len(runs)
        self.params, self.buffers = params, buffers
        self.epochs = [r.epochs for r in runs]
        self.trained = {n: self.params[n] for n in stack.trainable}
        self.momentum = {n: torch.zeros_like(p) for n, p in self.trained.items()}
        self.preserve = self.run.preserve
        self.preserve.check_network(buffers)
        self.hooks = Hooks(self.preserve, stack, self.trained)
        self.alpha: Tensors = {}
        self.tasks = 0
        self.seeds = torch.tensor([r.seed for r in runs], device=device)
        self.base_lr = torch.tensor([r.lr for r in runs], device=device)
        self.lr = self.base_lr.clone()
        self.inhibition = torch.tensor([r.sparsify.strength for r in runs], device=device)  # λ of this epoch
        self.strength = torch.tensor([r.preserve.strength for r in runs], device=device)
        self.groups = _groups([r.sparsify for r in runs])  # members whose penalty is computed as such
        self.inhibitions: Inhibitions | None = None  # those whose penalty joins the backward pass
        self._explicit = self.preserve.penalises and (self.run.anchor == "explicit" or not isinstance(self.preserve, Quadratic))
        self._reads_parameters = self._explicit or any(kind.reads != "activations" for kind, _ in self.groups)
        self.share: Tensors = {}
        self.ratio = torch.ones(self.size, device=device)
        self.pressure = self.lr * self.inhibition
        self.pull = torch.zeros(self.size, device=device)
        self.footprint = 0
        self._warmed: set[tuple[Sparsifier, int]] = set()
        self.clock = torch.zeros(2, dtype=torch.int64, device=device)
        self.cursor, self.step_number = self.clock[:1], self.clock[1:]  # views: samples seen in this epoch, steps in this task
        self._advances: dict[int, Tensor] = {}
        self.loss_sum = torch.zeros(self.size, device=device)
        self.hits = torch.zeros(self.size, device=device)
        self.order = torch.zeros(self.size, 0, dtype=torch.int64, device=device)
        self.factors: Tensor | None = None
        self.noise_key, self.drop_key = self.seeds.clone(), self.seeds.clone()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # batch size → the step as a CUDA graph
        self.augment = AUGMENT[self.run.augment]
        self.past: tuple[range, ...] = ()  # the heads of earlier tasks

    @property
    def state(self) -> State:
        """The preserver's, of every member."""
        return self.hooks.state

    # ----------------------------------------------------------------------------------------------------------------- a task
    def begin_task(self, data: FleetData, heads: tuple[range, ...], outputs: int, past: Sequence[range] = ()) -> None:
        """A fresh optimizer, as in the authors' code; the head's columns, and those of `past` tasks; the learning rates."""
        self.data, self.heads, self.past = data, heads, tuple(dict.fromkeys(past))
        self.allowed = None
        if len(heads) > 1:  # joint training: each sample is judged among the columns of its own head
            self.allowed = torch.zeros(outputs, outputs, dtype=torch.bool, device=self.device)
            for head in heads:
                self.allowed[head.start : head.stop, head.start : head.stop] = True
        self.graphs = {}
        self.order = torch.zeros(self.size, data.n, dtype=torch.int64, device=self.device)
        for v in self.momentum.values():
            v.zero_()
        self.lr.copy_(self.base_lr)
        self.step_number.zero_()
        self.factors = self._cosines(math.ceil(data.n / self.run.batch)) if self.run.schedule == "cosine" else None
        self.ratio.fill_(1.0)
        self._inhibit()
        self.refresh_shares()

    def _cosines(self, steps: int) -> Tensor:
        """(F, steps of the longest): each member's rate falls to 0 over its own epochs, and stays there."""
        place = torch.arange(max(self.epochs) * steps, dtype=torch.float64)
        own = torch.tensor(self.epochs, dtype=torch.float64)[:, None] * steps
        return torch.where(place < own, 0.5 * (1 + torch.cos(math.pi * place / own)), 0.0).float().to(self.device)

    def _inhibit(self) -> None:
        """Which penalties join the backward pass, with this task's α; the others stay in `groups`."""
        x, _ = self._sample(self.data)
        self.footprint = self.footprint or self.stack.footprint(x)
        self.inhibitions, kinds = None, [r.sparsify for r in self.runs]
        if self.stack.inhibits and self.stack.layers and not self.preserve.watches:
            widths = self.stack.widths(self.params, self.buffers, x)
            self.inhibitions = Inhibitions(kinds, widths, self.alpha, self.lr)
            self.groups = [(kind, members) for kind, members in _groups(kinds) if members.start not in self.inhibitions.members]

    def set_lr(self, lr: Tensor) -> None:
        """New rates between epochs: the momentum, which holds them, is scaled along."""
        ratio = torch.where(self.lr > 0, lr / self.lr, torch.zeros_like(lr))
        for v in self.momentum.values():
            v.mul_(column(ratio, v))
        self.lr.copy_(lr)
        self.refresh_shares()

    def refresh_shares(self) -> None:
        """What follows from the rates: lr·λ_SSL, and how far the implicit anchor pulls; after a change of rate or a new task."""
        self.pressure.copy_(self.lr * self.inhibition)
        if self.inhibitions is not None:
            self.inhibitions.press(self.pressure)
        step = self.lr * self.strength / (1 - self.run.momentum)
        self.pull.copy_(2 * step)
        if self.anchored and kernels(self.lr) is None:  # the kernel of the update takes its share itself
            assert isinstance(self.preserve, Quadratic)
            shares = self.preserve.shares(self.state, {n: column(step, p) for n, p in self.trained.items()})
            for name, share in shares.items():  # in place where there is one already: a recorded step reads that tensor
                self.share[name] = self.share[name].copy_(share) if name in self.share else share

    @property
    def anchored(self) -> bool:
        return self.run.anchor == "implicit" and self.tasks > 0 and isinstance(self.preserve, Quadratic) and bool(self.state["omega"])

    def begin_epoch(self, task: int, epoch: int) -> None:
        if self.factors is None and epoch in self.epochs:
            self.set_lr(torch.where(torch.tensor([epoch < e for e in self.epochs], device=self.device), self.lr, 0.0))
        if any(r.ramp for r in self.runs):  # in place, where a recorded step reads them
            now = [r.sparsify.strength * (min(1.0, epoch / r.ramp) if r.ramp else 1.0) for r in self.runs]
            self.inhibition.copy_(torch.tensor(now))
            self.refresh_shares()
        if self.preserve.turning(epoch, self.run.epochs):
            if self.preserve.gates:
                place = self.state["fresh"]["all"]
                place.copy_(rng.normal(rng.stream_key(self.seeds, "gates", task, epoch), place.shape[1]))
            self.hooks.turn(epoch, self.run.epochs)
            self.graphs = {}  # which read the state that was
        self.order.copy_(self.data.order(self.seeds, task, epoch))
        self.noise_key.copy_(rng.stream_key(self.seeds, "augment", task, epoch))
        self.drop_key.copy_(rng.stream_key(self.seeds, "drop", task, epoch))
        self.cursor.zero_()
        self.loss_sum.zero_()
        self.hits.zero_()

    def train_epoch(self, task: int, epoch: int) -> tuple[list[float], list[float]]:
        """One epoch; every member's mean task loss and training accuracy."""
        self.begin_epoch(task, epoch)
        self.stack.module.train()
        batch, n = self.run.batch, self.data.n
        with torch.random.fork_rng(devices=[]):  # dropout, where a model has it, draws from here
            torch.manual_seed(rng.one_seed(self.runs[0].seed, "dropout", task, epoch))
            for start in range(0, n, batch):
                size = min(batch, n - start)
                if self.recordable:
                    self._recorded(size).replay()
                else:
                    self.step(size)
        return (self.loss_sum.double() / n).tolist(), (self.hits.double() / n).tolist()

    def _sample(self, data: FleetData) -> tuple[Tensor, Tensor]:
        """The first sample of every member, (F, 1, …)."""
        still = self.augment.still() if self.augment else None
        return data.batch(torch.zeros(self.size, 1, dtype=torch.int64, device=self.device), still)

    # ----------------------------------------------------------------------------------------------------------------- a step
    def step(self, size: int) -> None:
        """One optimizer step on the next `size` samples of every member."""
        x, y = self._batch(size)
        if self.preserve.gates:
            self.hooks.open_gates(self.cursor, (self.data.n - 1) // self.run.batch * self.run.batch)
        other = self.hooks.dropped(self.params, self.drop_key, self.cursor)
        with self._precision():
            raw, found = self.stack.forward(self.params, self.buffers, x, self.inhibitions.by_layer if self.inhibitions else None, other)
        self._schedule()
        value, given = self._task_loss(raw, y)
        penalty = self._penalty(found)
        if self.preserve.distils and self.past:
            penalty = _sum(penalty, self.hooks.distillation(self.params, self.buffers, x, (raw, found), self.past, self.lr * self.strength))
        if self.preserve.gates:
            penalty = _sum(penalty, self.hooks.gate_cost(self.lr * self.strength))
        grads = self._gradients(value, given, penalty)
        with torch.no_grad():
            if self.preserve.gates:
                grads = self.hooks.learn_gates(grads, self.lr)
            self._update(grads)
            if self.preserve.projects:
                self.hooks.project()
            self.clock += self._advance(size)

    def _advance(self, size: int) -> Tensor:
        if size not in self._advances:
            self._advances[size] = torch.tensor([size, 1], device=self.device)
        return self._advances[size]

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        ready = self.data.next(self.order, self.cursor, size, self._dtype) if self.augment is None else None
        if ready is not None:
            return ready
        rows = self.cursor + torch.arange(size, device=self.device)
        x, y = self.data.batch(self.order.index_select(1, rows), self.augment, lambda k, _: self._noise(k, rows))
        return x.to(self._dtype), y

    def _precision(self) -> AbstractContextManager[Any]:
        bf16 = self.run.precision == "bf16" and self.device.type == "cuda" and not self.stack.native
        return torch.autocast("cuda", dtype=torch.bfloat16) if bf16 else nullcontext()

    @property
    def _dtype(self) -> torch.dtype:
        """Of the activations: a native network in bf16 keeps them in it, and its parameters and sums in float32."""
        return torch.bfloat16 if self.run.precision == "bf16" and self.device.type == "cuda" and self.stack.native else torch.float32

    @property
    def recordable(self) -> bool:
        return self.device.type == "cuda" and not self.data.first.mapped and self.preserve.recordable

    def _recorded(self, size: int) -> torch.cuda.CUDAGraph:
        """The step on `size` samples, recorded once a task and phase."""
        if size not in self.graphs:
            self.graphs[size] = record(lambda: self.step(size), lambda: self.clock.zero_(), self.changing())
        return self.graphs[size]

    def changing(self) -> list[Tensor]:
        """Every tensor that a step changes and that outlives it."""
        held = [*self.params.values(), *self.buffers.values(), *self.momentum.values(), *self.hooks.stepped(), *self.share.values()]
        held += self.inhibitions.pressed() if self.inhibitions is not None else []
        return [*held, self.clock, self.loss_sum, self.hits, self.lr, self.ratio, self.pressure, self.pull]

    def _noise(self, rows: int, places: Tensor) -> Tensor:
        """(rows, F·B) uniform numbers for augmentation: each member's own, by its place in the epoch."""
        key = torch.stack([rng.stream_key(self.noise_key, "row", k) for k in range(rows)])  # (rows, F)
        u = rng.uniform_at(key.flatten(), places).view(rows, self.size, -1)
        return u.flatten(1)

    def _task_loss(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, ∂/∂logits) of Σ_f lr_f mean CE within the head, lr_f/B (softmax − 1_y); losses and hits are counted."""
        fast = kernels(logits)
        if fast is not None and self.allowed is None:
            given = fast.cross_entropy(logits.detach().contiguous(), y, self.lr, self.heads[0], self.loss_sum, self.hits)
            return logits, given
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
            given = e.div_(norm).scatter_add_(-1, label, torch.full_like(norm, -1.0)).mul_((self.lr / y.shape[1])[:, None, None])
        return logits, given.to(logits.dtype)

    def _penalty(self, found: list[Tensor]) -> Tensor | None:
        """lr_f (λ_SSL Σ_l R (+ the explicit anchor)), summed over members; None where there is nothing."""
        terms: list[Tensor] = []
        live = self.stack.leaves(self.params) if self._reads_parameters else {}
        for kind, members in self.groups:
            if not any(r.sparsify.strength for r in self.runs[members]):
                continue
            reads = kind.reads
            if reads == "activations":
                xs = [(h[members], self._alpha_of(name, kind, members)) for name, h in zip(self.stack.layers, found, strict=True)]
            elif reads == "weights":
                every = self.params | live  # also frozen weights, which cost the same whatever is learnt
                xs = [(every[self.stack.weight_behind(name)][members], None) for name in self.stack.layers]
            else:
                xs = [(p[members], None) for p in live.values()]
            for x, alpha in xs:
                self._warm(kind, x)
                terms.append(torch.dot(self.pressure[members], each(kind.penalty, x, alpha)))
        if self._explicit and self.tasks:
            groups = ("omega", "anchor") if isinstance(self.preserve, Quadratic) else tuple(self.state)
            costs = each(self.preserve.penalty, {k: self.state[k] for k in groups}, live)
            terms.append((self.lr * self.strength * costs).sum())
        return torch.stack(terms).sum() if terms else None

    def _warm(self, kind: Sparsifier, x: Tensor) -> None:
        """Once outside the map, where the formula can keep its kernel (inside, it would make it anew every step)."""
        if len(x) > 1 and (kind, x.shape[-1]) not in self._warmed:
            with torch.no_grad():
                kind.penalty(x[0].detach())
            self._warmed.add((kind, x.shape[-1]))

    def _alpha_of(self, name: str, kind: Sparsifier, members: slice) -> Tensor | None:
        return self.alpha[name][members] if kind.discounted and name in self.alpha else None

    def _gradients(self, value: Tensor, given: Tensor, penalty: Tensor | None) -> list[Tensor | None]:
        extra = [penalty] if penalty is not None and penalty.requires_grad else []
        if not self.preserve.watches:
            return self.stack.gradients([value, *extra], [given, *[None] * len(extra)], self.params, more=list(self.stack.gates.values()))
        task = self.stack.gradients([value], [given], self.params, retain=bool(extra))
        unscaled = {n: g / column(self.lr, g) for n, g in zip(self.trained, task, strict=True) if g is not None}
        self._task_gradient = {n: torch.where(torch.isfinite(g), g, 0.0) for n, g in unscaled.items()}  # a member at rate 0 has stopped
        if not extra:
            return task
        more = self.stack.gradients(extra, [None], self.params)
        return [g if e is None else e if g is None else g + e for g, e in zip(task, more, strict=True)]

    def _schedule(self) -> None:
        """This step's rates; `ratio` is what the kept momentum must be scaled by."""
        fast = kernels(self.lr)
        if self.factors is not None and fast is not None:
            to = (self.lr, self.ratio, self.pressure, self.pull)
            fast.rates_(self.factors, self.step_number, self.base_lr, self.inhibition, self.strength, self.run.momentum, to)
            if self.inhibitions is not None:
                self.inhibitions.press(self.pressure)
        elif self.factors is not None:
            now = self.factors.index_select(1, self.step_number).squeeze(1)
            last = self.factors.index_select(1, (self.step_number - 1).clamp(min=0)).squeeze(1)
            self.ratio.copy_(torch.where(last > 0, now / last, 0.0))
            self.lr.copy_(self.base_lr * now)
            self.refresh_shares()

    def _update(self, grads: list[Tensor | None]) -> None:
        watched = self.preserve.watches
        before = {n: p.detach().clone() for n, p in self.trained.items()} if watched else {}
        names = [n for n, g in zip(self.trained, grads, strict=True) if g is not None]
        found = [g for g in grads if g is not None]
        params, speed = [self.trained[n] for n in names], [self.momentum[n] for n in names]
        if self.run.weight_decay:
            found = [g + self.run.weight_decay * column(self.lr, p) * p for g, p in zip(found, params, strict=True)]
        fast = kernels(self.lr)
        if fast is not None:
            omega, anchor = (self.state["omega"], self.state["anchor"]) if self.anchored else ({}, {})
            for n, p, u, g in zip(names, params, speed, found, strict=True):
                fast.update_(p, u, g.contiguous(), self.ratio, self.run.momentum, omega.get(n), anchor.get(n), self.pull)
        else:
            for u, g in zip(speed, found, strict=True):
                if self.factors is None:
                    torch.add(g, u, alpha=self.run.momentum, out=u)
                else:
                    u.mul_(column(self.ratio * self.run.momentum, u)).add_(g)
            torch._foreach_sub_(params, speed)
            held = list(self.share) if self.anchored else []
            if held:
                anchors, shares = [self.state["anchor"][n] for n in held], [self.share[n] for n in held]
                torch._foreach_lerp_([self.trained[n] for n in held], anchors, shares)
        if watched:
            self.hooks.observe(before, self._task_gradient)

    # -------------------------------------------------------------------------------------------------------- after the epochs
    def consolidate(self) -> None:
        """A task has ended: Ω, α and θ* of every member, in one pass over its training data."""
        self.hooks.close_gates(None, self.tasks)
        head = slice(self.heads[0].start, self.heads[0].stop) if len(self.heads) == 1 else slice(0, None)
        preserve = self.preserve
        still = self.augment.still() if self.augment else None
        size = self.run.batch if preserve.how == "per-batch" else self.data.at_once(self.footprint, self.run.batch)
        # a blurred task is what it was drawn from: importance is measured on draws, not on all rows alike
        drawn = None if self.data.weights is None else self.data.order(self.seeds, self.tasks, self.run.epochs)
        if preserve.measures or self.stack.layers:
            params = {n: p.detach() for n, p in self.params.items()}
            omega, alpha = self.stack.importance(
                params,
                self.buffers,
                lambda: ((x.to(self._dtype), y) for x, y in self.data.passes(size, still, drawn)),
                preserve,
                head,
                self.data.positive,
            )
        else:
            omega, alpha = {}, {}
        if preserve.encodes:
            self.hooks.encode(self._shuffled("encoder"), self.params, self.buffers, head, self.tasks)
        self.hooks.consolidate(omega)
        for name, a in alpha.items():
            old = self.alpha.get(name)
            new = a if old is None else old + a if self.run.alpha == "sum" else old + (a - old) / (self.tasks + 1)
            self.alpha[name] = new
        self.tasks += 1
        self.share = {}

    def _shuffled(self, purpose: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The task's data in batches, over and over in one order of its own."""
        still = self.augment.still() if self.augment else None
        order = rng.order(rng.stream_key(self.seeds, purpose, self.tasks), self.data.n, self.data.weights)
        for rows in cycle(order.split(self.run.batch, 1)):
            x, y = self.data.batch(rows, still)
            yield x.to(self._dtype), y

    def finite(self) -> list[bool]:
        """Whether a member's parameters and importances are numbers, all of them."""
        held = [*self.params.values(), *self.state.get("omega", {}).values(), *self.alpha.values()]
        fine = torch.ones(self.size, dtype=torch.bool, device=self.device)
        for t in held:
            fine &= torch.isfinite(t.detach()).flatten(1).all(1)
        return [bool(x) for x in fine.tolist()]

    @torch.no_grad()
    def evaluate(self, data: FleetData, columns: range | None, task: int | None = None) -> list[float]:
        """Every member's accuracy on `data`, judged among `columns` (None: all outputs); of task number `task`, with the parameters that
        the preserver judges it with, or (None) with those being trained."""
        other = self.hooks.evaluated(task, self.tasks)
        self.hooks.close_gates(task, self.tasks)
        hits = torch.zeros(self.size, device=self.device)
        self.stack.module.eval()
        still = self.augment.still() if self.augment else None
        if not self.footprint:
            self.footprint = self.stack.footprint(self._sample(data)[0])
        for x, y in data.passes(data.at_once(self.footprint), still):
            with self._precision():
                if other:
                    logits, _ = self.stack.outputs(self.params | other, self.buffers, x.to(self._dtype))
                else:
                    logits, _ = self.stack.forward(self.params, self.buffers, x.to(self._dtype))
            if columns is not None:
                logits, y = logits[..., columns.start : columns.stop], y - columns.start
            hits += (logits.argmax(-1) == y).sum(1)
        return (hits.double() / data.n).tolist()

    # ------------------------------------------------------------------------------------------------------- saving, restoring
    def tensors(self) -> Tensors:
        """Everything that a step depends on, as flat named tensors."""
        flat = {f"params.{n}": p for n, p in self.params.items()} | {f"buffers.{n}": b for n, b in self.buffers.items()}
        flat |= {f"momentum.{n}": v for n, v in self.momentum.items()} | {f"alpha.{n}": a for n, a in self.alpha.items()}
        flat |= {f"state.{g}.{n}": t for g, ts in self.state.items() for n, t in ts.items()}
        return {n: t.detach() for n, t in flat.items()} | {"lr": self.lr, "step_number": self.step_number}

    def restore(self, tensors: Tensors, tasks: int) -> None:
        with torch.no_grad():
            for group, held in (("params", self.params), ("buffers", self.buffers), ("momentum", self.momentum)):
                for n, t in held.items():
                    t.copy_(tensors[f"{group}.{n}"])
            self.lr.copy_(tensors["lr"])
            self.step_number.copy_(tensors["step_number"])
        self.alpha = {n.removeprefix("alpha."): t.to(self.device) for n, t in tensors.items() if n.startswith("alpha.")}
        state: State = {group: {} for group in self.state}
        for key, t in tensors.items():
            if key.startswith("state."):
                _, group, name = key.split(".", 2)
                state.setdefault(group, {})[name] = t.to(self.device)
        self.hooks.state, self.tasks, self.share = state, tasks, {}


def _groups(kinds: list[Sparsifier]) -> list[tuple[Sparsifier, slice]]:
    """Neighbouring members with the same sparsifier, strengths aside."""
    alike = [dataclasses.replace(k, strength=0.0) for k in kinds]
    groups, start = [], 0
    for kind, same in groupby(alike):
        count = len(list(same))
        groups.append((kind, slice(start, start + count)))
        start += count
    return groups


def _sum(penalty: Tensor | None, more: Tensor) -> Tensor:
    return more if penalty is None else penalty + more
