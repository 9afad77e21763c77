"""`attach`: preservers and sparsifiers for anybody's model and training loop.

    keeper = selfless.attach(model, preserve=MAS(0.1), sparsify=SLNID(1e-3), layers=["fc1", "fc2"])
    keeper.anchor_with(optimizer)
    for task in tasks:
        for x, y in task:
            loss = F.cross_entropy(model(x), y) + keeper.penalty()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        keeper.consolidate(task)

The keeper only reads: hooks record activations of forward passes in training mode with gradients on. Passes in eval mode or under
`no_grad`, and those that activation checkpointing repeats, do not count. The optimizer's post-step hook applies the implicit anchor.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from selfless.anchor import step_sizes
from selfless.capacity import THRESHOLD, Capacity, free_share
from selfless.importance import Forward, complete_taps, measure, run_batch, to_device, unwrap
from selfless.layers import Discovery, Layers, Tap, neuron_axis, resolve
from selfless.path import PathWatch
from selfless.persample import MEMORY
from selfless.preserve import PRESERVERS, NoPreserver, Preserver, State
from selfless.sparsify import SPARSIFIERS, NoSparsifier, Sparsifier
from selfless.terms import parse

_PILE = 64  # forward passes recorded without a penalty() before we say so


def attach(
    model: nn.Module,
    preserve: Preserver | str | None = None,
    sparsify: Sparsifier | str | None = None,
    layers: Layers = "auto",
    *,
    check_finite: bool = True,
) -> Keeper:
    """A keeper for `model`.

    preserve      MAS(0.1), EWC(10), SI(1) or "mas:0.1"; None keeps nothing
    sparsify      SLNID(1e-3) or any other of `selfless.sparsify`, or "slnid:1e-3"; None leaves the activations alone
    layers        where the sparsifier acts and neurons are counted: names, globs ("blocks.*.act"), modules, or "auto": the activation
                  after every hidden nn.Linear. A layer is named by its activation module or by the module before it.
    check_finite  raise on NaN or infinite activations (one synchronisation a step on a GPU; False skips it)
    """
    return Keeper(
        model,
        _term(preserve, PRESERVERS, Preserver, NoPreserver(), "preserve"),
        _term(sparsify, SPARSIFIERS, Sparsifier, NoSparsifier(), "sparsify"),
        layers,
        check_finite,
    )


def _term(value: Any, kinds: Mapping[str, Any], base: type, none: Any, role: str) -> Any:
    if isinstance(value, str):
        value = parse(value, kinds, "preserver" if role == "preserve" else "sparsifier")
    value = none if value is None else value
    if not isinstance(value, base):
        raise TypeError(f"{role}= takes one of {', '.join(k.__name__ for k in kinds.values())}, not {value!r}")
    return value


class Keeper:
    """State and hooks over one model; made by `attach`. `state`, `alpha` and `tasks` are what it has learned so far."""

    def __init__(self, model: nn.Module, preserve: Preserver, sparsify: Sparsifier, layers: Layers, check_finite: bool) -> None:
        self.model = unwrap(model)
        self.preserve, self.sparsify, self.check_finite = preserve, sparsify, check_finite
        self.alpha: dict[str, Tensor] = {}
        self.tasks = 0
        self._auto = isinstance(layers, str) and layers == "auto"
        self._records: dict[str, list[Tensor]] = {}
        self._reached: set[str] = set()
        self._handles: list[Any] = []
        self._anchored: dict[torch.optim.Optimizer, Any] = {}
        self._tap_handles: list[Any] = []
        self._watch = PathWatch() if preserve.watches else None
        self.taps = self._resolve(layers, compiled=self.model is not model or model._compiled_call_impl is not None)
        self.state: State = preserve.init(self._parameters())
        if self._watch is not None:
            self._watch.follow(self._parameters())
        self._listen()

    # ------------------------------------------------------------------------------------------------------------- the loop
    def penalty(self) -> Tensor:
        """λ_SSL Σ_l R(H_l) over the forward passes since the last call, plus the explicit λ_Ω Σ Ω(θ − θ*)² where no optimizer is anchored.

        Call it once per backward pass. Several forward passes before it count as one larger batch.
        """
        parameters = self._parameters()
        self._place()
        self._observe()
        parts: list[Tensor] = []
        training = torch.is_grad_enabled() and self.model.training
        records, self._records = self._records, {}
        if self.sparsify.strength > 0 and (training or self.sparsify.reads != "activations"):
            parts.append(self.sparsify.strength * self._inhibition(records, parameters))
        if self.preserve.strength > 0 and self.tasks:
            implicit = self._implicit()
            explicit = {n: p for n, p in parameters.items() if n not in implicit}
            if explicit:
                self._check_shapes(explicit)
                parts.append(self.preserve.strength * self.preserve.penalty(self.state, explicit))
        device = next(iter(parameters.values())).device
        total = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())
        depends = torch.stack([p.to(total.dtype) for p in parts]).sum() if parts else None
        total = total + depends if depends is not None else total + 0
        if self.check_finite and parts and not math.isfinite(total.item()):
            self._explain(records)
        if self._watch is not None and training:
            self._watch.penalised(total, depends)
        return total

    def consolidate(self, batches: Iterable[Any], forward: Forward | None = None, *, memory: int = MEMORY) -> None:
        """A task has ended: take Ω, α and θ* in one pass over its `batches`, and anchor the model here from now on.

        `forward(model, batch)` gives the output for models that take more than x: `lambda m, b: m(b[0], task=2)`. If anything fails,
        the keeper stays as it was.
        """
        self._place()
        self._observe()
        self._records = {}
        batches = self._complete(batches, forward)
        preserve = self.preserve
        omega: dict[str, Tensor] = {}
        alpha: dict[str, Tensor] = {}
        if preserve.measures or self.taps:
            found = measure(
                self.model,
                batches,
                preserve.objective,
                taps=self.taps,
                parameters=preserve.measures,
                estimator=preserve.how,
                forward=forward,
                memory=memory,
            )
            omega, alpha = found.omega, found.alpha
        parameters = {n: p.detach() for n, p in self._parameters().items()}
        self._check_shapes(parameters)
        state = preserve.consolidate(self.state, parameters, omega)
        alpha = {name: self.alpha[name] + a if name in self.alpha else a for name, a in alpha.items()}
        self.state, self.alpha, self.tasks = state, alpha, self.tasks + 1
        if self._watch is not None:
            self._watch.follow(self._parameters())

    def anchor_with(self, optimizer: torch.optim.Optimizer) -> Keeper:
        """Anchor implicitly after every step of `optimizer`: stable at any strength. Call it again for every new optimizer.

        What the step size means for each optimizer is said in `selfless.anchor`.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"anchor_with takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if optimizer not in self._anchored:
            if not step_sizes(optimizer, self._names()):
                raise ValueError("the optimizer holds none of the model's trainable parameters; build it over model.parameters()")
            self._anchored[optimizer] = optimizer.register_step_post_hook(self._pull)
        return self

    def capacity(self, threshold: float = THRESHOLD) -> Capacity:
        """Free parameters and neurons by layer: those whose importance over all tasks so far is below `threshold`."""
        self._place()
        omega = self.state.get("omega")
        return Capacity(
            {n: free_share(omega.get(n, torch.zeros_like(p)), threshold) for n, p in self._parameters().items()}
            if omega is not None
            else {},
            {name: free_share(a, threshold) for name, a in self.alpha.items()},
            self.tasks,
            threshold,
        )

    # ------------------------------------------------------------------------------------------------------------ state, ends
    def state_dict(self) -> dict[str, Tensor]:
        """Everything learned, as flat named tensors (safetensors will take it)."""
        flat = {f"preserve.{group}.{name}": t for group, tensors in self.state.items() for name, t in tensors.items()}
        flat |= {f"alpha.{name}": t for name, t in self.alpha.items()}
        method = torch.tensor(list(self.preserve.name.encode()), dtype=torch.uint8)
        return {n: t.detach().clone() for n, t in flat.items()} | {"tasks": torch.tensor(self.tasks), "method": method}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a `state_dict`. Checked against this model first; on a mismatch nothing changes."""
        if "tasks" not in state or "method" not in state:
            raise ValueError("this is not a keeper's state_dict: it has no 'tasks' and 'method'. Pass what keeper.state_dict() returned")
        method = bytes(state["method"].tolist()).decode()
        if method != self.preserve.name:
            raise ValueError(f"the state is of preserver {method!r}, but this keeper has {self.preserve.name!r}; attach with the same one")
        shapes = {n: p.shape for n, p in self.model.named_parameters()}
        new: State = {group: {} for group in self.state}
        alpha: dict[str, Tensor] = {}
        for key, tensor in state.items():
            kind, _, rest = key.partition(".")
            if kind == "alpha":
                alpha[rest] = tensor.detach().clone()
            elif kind == "preserve":
                group, _, name = rest.partition(".")
                if group != "offset" and name not in shapes:
                    raise ValueError(f"the state has parameter {name!r}, which the model has not; build the model the state was saved with")
                if group != "offset" and tensor.shape != shapes[name]:
                    raise ValueError(
                        f"parameter {name!r} is {tuple(tensor.shape)} in the state and {tuple(shapes[name])} in the model; "
                        "build the model the state was saved with"
                    )
                new.setdefault(group, {})[name] = tensor.detach().clone()
        unknown = [name for name in alpha if name not in self.taps]
        if unknown:
            raise ValueError(
                f"the state has layer {unknown[0]!r}, but this keeper has {', '.join(self.taps) or 'none'}; attach with the same layers"
            )
        self.state, self.alpha, self.tasks = new, alpha, int(state["tasks"])
        self._place()

    def detach(self) -> None:
        """Remove every hook; the model and its optimizers are as before `attach`."""
        for handle in [*self._handles, *self._tap_handles, *self._anchored.values()]:
            handle.remove()
        self._handles, self._tap_handles, self._anchored, self._records = [], [], {}, {}
        if self._watch is not None:
            self._watch.stop()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        anchor = "implicit" if self._anchored else "explicit"
        layers = ", ".join(self.taps) or "none"
        return f"Keeper({self.preserve!r}, {self.sparsify!r}, layers=[{layers}], anchor={anchor}, tasks={self.tasks})"

    # -------------------------------------------------------------------------------------------------------------- the insides
    def _parameters(self) -> dict[str, nn.Parameter]:
        found = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not found:
            raise ValueError("the model has no trainable parameters; unfreeze some before attaching or training")
        return found

    def _names(self) -> dict[Tensor, str]:
        return {p: n for n, p in self._parameters().items()}

    def _implicit(self) -> set[str]:
        names = self._names()
        return {names[p] for o in self._anchored for g in o.param_groups for p in g["params"] if p in names}

    def _resolve(self, layers: Layers, compiled: bool) -> dict[str, Tap]:
        wants = self.sparsify.strength > 0 and self.sparsify.reads != "parameters"
        try:
            taps = resolve(self.model, layers)
        except ValueError:
            if self._auto and not wants:
                return {}
            raise
        open_taps = [name for name, tap in taps.items() if not tap.complete]
        if compiled and open_taps and not self._auto:
            raise ValueError(
                f"layer {open_taps[0]!r} is inside a compiled model, where the activation function after it cannot be seen; "
                "name its activation module instead, or attach before torch.compile and run one forward pass"
            )
        if compiled:
            taps = {name: tap for name, tap in taps.items() if tap.complete}
        if wants and not taps:
            raise ValueError("no layer was found for the sparsifier; pass layers=[names of activation modules]")
        return taps

    def _listen(self) -> None:
        """(Re)place the hooks: on every tap that is complete, and on the model once while some are not."""
        for handle in self._tap_handles:
            handle.remove()
        wants = self.sparsify.strength > 0 and self.sparsify.reads == "activations"
        self._tap_handles = [tap.module.register_forward_hook(self._hook(n, tap)) for n, tap in self.taps.items() if wants and tap.complete]
        weights = self.sparsify.reads == "weights"
        if any(not tap.complete or (weights and tap.weighted is None) for tap in self.taps.values()) and not self._handles:
            watch = Discovery(self.model)

            def finish(*_: Any) -> None:
                watch.stop()
                for handle in self._handles:
                    handle.remove()
                open_taps = [name for name, tap in self.taps.items() if not tap.complete]
                self._close({name: watch.complete(name, tap) for name, tap in self.taps.items()})
                for name in open_taps:
                    if wants and name in self.taps and name in watch.seen:
                        self._record(name, watch.seen[name], None)

            self._handles = [
                self.model.register_forward_pre_hook(lambda *_: watch.start()),
                self.model.register_forward_hook(finish, always_call=True),
            ]

    def _close(self, taps: dict[str, Tap]) -> None:
        """Take the taps a forward pass completed. "auto" drops layers that no activation follows; a named one is an error."""
        silent = [name for name, tap in taps.items() if not tap.complete]
        if silent and not self._auto and self.sparsify.strength > 0:
            raise ValueError(
                f"no activation was seen right after layer {silent[0]!r} (or after a norm behind it); "
                "name the activation module itself, or use one of torch's activation functions"
            )
        if self._auto:
            taps = {name: tap for name, tap in taps.items() if tap.complete}
        self.taps = taps
        self._listen()

    def _complete(self, batches: Iterable[Any], forward: Forward | None) -> Iterable[Any]:
        """If no forward pass has shown the activations yet, the first batch does."""
        if all(tap.complete for tap in self.taps.values()):
            return batches
        rest = iter(batches)
        first = next(rest, None)
        if first is None:
            raise ValueError("there is no data to consolidate: the batches are empty (a generator that was used up, perhaps?)")
        for handle in self._handles:
            handle.remove()
        with torch.no_grad():
            self._close(complete_taps(self.model, self.taps, lambda: run_batch(self.model, to_device(first, self.model), forward)))
        return itertools.chain([first], rest)

    def _hook(self, name: str, tap: Tap) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if module.training and torch.is_grad_enabled():
                if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
                    return  # activation checkpointing: the pass is being repeated inside backward
                h = output if tap.activation is None else tap.activation(output)
                self._record(name, h, inputs[0] if tap.at_input else output)

        return hook

    def _record(self, name: str, h: Tensor, n: Tensor | None) -> None:
        if n is not None and n.dim() == 3 and neuron_axis(n) == 1:
            h = h.transpose(1, 2)  # (M, channels, length) of a Conv1d → (M, positions, neurons)
        pile = self._records.setdefault(name, [])
        if len(pile) == _PILE:
            warnings.warn(
                f"{_PILE} forward passes were recorded without keeper.penalty(); call it every step or keeper.detach()", stacklevel=2
            )
            pile.clear()
        pile.append(h)

    def _inhibition(self, records: Mapping[str, list[Tensor]], parameters: Mapping[str, Tensor]) -> Tensor:
        """Σ R over what the sparsifier reads, unscaled."""
        if self.sparsify.reads == "parameters":
            return torch.stack([self.sparsify.penalty(p) for p in parameters.values()]).sum()
        if self.sparsify.reads == "weights":
            weights = [(name, tap.weighted) for name, tap in self.taps.items()]
            lost = [name for name, module in weights if module is None]
            if lost:
                raise ValueError(
                    f"no weights are known to stand behind layer {lost[0]!r}; name the Linear or convolution itself as the layer"
                )
            return torch.stack([self.sparsify.penalty(module.weight) for _, module in weights if module is not None]).sum()  # type: ignore[arg-type]
        self._reached |= set(records)
        never = [name for name in self.taps if name not in self._reached]
        if not records:
            raise RuntimeError(
                "keeper.penalty() found no forward pass since the last one: call it once after model(x), in training mode and with "
                "gradients on. Passes in eval mode or under no_grad do not count."
            )
        if never:
            raise RuntimeError(
                f"layer {never[0]!r} was never reached by a forward pass; leave it out of layers= or run the model through it"
            )
        terms = [self.sparsify.penalty(torch.cat(hs) if len(hs) > 1 else hs[0], self.alpha.get(name)) for name, hs in records.items()]
        return torch.stack(terms).sum()

    def _explain(self, records: Mapping[str, list[Tensor]]) -> None:
        """Raise for a penalty that is not finite, unless half precision overflowed: a GradScaler then skips the step."""
        for name, hs in records.items():
            if any(h.dtype == torch.float16 for h in hs):
                return
            if not all(bool(torch.isfinite(h).all()) for h in hs):
                raise ValueError(
                    f"layer {name!r} has NaN or infinite activations; lower the learning rate, clip gradients or check the data"
                )
        raise ValueError("the penalty is not finite though the activations are; lower its strength or the learning rate")

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

    def _observe(self) -> None:
        """Tell a path-integral preserver about the last optimizer step."""
        if self._watch is not None:
            self._watch.follow(self._parameters())
            step = self._watch.step()
            if step is not None:
                self.state = self.preserve.observe(self.state, *step)

    @torch.no_grad()
    def _pull(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The implicit anchor, after each step of an anchored optimizer."""
        if not self.tasks or self.preserve.strength == 0:
            return
        self._place()
        names = self._names()
        sizes = {n: s * self.preserve.strength for n, s in step_sizes(optimizer, names).items()}
        parameters = {n: p for p, n in names.items() if n in sizes}
        self._check_shapes(parameters)
        for name, value in self.preserve.anchor(self.state, parameters, sizes).items():
            parameters[name].copy_(value)
