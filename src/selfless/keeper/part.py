"""One preserver of a keeper: its state, and the calls of its capabilities in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfless.keeper.anchor import step_sizes
from selfless.keeper.distillation import distillation, task_features
from selfless.keeper.drops import DroppedNodes
from selfless.keeper.gates import Gates
from selfless.keeper.memory import fill_memory, replay_cost
from selfless.keeper.path import PathWatch
from selfless.network.calling import Forward
from selfless.network.layers import Tap
from selfless.network.roles import within
from selfless.preserve import Preserver, State
from selfless.preserve.capabilities import (
    Anchored,
    Distils,
    Drops,
    Encodes,
    Evaluates,
    Freezes,
    Gated,
    KnowsHeads,
    Observes,
    Phased,
    Projects,
    Replays,
)  # fmt: skip

Parameters = Mapping[str, nn.Parameter]


class Part:
    """A preserver that is attached to a model. Setting `state` also updates the hooks."""

    def __init__(self, term: Preserver, model: nn.Module, parameters: Parameters, taps: Mapping[str, Tap], heads: Sequence[str]) -> None:
        self.term, self.model, self.heads = term, model, tuple(heads)
        if isinstance(term, Freezes):
            term.check_network(n for n, _ in model.named_buffers())
        self.gates: Gates | None = None
        self.drops: DroppedNodes | None = None
        self.path = PathWatch() if isinstance(term, Observes) else None
        self.path_started = False  # True after the first penalty() of the task
        self.has_own_heads = False  # True if the heads of single tasks are known
        self.draw_noise: Callable[[int], Tensor] = torch.randn
        self._shares: tuple[Any, dict[str, Tensor]] | None = None
        self._state: State = term.init(parameters)
        self.place_heads(parameters)
        if isinstance(term, Gated):
            self.gates = Gates(model, taps, term)
            self.state = term.wire(self.state, self.gates.wiring)
        if isinstance(term, Drops) and term.drop_rate > 0:
            self.drops = DroppedNodes(model, term, heads)

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        for hooks in (self.gates, self.drops):
            if hooks is not None:
                hooks.follow(state)

    @property
    def is_on(self) -> bool:
        return self.term.strength > 0

    # ------------------------------------------------------------------------------------------------------------- in the loss
    def costs(self, parameters: Parameters, tasks: int, implicit: bool, training: bool, forwards: Any, batch: Any) -> list[Tensor]:
        """Return the terms of the loss, with their strength: penalty, gates, distillation, replay."""
        term, found = self.term, list[Tensor]()
        if self.is_on and tasks and term.penalises and not (implicit and isinstance(term, Anchored)):
            self.check_shapes(parameters)
            found.append(term.strength * term.penalty(self.state, parameters))
        if self.gates is not None and training and isinstance(term, Gated):
            self.gates.follow(self.state)
            found.append(term.strength * term.gate_penalty(self.state, self.gates.leaves()))
        if isinstance(term, Distils) and self.is_on and tasks:
            self.check_shapes(parameters)
            found.append(term.strength * distillation(self.model, term, self.state, forwards, batch))
        if isinstance(term, Replays) and self.is_on and tasks:
            found.append(term.strength * replay_cost(self.model, term, self.state, forwards))
        return found

    def needs_penalty(self, tasks: int, implicit: bool) -> bool:
        """Return True if the loss of this task must contain keeper.penalty()."""
        is_anchored = implicit and isinstance(self.term, Anchored)
        has_cost = bool(tasks) and (isinstance(self.term, Distils | Replays) or (self.term.penalises and not is_anchored))
        return self.is_on and (has_cost or isinstance(self.term, Observes | Gated))

    # ---------------------------------------------------------------------------------------------------------------- an epoch
    def begin_epoch(self, parameters: Parameters, epoch: int, epochs: int, batches: int | None) -> dict[str, Tensor]:
        """Start gates and phases; return the new values of the parameters that change."""
        term, changed = self.term, dict[str, Tensor]()
        if self.gates is not None and isinstance(term, Gated):
            if batches is None or batches < 1:
                raise ValueError(
                    f"{type(term).__name__} anneals its gates over an epoch: write keeper.begin_epoch(epoch, epochs, batches=len(loader))"
                )
            self.gates.begin_epoch(batches)
            if epoch == 0:
                self.state = term.start_gates(self.state, self.draw_noise(term.gate_count(self.state)))
            self.gates.follow(self.state)
        if isinstance(term, Phased) and term.starts_phase(epoch, epochs):
            self.state, changed = term.begin_phase(self.state, _values(parameters), epoch, epochs)
        return changed

    # ------------------------------------------------------------------------------------------------- after an optimizer step
    def pull(self, optimizer: torch.optim.Optimizer, parameters: Parameters, names: Mapping[Tensor, str]) -> None:
        """Apply the implicit anchor, θ ← θ + share · (θ* − θ). The shares are cached while the step sizes are plain numbers and stay."""
        if not isinstance(self.term, Anchored) or not self.is_on:
            return
        anchor, key = self.term.anchor(self.state), _plain_steps(optimizer, names)
        if key is None or self._shares is None or self._shares[0] != key:
            self.check_shapes(parameters)
            steps = {n: s * self.term.strength for n, s in step_sizes(optimizer, names).items()}
            self._shares = (key, anchor.shares(steps))
        for name, share in self._shares[1].items():
            p, star = parameters[name], anchor.star[name]
            if p.dtype == star.dtype:
                p.lerp_(star, share)
            else:
                p.copy_(torch.lerp(p.to(star.dtype), star, share))

    def step_gates(self, lr: float | Tensor) -> None:
        """Take the training step of the gates."""
        if self.gates is not None and isinstance(self.term, Gated) and (found := self.gates.take()):
            rate = torch.as_tensor(lr, dtype=torch.float32, device=next(iter(found[0].values())).device)
            self.state = self.term.step_gates(self.state, *found, rate)

    def project(self, parameters: Parameters) -> dict[str, Tensor]:
        """Return the corrected values of the parameters that the step must not change."""
        return self.term.project(self.state, _values(parameters)) if isinstance(self.term, Projects) else {}

    def watch_path(self, parameters: Parameters) -> None:
        """Start the path at the first penalty of a task; later, observe a step that no optimizer reported."""
        if self.path is None or not isinstance(self.term, Observes):
            return
        self.path.follow(parameters)
        if not self.path_started:
            self.path_started = True
            self.path.begin()
            self.state = self.term.start_path(self.state, _values(parameters))
        elif self.path.moved():
            self.observe()

    def observe(self) -> None:
        """Pass the last step to the preserver."""
        if self.path is not None and self.path_started and isinstance(self.term, Observes):
            self.state = self.term.observe(self.state, *self.path.step())

    # ------------------------------------------------------------------------------------------------------------------ a task
    def next_state(
        self, parameters: Parameters, omega: Mapping[str, Tensor], batches: Iterable[Any], forward: Forward | None, task: int
    ) -> State:
        """Return the state after a task. It is checked, and nothing is changed yet: `end_task` takes it over."""
        state, values = self.state, _values(parameters)
        self.check_shapes(values)
        if isinstance(self.term, Encodes):
            encoders = self.term.fit(task_features(self.model, self.term, batches, forward), task)
            state = self.term.add_encoder(state, encoders[0])
        if isinstance(self.term, Replays):
            state = fill_memory(self.model, self.term, state, batches, forward, task)
        state = self.term.consolidate(state, values, omega)
        for name, value in (self.term.importance(state) or {}).items():
            if not bool(torch.isfinite(value).all()):
                raise ValueError(
                    f"the importance of {name!r} is not finite; did training diverge? Lower the learning rate or clip gradients"
                )
        return state

    def end_task(self, state: State) -> None:
        """End the task with the state that `next_state` returned."""
        self._shares, self.path_started = None, False
        self.state = state

    def evaluated_parameters(self, parameters: Parameters, task: int) -> dict[str, Tensor]:
        """Return the parameters that a task is evaluated with; only those that differ from the current ones."""
        term = self.term
        return term.evaluated_parameters(self.state, _values(parameters), task) if isinstance(term, Evaluates) else {}

    def place_heads(self, parameters: Mapping[str, Tensor]) -> None:
        """Tell the preserver which parameters belong to the head of a single task, by the names in `heads`."""
        owners = {
            name: torch.full_like(p.detach(), task, dtype=torch.int16)
            for task, head in enumerate(self.heads)
            for name, p in parameters.items()
            if within(name, head)
        }
        self.place_owners(owners)

    def place_owners(self, owners: Mapping[str, Tensor]) -> None:
        """Tell the preserver the owner of each entry: the number of its task, or −1 if tasks share it."""
        if isinstance(self.term, KnowsHeads) and owners:
            self.state = self.term.place_heads(self.state, owners)
            self.has_own_heads = True

    # ----------------------------------------------------------------------------------------------------------- state and ends
    def check_shapes(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise ValueError for a parameter that was resized since the last task."""
        groups = [self.state.get(group.name, {}) for group in self.term.groups if group.like_parameter]
        for name, p in parameters.items():
            old = next((tensors[name] for tensors in groups if name in tensors), p)
            if old.shape != p.shape:
                raise ValueError(
                    f"parameter {name!r} was {tuple(old.shape)} at the end of the last task and is {tuple(p.shape)} now; "
                    "do not resize a head, add a new one to the model"
                )

    def move_to(self, device: torch.device) -> None:
        """Move the state to a device."""
        if any(t.device != device for tensors in self.state.values() for t in tensors.values()):
            self._shares = None
            self.state = {g: {n: t.to(device) for n, t in tensors.items()} for g, tensors in self.state.items()}

    def load(self, state: State, parameters: Parameters, path_started: bool) -> None:
        """Use a state that was saved."""
        self._shares, self.path_started = None, path_started
        self.state = state
        if self.path is not None:
            self.path.follow(parameters)
            self.path.begin()

    def stop(self) -> None:
        """Remove every hook."""
        for hooks in (self.gates, self.drops, self.path):
            if hooks is not None:
                hooks.stop()


def _values(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in parameters.items()}


def _plain_steps(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Any:
    """Return the settings that the step sizes depend on; None for optimizers with a step size per entry."""
    groups = [(g["lr"], g.get("momentum"), g.get("dampening")) for g in optimizer.param_groups]
    if any(isinstance(g[0], Tensor) for g in groups) or any(
        "square" in k or "sq" in k or k == "sum" for s in optimizer.state.values() for k in s
    ):
        return None
    return str(groups), tuple((i, id(p)) for i, g in enumerate(optimizer.param_groups) for p in g["params"] if p in names)
