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

import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from selfless.capacity import THRESHOLD, Capacity, count_free
from selfless.importance import measure
from selfless.importance.reducer import MEMORY
from selfless.keeper import state as saving
from selfless.keeper.activations import Collector, resolve_layers
from selfless.keeper.anchor import step_sizes
from selfless.keeper.deprecated import OldNames
from selfless.keeper.inhibition import explain_infinite, inhibition
from selfless.keeper.optimizers import forget_optimizers, watch_optimizers
from selfless.keeper.part import Part
from selfless.network.calling import Forward, check_batches, unwrap
from selfless.network.layers import Layers, Tap, is_automatic
from selfless.network.roles import within
from selfless.preserve import State
from selfless.preserve.base import importance_of, measurements
from selfless.preserve.capabilities import Anchored, Distils, Encodes, KnowsHeads, Phased, Replays
from selfless.sparsify import Sparsifier
from selfless.terms import Term


class Keeper(OldNames):
    """State and hooks for one model; `attach` returns one.

    states   the state of each preserver
    alpha    the importance α of neurons, by layer
    tasks    the number of tasks that have ended
    """

    def __init__(self, model: nn.Module, preserve: Term, sparsify: Term, layers: Layers, heads: Sequence[str], check_finite: bool) -> None:
        if isinstance(heads, str):
            raise TypeError(f"heads= takes a list of names, one per task, not {heads!r}; write heads=[{heads!r}]")
        self.model = unwrap(model)
        self.preserve, self.sparsify, self.check_finite = preserve, sparsify, check_finite
        self.heads = tuple(heads)
        self.forwards: list[Forward | None] = []  # the forward= of each task that has ended, for distillation
        self.alpha: dict[str, Tensor] = {}
        self.tasks = 0
        self.implicit = False
        self._attached = True
        self._has_penalty, self._has_step, self._has_epoch = False, False, False  # True if this task had a call or step
        self._sparsifiers: tuple[Sparsifier, ...] = sparsify.parts
        reads = {term.reads for term in self._sparsifiers if term.strength > 0}
        compiled = self.model is not model or model._compiled_call_impl is not None
        taps = resolve_layers(self.model, layers, self.heads, compiled, needed=bool(reads & {"activations", "weights"}))
        self.parts: list[Part] = [Part(term, self.model, self._parameters(), taps, self.heads) for term in preserve.parts]
        self.collector = Collector(self.model, taps, is_automatic(layers), "activations" in reads, "weights" in reads)
        watch_optimizers(self)
        weakref.finalize(self, _stop, self.collector, self.parts)

    @property
    def taps(self) -> dict[str, Tap]:
        """The place where the activations of each layer are read."""
        return self.collector.taps

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
        count as one larger batch. Preservers that distil (LwF) need the `batch` of the loss, (x, y) or a dict: on it they compare the
        outputs of old heads with those of the network before the task.
        """
        self._check_attached()
        parameters = self._parameters()
        self.follow_device()
        for part in self.parts:
            part.watch_path(parameters)
        self._has_penalty = True
        training = torch.is_grad_enabled() and self.model.training
        self._warn_eval_mode()
        found = self.collector.take()
        costs = inhibition(self._sparsifiers, self.collector, found, self.alpha, parameters, training)
        for part in self.parts:
            costs += part.costs(parameters, self.tasks, self.implicit, training, self.forwards, batch)
            if isinstance(part.term, Distils | Replays):
                self.collector.drop()  # their own passes are not part of the training loop
        like = costs[0] if costs else next(iter(parameters.values()))
        dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
        zero = torch.zeros((), device=like.device, dtype=dtype, requires_grad=torch.is_grad_enabled())
        cost = torch.stack(costs).sum() if costs else None
        total = zero + cost if cost is not None else zero + 0
        if self.check_finite and costs and not math.isfinite(total.item()):
            explain_infinite(found, not self.implicit and any(isinstance(part.term, Anchored) for part in self.parts))
        for part in self.parts if training else ():
            if part.path is not None:
                part.path.note_penalty(total, cost)
            if part.gates is not None:
                total.register_hook(part.gates.note_scale)
        return total

    def consolidate(self, batches: Iterable[Any], forward: Forward | None = None, *, memory: int = MEMORY) -> None:
        """End a task: measure Ω and α in one pass over its `batches`, and set θ* to the current parameters.

        `forward(model, batch)` returns the output, for models that take more than x: `lambda m, b: m(b[0], task=2)`. If an error is
        raised, the keeper is unchanged.
        """
        self._check_attached()
        check_batches(batches)
        self.follow_device()
        parameters = self._parameters()
        for part in self.parts:
            part.watch_path(parameters)
            part.place_heads(parameters)
        self.collector.drop()
        self._check_head(parameters)
        passes = measurements([part.term for part in self.parts])
        if iter(batches) is batches and (len(passes) > 1 or any(isinstance(part.term, Encodes | Replays) for part in self.parts)):
            batches = list(batches)  # a generator can be used only once
        omegas: list[dict[str, Tensor]] = [{} for _ in self.parts]
        alpha: dict[str, Tensor] = {}
        for one in passes:
            if not one.users and not self.taps:
                continue
            found = measure(
                self.model,
                self.collector.complete_taps(batches, forward),
                one.objective,
                alpha_objective=one.alpha_objective,
                taps=self._measured_taps() if one.neurons else {},
                parameters=bool(one.users),
                estimator=one.estimator,
                forward=forward,
                memory=memory,
                lenient=self.collector.auto,
            )
            alpha = found.alpha if one.neurons else alpha
            for user in one.users:
                omegas[user] = found.omega
        states = [part.next_state(parameters, o, batches, forward, self.tasks) for part, o in zip(self.parts, omegas, strict=True)]
        self._warn_forgotten(forward)
        for part, state in zip(self.parts, states, strict=True):
            part.end_task(state)
        self._has_penalty, self._has_step, self._has_epoch = False, False, False
        self.tasks += 1
        self.forwards.append(forward)
        self.alpha = self.alpha | {name: self.alpha[name] + a if name in self.alpha else a for name, a in alpha.items()}

    def anchor_with(self, optimizer: torch.optim.Optimizer) -> Keeper:
        """Apply the implicit anchor after every step of this and any later optimizer. It is stable at any strength.

        `selfless.keeper.anchor` lists the step size for each optimizer.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"anchor_with takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if not step_sizes(optimizer, self._names()):
            raise ValueError("the optimizer has none of the model's trainable parameters; build it over model.parameters()")
        self.implicit = True
        return self

    def begin_epoch(self, epoch: int, epochs: int, batches: int | None = None) -> None:
        """Begin epoch `epoch`, counted from 0, of a task with `epochs` epochs.

        Preservers with phases (LwF's warm-up, PackNet's pruning) or gates (HAT) need this call. Only HAT needs the number of `batches`.
        """
        self._check_attached()
        if not 0 <= epoch < epochs:
            raise ValueError(f"epoch {epoch} of {epochs}: count from 0 to {epochs - 1}")
        self.follow_device()
        parameters = self._parameters()
        self._has_epoch = True
        for part in self.parts:
            part.place_heads(parameters)
            self._write(parameters, part.begin_epoch(parameters, epoch, epochs, batches))

    @contextmanager
    def evaluating(self, task: int) -> Iterator[nn.Module]:
        """Inside `with`: the model for evaluating task `task`, counted from 0 (PackNet's masks, IMM's merged network, HAT's gates).

        Use it in eval mode or under no_grad: in training mode with gradients on, HAT uses the gates of training.
        """
        if not 0 <= task < max(self.tasks, 1):
            raise ValueError(f"task {task} has not ended yet: {self.tasks} tasks were consolidated so far; count from 0")
        self.follow_device()
        parameters = self._parameters()
        before: dict[str, Tensor] = {}
        for part in self.parts:
            other = part.evaluated_parameters(parameters, task) if self.tasks else {}
            before |= {n: parameters[n].detach().clone() for n in other if n not in before}
            self._write(parameters, other)
            if part.gates is not None:
                part.gates.follow(part.state, task if self.tasks else None)
        try:
            yield self.model
        finally:
            self._write(parameters, before)
            for part in self.parts:
                if part.gates is not None:
                    part.gates.follow(part.state)

    def capacity(self, threshold: float = THRESHOLD) -> Capacity:
        """Return the free parameters and neurons by layer: those whose importance over all tasks so far is below `threshold`."""
        self.follow_device()
        omega = importance_of([part.term for part in self.parts], self.states)
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad or (omega and n in omega)}
        return Capacity(
            {n: count_free(omega.get(n, torch.zeros_like(p)), threshold) for n, p in named.items()} if omega is not None else {},
            {name: count_free(a, threshold) for name, a in self.alpha.items()},
            self.tasks,
            threshold,
        )

    # ------------------------------------------------------------------------------------------------------------ state, ends
    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the keeper as flat named tensors, which safetensors can save."""
        terms = [part.term for part in self.parts]
        calls = any(isinstance(term, Distils | Replays) for term in terms)
        called = [forward is not None for forward in self.forwards] if calls and self.tasks else None
        begun = any(part.path_started for part in self.parts)
        return saving.flatten(terms, saving.Learned(self.states, self.alpha, self.tasks, begun, called))

    def load_state_dict(self, state: Mapping[str, Tensor], forwards: Sequence[Forward | None] | None = None) -> None:
        """Load a `state_dict`. It is checked first; if it does not fit this model, an error is raised and nothing changes.

        forwards   the forward= of each consolidate() so far, for a preserver that distils or replays
        """
        terms = [part.term for part in self.parts]
        new = saving.unflatten(state, terms)
        saving.check(new, terms, {n: p.shape for n, p in self.model.named_parameters()}, self.taps)
        calls: list[Forward | None] = list(forwards) if forwards is not None else [None] * new.tasks
        if len(calls) != new.tasks or (forwards is None and any(new.called or ())):
            raise ValueError(
                f"the {new.tasks} tasks of this state were consolidated with forward=, which a file cannot store; "
                "pass forwards=[one per task] to load_state_dict"
            )
        self.forwards, self.alpha, self.tasks = calls, new.alpha, new.tasks
        for part, saved in zip(self.parts, new.states, strict=True):
            part.load(saved, self._parameters(), new.begun)
        self.follow_device()

    def detach(self) -> None:
        """Remove every hook. The model and its optimizers are then as before `attach`."""
        self._attached = False
        forget_optimizers(self)
        _stop(self.collector, self.parts)

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
        return f"Keeper({self.preserve!r}, {self.sparsify!r}, layers=[{layers}], anchor={anchor}, tasks={self.tasks})"

    # ------------------------------------------------------------------------------------------------------ parameters and layers
    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name."""
        found = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not found:
            raise ValueError("the model has no trainable parameters; unfreeze some before attaching or training")
        return found

    def _names(self) -> dict[Tensor, str]:
        return {p: n for n, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def _write(self, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            parameters[name].copy_(value)

    def _measured_taps(self) -> dict[str, Tap]:
        return {n: t for n, t in self.taps.items() if t.complete or self.sparsify.strength == 0}

    def follow_device(self) -> None:
        """Move the state to the device of the model."""
        device = next(self.model.parameters()).device
        self.alpha = {n: t.to(device) for n, t in self.alpha.items()}
        for part in self.parts:
            part.move_to(device)

    # ------------------------------------------------------------------------------------------------------ checks and warnings
    def _check_attached(self) -> None:
        if not self._attached:
            raise RuntimeError("this keeper was detached; attach() a new one and call load_state_dict(old_keeper.state_dict())")

    def _check_head(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise ValueError if the head of the current task is not in the model."""
        if self.tasks < len(self.heads) and any(isinstance(part.term, KnowsHeads) for part in self.parts):
            head = self.heads[self.tasks]
            if not any(within(name, head) for name in parameters):
                raise ValueError(f"heads= names {head!r} for task {self.tasks + 1}, but no trainable parameter of the model is in it")

    def _warn_eval_mode(self) -> None:
        reads = any(term.strength > 0 and term.reads == "activations" for term in self._sparsifiers)
        if torch.is_grad_enabled() and not self.model.training and reads:
            warnings.warn("in eval mode keeper.penalty() does not include the sparsifier; call model.train() before training", stacklevel=3)

    def _warn_forgotten(self, forward: Forward | None) -> None:
        """Warn if this task was trained without a call that a term needs."""
        if not self._has_step:
            return
        needed = [type(term).__name__ for term in self._sparsifiers if term.strength > 0]
        needed += [type(part.term).__name__ for part in self.parts if part.needs_penalty(self.tasks, self.implicit)]
        if needed and not self._has_penalty:
            warnings.warn(f"this task was trained without keeper.penalty(), which {needed[0]} needs in the loss", stacklevel=3)
        for part in self.parts:
            has_new_head = part.has_own_heads or forward is not None  # a head that all tasks share is not new and needs no forward=
            had_warmup = part.has_own_heads and self._has_epoch
            if isinstance(part.term, Phased) and part.term.warms_up(self.tasks) and has_new_head and not had_warmup:
                remedy = "call keeper.begin_epoch(epoch, epochs) before every epoch"
                remedy = remedy if part.has_own_heads else "name the heads of the tasks: attach(…, heads=[…])"
                warnings.warn(
                    f"{type(part.term).__name__} trains the head of a new task alone at first, but this task had no warm-up: {remedy}, "
                    "or set warmup=0",
                    stacklevel=3,
                )

    # --------------------------------------------------------------------------------------------------------- optimizer steps
    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the implicit anchor, gates, projections and the path after an optimizer step over this model's parameters."""
        names = self._names()
        if not any(p in names for g in optimizer.param_groups for p in g["params"]):
            return
        self._has_step = True
        self.collector.drop()
        self.follow_device()
        parameters = self._parameters()
        for part in self.parts:
            if part.drops is not None:
                part.drops.end_step()
            if self.implicit and self.tasks:
                part.pull(optimizer, parameters, names)
            part.step_gates(optimizer.param_groups[0]["lr"])
        for part in self.parts:
            self._write(parameters, part.project(parameters))
        for part in self.parts:
            part.observe()


def _stop(collector: Collector, parts: Sequence[Part]) -> None:
    """Remove all hooks; also called when the keeper is garbage-collected."""
    collector.stop()
    for part in parts:
        part.stop()
