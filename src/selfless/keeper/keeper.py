"""`attach`: preservers and sparsifiers for anybody's model and training loop.

    keeper = selfless.attach(model, preserve=MAS(0.1), sparsify=SLNID(1e-3), layers=["fc1", "fc2"])
    keeper.anchor_with(optimizer)
    for task in tasks:
        for x, y in task:
            loss = F.cross_entropy(model(x), y) + keeper.penalty()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        keeper.consolidate(task)

The keeper only reads the model; `selfless.recording` says which forward passes count. After `anchor_with`, every optimizer step over the
model's parameters is followed by the implicit anchor, also that of an optimizer made later.
"""

from __future__ import annotations

import itertools
import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from selfless.capacity import THRESHOLD, Capacity, free_share
from selfless.importance.layerwise import Layerwise
from selfless.importance.loop import measure
from selfless.importance.persample import MEMORY
from selfless.keeper import state as saved
from selfless.keeper.activations import Recording
from selfless.keeper.anchor import step_sizes
from selfless.keeper.distillation import coded, distillation, unwarmed
from selfless.keeper.drops import Drops
from selfless.keeper.gates import Gates
from selfless.keeper.path import PathWatch
from selfless.network.calling import Forward, check_batches, evaluating, run_batch, to_device, unwrap
from selfless.network.discovery import Discovery
from selfless.network.layers import Layers, Tap, by_itself, resolve
from selfless.network.roles import within
from selfless.preserve import PRESERVERS, NoPreserver, Preserver, Quadratic, State
from selfless.sparsify import SPARSIFIERS, NoSparsifier, Sparsifier
from selfless.terms import parse


