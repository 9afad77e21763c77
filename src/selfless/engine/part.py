"""One preserver of a fleet: its stacked state, and the calls of its capabilities during a run.

    begin_epoch                before an epoch: new gates, the next phase
    dropped_parameters         in the forward pass of a step: the parameters with some nodes off
    open_gates, step_gates     in a step: the gates of the forward pass, and their training step
    close_gates                the gates that a task is evaluated with
    distillation               in the loss: compare outputs of old heads, and codes of features, with those of the teacher
    proximal_step              after a step: the proximal step of a penalty
    project_step, project      after a step: project the step; reset parameters
    observe                    after a step: read the step
    encode, remember           after a task: train an encoder of its features; keep samples of it
    add_inputs                 after a task: add the inputs that its layers had
    add_activity, restart      after a task: add the activity of its neurons; set the weights that the next task starts from
    consolidate                after a task: compute the new state
    evaluated_parameters       the parameters that a task is evaluated with

The pure functions of the preserver are mapped over the members with vmap. A step writes the state in place, and only its groups with
`changes_in_step`: a CUDA graph holds their addresses. `begin_epoch` and `consolidate` may replace the state, and end captured steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfless.engine import kinds, rng
from selfless.engine.stack import Stack, Tensors, column, each, mapping_error
from selfless.network.roles import output_layer
from selfless.network.wiring import Wiring
from selfless.preserve import Preserver, State
from selfless.preserve.base import consolidated
from selfless.preserve.capabilities import (
    Distils,
    Drops,
    Encodes,
    Evaluates,
    Gated,
    Holds,
    KnowsHeads,
    Observes,
    Phased,
    Projects,
    ProjectsSteps,
    Proximal,
    Replays,
    WeighsNodes,
    Wired,
)  # fmt: skip
from selfless.preserve.groups import check_groups, check_step


class Part:
    """A preserver, its state for all members, and the stack and parameters it acts on. Members of other `kinds` have the same step."""

    def __init__(self, terms: Sequence[Preserver], stack: Stack, trained: Tensors) -> None:
        term, strengths = terms[0], [one.strength for one in terms]
        self.term, self.kinds, self.stack, self.trained = term, kinds.kinds_of(terms), stack, trained
        differs = term.reads_strength and len(set(strengths)) > 1
        self.strengths = torch.tensor(strengths, device=next(iter(trained.values())).device) if differs else None
        self.state: State = self._over_members("init")(self.values())
        self.measured: Tensor | None = None  # λ (F,) of the strength "auto", from the end of the first task on
        check_groups(term, self.state, trained)
        self.is_wired = False
        self.held: dict[str, tuple[Tensor, Tensor]] | None = None  # (mask, value) of each parameter, if the update resets them
        self._share = torch.zeros(())

    def values(self) -> Tensors:
        return {n: p.detach() for n, p in self.trained.items()}

    def place_heads(self, tasks: Sequence[tuple[range, ...]], outputs: int) -> None:
        """Tell a preserver that needs it which task each output belongs to; −1 if several tasks share the output.

        An output that no task uses yet is kept for the task that comes after these.
        """
        users: dict[int, set[int]] = {}
        for t, heads in enumerate(tasks):
            for column_number in (c for head in heads for c in head):
                users.setdefault(column_number, set()).add(t)
        every = [users.get(c, {len(tasks)}) for c in range(outputs)]
        owner = torch.tensor([next(iter(of)) if len(of) == 1 else -1 for of in every], dtype=torch.int16)
        is_alone = len(tasks) == 1 and len(users) == outputs
        if not isinstance(self.term, KnowsHeads) or is_alone or bool((owner < 0).all()):
            return
        found = {name: self.trained[name] for name in self.stack.output_parameters(outputs)}
        owners = {n: owner.to(p.device).view(1, -1, *[1] * (p.dim() - 2)).expand(p.shape).clone() for n, p in found.items()}
        self.state = self.term.place_heads(self.state, owners)

    def wire(self, wiring: Wiring) -> None:
        """Tell a preserver that needs it which neurons are at the two ends of every weight."""
        if isinstance(self.term, Wired):
            size, term = len(next(iter(self.trained.values()))), self.term
            states = [term.wire({g: {n: t[m] for n, t in ts.items()} for g, ts in self.state.items()}, wiring) for m in range(size)]
            self.state = {g: {n: torch.stack([s[g][n] for s in states]) for n in ts} for g, ts in states[0].items()}
            check_groups(term, self.state, self.trained)
            self.is_wired = True

    def _over_members(self, function: str | Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the preserver, by name, or any function(preserver, …), mapped over the members.

        If members differ in a strength that its functions read, the preserver of each has its own as a tensor. Where vmap cannot map the
        function, an error names the preserver and the remedy.
        """

        def of_member(strength: Tensor | None, *arguments: Any) -> Any:
            term = self.term if strength is None else _at(self.term, strength)
            return getattr(term, function)(*arguments) if isinstance(function, str) else function(term, *arguments)

        def call(*arguments: Any) -> Any:
            strength_axis = None if self.strengths is None else 0
            mapped = torch.func.vmap(of_member, (strength_axis, *[0] * len(arguments)))
            try:
                return mapped(self.strengths, *arguments)
            except RuntimeError as error:
                if (found := mapping_error(error, self.term.label)) is None:
                    raise
                raise found from error

        return call

    # ---------------------------------------------------------------------------------------------------------------- an epoch
    @torch.no_grad()
    def begin_epoch(self, seeds: Tensor, task: int, epoch: int, epochs: int) -> bool:
        """Start gates and phases; return True if the state was replaced."""
        replaced = False
        if isinstance(self.term, Gated) and epoch == 0:
            one = {g: {n: t[0] for n, t in ts.items()} for g, ts in self.state.items()}
            noise = rng.normal(rng.stream_key(seeds, "gates", task, epoch), self.term.gate_count(one))
            self.state, replaced = self._over_members("start_gates")(self.state, noise), True
        if isinstance(self.term, Phased) and self.starts_phase(epoch, epochs):
            begin = self._over_members(lambda term, state, params: term.begin_phase(state, params, epoch, epochs))
            self.state, changed = begin(self.state, self.values())
            replaced = True
            self._set(changed)
        if isinstance(self.term, Observes) and epoch == 0:  # after the parameters were set for the task, by this preserver or another
            self.state, replaced = self._over_members("start_path")(self.state, self.values()), True
        return replaced

    def starts_phase(self, epoch: int, epochs: int) -> bool:
        """Return True if a phase begins at this epoch."""
        return isinstance(self.term, Phased) and self.term.starts_phase(epoch, epochs)

    # ------------------------------------------------------------------------------------------------------------------ a step
    @property
    def step_groups(self) -> list[str]:
        """The groups of the state that a step changes."""
        return [group.name for group in self.term.groups if group.changes_in_step]

    def step_tensors(self) -> list[Tensor]:
        """Return the tensors of the state that a step changes."""
        return [t for group in self.step_groups for t in self.state[group].values()]

    def dropped_parameters(self, params: Tensors, key: Tensor, cursor: Tensor) -> Tensors:
        """Return the parameters of a forward pass with some nodes off. The draw depends on each member's `key` and on `cursor`."""
        if not isinstance(self.term, Drops) or not self.term.drop_rate:
            return {}
        leaves, layers = self.stack.leaves(params), self.stack.nodes()
        sizes = [leaves[names[0]].shape[1] for names in layers.values()]
        places = cursor * sum(sizes) + torch.arange(sum(sizes), device=cursor.device)
        masks = (rng.uniform_at(key, places) < self.term.drop_rate).split(sizes, 1)
        off = {n: mask for names, mask in zip(layers.values(), masks, strict=True) for n in names}
        found: Tensors = self._over_members("drop_nodes")(self.state, leaves, off)
        return found

    def open_gates(self, cursor: Tensor, last: int) -> None:
        """Set the gates of this step as leaves. `cursor` samples of the epoch are done; its last batch starts at sample `last`."""
        if isinstance(self.term, Gated):
            self._share = (cursor / last if last else torch.ones_like(cursor, dtype=torch.float32)).float().squeeze(0)
            found = self._over_members(lambda term, state: term.gate(state, self._share))(self.state)
            self.stack.gates = {n: g.detach().requires_grad_() for n, g in found.items()}

    def gate_cost(self, rates: Tensor) -> Tensor | None:
        """Σ_f rate_f · gate_penalty_f; None without gates."""
        if not isinstance(self.term, Gated):
            return None
        return torch.dot(rates, self._over_members("gate_penalty")(self.state, self.stack.gates))

    def step_gates(self, grads: Sequence[Tensor | None], lr: Tensor) -> None:
        """Take the training step of the gates; `grads` are the gradients of the stack's gates, times the rate of each member."""
        if not isinstance(self.term, Gated):
            return
        rates = lr.clamp(min=torch.finfo(torch.float32).tiny)
        unscaled = {
            n: (torch.zeros_like(g) if d is None else d.float() / column(rates, g))
            for (n, g), d in zip(self.stack.gates.items(), grads, strict=True)
        }

        def step(term: Any, state: State, gradients: Tensors, rate: Tensor) -> State:
            new = term.step_gates(state, gradients, self._share, rate)
            check_step(term, "step_gates", state, new)
            return {group: new[group] for group in self.step_groups}

        self._write(self._over_members(step)(self.state, unscaled, lr))

    def close_gates(self, task: int | None, tasks: int) -> None:
        """Set the gates that a task is evaluated with; None means the current task. `tasks` tasks have ended.

        A task that has not been trained yet is evaluated with the gates of the newest. Before the end of the first task there are none.
        """
        if isinstance(self.term, Gated) and self.is_wired and (tasks or task is None):
            used = None if task is None else min(task, tasks - 1)
            self.stack.gates = self._over_members(lambda term, state: term.hard_gate(state, used))(self.state)

    def distillation(
        self, params: Tensors, buffers: Tensors, x: Tensor, outputs: tuple[Tensor, list[Tensor]], past: Sequence[range]
    ) -> Tensor | None:
        """D = Σ_old heads distil(z, z*) + code_drift(f, f*) of every member, (F,); None if there is nothing to distil.

        z and f are the logits and features in `outputs`, z* and f* those of the teacher.
        """
        if not isinstance(self.term, Distils) or not past:
            return None
        logits, hidden = outputs
        old_logits, old_hidden = self.stack.outputs(params | dict(self.term.teacher(self.state)), buffers, x)
        costs = [each(self.term.distil, *pair).view(len(x), -1).sum(1) for pair in by_head(logits, old_logits, past)]
        if isinstance(self.term, Encodes):
            costs.append(each(self.term.code_drift, self.state, hidden[-1].flatten(2), old_hidden[-1].flatten(2)))
        return torch.stack(costs).sum(0)

    @property
    def is_damped(self) -> bool:
        """True if the strength of the distillation is damped."""
        return isinstance(self.term, Distils) and self.term.is_damped(self.state)

    def measure_curvature(self, value: Tensor, gradients: Sequence[Tensor | None], trains: Tensor) -> None:
        """Measure κ of the members that still train (F,), from D (F,) and ∂D/∂θ. The next task begins with the last κ."""
        assert isinstance(self.term, Distils)
        square = torch.stack([g.flatten(1).float().square().sum(1) for g in gradients if g is not None]).sum(0)
        self._write_where(trains, self.term.measure_curvature(self.state, value, square))

    def damping(self, step_lambda: Tensor) -> Tensor:
        """Return the factor of the strength of every member, given step λ (F,)."""
        if not isinstance(self.term, Distils) or not self.is_damped:
            return torch.ones_like(step_lambda)
        return self.term.damping(self.state, step_lambda)

    def proximal_step(self, step: Tensor, strength: Tensor) -> None:
        """Take the proximal step of every member; `step` and `strength` are (F,)."""
        if isinstance(self.term, Proximal):
            steps = dict.fromkeys(self.trained, step)
            self._set(self._over_members("proximal_step")(self.state, self.values(), steps, strength))

    @property
    def projects_steps(self) -> bool:
        """True if `project_step` needs the parameters before each step."""
        return isinstance(self.term, ProjectsSteps) and self.term.is_on

    def project_step(self, before: Tensors) -> None:
        """Project a step from `before` to the current parameters."""
        if self.projects_steps:
            self._set(self._over_members("project_step")(self.state, before, self.values()))

    def hold_in_update(self) -> None:
        """Prepare what the update resets, until the next phase or task; `project` then does nothing."""
        if isinstance(self.term, Holds):
            found = {n: pair for n, pair in self._over_members("held")(self.state).items() if n in self.trained}
            self.held = {n: (_fill(m, self.trained[n], torch.uint8), _fill(v, self.trained[n])) for n, (m, v) in found.items()}

    def project(self) -> None:
        """Reset the parameters that a step must not change."""
        if isinstance(self.term, Projects) and self.held is None:
            self._set(self._over_members("project")(self.state, self.values()))

    def observe(self, before: Tensors, gradients: Tensors, lr: Tensor) -> None:
        """Pass a step from `before` to the current parameters to the preserver of the members that still train: their rate is not 0."""
        if isinstance(self.term, Observes):
            new = self.term.observe(self.state, before, self.trained, gradients)
            check_step(self.term, "observe", self.state, new)
            self._write_where(lr > 0, new)

    def _set(self, values: Tensors) -> None:
        """Set parameters to these values."""
        for name, value in values.items():
            self.trained[name].copy_(value)

    def _write_where(self, trains: Tensor, new: State) -> None:
        """Write the groups that a step changes, of the members where `trains` (F,) is True."""
        old = self.state
        self._write({g: {n: torch.where(column(trains, t), t, old[g][n]) for n, t in new[g].items()} for g in self.step_groups})

    def _write(self, new: State) -> None:
        """Write into the tensors of the state, whose addresses a captured step contains."""
        for group, tensors in new.items():
            for name, value in tensors.items():
                self.state[group][name].copy_(value)

    # ------------------------------------------------------------------------------------------------------------------ a task
    def encode(
        self, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]], params: Tensors, buffers: Tensors, head: slice, task: int
    ) -> None:
        """Train the encoders of a task's features on batches of x (F, M, …), y (F, M); its head is the output columns `head`.

        Features of a batch are computed once and kept for the next rounds over the data.
        """
        if not isinstance(self.term, Encodes):
            return
        last = output_layer(self.stack.module)
        weight, bias = params[f"{last}.weight"][:, head].detach(), params.get(f"{last}.bias")

        def features() -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
            for x, y in batches():
                found = self.stack.outputs(params, buffers, x)[1][-1].flatten(2).float()
                if found.shape[-1] != weight.shape[-1]:
                    raise ValueError(
                        f"{self.term.name} encodes the features of the head. The last activation {self.stack.layers[-1]!r} gives "
                        f"{found.shape[-1]}, but {last!r} reads {weight.shape[-1]}; put the last activation right before the head"
                    )
                yield found, partial(loss, (y - (head.start or 0)).flatten())

        def loss(y: Tensor, features: Tensor) -> Tensor:
            logits = features @ weight.mT + (0 if bias is None else bias[:, head].detach().unsqueeze(1))
            return F.cross_entropy(logits.flatten(0, 1), y, reduction="sum") / logits.shape[1]

        self.state = self._over_members("add_encoder")(self.state, self.term.fit(cycle(features()), task))

    def remember(self, rows: Tensors) -> None:
        """Add samples of a task to the memory of the preserver."""
        if isinstance(self.term, Replays):
            self.state = self._over_members("remember")(self.state, rows)

    def add_inputs(self, moments: Tensors, others: Sequence[str]) -> None:
        """Add the inputs that the layers of every member had in a task, {weight: (F, d, d)}; `others` are further parameters it used."""
        if isinstance(self.term, ProjectsSteps):
            add = self._over_members(lambda term, state, found, like: term.add_inputs(state, found, others, like))
            self.state = self.term.trim(add(self.state, moments, self.values()))

    def add_activity(self, activity: Tensors) -> None:
        """Add the mean activity of the neurons of every member in a task, {layer: (F, N)}."""
        if isinstance(self.term, WeighsNodes):
            self.state = self._over_members("add_activity")(self.state, activity)

    @torch.no_grad()
    def restart(self, strength: Tensor) -> None:
        """Set the weights that the next task starts from; `strength` is (F,)."""
        if isinstance(self.term, WeighsNodes):
            self._set(self._over_members("restart")(self.state, self.values(), strength))

    def consolidate(self, omega: Tensors) -> None:
        """Compute the state after a task; after the first one also λ of the strength "auto"."""
        self._consolidate(omega)
        self.measure_strength()

    def _consolidate(self, omega: Tensors) -> None:
        if self.state:
            new = self._over_members(consolidated) if len(self.kinds) == 1 else partial(kinds.consolidate, self.kinds)
            self.state = new(self.state, self.values(), omega)

    def measure_strength(self) -> None:
        """Measure λ of the strength "auto" from the state, if that was not done before."""
        if self.term.is_auto and self.measured is None:
            self.measured = self._over_members("auto_strength")(self.state)

    def skip_tasks(self, count: int) -> None:
        """Compute the state after `count` tasks that ended where they began, with importances of 0."""
        for _ in range(count):
            self._consolidate({n: torch.zeros_like(p) for n, p in self.values().items()})

    def evaluated_parameters(self, task: int | None, tasks: int) -> Tensors:
        """Return the parameters that a task is evaluated with; only those that differ from the trained ones.

        There are none before the end of the first task, and none for the current task (None).
        """
        if task is None or not isinstance(self.term, Evaluates) or not tasks:
            return {}
        used = min(task, tasks - 1)  # a task that has not been trained yet is evaluated like the newest
        evaluated = self._over_members(lambda term, state, params: term.evaluated_parameters(state, params, used))
        found: Tensors = evaluated(self.state, self.values())
        return found


def _at(term: Preserver, strength: Tensor) -> Preserver:
    """Return the preserver with a tensor as its strength; `__post_init__`, which checks a number, is not called."""
    same = copy.copy(term)
    object.__setattr__(same, "strength", strength)
    return same


def _fill(value: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return `value` expanded to the shape of `like`, contiguous, as `dtype` or in the type of `like`."""
    return value.to(dtype or like.dtype).expand(like.shape).contiguous()


def by_head(logits: Tensor, old: Tensor, heads: Sequence[range]) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of outputs (F·heads, M, C), of the network and of its teacher: one pair for all heads of the same width."""
    by_width: dict[int, list[range]] = {}
    for head in heads:
        by_width.setdefault(len(head), []).append(head)
    return [(_cut(logits, same), _cut(old, same)) for same in by_width.values()]


def _cut(outputs: Tensor, heads: Sequence[range]) -> Tensor:
    """Return the columns of the heads, which have the same width: (F, M, outputs) → (F·heads, M, width)."""
    columns = torch.cat([outputs[..., head.start : head.stop] for head in heads], -1)
    return columns.view(*columns.shape[:2], len(heads), -1).transpose(1, 2).flatten(0, 1)
