"""One preserver of a fleet: its stacked state, and what its capabilities do at each place of a run.

    begin_phase                before an epoch: the next phase
    dropped                    in a step's forward pass: nodes turned off
    open_gates, step_gates     gates in the forward pass, and their own training step
    close_gates                the gates that a task is evaluated with
    distillation               in the loss: old heads' outputs, and codes of features, beside the teacher's
    project, observe           after a step: put parameters back; note what the step did
    encode, consolidate        after a task: codes of its features; the new state
    evaluated_parameters       the parameters that a task is evaluated with

Each of the preserver's pure functions is mapped over the members. A step writes the state in place, and only the groups that declare
`changes_in_step`: a CUDA graph holds the addresses of these tensors. `begin_phase` and `consolidate` may replace the state; captured
steps are void then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from selfless.engine import rng
from selfless.engine.stack import Stack, Tensors, column, each
from selfless.network.roles import output_layer
from selfless.network.wiring import Wiring
from selfless.preserve import Preserver, State
from selfless.preserve.capabilities import Distils, Drops, Encodes, Evaluates, Gated, KnowsHeads, Observes, Phased, Projects


class Part:
    """A preserver, its state for every member, and the stack and parameters it acts on."""

    def __init__(self, term: Preserver, stack: Stack, trained: Tensors) -> None:
        self.term, self.stack, self.trained = term, stack, trained
        self.state: State = torch.func.vmap(term.init)(self.values())
        self.is_wired = False
        self._share = torch.zeros(())

    def values(self) -> Tensors:
        return {n: p.detach() for n, p in self.trained.items()}

    def place_heads(self, tasks: Sequence[tuple[range, ...]], outputs: int) -> None:
        """Tell a preserver that must know it whose head each output is: the number of its only task, −1 where tasks share it."""
        users: dict[int, set[int]] = {}
        for t, heads in enumerate(tasks):
            for place in (c for head in heads for c in head):
                users.setdefault(place, set()).add(t)
        owner = torch.tensor([next(iter(users[c])) if len(users.get(c, ())) == 1 else -1 for c in range(outputs)], dtype=torch.int16)
        if not isinstance(self.term, KnowsHeads) or len(tasks) == 1 or bool((owner < 0).all()):
            return
        owners = {}
        for name in self.stack.output_parameters(outputs):
            p = self.trained[name]
            rows = owner.to(p.device).view(1, -1, *[1] * (p.dim() - 2))
            owners[name] = rows.expand(p.shape).clone()
        self.state = self.term.place_heads(self.state, owners)

    def wire(self, wiring: Wiring) -> None:
        """Put gates behind the neurons of this wiring, for a preserver that has gates."""
        if isinstance(self.term, Gated):
            size, term = len(next(iter(self.trained.values()))), self.term
            states = [term.wire({g: {n: t[m] for n, t in ts.items()} for g, ts in self.state.items()}, wiring) for m in range(size)]
            self.state = {g: {n: torch.stack([s[g][n] for s in states]) for n in ts} for g, ts in states[0].items()}
            self.is_wired = True

    # ---------------------------------------------------------------------------------------------------------------- an epoch
    @torch.no_grad()
    def begin_epoch(self, seeds: Tensor, task: int, epoch: int, epochs: int) -> bool:
        """Start gates and phases; True if the state was replaced."""
        replaced = False
        if isinstance(self.term, Gated) and epoch == 0:
            one = {g: {n: t[0] for n, t in ts.items()} for g, ts in self.state.items()}
            noise = rng.normal(rng.stream_key(seeds, "gates", task, epoch), self.term.gate_count(one))
            self.state, replaced = torch.func.vmap(self.term.start_gates)(self.state, noise), True
        if isinstance(self.term, Phased) and self.starts_phase(epoch, epochs):
            term = self.term
            begin = torch.func.vmap(lambda state, params: term.begin_phase(state, params, epoch, epochs))
            self.state, changed = begin(self.state, self.values())
            for name, value in changed.items():
                self.trained[name].copy_(value)
            replaced = True
        return replaced

    def starts_phase(self, epoch: int, epochs: int) -> bool:
        """True if a phase begins at this epoch."""
        return isinstance(self.term, Phased) and self.term.starts_phase(epoch, epochs)

    # ------------------------------------------------------------------------------------------------------------------ a step
    @property
    def step_groups(self) -> list[str]:
        """The groups of the state that a step changes."""
        return [group.name for group in self.term.groups if group.changes_in_step]

    def changed_in_step(self) -> list[Tensor]:
        """The tensors of the state that a step changes."""
        return [t for group in self.step_groups for t in self.state[group].values()]

    def dropped(self, params: Tensors, key: Tensor, cursor: Tensor) -> Tensors:
        """The parameters of this step's forward pass where nodes are turned off, drawn by each member's `key` and the place `cursor`."""
        if not isinstance(self.term, Drops) or not self.term.drop_rate:
            return {}
        live, layers = self.stack.leaves(params), self.stack.nodes()
        sizes = [live[names[0]].shape[1] for names in layers.values()]
        places = cursor * sum(sizes) + torch.arange(sum(sizes), device=cursor.device)
        off = (rng.uniform_at(key, places) < self.term.drop_rate).split(sizes, 1)
        by_name = {n: gone for names, gone in zip(layers.values(), off, strict=True) for n in names}
        found: Tensors = torch.func.vmap(self.term.drop_nodes)(self.state, live, by_name)
        return found

    def open_gates(self, cursor: Tensor, last: int) -> None:
        """Make the gates of this step leaves of the loss; `cursor` samples of the epoch are over, and its last batch begins at `last`."""
        if isinstance(self.term, Gated):
            term = self.term
            self._share = (cursor / last if last else torch.ones_like(cursor, dtype=torch.float32)).float().squeeze(0)
            found = torch.func.vmap(lambda state: term.gate(state, self._share))(self.state)
            self.stack.gates = {n: g.detach().requires_grad_() for n, g in found.items()}

    def gate_cost(self, rates: Tensor) -> Tensor | None:
        """Σ_f rate_f (what member f's gates cost)."""
        if not isinstance(self.term, Gated):
            return None
        return torch.dot(rates, torch.func.vmap(self.term.gate_penalty)(self.state, self.stack.gates))

    def step_gates(self, grads: Sequence[Tensor | None], lr: Tensor) -> None:
        """Let the gates take their step; `grads` are those of the stack's gates, times each member's rate."""
        if not isinstance(self.term, Gated):
            return
        rates, term = lr.clamp(min=torch.finfo(torch.float32).tiny), self.term
        given = {
            n: (torch.zeros_like(g) if d is None else d.float() / column(rates, g))
            for (n, g), d in zip(self.stack.gates.items(), grads, strict=True)
        }

        def step(state: State, gradients: Tensors, rate: Tensor) -> State:
            new = term.step_gates(state, gradients, self._share, rate)
            return {group: new[group] for group in self.step_groups}

        self._write(torch.func.vmap(step)(self.state, given, lr))

    def close_gates(self, task: int | None, tasks: int) -> None:
        """Set the gates that a task is evaluated with after `tasks` of them; None: the present task. Before the first task: none."""
        if isinstance(self.term, Gated) and self.is_wired and (tasks or task is None):
            term, known = self.term, None if task is None else min(task, tasks - 1)
            self.stack.gates = torch.func.vmap(lambda state: term.hard_gate(state, known))(self.state)

    def distillation(
        self, params: Tensors, buffers: Tensors, x: Tensor, made: tuple[Tensor, list[Tensor]], past: Sequence[range], rates: Tensor
    ) -> Tensor | None:
        """Σ_f rate_f (Σ_old heads distil(z, z*) + code_drift(f, f*)): z, f the outputs and features `made`, z*, f* the teacher's."""
        if not isinstance(self.term, Distils) or not past:
            return None
        logits, found = made
        old, features = self.stack.outputs(params | dict(self.term.teacher(self.state)), buffers, x)
        costs = [each(self.term.distil, logits[..., h.start : h.stop], old[..., h.start : h.stop]) for h in past]
        if isinstance(self.term, Encodes):
            costs.append(each(self.term.code_drift, self.state, found[-1].flatten(2), features[-1].flatten(2)))
        return torch.dot(rates, torch.stack(costs).sum(0))

    def project(self) -> None:
        """Put back what a step may not move."""
        if isinstance(self.term, Projects):
            for name, right in torch.func.vmap(self.term.project)(self.state, self.values()).items():
                self.trained[name].copy_(right)

    def observe(self, before: Tensors, gradients: Tensors) -> None:
        """Note a step that was made from `before`."""
        if isinstance(self.term, Observes):
            seen = self.term.observe(self.state, before, self.trained, gradients)
            self._write({group: seen[group] for group in self.step_groups})

    def _write(self, new: State) -> None:
        """In place: a captured step reads and writes these tensors."""
        for group, tensors in new.items():
            for name, value in tensors.items():
                self.state[group][name].copy_(value)

    # ------------------------------------------------------------------------------------------------------------------ a task
    def encode(
        self, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]], params: Tensors, buffers: Tensors, head: slice, task: int
    ) -> None:
        """Train the codes of a task's features on batches of x (F, M, …), y (F, M); its head is the output columns `head`."""
        if not isinstance(self.term, Encodes):
            return
        last = output_layer(self.stack.module)
        weight, bias = params[f"{last}.weight"][:, head].detach(), params.get(f"{last}.bias")

        def features() -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
            for x, y in batches():
                found = self.stack.outputs(params, buffers, x)[1][-1].flatten(2).float()
                if found.shape[-1] != weight.shape[-1]:
                    raise ValueError(
                        f"{self.term.name} codes what the head reads, the output of {self.stack.layers[-1]!r}, of {found.shape[-1]} "
                        f"features; but {last!r} reads {weight.shape[-1]}. The last activation module must stand right before the head"
                    )
                yield found, partial(loss, (y - (head.start or 0)).flatten())

        def loss(y: Tensor, features: Tensor) -> Tensor:
            logits = features @ weight.mT + (0 if bias is None else bias[:, head].detach().unsqueeze(1))
            return F.cross_entropy(logits.flatten(0, 1), y, reduction="sum") / logits.shape[1]

        self.state = torch.func.vmap(self.term.add_encoder)(self.state, self.term.fit(features(), task))

    def consolidate(self, omega: Tensors) -> None:
        """The state after a task."""
        if self.state:
            self.state = torch.func.vmap(self.term.consolidate)(self.state, self.values(), omega)

    def evaluated_parameters(self, task: int | None, tasks: int) -> Tensors:
        """The parameters (those that differ) that a task is evaluated with; none before the first task has ended, and within tasks."""
        if task is None or not isinstance(self.term, Evaluates) or not tasks:
            return {}
        term, known = self.term, min(task, tasks - 1)  # a task that is still to come is evaluated as the newest
        found: Tensors = torch.func.vmap(lambda state, params: term.evaluated_parameters(state, params, known))(self.state, self.values())
        return found