def attach(
    model: nn.Module,
    preserve: Preserver | str | None = None,
    sparsify: Sparsifier | str | None = None,
    layers: Layers = "auto",
    *,
    heads: Sequence[str] = (),
    check_finite: bool = True,
) -> Keeper:
    """A keeper for `model`.

    preserve      MAS(0.1), EWC(10), LwF(1) and the others of `selfless.preserve`, or "mas:0.1"; None keeps nothing
    sparsify      SLNID(1e-3) or any other of `selfless.sparsify`, or "slnid:1e-3"; None leaves the activations alone
    layers        where the sparsifier acts and neurons are counted: names, globs ("blocks.*.act"), modules; "auto": the activation
                  after every hidden nn.Linear; "all": and after every convolution that has one, whose neurons are its channels. (The one
                  registered last counts as the head.) A layer is named by its activation module or by the module before it.
    heads         where each task has an output layer of its own: its name, task by task (["heads.0", "heads.1"]); it may be added to the
                  model later. LwF, IMM, PackNet and HAT treat it apart from what tasks share
    check_finite  raise on NaN or infinite activations (one synchronisation a step on a GPU; False skips it)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach takes a torch.nn.Module, not {type(model).__name__}")
    return Keeper(
        model,
        _term(preserve, PRESERVERS, Preserver, NoPreserver(), "preserve"),
        _term(sparsify, SPARSIFIERS, Sparsifier, NoSparsifier(), "sparsify"),
        layers,
        heads,
        check_finite,
    )


def _term(value: Any, kinds: Mapping[str, Any], base: type, none: Any, role: str) -> Any:
    if isinstance(value, str):
        value = parse(value, kinds, "preserver" if role == "preserve" else "sparsifier")
    value = none if value is None else value
    if not isinstance(value, base):
        known = ", ".join(dict.fromkeys(k.__name__ for k in kinds.values()))
        written = f"; write {value.__name__}(…)" if isinstance(value, type) and issubclass(value, base) else ""
        raise TypeError(f"{role}= takes one of {known}, or a subclass of {base.__name__}, not {value!r}{written}")
    return value


class Keeper:
    """State and hooks over one model; made by `attach`. `state`, `alpha` and `tasks` are what it has learned so far."""

    def __init__(
        self, model: nn.Module, preserve: Preserver, sparsify: Sparsifier, layers: Layers, heads: Sequence[str], check_finite: bool
    ) -> None:
        if isinstance(heads, str):
            raise TypeError(f"heads= takes a list of names, one a task, not {heads!r}; write heads=[{heads!r}]")
        self.model = unwrap(model)
        self.preserve, self.sparsify, self.check_finite = preserve, sparsify, check_finite
        self.heads = tuple(heads)
        self.forwards: list[Forward | None] = []  # how the tasks that ended were run: what LwF compares
        self.alpha: dict[str, Tensor] = {}
        self.tasks = 0
        self.implicit = False
        self._attached = True
        self._fresh = True  # no step of this task was seen yet
        self._asked, self._moved, self._turned = False, False, False  # whether this task had a penalty(), a step, a turn()
        self._drawn = False  # what the next task's gates start from has been given
        self._shares: tuple[Any, dict[str, Tensor]] | None = None
        compiled = self.model is not model or model._compiled_call_impl is not None
        auto = by_itself(layers)
        reads = sparsify.reads if sparsify.strength > 0 else ""
        taps = self._resolve(layers, auto, compiled, wanted=reads in ("activations", "weights"))
        preserve.check_network(n for n, _ in self.model.named_buffers())
        self.state: State = preserve.init(self._parameters())
        self._place_heads()
        self._gates = Gates(self.model, taps, preserve) if preserve.gates else None
        if self._gates is not None:
            self.state = preserve.wire(self.state, self._gates.wiring)
            self._gates.follow(self.state)
        self._drops = Drops(self.model, preserve.drop_rate, self.heads) if preserve.drops else None
        self._recording = Recording(self.model, taps, auto, reads == "activations", reads == "weights")
        self._watch = PathWatch() if preserve.watches else None
        self._step_hook = register_optimizer_step_post_hook(_weak_step(self))
        weakref.finalize(self, _let_go, self._recording, self._step_hook, self._watch, self._gates, self._drops)

    @property
    def taps(self) -> dict[str, Tap]:
        return self._recording.taps

    # ------------------------------------------------------------------------------------------------------------- the loop
    def penalty(self, batch: Any = None) -> Tensor:
        """λ_SSL Σ_l R(H_l) over the forward passes since the last call, plus the explicit λ_Ω Σ Ω(θ − θ*)² unless anchored implicitly.

        Call it once per backward pass. Several forward passes before it count as one larger batch. Preservers that distil (LwF) need the
        `batch` that the loss is of, (x, y) or a dict: old tasks' outputs on it are compared with those of the network before the task.
        """
        self._check_attached()
        parameters = self._parameters()
        self._place()
        self._begin_or_observe(parameters)
        self._asked = True
        parts: list[Tensor] = []
        training = torch.is_grad_enabled() and self.model.training
        if torch.is_grad_enabled() and not self.model.training and self.sparsify.strength > 0 and self.sparsify.reads == "activations":
            warnings.warn("keeper.penalty() in eval mode leaves the sparsifier out; call model.train() before training", stacklevel=2)
        found = self._recording.take()
        if self.sparsify.strength > 0 and (training or self.sparsify.reads != "activations"):
            parts.append(self.sparsify.strength * self._inhibition(found, parameters))
        taken = self.implicit and isinstance(self.preserve, Quadratic)  # by the anchor, after each step
        if self.preserve.strength > 0 and self.tasks and self.preserve.penalises and not taken:
            self._check_shapes(parameters)
            parts.append(self.preserve.strength * self.preserve.penalty(self.state, parameters))
        if self._gates is not None and training:
            self._gates.follow(self.state)
            parts.append(self.preserve.strength * self.preserve.gate_penalty(self.state, self._gates.leaves()))
        if self.preserve.distils and self.preserve.strength > 0 and self.tasks:
            self._check_shapes(parameters)
            parts.append(self.preserve.strength * distillation(self.model, self.preserve, self.state, self.forwards, batch))
            self._recording.drop()  # its passes are not the loop's
        like = parts[0] if parts else next(iter(parameters.values()))
        dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
        zero = torch.zeros((), device=like.device, dtype=dtype, requires_grad=torch.is_grad_enabled())
        depends = torch.stack(parts).sum() if parts else None
        total = zero + depends if depends is not None else zero + 0
        if self.check_finite and parts and not math.isfinite(total.item()):
            self._explain(found)
        if self._watch is not None and training:
            self._watch.penalised(total, depends)
        if self._gates is not None and training:
            total.register_hook(self._gates.scaled)
        return total

    def consolidate(self, batches: Iterable[Any], forward: Forward | None = None, *, memory: int = MEMORY) -> None:
        """A task has ended: take Ω, α and θ* in one pass over its `batches`, and anchor the model here from now on.

        `forward(model, batch)` gives the output for models that take more than x: `lambda m, b: m(b[0], task=2)`. If anything fails,
        the keeper stays as it was.
        """
        self._check_attached()
        check_batches(batches)
        self._place()
        parameters = self._parameters()
        self._begin_or_observe(parameters)
        self._recording.drop()
        preserve = self.preserve
        omega: dict[str, Tensor] = {}
        alpha: dict[str, Tensor] = {}
        self._place_heads()
        self._check_head(parameters)
        if preserve.encodes and iter(batches) is batches:
            batches = list(batches)  # they are gone through several times
        if preserve.measures or self.taps:
            found = measure(
                self.model,
                self._shown(batches, forward),
                preserve.objective,
                spares=preserve.spares,
                taps={n: t for n, t in self.taps.items() if t.complete or self.sparsify.strength == 0},
                parameters=preserve.measures,
                estimator=preserve.how,
                forward=Layerwise(forward) if preserve.local else forward,
                memory=memory,
                lenient=self._recording.auto,
            )
            omega, alpha = found.omega, found.alpha
        values = {n: p.detach() for n, p in parameters.items()}
        self._check_shapes(values)
        state = self.state
        if preserve.encodes:
            state = preserve.coded(state, preserve.fit(coded(self.model, preserve, batches, forward), self.tasks)[0])
        state = preserve.consolidate(state, values, omega)
        for name, value in (preserve.importance(state) or {}).items():
            if not bool(torch.isfinite(value).all()):
                raise ValueError(
                    f"the importance of {name!r} is not finite; did training diverge? Lower the learning rate or clip gradients"
                )
        if self._moved and not self._asked and self._asks:
            warnings.warn(f"this task was trained without keeper.penalty(), which {self._asks} needs in the loss", stacklevel=2)
        if self._moved and self.tasks and (why := unwarmed(preserve, state, self._turned, forward)):
            warnings.warn(why, stacklevel=2)
        self._asked, self._moved, self._turned = False, False, False
        self.state, self.tasks, self._fresh, self._shares = state, self.tasks + 1, True, None
        self.forwards.append(forward)
        self._follow()
        self.alpha = self.alpha | {name: self.alpha[name] + a if name in self.alpha else a for name, a in alpha.items()}

    def anchor_with(self, optimizer: torch.optim.Optimizer) -> Keeper:
        """Anchor implicitly from now on, after every step of this and any later optimizer: stable at any strength.

        What the step size means for each optimizer is said in `selfless.keeper.anchor`.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"anchor_with takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if not step_sizes(optimizer, self._names()):
            raise ValueError("the optimizer holds none of the model's trainable parameters; build it over model.parameters()")
        self.implicit = True
        return self

    def turn(self, epoch: int, epochs: int, batches: int | None = None) -> None:
        """Epoch `epoch` of `epochs`, counted from 0, of a task begins, with so many `batches`: for preservers with phases (LwF's warm-up,
        PackNet's pruning) or gates (HAT, which alone needs `batches`)."""
        self._check_attached()
        if not 0 <= epoch < epochs:
            raise ValueError(f"epoch {epoch} of {epochs}: count from 0 to {epochs - 1}")
        self._place()
        self._place_heads()
        self._turned = True
        if self._gates is not None:
            if batches is None or batches < 1:
                raise ValueError(
                    f"{type(self.preserve).__name__} anneals its gates over an epoch: write keeper.turn(epoch, epochs, batches=len(loader))"
                )
            if epoch == 0 and not self._drawn:
                self.draw_gates(torch.randn(self.state["fresh"]["all"].shape))
            self._drawn = False
            self._gates.begin(batches)
        if self.preserve.turning(epoch, epochs):
            parameters = self._parameters()
            self.state, changed = self.preserve.turn(self.state, {n: p.detach() for n, p in parameters.items()}, epoch, epochs)
            self._write(parameters, changed)
        if self._gates is not None:
            self._gates.follow(self.state)

    def draw_gates(self, noise: Tensor) -> None:
        """What the next task's gates start from, in place of `torch.randn`: call it before the task's first `turn`."""
        held = self.state["fresh"]["all"]
        self.state = {**self.state, "fresh": {"all": noise.to(held).view(held.shape)}}
        self._drawn = True

    @contextmanager
    def as_task(self, task: int) -> Iterator[nn.Module]:
        """The model as the preserver judges task `task`, counted from 0: PackNet's masks, IMM's merged network, HAT's gates. Afterwards as
        before. Use it to evaluate, in eval mode or under no_grad: a pass in training mode with gradients has the gates of training."""
        if not 0 <= task < max(self.tasks, 1):
            raise ValueError(f"task {task} has not ended yet: consolidate() has been called for {self.tasks}; count from 0")
        self._place()
        parameters = self._parameters()
        values = {n: p.detach() for n, p in parameters.items()}
        other = self.preserve.evaluated(self.state, values, task) if self.preserve.evaluates and self.tasks else {}
        before = {n: values[n].clone() for n in other}
        self._write(parameters, other)
        if self._gates is not None:
            self._gates.follow(self.state, task if self.tasks else None)
        try:
            yield self.model
        finally:
            self._write(parameters, before)
            if self._gates is not None:
                self._gates.follow(self.state)

    def capacity(self, threshold: float = THRESHOLD) -> Capacity:
        """Free parameters and neurons by layer: those whose importance over all tasks so far is below `threshold`."""
        self._place()
        omega = self.preserve.importance(self.state)
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad or (omega and n in omega)}
        return Capacity(
            {n: free_share(omega.get(n, torch.zeros_like(p)), threshold) for n, p in named.items()} if omega is not None else {},
            {name: free_share(a, threshold) for name, a in self.alpha.items()},
            self.tasks,
            threshold,
        )

    # ------------------------------------------------------------------------------------------------------------ state, ends
    def state_dict(self) -> dict[str, Tensor]:
        """Everything learned, as flat named tensors (safetensors will take it)."""
        called = [forward is not None for forward in self.forwards] if self.preserve.distils and self.tasks else None
        return saved.flat(self.preserve, saved.Saved(self.state, self.alpha, self.tasks, not self._fresh, called))

    def load_state_dict(self, state: Mapping[str, Tensor], forwards: Sequence[Forward | None] | None = None) -> None:
        """Take over a `state_dict`. Checked against this model first; on a mismatch nothing changes.

        `forwards`: for a preserver that distils, the `forward` of each consolidate() so far, where there were any.
        """
        new = saved.read(state, self.preserve, self._parameters())
        saved.check(new, self.preserve, {n: p.shape for n, p in self.model.named_parameters()}, self.taps)
        calls: list[Forward | None] = list(forwards) if forwards is not None else [None] * new.tasks
        if len(calls) != new.tasks or (forwards is None and any(new.called or ())):
            raise ValueError(
                f"the state's {new.tasks} tasks were consolidated with forward=, which a file cannot hold; "
                "pass forwards=[one for each task] to load_state_dict"
            )
        self.forwards = calls
        self.state, self.alpha, self.tasks, self._shares = new.state, new.alpha, new.tasks, None
        self._follow()
        self._fresh = not new.begun
        if self._watch is not None:
            self._watch.follow(self._parameters())
            self._watch.begin()
        self._place()

    def detach(self) -> None:
        """Remove every hook; the model and its optimizers are as before `attach`."""
        self._attached = False
        self._recording.stop()
        self._step_hook.remove()
        if self._watch is not None:
            self._watch.stop()
        if self._gates is not None:
            self._gates.stop()
        if self._drops is not None:
            self._drops.stop()

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

    # -------------------------------------------------------------------------------------------------------------- the insides
    def _follow(self) -> None:
        """The hooks go on with the state as it is now."""
        if self._gates is not None:
            self._gates.follow(self.state)
        if self._drops is not None:
            self._drops.follow(self.state)

    @property
    def _asks(self) -> str:
        """Who needs penalty() in the loss of this task: nobody, or its name."""
        if self.sparsify.strength > 0:
            return type(self.sparsify).__name__
        anchored = self.implicit and isinstance(self.preserve, Quadratic)
        holds = self.tasks and (self.preserve.distils or (self.preserve.penalises and not anchored))
        needed = holds or self.preserve.watches or self.preserve.gates
        return type(self.preserve).__name__ if self.preserve.strength > 0 and needed else ""

    def _check_attached(self) -> None:
        if not self._attached:
            raise RuntimeError("this keeper was detached; attach a new one and load_state_dict() the old one's state_dict()")

    def _parameters(self) -> dict[str, nn.Parameter]:
        found = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not found:
            raise ValueError("the model has no trainable parameters; unfreeze some before attaching or training")
        return found

    def _names(self) -> dict[Tensor, str]:
        return {p: n for n, p in self.model.named_parameters() if p.requires_grad}

    def _resolve(self, layers: Layers, auto: bool, compiled: bool, wanted: bool) -> dict[str, Tap]:
        try:
            taps = resolve(self.model, layers, self.heads)
        except ValueError:
            if auto and not wanted:
                return {}
            raise
        open_taps = [name for name, tap in taps.items() if not tap.complete]
        if compiled and open_taps and not auto:
            raise ValueError(
                f"layer {open_taps[0]!r} is inside a compiled model, where the activation function after it cannot be seen; "
                "name its activation module instead"
            )
        if compiled:
            taps = {name: tap for name, tap in taps.items() if tap.complete}
        if wanted and not taps:
            raise ValueError("no layer was found for the sparsifier; pass layers=[names of activation modules]")
        return taps

    def _shown(self, batches: Iterable[Any], forward: Forward | None) -> Iterable[Any]:
        """If no forward pass has shown the activations yet, the first batch does."""
        if all(tap.complete for tap in self.taps.values()):
            return batches
        rest = iter(batches)
        first = next(rest, None)
        if first is None:
            raise ValueError("there is no data to consolidate: the batches are empty (a generator that was used up, perhaps?)")
        watch = Discovery(self.model)
        with evaluating(self.model), torch.no_grad():
            watch.start()
            try:
                run_batch(self.model, to_device(first, self.model), forward)
            finally:
                watch.stop()
        self._recording.learn(watch)
        return itertools.chain([first], rest)

    def _place_heads(self) -> None:
        """Tell the preserver whose head each parameter is."""
        if self.preserve.owns and self.heads:
            named = {n: p.detach() for n, p in self._parameters().items()}
            for t, head in enumerate(self.heads):
                for name, p in named.items():
                    if within(name, head):
                        self.state["head"][name] = torch.full_like(p, t, dtype=torch.int16)

    def _check_head(self, parameters: Mapping[str, Tensor]) -> None:
        """The head of the task that has just ended must be in the model by now."""
        if self.preserve.owns and self.tasks < len(self.heads):
            head = self.heads[self.tasks]
            if not any(within(name, head) for name in parameters):
                raise ValueError(f"heads= names {head!r} for task {self.tasks + 1}, but the model has no trainable parameter of that name")

    @torch.no_grad()
    def _write(self, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            parameters[name].copy_(value)

    def _inhibition(self, found: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Σ R over what the sparsifier reads, unscaled."""
        if self._recording.silent:
            raise RuntimeError(
                f"no activation was seen right after layer {self._recording.silent!r} (or after a norm behind it); "
                "name the activation module itself, or use one of torch's activation functions"
            )
        if self.sparsify.reads == "parameters":
            return torch.stack([self.sparsify.penalty(p) for p in parameters.values()]).sum()
        if self.sparsify.reads == "weights":
            weights = [(name, tap.weighted) for name, tap in self.taps.items() if tap.complete or not self._recording.auto]
            lost = [name for name, module in weights if module is None]
            if lost:
                raise ValueError(
                    f"no weights are known to stand behind layer {lost[0]!r}; name the Linear or convolution itself as the layer"
                )
            return torch.stack([self.sparsify.penalty(module.weight) for _, module in weights if module is not None]).sum()  # type: ignore[arg-type]
        if not self.taps:
            raise RuntimeError(
                "the forward pass showed no activation function of torch right after any hidden layer; "
                "use activation modules and name them: layers=['act1', …]"
            )
        if not found:
            raise RuntimeError(
                "keeper.penalty() found no forward pass since the last one: call it once after model(x), in training mode and with "
                "gradients on. Passes in eval mode, under no_grad or in reentrant checkpoints do not count; of a model that was compiled "
                "after attach(), only activation modules do."
            )
        never = [name for name in self.taps if name not in self._recording.reached]
        if never and not self._recording.auto:
            raise RuntimeError(
                f"layer {never[0]!r} was never reached by a forward pass; leave it out of layers= or run the model through it"
            )
        return torch.stack([self.sparsify.penalty(h, self.alpha.get(name)) for name, h in found.items()]).sum()

    def _explain(self, found: Mapping[str, Tensor]) -> None:
        """Raise for a penalty that is not finite, unless half precision overflowed: a GradScaler then skips the step."""
        for name, h in found.items():
            if h.dtype == torch.float16:
                return
            if not bool(torch.isfinite(h).all()):
                raise ValueError(
                    f"layer {name!r} has NaN or infinite activations; lower the learning rate, clip gradients or check the data"
                )
        explicit = isinstance(self.preserve, Quadratic) and not self.implicit
        remedy = "keeper.anchor_with(optimizer), which no strength breaks, or " if explicit else ""
        raise ValueError(f"the penalty is not finite though the activations are; try {remedy}a lower strength or learning rate")

    def _check_shapes(self, parameters: Mapping[str, Tensor]) -> None:
        for name, p in parameters.items():
            held = self.state.get("anchor", {}).get(name)
            if held is not None and held.shape != p.shape:
                raise ValueError(
                    f"parameter {name!r} was {tuple(held.shape)} when the last task ended and is {tuple(p.shape)} now; "
                    "add a new head beside the old one instead of resizing it"
                )

    def _place(self) -> None:
        """Follow the model to another device."""
        device = next(self.model.parameters()).device
        if any(t.device != device for t in itertools.chain(self.alpha.values(), *(g.values() for g in self.state.values()))):
            self.alpha = {n: t.to(device) for n, t in self.alpha.items()}
            self.state = {g: {n: t.to(device) for n, t in tensors.items()} for g, tensors in self.state.items()}
            self._shares = None
            if self._drops is not None:
                self._drops.follow(self.state)

    # --------------------------------------------------------------------------------------------------------- optimizer steps
    def _begin_or_observe(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """For a path integral: the first penalty of a task starts it here; later, steps made by hand are noticed."""
        if self._watch is None:
            return
        self._watch.follow(parameters)
        if self._fresh:
            self._fresh = False
            self._watch.begin()
            self.state = {**self.state, "start": {n: p.detach().clone() for n, p in parameters.items()}}
        elif self._watch.moved():
            self.state = self.preserve.observe(self.state, *self._watch.step())

    @torch.no_grad()
    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """After every optimizer step over this model's parameters: the implicit anchor, the path, the end of recorded passes."""
        if not any(p in (names := self._names()) for g in optimizer.param_groups for p in g["params"]):
            return
        self._moved = True
        self._recording.drop()
        if self._drops is not None:
            self._drops.renew()
        if self.implicit and self.tasks and self.preserve.strength > 0 and isinstance(self.preserve, Quadratic):
            self._place()
            self._pull(optimizer, names)
        if self._gates is not None and (found := self._gates.take()):
            lr = torch.as_tensor(optimizer.param_groups[0]["lr"], dtype=torch.float32, device=next(iter(found[0].values())).device)
            self.state = self.preserve.learn_gates(self.state, *found, lr)
            self._gates.follow(self.state)
        if self.preserve.projects:
            self._place()
            live = {n: p for p, n in names.items()}
            self._write(live, self.preserve.project(self.state, {n: p.detach() for n, p in live.items()}))
        if self._watch is not None and not self._fresh:
            self.state = self.preserve.observe(self.state, *self._watch.step())

    def _pull(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
        """θ ← θ + share · (θ* − θ). The shares are kept while the step sizes are plain numbers and do not change."""
        assert isinstance(self.preserve, Quadratic)
        groups = [(g["lr"], g.get("momentum"), g.get("dampening")) for g in optimizer.param_groups]
        plain = not optimizer.state or all("square" not in k and "sq" not in k and k != "sum" for s in optimizer.state.values() for k in s)
        held = tuple((i, id(p)) for i, g in enumerate(optimizer.param_groups) for p in g["params"] if p in names)
        key = (str(groups), held) if plain and not any(isinstance(g[0], Tensor) for g in groups) else None
        if key is None or self._shares is None or self._shares[0] != key:
            self._check_shapes({n: p for p, n in names.items()})
            sizes = {n: s * self.preserve.strength for n, s in step_sizes(optimizer, names).items()}
            self._shares = (key, self.preserve.shares(self.state, sizes))
        parameters = {n: p for p, n in names.items()}
        for name, share in self._shares[1].items():
            p, star = parameters[name], self.state["anchor"][name]
            if p.dtype == star.dtype:
                p.lerp_(star, share)
            else:
                p.copy_(torch.lerp(p.to(star.dtype), star, share))


def _let_go(recording: Recording, step_hook: Any, watch: PathWatch | None, gates: Gates | None, drops: Drops | None) -> None:
    """A keeper that nobody holds any more leaves no hooks behind."""
    recording.stop()
    step_hook.remove()
    for hooks in (gates, drops):
        if hooks is not None:
            hooks.stop()
    if watch is not None:
        watch.stop()


def _weak_step(keeper: Keeper) -> Any:
    """The global post-step hook of a keeper, which does not keep it alive."""
    held = weakref.ref(keeper)

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        alive = held()
        if alive is not None:
            alive._stepped(optimizer)

    return hook
