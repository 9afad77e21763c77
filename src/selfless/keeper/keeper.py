"""The keeper: preservers and sparsifiers in anybody's training loop.

    keeper = selfless.attach(model, preserve=MAS(0.1), sparsify=SLNID(1e-3), layers=["fc1", "fc2"])
    keeper.anchor_with(optimizer)
    for task in tasks:
        for x, y in task:
            loss = F.cross_entropy(model(x), y) + keeper.penalty()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        keeper.consolidate(task)

The keeper only reads the model; `selfless.keeper.activations` says which forward passes count. After `anchor_with`, every optimizer step
over the model's parameters is followed by the implicit anchor, also with an optimizer made later.
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
from selfless.preserve.capabilities import Anchored, Distils, Encodes, KnowsHeads, Phased
from selfless.sparsify import Sparsifier
from selfless.terms import Term


class Keeper(OldNames):
    """State and hooks over one model; made by `attach`. `states`, `alpha` and `tasks` are what it has learned so far."""

    def __init__(self, model: nn.Module, preserve: Term, sparsify: Term, layers: Layers, heads: Sequence[str], check_finite: bool) -> None:
        if isinstance(heads, str):
            raise TypeError(f"heads= takes a list of names, one a task, not {heads!r}; write heads=[{heads!r}]")
        self.model = unwrap(model)
        self.preserve, self.sparsify, self.check_finite = preserve, sparsify, check_finite
        self.heads = tuple(heads)
        self.forwards: list[Forward | None] = []  # how the tasks that ended were run: what distillation compares
        self.alpha: dict[str, Tensor] = {}
        self.tasks = 0
        self.implicit = False
        self._attached = True
        self._saw_penalty, self._saw_step, self._saw_epoch = False, False, False  # in this task
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
        """Where the activations of each layer are read."""
        return self.collector.taps

    @property
    def states(self) -> list[State]:
        """The state of each preserver, in the order of the sum."""
        return [part.state for part in self.parts]

    @property
    def state(self) -> State:
        """The state of the only preserver; of a sum, see `states`."""
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
        """λ_SSL Σ_l R(H_l) over the forward passes since the last call, plus the explicit λ_Ω Σ Ω(θ − θ*)² unless anchored implicitly.

        Call it once per backward pass. Several forward passes before it count as one larger batch. Preservers that distil (LwF) need the
        `batch` that the loss is of, (x, y) or a dict: they compare old tasks' outputs on it with those of the network before the task.
        """
        self._check_attached()
        parameters = self._parameters()
        self.follow_device()
        for part in self.parts:
            part.watch_path(parameters)
        self._saw_penalty = True
        training = torch.is_grad_enabled() and self.model.training
        self._warn_eval_mode()
        found = self.collector.take()
        costs = inhibition(self._sparsifiers, self.collector, found, self.alpha, parameters, training)
        for part in self.parts:
            costs += part.costs(parameters, self.tasks, self.implicit, training, self.forwards, batch)
            if isinstance(part.term, Distils):
                self.collector.drop()  # the passes of distillation are not the loop's
        like = costs[0] if costs else next(iter(parameters.values()))
        dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
        zero = torch.zeros((), device=like.device, dtype=dtype, requires_grad=torch.is_grad_enabled())
        depends = torch.stack(costs).sum() if costs else None
        total = zero + depends if depends is not None else zero + 0
        if self.check_finite and costs and not math.isfinite(total.item()):
            explain_infinite(found, not self.implicit and any(isinstance(part.term, Anchored) for part in self.parts))
        for part in self.parts if training else ():
            if part.path is not None:
                part.path.note_penalty(total, depends)
            if part.gates is not None:
                total.register_hook(part.gates.note_scale)
        return total

    def consolidate(self, batches: Iterable[Any], forward: Forward | None = None, *, memory: int = MEMORY) -> None:
        """End a task: take Ω, α and θ* in one pass over its `batches`, and anchor the model here from now on.

        `forward(model, batch)` gives the output for models that take more than x: `lambda m, b: m(b[0], task=2)`. If anything fails,
        the keeper stays as it was.
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
        if iter(batches) is batches and (len(passes) > 1 or any(isinstance(part.term, Encodes) for part in self.parts)):
            batches = list(batches)  # a generator that is needed several times
        omegas: list[dict[str, Tensor]] = [{} for _ in self.parts]
        alpha: dict[str, Tensor] = {}
        for one in passes:
            if not one.users and not self.taps:
                continue
            found = measure(
                self.model,
                self.collector.show(batches, forward),
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
        states = [part.consolidated(parameters, o, batches, forward, self.tasks) for part, o in zip(self.parts, omegas, strict=True)]
        self._warn_forgotten(forward)
        for part, state in zip(self.parts, states, strict=True):
            part.end_task(state)
        self._saw_penalty, self._saw_step, self._saw_epoch = False, False, False
        self.tasks += 1
        self.forwards.append(forward)
        self.alpha = self.alpha | {name: self.alpha[name] + a if name in self.alpha else a for name, a in alpha.items()}

    def anchor_with(self, optimizer: torch.optim.Optimizer) -> Keeper:
        """Anchor implicitly from now on, after every step of this and any later optimizer: stable at any strength.

        `selfless.keeper.anchor` says what the step size is for each optimizer.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"anchor_with takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if not step_sizes(optimizer, self._names()):
            raise ValueError("the optimizer holds none of the model's trainable parameters; build it over model.parameters()")
        self.implicit = True
        return self

    def begin_epoch(self, epoch: int, epochs: int, batches: int | None = None) -> None:
        """Say that epoch `epoch`, counted from 0, of a task of `epochs` begins.

        For preservers with phases (LwF's warm-up, PackNet's pruning) or gates (HAT, which alone needs the number of `batches`).
        """
        self._check_attached()
        if not 0 <= epoch < epochs:
            raise ValueError(f"epoch {epoch} of {epochs}: count from 0 to {epochs - 1}")
        self.follow_device()
        parameters = self._parameters()
        self._saw_epoch = True
        for part in self.parts:
            part.place_heads(parameters)
            self._write(parameters, part.begin_epoch(parameters, epoch, epochs, batches))

    @contextmanager
    def evaluating(self, task: int) -> Iterator[nn.Module]:
        """Inside `with`: the model as task `task`, counted from 0, is evaluated (PackNet's masks, IMM's merged network, HAT's gates).

        Use it in eval mode or under no_grad: a pass in training mode with gradients has the gates of training.
        """
        if not 0 <= task < max(self.tasks, 1):
            raise ValueError(f"task {task} has not ended yet: consolidate() has been called for {self.tasks}; count from 0")
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
        """Free parameters and neurons by layer: those whose importance over all tasks so far is below `threshold`."""
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
        """Everything learned, as flat named tensors (safetensors will take it)."""
        terms = [part.term for part in self.parts]
        distils = any(isinstance(term, Distils) for term in terms)
        called = [forward is not None for forward in self.forwards] if distils and self.tasks else None
        begun = any(part.path_started for part in self.parts)
        return saving.flatten(terms, saving.Learned(self.states, self.alpha, self.tasks, begun, called))

    def load_state_dict(self, state: Mapping[str, Tensor], forwards: Sequence[Forward | None] | None = None) -> None:
        """Take over a `state_dict`. It is checked against this model first; on a mismatch nothing changes.

        `forwards`: for a preserver that distils, the `forward` of each consolidate() so far, where there were any.
        """
        terms = [part.term for part in self.parts]
        new = saving.unflatten(state, terms)
        saving.check(new, terms, {n: p.shape for n, p in self.model.named_parameters()}, self.taps)
        calls: list[Forward | None] = list(forwards) if forwards is not None else [None] * new.tasks
        if len(calls) != new.tasks or (forwards is None and any(new.called or ())):
            raise ValueError(
                f"the state's {new.tasks} tasks were consolidated with forward=, which a file cannot hold; "
                "pass forwards=[one for each task] to load_state_dict"
            )
        self.forwards, self.alpha, self.tasks = calls, new.alpha, new.tasks
        for part, saved in zip(self.parts, new.states, strict=True):
            part.load(saved, self._parameters(), new.begun)
        self.follow_device()

    def detach(self) -> None:
        """Remove every hook; the model and its optimizers are as before `attach`."""
        self._attached = False
        forget_optimizers(self)
        _stop(self.collector, self.parts)

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a keeper is tied to its model by hooks and cannot be copied or pickled: copy the model, attach() a new keeper to it and "
            "load_state_dict(keeper.state_dict())"
        )

    def __repr__(self) -> str:
        anchor = "implicit" if self.implicit else "explicit"
        layers = ", ".join(self.taps) or "none"
        return f"Keeper({self.preserve!r}, {self.sparsify!r}, layers=[{layers}], anchor={anchor}, tasks={self.tasks})"

    # ------------------------------------------------------------------------------------------------------ parameters and layers
    def _parameters(self) -> dict[str, nn.Parameter]:
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
        """Move the state to where the model is now."""
        device = next(self.model.parameters()).device
        self.alpha = {n: t.to(device) for n, t in self.alpha.items()}
        for part in self.parts:
            part.move_to(device)

    # ------------------------------------------------------------------------------------------------------ checks and warnings
    def _check_attached(self) -> None:
        if not self._attached:
            raise RuntimeError("this keeper was detached; attach a new one and load_state_dict() the old one's state_dict()")

    def _check_head(self, parameters: Mapping[str, Tensor]) -> None:
        """The head of the task that has just ended must be in the model by now."""
        if self.tasks < len(self.heads) and any(isinstance(part.term, KnowsHeads) for part in self.parts):
            head = self.heads[self.tasks]
            if not any(within(name, head) for name in parameters):
                raise ValueError(f"heads= names {head!r} for task {self.tasks + 1}, but the model has no trainable parameter of that name")

    def _warn_eval_mode(self) -> None:
        reads = any(term.strength > 0 and term.reads == "activations" for term in self._sparsifiers)
        if torch.is_grad_enabled() and not self.model.training and reads:
            warnings.warn("keeper.penalty() in eval mode leaves the sparsifier out; call model.train() before training", stacklevel=3)

    def _warn_forgotten(self, forward: Forward | None) -> None:
        """Warn of a task that was trained without a call that its terms need."""
        if not self._saw_step:
            return
        needed = [type(term).__name__ for term in self._sparsifiers if term.strength > 0]
        needed += [type(part.term).__name__ for part in self.parts if part.needs_penalty(self.tasks, self.implicit)]
        if needed and not self._saw_penalty:
            warnings.warn(f"this task was trained without keeper.penalty(), which {needed[0]} needs in the loss", stacklevel=3)
        for part in self.parts:
            new_head = part.has_own_heads or forward is not None  # a head that all tasks share needs no forward=, and is not new
            warmed = part.has_own_heads and self._saw_epoch
            if isinstance(part.term, Phased) and part.term.warms_up(self.tasks) and new_head and not warmed:
                remedy = "call keeper.begin_epoch(epoch, epochs) before every epoch"
                remedy = remedy if part.has_own_heads else "name the heads of the tasks: attach(…, heads=[…])"
                warnings.warn(
                    f"{type(part.term).__name__} warms up the head of a new task, and this task's was not: {remedy}, or set warmup=0",
                    stacklevel=3,
                )

    # --------------------------------------------------------------------------------------------------------- optimizer steps
    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After every optimizer step over this model's parameters: the implicit anchor, gates, projections, the path."""
        names = self._names()
        if not any(p in names for g in optimizer.param_groups for p in g["params"]):
            return
        self._saw_step = True
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
    """Leave no hooks behind, also when nobody holds the keeper any more."""
    collector.stop()
    for part in parts:
        part.stop()
