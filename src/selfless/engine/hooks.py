"""What a preserver does in a fleet beside its penalty: its state, of every member at once, and the places where it is called.

    turn                     before an epoch: its next phase
    dropped                  in the forward pass of a step: nodes turned off, towards θ*
    open, learn, close       gates in the forward pass, the step of what they are made of, the gates that a task is judged with
    distillation             in the loss: old heads' outputs, and codes of features, beside those of θ*
    project, observe         after a step: what may not move is put back; what the step did is remembered
    encode, consolidate      after a task: the codes of its features; the new state
    evaluated                the parameters that a task is judged with

Each of the preserver's pure functions is mapped over the members. A step writes the state in place, and only the groups that the preserver
names (`stepped`): a GPU has recorded which tensors these are. `turn` and `consolidate` may replace it; what was recorded is void then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless.engine import rng
from selfless.engine.stack import Stack, Tensors, column, each
from selfless.network.wiring import Wiring
from selfless.preserve import Preserver, State


class Hooks:
    """A preserver, the stacked state it keeps, and the stack and parameters it acts on."""

    def __init__(self, preserve: Preserver, stack: Stack, trained: Tensors) -> None:
        self.preserve, self.stack, self.trained = preserve, stack, trained
        self.state: State = torch.func.vmap(preserve.init)(self.values())
        self._share = torch.zeros(())

    def values(self) -> Tensors:
        return {n: p.detach() for n, p in self.trained.items()}

    def own_heads(self, tasks: Sequence[tuple[range, ...]], outputs: int) -> None:
        """For preservers that must know: the number of the task whose own head an entry of the output layer is, −1 where tasks share it."""
        users: dict[int, set[int]] = {}
        for t, heads in enumerate(tasks):
            for place in (c for head in heads for c in head):
                users.setdefault(place, set()).add(t)
        owner = torch.tensor([next(iter(users[c])) if len(users.get(c, ())) == 1 else -1 for c in range(outputs)], dtype=torch.int16)
        if not self.preserve.owns or len(tasks) == 1 or bool((owner < 0).all()):
            return
        for name in self.stack.output_layer(outputs):
            p = self.trained[name]
            rows = owner.to(p.device).view(1, -1, *[1] * (p.dim() - 2))
            self.state["head"][name] = rows.expand(p.shape).clone()

    def wire(self, wiring: Wiring) -> None:
        """Gates for a preserver that has them."""
        size = len(next(iter(self.trained.values())))
        states = [self.preserve.wire({g: {n: t[m] for n, t in ts.items()} for g, ts in self.state.items()}, wiring) for m in range(size)]
        self.state = {g: {n: torch.stack([s[g][n] for s in states]) for n in ts} for g, ts in states[0].items()}

    # ---------------------------------------------------------------------------------------------------------------- an epoch
    @torch.no_grad()
    def turn(self, epoch: int, epochs: int) -> None:
        """The preserver goes to its next phase."""
        turned = torch.func.vmap(lambda state, params: self.preserve.turn(state, params, epoch, epochs))
        self.state, changed = turned(self.state, self.values())
        for name, value in changed.items():
            self.trained[name].copy_(value)

    # ------------------------------------------------------------------------------------------------------------------ a step
    def stepped(self) -> list[Tensor]:
        """The tensors of the state that a step changes."""
        return [t for group in self.preserve.stepped for t in self.state[group].values()]

    def dropped(self, params: Tensors, key: Tensor, cursor: Tensor) -> Tensors:
        """The parameters of this step's forward pass where they differ: nodes turned off, drawn by each member's `key` and the place
        `cursor` in the epoch."""
        if not self.preserve.drops or not self.state["anchor"]:
            return {}
        live, layers = self.stack.leaves(params), self.stack.nodes()
        sizes = [live[names[0]].shape[1] for names in layers.values()]
        places = cursor * sum(sizes) + torch.arange(sum(sizes), device=cursor.device)
        off = (rng.uniform_at(key, places) < self.preserve.drop_rate).split(sizes, 1)
        by_name = {n: gone for names, gone in zip(layers.values(), off, strict=True) for n in names}
        found: Tensors = torch.func.vmap(self.preserve.dropped)({"anchor": self.state["anchor"]}, live, by_name)
        return found

    def open_gates(self, cursor: Tensor, last: int) -> None:
        """The gates of this step, as leaves that the loss is differentiated for; `cursor` of the epoch's samples are over, and its last
        batch begins at `last`."""
        self._share = (cursor / last if last else torch.ones_like(cursor, dtype=torch.float32)).float().squeeze(0)
        found = torch.func.vmap(lambda state: self.preserve.gate(state, self._share))(self.state)
        self.stack.gates = {n: g.detach().requires_grad_() for n, g in found.items()}

    def gate_cost(self, rates: Tensor) -> Tensor:
        """Σ_f rate_f (what member f's gates cost)."""
        return torch.dot(rates, torch.func.vmap(self.preserve.gate_penalty)(self.state, self.stack.gates))

    def learn_gates(self, grads: list[Tensor | None], lr: Tensor) -> list[Tensor | None]:
        """What the gates are made of takes a step; the gradients of the parameters are left. The rate is in the gradients already."""
        own, ours = grads[: len(self.trained)], grads[len(self.trained) :]
        rates = lr.clamp(min=torch.finfo(torch.float32).tiny)
        given = {
            n: (torch.zeros_like(g) if d is None else d.float() / column(rates, g))
            for (n, g), d in zip(self.stack.gates.items(), ours, strict=True)
        }

        def learnt(state: State, gradients: Tensors, rate: Tensor) -> State:
            new = self.preserve.learn_gates(state, gradients, self._share, rate)
            return {group: new[group] for group in self.preserve.stepped}

        self._write(torch.func.vmap(learnt)(self.state, given, lr))
        return own

    def close_gates(self, task: int | None, tasks: int) -> None:
        """The gates that a task is judged with after `tasks` of them; before the first task, none."""
        if self.preserve.gates and "fresh" in self.state and (tasks or task is None):
            judged = None if task is None else min(task, tasks - 1)
            self.stack.gates = torch.func.vmap(lambda state: self.preserve.kept_gate(state, judged))(self.state)

    def distillation(
        self, params: Tensors, buffers: Tensors, x: Tensor, made: tuple[Tensor, list[Tensor]], past: Sequence[range], rates: Tensor
    ) -> Tensor:
        """Σ_f rate_f (Σ_old heads distil(z, z*) + code_drift(f, f*)), z and f the outputs and features `made`, z* and f* those of θ*."""
        logits, found = made
        old, features = self.stack.outputs(params | self.state["anchor"], buffers, x)
        costs = [each(self.preserve.distil, logits[..., h.start : h.stop], old[..., h.start : h.stop]) for h in past]
        if self.preserve.encodes:
            costs.append(each(self.preserve.code_drift, {"encoder": self.state["encoder"]}, found[-1].flatten(2), features[-1].flatten(2)))
        return torch.dot(rates, torch.stack(costs).sum(0))

    def encode(self, batches: Iterable[tuple[Tensor, Tensor]], params: Tensors, buffers: Tensors, head: slice, task: int) -> None:
        """Train the codes of a task's features on `batches` of x (F, M, …), y (F, M), its head being the output columns `head`."""
        last = next(reversed([n for n, m in self.stack.module.named_modules() if isinstance(m, nn.Linear)]))
        weight, bias = params[f"{last}.weight"][:, head].detach(), params.get(f"{last}.bias")

        def coded() -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
            for x, y in batches:
                features = self.stack.outputs(params, buffers, x)[1][-1].flatten(2).float()
                if features.shape[-1] != weight.shape[-1]:
                    raise ValueError(
                        f"{self.preserve.name} codes what the head reads, the output of {self.stack.layers[-1]!r}, of {features.shape[-1]} "
                        f"features; but {last!r} reads {weight.shape[-1]}. The last activation module must stand right before the head"
                    )
                yield features, partial(loss, (y - (head.start or 0)).flatten())

        def loss(y: Tensor, features: Tensor) -> Tensor:
            logits = features @ weight.mT + (0 if bias is None else bias[:, head].detach().unsqueeze(1))
            return F.cross_entropy(logits.flatten(0, 1), y, reduction="sum") / logits.shape[1]

        self.state = torch.func.vmap(self.preserve.coded)(self.state, self.preserve.fit(coded(), task))

    def project(self) -> None:
        """What a step may not move is put back."""
        for name, right in torch.func.vmap(self.preserve.project)(self.state, self.values()).items():
            self.trained[name].copy_(right)

    def observe(self, before: Tensors, gradients: Tensors) -> None:
        """A step has been made, from `before`."""
        seen = self.preserve.observe(self.state, before, self.trained, gradients)
        self._write({group: seen[group] for group in self.preserve.stepped})

    def _write(self, new: State) -> None:
        """In place: a recorded step reads and writes these tensors."""
        for group, tensors in new.items():
            for name, value in tensors.items():
                self.state[group][name].copy_(value)

    # ------------------------------------------------------------------------------------------------------------------ a task
    def consolidate(self, omega: Tensors) -> None:
        if self.state:
            self.state = torch.func.vmap(self.preserve.consolidate)(self.state, self.values(), omega)

    def evaluated(self, task: int | None, tasks: int) -> Tensors:
        """The parameters (those that differ) with which a task is judged; before the first task has ended, and within tasks, none do."""
        if task is None or not self.preserve.evaluates or not tasks:
            return {}
        judged = min(task, tasks - 1)  # a task that is still to come: as the newest
        found: Tensors = torch.func.vmap(lambda state, params: self.preserve.evaluated(state, params, judged))(self.state, self.values())
        return found
