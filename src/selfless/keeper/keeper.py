"""The keeper: preservers and sparsifiers in any training loop.

    keeper = selfless.attach(model, preserve=MAS(0.1), sparsify=SLNID(1e-3), layers=["fc1", "fc2"])
    keeper.anchor_with(optimizer)
    for task in tasks:
        for x, y in task:
            loss = F.cross_entropy(model(x), y) + keeper.penalty()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        keeper.consolidate(task)

`selfless.keeper.activations` says which forward passes count. After `anchor_with`, the implicit anchor follows every optimizer step over
the model's parameters, including steps of an optimizer that is created later.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from selfless.capacity.counts import THRESHOLD, Capacity, check_threshold
from selfless.distributed import Ranks, find_ranks
from selfless.distributed.shards import reshard
from selfless.importance.objectives import Loss
from selfless.importance.reducer import MEMORY
from selfless.keeper import sharing
from selfless.keeper import state as saving
from selfless.keeper.activations import Collector, resolve_layers
from selfless.keeper.anchor import check_optimizer
from selfless.keeper.calls import Calls, reference_to
from selfless.keeper.changes import Changes
from selfless.keeper.deprecated import OldNames
from selfless.keeper.evaluation import changes_model, check_task, evaluated, finish_step, write
from selfless.keeper.footprint import Footprint, measure_footprint
from selfless.keeper.heads import check_head, check_heads
from selfless.keeper.hook import stop_hooks
from selfless.keeper.inhibition import add_up, as_leaf_sum, check_step, inhibition
from selfless.keeper.inject import Injector
from selfless.keeper.log import Log
from selfless.keeper.measuring import Measuring, measure_task, several_reads
from selfless.keeper.notices import Notices
from selfless.keeper.optimizers import forget_optimizers, warn_second_keeper, watch_optimizers
from selfless.keeper.part import Part
from selfless.keeper.ready import Ready, prepare
from selfless.keeper.room import Room, activity_bytes, grown, look, over_ranks
from selfless.keeper.roster import Roster
from selfless.keeper.sparsifiers import Sparsifiers
from selfless.keeper.storage import Choice, Storage
from selfless.network.calling import Forward, check_batches, is_compiled, unwrap
from selfless.network.describing import Description, describe_taps
from selfless.network.layers import Layers, Tap, is_automatic
from selfless.preserve import State
from selfless.preserve.capabilities import Anchored, Distils, KnowsHeads, Replays
from selfless.terms import Term


class Keeper(OldNames):
    """State and hooks for one model; `attach` returns one.

    states   the state of each preserver
    alpha    the importance α of neurons, by layer
    tasks    the number of tasks that have ended
    """

    def __init__(
        self,
        model: nn.Module,
        preserve: Term,
        sparsify: Term,
        layers: Layers,
        heads: Sequence[str],
        check_finite: bool,
        storage: Storage = Storage(),  # noqa: B008
        choice: Choice | None = None,
        inject: bool = False,
        process_group: Any = None,
    ) -> None:
        self.model = unwrap(model)
        self.preserve, self.sparsify, self.check_finite, self.choice = preserve, sparsify, check_finite, choice
        self.heads = check_heads(heads, self.model)
        self.forwards: list[Forward | None] = []  # the forward= of each task that has ended, for distillation
        self.tasks, self.room, self.alpha = 0, Room(), dict[str, Tensor]()
        self.implicit, self._attached, self._calls = False, True, Calls()
        self.sparsifiers = Sparsifiers(sparsify.parts)
        self.step_log, self.notices, self.changes = Log(), Notices(sparsify.parts), Changes(self.model)
        self.scale: Any = 1.0  # for inject=True, the factor of the loss in the backward pass: a number, a function or a GradScaler
        self._find_ranks, self._checked = partial(find_ranks, process_group), False  # _checked: the terms were, for these ranks
        self._roster = Roster(self.model)
        self._ready: Ready | None = None  # for the next step, if it is like this one
        reads, compiled, found = {term.reads for term in sparsify.parts if term.is_on}, is_compiled(model), self.preserved()
        taps = resolve_layers(self.model, layers, self.heads, compiled, needed=bool(reads & {"activations", "weights"}))
        self._chosen: tuple[Layers, bool] = (layers if is_automatic(layers) else (), compiled)
        self.parts: list[Part] = [Part(t, self.model, found, taps, heads, storage, self._find_ranks, check_finite) for t in preserve.parts]
        self.collector = Collector(self.model, taps, is_automatic(layers), "activations" in reads, "weights" in reads)
        self.collector.on_left_out = self.notices.left_out
        warn_second_keeper(self.model)
        watch_optimizers(self)
        self.injector = Injector(self) if inject else None
        weakref.finalize(self, stop_hooks, self.collector, self.injector, *self.parts)  # also if the keeper is only forgotten

    @property
    def taps(self) -> dict[str, Tap]:
        """The place where the activations of each layer are read."""
        return self.collector.taps

    @property
    def ranks(self) -> Ranks:
        """The processes that train the model; one if torch.distributed is not initialised."""
        return self._find_ranks()

    @property
    def states(self) -> list[State]:
        """The state of each preserver, in the order of the sum."""
        return [part.state for part in self.parts]

    @property
    def state(self) -> State:
        """The state of the only preserver; for a sum use `states`."""
        if len(self.parts) > 1:
            raise AttributeError(f"{self.preserve} has a state for each of its {len(self.parts)} parts: use keeper.states")
        return self.parts[0].state

    @state.setter
    def state(self, state: State) -> None:
        if len(self.parts) > 1:
            raise AttributeError(f"{self.preserve} has a state for each of its {len(self.parts)} parts: set keeper.parts[i].state")
        self.parts[0].state = state

    # ------------------------------------------------------------------------------------------------------------- the loop
    def penalty(self, batch: Any = None) -> Tensor:
        """Return λ_SSL Σ_l R(H_l) over the forward passes since the last call, plus the terms of the preservers.

        These include λ_Ω Σ Ω(θ − θ*)² unless the anchor is implicit. Call it once per backward pass. Several forward passes before it
        count as one larger batch. LwF needs the `batch` of the loss, (x, y) or a dict: on it old heads are compared with their teacher.
        """
        self._check_attached()
        if self.injector is not None:
            raise RuntimeError(
                "this keeper adds its gradients in the backward pass of your loss (inject=True), so keeper.penalty() would count twice; "
                "leave it out of the loss, or attach without inject=True"
            )
        self._calls.check_training("keeper.penalty()" if self.model.training and torch.is_grad_enabled() else "")
        self._calls.penalties += 1
        if self._ready is not None and self._calls.penalty and (hs := self._ready.read(self)) is not None:
            return self._calls.watch(self._ready.cost(hs, self))
        trainable = self.trainable()
        parameters = self.begin_penalty(trainable)
        training = torch.is_grad_enabled() and self.model.training
        self.notices.check_mode(self.model)
        passes, found = self.collector.passes, self.collector.take(self.ranks.is_alone)
        self.notices.check_sign(found)
        costs = inhibition(self.sparsifiers, self.collector, found, self.alpha, trainable, training, self.step_log, self.ranks)
        for part in self.parts:
            costs += part.costs(parameters, self.tasks, self.implicit, training, self.forwards, batch, self.step_log)
            if isinstance(part.term, Distils | Replays):
                self.collector.drop()  # their own passes are not part of the training loop
        cost = add_up(costs) if costs else None
        total = as_leaf_sum(cost, next(iter(parameters.values())), any(part.path or part.gates for part in self.parts))
        if costs:
            self.check_penalty(found, total)
        for part in self.parts if training else ():
            if part.path is not None:
                part.path.note_penalty(total, cost)
            if part.gates is not None:
                total.register_hook(part.gates.note_scale)
        self._ready = prepare(self, found, passes) if training else None
        return self._calls.watch(total) if cost is not None and cost.requires_grad else total

    def begin_penalty(self, trainable: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Begin the penalty of one backward pass: start a new log, follow the model; return the preserved parameters."""
        parameters = self._preserved_of(trainable)
        if not self._calls.penalty:
            check_head(self.heads, self.model, self.tasks)
            self.notices.check_changes(self.changes, self, self._calls.is_fresh)
        self.follow_device()
        self._check_ranks()
        self.step_log.begin()
        for part in self.parts:
            part.watch_path(parameters)
        self._calls.penalty = True
        return parameters

    def check_penalty(self, found: Mapping[str, Tensor], cost: Tensor) -> None:
        """Check activations and their cost, if `check_finite`."""
        if self.check_finite:
            explicit = not self.implicit and any(isinstance(part.term, Anchored | Distils) for part in self.parts)
            check_step(cost, found, explicit, self.step_log, self.notices)

    def consolidate(
        self, batches: Iterable[Any], forward: Forward | None = None, *, loss: Loss | None = None, memory: int = MEMORY
    ) -> None:
        """End a task: measure Ω and α in one pass over its `batches`, and set θ* to the current parameters.

        `forward(model, batch)` returns the output, for models that take more than x: `lambda m, b: m(b[0], task=2)`. EWC and IMM take
        `loss(output, batch)`, one loss per sample (M,), in place of −log p(y|x). `memory` is how many bytes per-sample gradients may
        take at a time. AGSCL also sets weights of neurons that it restarts. If an error is raised, nothing has changed.
        """
        self._check_attached(trains="keeper.consolidate()")
        check_batches(batches, forward)
        self.follow_model()
        self._check_ranks(again=True)
        parameters = self.preserved()
        sharing.check_same(self.ranks, (), parameters, {})
        for part in self.parts:
            part.watch_path(parameters)
            part.place_heads(parameters)
        self.collector.drop()
        check_head(self.heads, self.model, self.tasks, parameters if any(isinstance(p.term, KnowsHeads) for p in self.parts) else None)
        ended = reference_to(batches)
        if iter(batches) is batches and several_reads(self.parts):
            batches = list(batches)  # a generator can be used only once
        how = Measuring(forward, loss, memory, not self.sparsify.is_on, self.choice, self.ranks)
        with self.changes.watching(self.model):
            activity, batches = look(self.model, self.collector, batches, forward)
            omegas, alpha = measure_task(self.model, self.parts, self.collector, batches, how)
        room, total = grown(self.room, self.alpha, alpha, over_ranks(activity, self.ranks, self.model))
        ends = [part.prepare_end(parameters, o, batches, forward, self.tasks) for part, o in zip(self.parts, omegas, strict=True)]
        sums = [float(t.sum()) for t in alpha.values()] or [sum(float(t.sum()) for o in omegas for t in o.values())]
        self._calls.check_end(self, parameters, forward, ended, sums)
        for end in ends:
            end()
        for part in self.parts:
            write(parameters, part.restart(parameters))
        self._calls, self.tasks = Calls(ended=ended, sums=sums, follows=self._calls.step), self.tasks + 1
        self.changes.end_task(self.model, self.tasks)
        self.sparsifiers.end_task()
        self.forwards.append(forward)
        self.room, self.alpha = room, total
        sharing.check_same(self.ranks, self.parts, {}, self.alpha)

    def anchor_with(self, optimizer: torch.optim.Optimizer) -> Keeper:
        """Apply the implicit anchor after every step of this and any later optimizer. It is stable at any strength.

        `selfless.keeper.anchor` lists the step size for each optimizer.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"anchor_with takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        check_optimizer(optimizer)
        if not self._roster.follow().has(optimizer):
            raise ValueError("the optimizer has none of the model's trainable parameters; build it over model.parameters()")
        self.implicit = True
        for part in self.parts:
            part.optimizers.note(optimizer, is_anchored=True)
        return self

    def begin_epoch(self, epoch: int, epochs: int, batches: int | None = None) -> None:
        """Begin epoch `epoch`, counted from 0, of a task with `epochs` epochs.

        Preservers with phases (LwF's warm-up, PackNet's pruning) or gates (HAT) need this call. Only HAT needs `batches`, the number of
        optimizer steps of the epoch: fewer than batches of the loader if gradients are accumulated.
        """
        self._check_attached(trains="keeper.begin_epoch()")
        if not 0 <= epoch < epochs:
            raise ValueError(f"epoch {epoch} of {epochs}: count from 0 to {epochs - 1}")
        self.follow_model()
        parameters, goes_on = self.preserved(), self._calls.begin_epoch(epoch, epochs, self)
        for part in self.parts:
            part.place_heads(parameters)
            changed = part.begin_epoch(parameters, epoch, epochs, batches, goes_on)
            if write(parameters, changed) and not self._calls.step:
                self.changes.note_written(parameters, changed)

    def evaluating(self, task: int) -> AbstractContextManager[nn.Module]:
        """Inside `with`: the model for evaluating task `task`, counted from 0 (PackNet's masks, IMM's merged network, HAT's gates).

        Use it in eval mode or under no_grad: in training mode with gradients on, HAT uses the gates of training.
        """
        check_task(task, self.tasks)
        self.follow_model()
        found = evaluated(self.model, self.parts, self.preserved(), task, self.tasks)
        return self._calls.evaluating(found) if self.tasks and changes_model(self.parts) else found

    def capacity(self, threshold: float = THRESHOLD) -> Capacity:
        """Return what is free by layer (importance over all tasks so far below `threshold`), and each layer's `LayerRoom`."""
        check_threshold(threshold)
        self.follow_model()
        return sharing.count_capacity(self.model, self.parts, self.alpha, self.tasks, threshold, self.ranks, self.room.layers)

    def describe(self) -> Description:
        """Return a table of every layer: its activation, and why it was taken or left. After the first forward pass it is complete."""
        layers, compiled = self._chosen
        return describe_taps(self.model, layers, self.heads, self.taps, compiled)

    def log(self) -> dict[str, float]:
        """Return the parts of the last step and of the state as floats, for a logger. `selfless.keeper.log` lists the names."""
        self.follow_model()
        return self.step_log.read(self.parts, self.trainable(), self.capacity(), self.ranks)

    def footprint(self) -> Footprint:
        """Return the memory that this keeper holds now, by group of the state, and at the peak of the next `consolidate`."""
        self.follow_model()
        return measure_footprint(self.model, self.parts, self.preserved(), activity_bytes(self.model, self.taps))

    @property
    def strengths(self) -> dict[str, float | None]:
        """The strength λ of every term by name: for "auto" the measured one, None until it is measured in the first task."""
        return self.sparsifiers.strengths(self.parts)

    # ------------------------------------------------------------------------------------------------------------ state, ends
    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the keeper as flat named tensors, which safetensors can save."""
        self.follow_model()
        return saving.save(self, self._calls.epoch)

    def load_state_dict(self, state: Mapping[str, Tensor], forwards: Sequence[Forward | None] | None = None) -> None:
        """Load a `state_dict`. It is checked first; if it does not fit this model, an error is raised and nothing changes.

        forwards   the forward= of each consolidate() so far, for a preserver that distils or replays
        """
        with torch.inference_mode(False):  # else no later task could change the loaded tensors
            self.follow_model()
            epoch = saving.load(self, state, forwards)
            self._calls, self.changes = Calls(loaded=True, epoch=epoch, resumed=epoch), Changes(self.model)

    def detach(self) -> None:
        """Remove every hook. The model and its optimizers are then as before `attach`."""
        self._attached = False
        forget_optimizers(self)
        stop_hooks(self.collector, self.injector, *self.parts)

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a keeper has hooks on its model and cannot be copied or pickled: copy the model, attach() a new keeper to it and call "
            "load_state_dict(keeper.state_dict())"
        )

    def __repr__(self) -> str:
        anchor = "implicit" if self.implicit else "explicit"
        layers = ", ".join(self.taps) or "none"
        strengths = self.sparsifiers.describe(self.parts)
        return f"Keeper({self.preserve!r}, {self.sparsify!r}, layers=[{layers}], anchor={anchor}, tasks={self.tasks}{strengths})"

    # ------------------------------------------------------------------------------------------------------ parameters and layers
    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name."""
        return self._roster.follow().trainable

    def preserved(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters that are preserved, by name: those that `parameters=` of `attach` chooses."""
        return self._preserved_of(self.trainable())

    def _preserved_of(self, trainable: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        found = dict(trainable) if self.choice is None else {n: p for n, p in trainable.items() if self.choice(n, p)}
        if not found:
            raise ValueError("the model has no trainable parameters; unfreeze some before attaching or training")
        return found

    def follow_model(self) -> None:
        """Move the state to the device of the model, whose parameters are sharded again if FSDP2 left some whole."""
        if self._roster.follow().is_sharded:
            reshard(self.model)
        self.follow_device()

    def follow_device(self, roster: Roster | None = None) -> None:
        """Move the state to the device of the model."""
        device = (roster or self._roster.follow()).device
        if any(t.device != device for t in self.alpha.values()):
            self.alpha = {n: t.to(device) for n, t in self.alpha.items()}
        self.sparsifiers.move_to(device)
        for part in self.parts:
            part.move_to(device)

    def _check_attached(self, trains: str = "") -> None:
        if not self._attached:
            raise RuntimeError("this keeper was detached; attach() a new one and call load_state_dict(old_keeper.state_dict())")
        self._calls.check_training(trains)

    def _check_ranks(self, again: bool = False) -> None:
        """Raise ValueError, before the first step of a task, for a term that does not work with the ranks that train the model."""
        if again or not self._checked:
            sharing.check_terms(self.parts, self.sparsifiers.terms, self.model, self.implicit, self.injector is not None)
            self._checked = True

    # --------------------------------------------------------------------------------------------------------- optimizer steps
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply anchor, gates, proximal steps, projections and the path after an optimizer step over this model's parameters."""
        roster = self._roster.follow()
        if roster.is_sharded:
            self.follow_model()
            roster.follow()
        if roster.has(optimizer):
            self.follow_device(roster)
            self._calls.check_training("a step of the optimizer")
            if not self._calls.step and not self._calls.penalty:  # a loop without penalty()
                self.notices.check_changes(self.changes, self, is_fresh=False)
            self._calls.note_step(optimizer)
            self.collector.drop()
            finish_step(self, optimizer, self._preserved_of(roster.trainable), roster.names)
