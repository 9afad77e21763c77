"""One preserver of a keeper: its state, and the calls of its capabilities in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfless.distributed import ALONE, Ranks
from selfless.distributed.shards import agree, like, local_values, place_like
from selfless.functional import measures_curvature
from selfless.keeper import pieces
from selfless.keeper.anchor import Pull, plain_steps
from selfless.keeper.damping import Optimizers
from selfless.keeper.distillation import Steepness, distillation, task_features
from selfless.keeper.drops import DroppedNodes
from selfless.keeper.gates import Gates, wire
from selfless.keeper.inputs import add_activity, add_inputs
from selfless.keeper.log import Log
from selfless.keeper.memory import fill_memory, replay_cost
from selfless.keeper.norms import check_norms
from selfless.keeper.path import PathWatch
from selfless.keeper.storage import Storage
from selfless.network.calling import Forward, batch_size
from selfless.network.layers import Tap
from selfless.network.roles import within
from selfless.preserve import Preserver, State
from selfless.preserve.base import consolidated, cost_of
from selfless.preserve.capabilities import (
    Anchored,
    Distils,
    Drops,
    Encodes,
    Evaluates,
    Gated,
    KnowsHeads,
    Observes,
    Phased,
    Projects,
    ProjectsSteps,
    Proximal,
    Replays,
    WeighsNodes,
)  # fmt: skip
from selfless.preserve.groups import check_groups, check_real, warn_of_strength

Parameters = Mapping[str, nn.Parameter]
Tensors = Mapping[str, Tensor]


class Part:
    """A preserver that is attached to a model. Setting `state` also updates the hooks."""

    def __init__(
        self,
        term: Preserver,
        model: nn.Module,
        parameters: Parameters,
        taps: Mapping[str, Tap],
        heads: Sequence[str],
        storage: Storage = Storage(),  # noqa: B008
        find_ranks: Callable[[], Ranks] = lambda: ALONE,
        warns: bool = True,
    ) -> None:
        self._find_ranks, self._taps = find_ranks, taps
        self.term, self.model, self.heads = term, model, tuple(heads)
        check_norms(term, model)
        self.gates: Gates | None = None
        self.drops: DroppedNodes | None = None
        self.path = PathWatch() if isinstance(term, Observes) else None
        self.path_started = False  # True after the first penalty() of the task
        self.corrects = isinstance(term, Proximal | ProjectsSteps | Projects)  # True if it changes parameters after a step
        self.has_own_heads = False  # True if the heads of single tasks are known
        self.draw_noise: Callable[[int], Tensor] = torch.randn
        self.measured: float | None = None  # λ of the strength "auto", from the end of the first task on
        self.optimizers = Optimizers()
        self._pull, self._steepness, self.distilled = Pull(), Steepness(warns), 0  # distilled: how often in this task
        self._before: dict[str, Tensor] = {}  # the parameters before an optimizer step, during the step
        self.storage = storage
        self._placed: torch.device | None = None  # where the whole state is; None if that is not known
        self._state: State = storage.store(term, term.init(parameters), parameters)
        self.place_heads(parameters)
        if isinstance(term, Gated):
            self.gates = Gates(model, taps, term)
            self.state = term.wire(self.state, self.gates.wiring)
        if isinstance(term, WeighsNodes):
            self.state = term.wire(self.state, wire(model, taps))
        if isinstance(term, Drops) and term.drop_rate > 0:
            if not storage.is_plain:
                raise ValueError(f"{type(term).__name__} with dropped nodes reads θ* in every pass; leave state_dtype and state_device out")
            self.drops = DroppedNodes(model, term, heads)
            self.drops.share = lambda numbers: find_ranks().first(numbers)
        check_groups(term, self.state, parameters)
        check_real(term, parameters)

    @property
    def state(self) -> State:
        """The state as it is stored."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._placed = None
        self._state = self.storage.store(self.term, state, dict(self.model.named_parameters()) if not self.storage.is_plain else {})
        for hooks in (self.gates, self.drops):
            if hooks is not None:
                hooks.follow(state)

    @property
    def loaded(self) -> State:
        """The state as the preserver computes with it: on the device of the model, in at least float32."""
        return self.storage.load_state(self.state, next(self.model.parameters()).device)

    @property
    def rows(self) -> State:
        """The state as it is stored; of sharded tensors, the rows of this rank."""
        return {group: local_values(tensors) for group, tensors in self.state.items()}

    @property
    def ranks(self) -> Ranks:
        """The processes that train the model."""
        return self._find_ranks()

    @property
    def is_on(self) -> bool:
        return self.term.is_on

    @property
    def strength(self) -> float:
        """λ: a number, or for "auto" the measured one."""
        return self.term.fixed_strength if self.measured is None else self.measured

    @property
    def known_strength(self) -> float | None:
        """λ as a number; None for "auto" until the first task has ended."""
        return None if self.term.is_auto and self.measured is None else self.strength

    # ------------------------------------------------------------------------------------------------------------- in the loss
    def penalty(self, parameters: Parameters, tasks: int, implicit: bool, log: Log) -> list[Tensor]:
        """Return the penalty on θ with its strength; none in the first task, and none if the anchor is implicit."""
        term = self.term
        if not (self.is_on and tasks and term.penalises) or (implicit and isinstance(term, Anchored)):
            return []
        self.check_shapes(parameters)
        cost = self.strength * cost_of(term, self.loaded, parameters)
        if not isinstance(term, Anchored):
            log.add("penalty", cost)
        return [cost]

    def costs(
        self, parameters: Parameters, tasks: int, implicit: bool, training: bool, forwards: Any, batch: Any, log: Log
    ) -> list[Tensor]:
        """Return the terms of the loss, with their strength: penalty, gates, distillation, replay."""
        term, found = self.term, self.penalty(parameters, tasks, implicit, log)
        if self.gates is not None and training and isinstance(term, Gated):
            self.gates.follow(self.state)
            found.append(self.strength * term.gate_penalty(self.state, self.gates.leaves()))
            self.gates.check_acted()
            log.add("gates", found[-1])
        if isinstance(term, Distils) and self.is_on and tasks:
            self.check_shapes(parameters)
            found.append(self.distillation(parameters, forwards, batch))
            log.add("distillation", found[-1])
        return found + self.replay(tasks, forwards, log)

    def replay(self, tasks: int, forwards: Any, log: Log) -> list[Tensor]:
        """Return the loss on old samples with its strength; none in the first task."""
        if not isinstance(self.term, Replays) or not self.is_on or not tasks:
            return []
        cost = self.strength * replay_cost(self.model, self.term, self.loaded, forwards)
        log.add("replayed", cost)
        return [cost]

    def distillation(self, parameters: Parameters, forwards: Any, batch: Any) -> Tensor:
        """Return λ' D. The strength is damped if the optimizer is known, else λ' = λ."""
        term = self.term
        assert isinstance(term, Distils)
        value = distillation(self.model, term, self.loaded, forwards, batch)
        (value,) = self.ranks.global_mean([value], [batch_size(batch)])
        step, shares = self.optimizers.nominal_steps(parameters) if term.is_damped(self.state) else (None, {})
        if step is None:
            optimizers = self.optimizers if self.ranks.is_alone else None
            return self._steepness.look(str(term), self.strength * value, parameters, optimizers)
        if value.requires_grad and measures_curvature(self.distilled):
            found = torch.autograd.grad(value, list(parameters.values()), retain_graph=True, allow_unused=True)
            gradients = {name: g.float() for name, g in zip(parameters, found, strict=True) if g is not None}
            self.ranks.mean_(list(gradients.values()))
            square = torch.stack([shares.get(name, 1.0) * g.square().sum() for name, g in gradients.items()]).sum()
            self.state = term.measure_curvature(self.state, value.detach(), square)
        self.distilled += 1
        return self.strength * term.damping(self.state, torch.tensor(step * self.strength, device=value.device)) * value

    def star(self) -> tuple[Tensors, Tensors | None]:
        """Return (θ*, Ω as they are stored) of the last task; Ω is None for a preserver that has no anchor, both are empty without θ*."""
        if isinstance(self.term, Anchored):
            anchor = self.term.anchor(self.state)
            return anchor.star, anchor.omega
        return (self.term.teacher(self.state), None) if isinstance(self.term, Distils) else ({}, None)

    # ---------------------------------------------------------------------------------------------------------------- an epoch
    def begin_epoch(self, parameters: Parameters, epoch: int, epochs: int, batches: int | None, goes_on: bool) -> dict[str, Tensor]:
        """Start gates and phases; return the new values of the parameters that change. A phase that `goes_on` has begun before."""
        term, changed = self.term, dict[str, Tensor]()
        self.check_shapes(parameters)
        if self.gates is not None and isinstance(term, Gated):
            if batches is None or batches < 1:
                raise ValueError(
                    f"{type(term).__name__} anneals its gates over an epoch: write keeper.begin_epoch(epoch, epochs, batches=its steps)"
                )
            self.gates.begin_epoch(batches)
            if epoch == 0 and not goes_on:
                noise = self.draw_noise(term.gate_count(self.state)).to(next(self.model.parameters()).device)
                self.state = term.start_gates(self.state, self.ranks.first(noise))
            self.gates.follow(self.state)
        if isinstance(term, Phased) and term.starts_phase(epoch, epochs) and not goes_on:
            self.distilled = 0
            self.state, changed = term.begin_phase(self.loaded, _values(parameters), epoch, epochs)
        return changed

    # ------------------------------------------------------------------------------------------------- after an optimizer step
    def pull(self, optimizer: torch.optim.Optimizer, parameters: Parameters, names: Mapping[Tensor, str]) -> None:
        """Apply the implicit anchor, θ ← θ + share · (θ* − θ)."""
        if isinstance(self.term, Anchored) and self.is_on:
            anchor = self.term.anchor(self.state)
            if not self._pull.is_ready(optimizer, names, anchor):
                self.check_shapes(parameters)
            self._pull(optimizer, names, anchor, self.strength)

    def step_gates(self, lr: float | Tensor) -> None:
        """Take the training step of the gates."""
        if self.gates is not None and isinstance(self.term, Gated) and (found := self.gates.take(self.ranks)):
            rate = torch.as_tensor(lr, dtype=torch.float32, device=next(iter(found[0].values())).device)
            self.state = self.term.step_gates(self.state, *found, rate)

    def proximal_step(self, optimizer: torch.optim.Optimizer, parameters: Parameters, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """Return the parameters after the proximal step that follows a step of the optimizer; only those that may differ."""
        if not isinstance(self.term, Proximal) or not self.is_on:
            return {}
        self.check_shapes(parameters)
        steps, strength = plain_steps(optimizer, names), next(iter(parameters.values())).new_tensor(self.strength, dtype=torch.float32)
        return self.term.proximal_step(self.loaded, _values(parameters), steps, strength)

    def project(self, parameters: Parameters) -> dict[str, Tensor]:
        """Return the corrected values of the parameters that the step must not change."""
        return self.term.project(self.loaded, _values(parameters)) if isinstance(self.term, Projects) else {}

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the parameters that an optimizer step is going to change, if the preserver projects steps."""
        if self.corrects and isinstance(self.term, ProjectsSteps) and self.is_on:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._before = {n: p.detach().clone() for n, p in self.model.named_parameters() if id(p) in own}

    def project_step(self, parameters: Parameters) -> dict[str, Tensor]:
        """Return the corrected values of the parameters that a step changed."""
        before, self._before = self._before, {}
        if not isinstance(self.term, ProjectsSteps) or not before:
            return {}
        return self.term.project_step(self.loaded, before, {n: p for n, p in _values(parameters).items() if n in before})

    def watch_path(self, parameters: Parameters) -> None:
        """Start the path at the first penalty of a task; later, observe a step that no optimizer reported."""
        if self.path is None or not isinstance(self.term, Observes):
            return
        self.path.follow(parameters)
        if not self.path_started:
            self.path_started = True
            self.path.begin()
            self.state = self.term.start_path(self.loaded, _values(parameters))
        elif self.path.stepped():
            self.observe(parameters)

    def observe(self, names: Collection[str]) -> None:
        """Pass the last step, one of these parameters, to the preserver."""
        if self.path is not None and self.path_started and isinstance(self.term, Observes):
            before, after, gradients = self.path.step(names)
            self.state = self.term.observe(self.loaded, before, after, self._mean_gradients(gradients))

    def _mean_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradient of the task loss over all ranks: `path` reads gradients before DistributedDataParallel averages them."""
        if self.ranks.is_alone:
            return gradients
        if not agree(self.ranks, sorted(gradients), next(self.model.parameters()).device):
            raise RuntimeError(
                f"{type(self.term).__name__} needs the gradient of the same parameters on each rank, but a parameter was used on one rank "
                "only; use a model whose every parameter is used in each step"
            )
        self.ranks.mean_([gradients[name] for name in sorted(gradients)])
        return gradients

    # ------------------------------------------------------------------------------------------------------------------ a task
    def prepare_end(
        self, parameters: Parameters, omega: dict[str, Tensor], batches: Iterable[Any], forward: Forward | None, task: int
    ) -> Callable[[], None]:
        """Check the end of a task and return the function that ends it. Before its call nothing is changed; it empties `omega`."""
        self.check_shapes(parameters)
        state, values = self.rows, local_values(_values(parameters))
        if isinstance(self.term, Encodes):
            encoders = self.term.fit(task_features(self.model, self.term, batches, forward, self.ranks), task)
            state = self.term.add_encoder(state, encoders[0])
        if isinstance(self.term, Replays):
            state = fill_memory(self.model, self.term, state, batches, forward, task, self.ranks)
        if isinstance(self.term, ProjectsSteps):
            state = add_inputs(self.model, self.term, state, values, batches, forward, self.ranks)
        if isinstance(self.term, WeighsNodes) and self.is_on:
            state = add_activity(self.model, self.term, state, self._taps, batches, forward, self.ranks)
        if self.term.splits != "whole":
            pieces.check_consolidation(self.term, state, values, omega, self.storage)
            return lambda: self._end_task(pieces.consolidate(self.term, state, values, omega, self.storage), parameters)
        new = consolidated(self.term, self.storage.load_state(state, next(iter(values.values())).device), values, omega)
        for name, value in (self.term.importance(new) or {}).items():
            pieces.check_importance(name, value)
        return lambda: self._end_task(new, parameters)

    def _end_task(self, state: State, parameters: Mapping[str, Tensor]) -> None:
        self._pull.forget()
        self.optimizers.end_task()
        self.path_started, self.distilled = False, 0
        self.state = {g: {n: like(t, parameters[n]) if n in parameters else t for n, t in ts.items()} for g, ts in state.items()}
        if self.term.is_auto and self.measured is None:
            self.measured = float(place_like(self.term.auto_strength(self.state), torch.empty(0)))
            warn_of_strength(self.term, self.measured)

    def restart(self, parameters: Parameters) -> dict[str, Tensor]:
        """Return the values that the next task starts from; only those that may differ from the current ones."""
        if not isinstance(self.term, WeighsNodes) or not self.is_on:
            return {}
        strength = next(iter(parameters.values())).new_tensor(self.strength, dtype=torch.float32)
        return self.term.restart(self.loaded, _values(parameters), strength)

    def evaluated_parameters(self, parameters: Parameters, task: int) -> dict[str, Tensor]:
        """Return the parameters that a task is evaluated with; only those that differ from the current ones."""
        term = self.term
        return term.evaluated_parameters(self.loaded, _values(parameters), task) if isinstance(term, Evaluates) else {}

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
        """Move the state to a device. A state that was there in the last call is not looked at again."""
        if self._placed == device:
            return
        away = {group.name for group in self.term.groups if group.like_parameter} if self.storage.device is not None else set()
        if any(t.device != device for g, tensors in self.state.items() if g not in away for t in tensors.values()):
            self._pull.forget()
            self.state = {g: ts if g in away else {n: t.to(device) for n, t in ts.items()} for g, ts in self.state.items()}
        self._placed = device

    def load(self, state: State, parameters: Parameters, path_started: bool, measured: float | None) -> None:
        """Use a state that was saved."""
        self._pull.forget()
        self.path_started, self.measured = path_started, measured if self.term.is_auto else None
        shaped = {group.name for group in self.term.groups if group.like_parameter}
        known = dict(self.model.named_parameters())
        self.state = {
            g: {n: place_like(t, known[n]) if g in shaped and n in known else t for n, t in ts.items()} for g, ts in state.items()
        }
        if self.path is not None:
            self.path.follow(parameters)
            self.path.begin()

    def buffers(self) -> dict[str, int]:
        """Return the bytes of the tensors that follow the path of the optimizer, besides the state."""
        return {} if self.path is None else {"path buffers": self.path.nbytes()}

    def stop(self) -> None:
        """Remove every hook."""
        for hooks in (self.gates, self.drops, self.path):
            if hooks is not None:
                hooks.stop()


def _values(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in parameters.items()}
