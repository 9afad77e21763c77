"""One architecture, many members: parameters and buffers stacked along a leading axis, one forward pass for all.

A fleet of one calls the module itself; a larger one runs its layers on the stack (`native`) or, where it does not know them, maps the
module's call with `vmap`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfless.closed import rule_for
from selfless.engine import native
from selfless.importance import Estimator, Objective, evaluating, measure
from selfless.layers import Tap, neuron_axis
from selfless.persample import MEMORY, Recorder

Tensors = dict[str, Tensor]
Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]  # a fresh pass over x (F, B, …), y (F, B)


class Stack:
    """A module as a function of stacked parameters. `layers` are activation modules whose outputs `forward` returns too."""

    def __init__(self, module: nn.Module, layers: Sequence[str]) -> None:
        self.module = copy.deepcopy(module)
        self.layers = tuple(layers)
        self.trainable = [n for n, p in self.module.named_parameters() if p.requires_grad]
        self._outputs: Tensors = {}
        self._inputs: Tensors = {}
        self._nudges: Tensors | None = None  # zeros added at a module's output (or an activation's input): their gradient is δ
        self._resized: set[str] = set()  # activations that change the number of neurons (Maxout): α belongs to their output
        self._stackable: bool | None = None
        self._native = native.native(self.module)
        for name in self.layers:
            layer = self.module.get_submodule(name)
            layer.register_forward_hook(self._layer_output(name))
            layer.register_forward_pre_hook(self._nudge_input(name))
        for name in self._weighted():
            self.module.get_submodule(name).register_forward_hook(self._nudge_output(name))

    def stacked(self, modules: Sequence[nn.Module], device: torch.device) -> tuple[Tensors, Tensors]:
        """(parameters, buffers) of several modules of this architecture, stacked on the device."""
        self.module.to(device)
        params = [dict(m.named_parameters()) for m in modules]
        buffers = [dict(m.named_buffers()) for m in modules]
        stacks = (
            {n: torch.stack([p[n].detach() for p in params]).to(device) for n in params[0]},
            {n: torch.stack([b[n] for b in buffers]).to(device) for n in buffers[0]},
        )
        if len(modules) == 1:  # a fleet of one pays nothing: the module's own tensors are views of the stacks
            for own, group in ((self.module.named_parameters(), stacks[0]), (self.module.named_buffers(), stacks[1])):
                for name, tensor in own:
                    tensor.data = group[name][0]
        return stacks

    def leaves(self, params: Tensors) -> Tensors:
        """The trainable tensors that `forward` differentiates, stacked: the members' parameters, or those of the one module."""
        if len(next(iter(params.values()))) > 1:
            return {n: params[n] for n in self.trainable}
        return {n: p.unsqueeze(0) for n, p in self.module.named_parameters() if p.requires_grad}

    def gradients(self, value: Tensor, params: Tensors, retain: bool = False) -> list[Tensor | None]:
        """∂value/∂θ for every trainable parameter, stacked; None where it does not matter."""
        alone = len(next(iter(params.values()))) == 1
        sources = [p for p in self.module.parameters() if p.requires_grad] if alone else [params[n] for n in self.trainable]
        grads = torch.autograd.grad(value, sources, allow_unused=True, retain_graph=retain)
        return [g.unsqueeze(0) if alone and g is not None else g for g in grads]

    def forward(self, params: Tensors, buffers: Tensors, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """x (F, B, …) → logits (F, B, C) and the layers' activations [(F, B, N) …]."""
        if len(x) > 1:
            logits, found, _ = self._mapped(params, buffers, {}, x)
            return logits, found
        self._outputs = {}
        logits = self.module(x.squeeze(0))
        found = self._found()
        return logits.unsqueeze(0), [h.unsqueeze(0) for h in found]

    def _mapped(self, params: Tensors, buffers: Tensors, nudges: Tensors, x: Tensor) -> tuple[Tensor, list[Tensor], Tensors]:
        if len(x) > 1 and self._native:
            kept: Tensors = {}
            self._outputs, self._nudges = {}, nudges or None
            logits = native.forward(self.module, params, nudges, x, kept)
            found, self._nudges = self._found(), None
            return logits, found, kept
        if len(x) > 1:
            mapped = torch.func.vmap(self._one, randomness="different")
            result: tuple[Tensor, list[Tensor], Tensors] = mapped(params, buffers, nudges, x)
            return result
        p, b, z = ({n: t.squeeze(0) for n, t in group.items()} for group in (params, buffers, nudges))
        logits, found, inputs = self._one(p, b, z, x.squeeze(0))
        return logits.unsqueeze(0), [h.unsqueeze(0) for h in found], {n: a.unsqueeze(0) for n, a in inputs.items()}

    def _one(self, params: Tensors, buffers: Tensors, nudges: Tensors, x: Tensor) -> tuple[Tensor, list[Tensor], Tensors]:
        self._outputs, self._inputs, self._nudges = {}, {}, nudges or None
        logits = torch.func.functional_call(self.module, (params, buffers), (x,))
        found, inputs = self._found(), self._inputs
        self._inputs, self._nudges = {}, None
        return logits, found, inputs

    def _found(self) -> list[Tensor]:
        """What the layers gave in the pass that just ended, in the order of their names."""
        outputs, self._outputs = self._outputs, {}
        lost = [name for name in self.layers if name not in outputs]
        if lost:
            raise ValueError(f"layer {lost[0]!r} was not reached by the forward pass; take it out of the network's `hidden`")
        return [outputs[name] for name in self.layers]

    def _nudge_output(self, name: str) -> Callable[..., Tensor | None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if self._nudges is None or name not in self._nudges:
                return None
            self._inputs[name] = inputs[0]
            return output + self._nudges[name]

        return hook

    def _layer_output(self, name: str) -> Callable[..., Tensor | None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
            nudged = output
            if self._nudges is not None and name in self._nudges and name in self._resized:
                nudged = output + self._nudges[name]
            if name in self._outputs:
                raise ValueError(f"activation {name!r} ran twice in one forward pass: it serves several layers; give each its own module")
            self._outputs[name] = nudged
            return nudged

        return hook

    def _nudge_input(self, name: str) -> Callable[..., tuple[Any, ...] | None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if self._nudges is None or name not in self._nudges or name in self._resized:
                return None
            return (inputs[0] + self._nudges[name], *inputs[1:])

        return hook

    def _weighted(self) -> list[str]:
        """The modules that own trainable parameters."""
        return [n for n, m in self.module.named_modules() if any(p.requires_grad for p in m.parameters(recurse=False))]

    def weight_behind(self, layer: str) -> str:
        """The weight of the Linear or convolution registered last before an activation: what OrthReg acts on."""
        last = ""
        for name, module in self.module.named_modules():
            if name == layer:
                break
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                last = f"{name}.weight"
        if not last:
            raise ValueError(f"no linear layer or convolution stands before {layer!r}; orth-reg has nothing to act on")
        return last

    # ------------------------------------------------------------------------------------------------------------- importance
    def importance(
        self, params: Tensors, buffers: Tensors, batches: Batches, objective: Objective, estimator: Estimator, wanted: bool, head: slice
    ) -> tuple[Tensors, Tensors]:
        """(Ω, α) of every member, stacked, in one pass; f is the output in the columns `head`, and labels count from its first.

        With closed forms for every parameter the whole fleet is measured at once; otherwise member by member.
        """
        with evaluating(self.module):
            if self._closed(params, buffers, batches):
                return self._together(params, buffers, batches, objective, estimator, wanted, head)
            members = range(len(next(iter(params.values()))))
            parts = [self._alone(m, params, buffers, batches, objective, estimator, wanted, head) for m in members]
            return _stack([p.omega for p in parts]), _stack([p.alpha for p in parts])

    def _together(
        self, params: Tensors, buffers: Tensors, batches: Batches, objective: Objective, estimator: Estimator, wanted: bool, head: slice
    ) -> tuple[Tensors, Tensors]:
        exact, samples = wanted and estimator == "per-sample", 0
        omega: Tensors = {}
        alpha: Tensors = {}
        nudges: Tensors = {}
        leaves = {n: p.detach().requires_grad_(wanted and not exact) for n, p in params.items()}
        for x, y in batches():
            if not nudges or x.shape[1] != len(next(iter(nudges.values()))[0]):
                nudges = self._zeros(params, buffers, x, exact)
            logits, _, inputs = self._mapped(leaves, buffers, nudges, x)
            flat = logits[..., head].flatten(0, 1)
            pairs = objective.targets(flat, (y - (head.start or 0)).flatten())
            for k, (target, weight) in enumerate(pairs):
                total = objective.value(flat, target).sum()
                sources = [*nudges.values(), *([] if exact or not wanted else [leaves[n] for n in self.trainable])]
                grads = torch.autograd.grad(total, sources, retain_graph=k + 1 < len(pairs), allow_unused=True)
                rows = None if weight is None else weight.view(x.shape[:2])
                for name, delta in zip(nudges, grads, strict=False):
                    if delta is None:
                        continue
                    if name in self.layers:
                        sizes = _scaled(delta.abs(), rows)
                        _add(alpha, name, torch.func.vmap(_neuron_sizes)(sizes) if len(sizes) > 1 else _neuron_sizes(sizes[0])[None])
                    else:
                        self._by_rule(omega, name, inputs[name], delta, objective.power, rows)
                for name, g in zip(self.trainable, grads[len(nudges) :], strict=False):  # per-batch
                    if g is not None:
                        _add(omega, name, g.abs() if objective.power == 1 else g.square())
            samples += x.shape[1]
        omega = {n: omega[n] / samples if n in omega else torch.zeros_like(params[n]) for n in self.trainable} if wanted else {}
        return omega, {n: alpha[n] / samples for n in self.layers}

    def _by_rule(self, omega: Tensors, name: str, a: Tensor, delta: Tensor, power: int, rows: Tensor | None) -> None:
        module = self.module.get_submodule(name)
        rule = rule_for(module)
        assert rule is not None
        delta = _scaled(delta.float(), None if rows is None else rows if power == 1 else rows.sqrt())
        memory = max(1, MEMORY // len(a))
        if len(a) == 1:
            found = {k: v.unsqueeze(0) for k, v in rule(module, a[0].detach().float(), delta[0], power, memory)}
        else:
            found = torch.func.vmap(lambda a, d: dict(rule(module, a, d, power, memory)))(a.detach().float(), delta)
        for key, value in found.items():
            if f"{name}.{key}" in self.trainable or not name:
                _add(omega, f"{name}.{key}" if name else key, value)

    def _zeros(self, params: Tensors, buffers: Tensors, x: Tensor, exact: bool) -> Tensors:
        """One zero tensor for every place a gradient is wanted at, (F, B, …)."""
        shapes: dict[str, torch.Size] = {}
        handles = []

        def see(name: str, given: torch.Size, made: torch.Size) -> None:
            shapes[name] = made
            if given != made:
                self._resized.add(name)

        for name in self.layers:
            handles.append(self.module.get_submodule(name).register_forward_hook(lambda _m, i, o, n=name: see(n, i[0].shape, o.shape)))
        for name in self._weighted() if exact else ():
            handles.append(self.module.get_submodule(name).register_forward_hook(lambda _m, _i, o, n=name: shapes.update({n: o.shape})))
        with torch.no_grad():
            self._one({n: p[0] for n, p in params.items()}, {n: b[0] for n, b in buffers.items()}, {}, x[0])
        for handle in handles:
            handle.remove()
        return {n: torch.zeros(len(x), *shape, device=x.device, requires_grad=True) for n, shape in shapes.items()}

    def _closed(self, params: Tensors, buffers: Tensors, batches: Batches) -> bool:
        """Whether every trainable parameter has a closed form that depends on its own member's tensors alone (looked at once)."""
        if self._stackable is None:
            x, _ = next(iter(batches()))
            self._load(0, params, buffers)
            with torch.enable_grad(), Recorder(self.module) as recorder:
                recorder.listen()
                covered = recorder.covered(self._fresh(self.module, x[0][: min(8, x.shape[1])]).square().flatten(1).sum(1))
            self._outputs = {}
            normed = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.module.modules())
            self._stackable = not normed and set(self.trainable) <= covered
        return self._stackable

    def _fresh(self, model: nn.Module, x: Tensor) -> Any:
        self._outputs = {}
        return model(x)

    def _load(self, m: int, params: Tensors, buffers: Tensors) -> None:
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                p.copy_(params[name][m])
            for name, b in self.module.named_buffers():
                b.copy_(buffers[name][m])

    def _alone(
        self,
        m: int,
        params: Tensors,
        buffers: Tensors,
        batches: Batches,
        objective: Objective,
        estimator: Estimator,
        wanted: bool,
        head: slice,
    ) -> Any:
        self._load(m, params, buffers)

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for x, y in batches():
                yield x[m], y[m] - (head.start or 0)

        found = measure(
            self.module,
            pairs(),
            objective,
            taps={name: Tap(self.module.get_submodule(name), at_input=True) for name in self.layers},
            parameters=wanted,
            estimator=estimator,
            forward=lambda model, batch: self._fresh(model, batch[0])[:, head],
            finite=False,  # a member that diverged is a failed result, not an error
        )
        self._outputs = {}
        return found


def _neuron_sizes(delta: Tensor) -> Tensor:
    """Σ_m of |δ| per neuron, positions averaged: (B, N), (B, T, N) or (B, C, H, W) → (N,)."""
    size = delta.movedim(neuron_axis(delta), -1)
    return (size.flatten(1, -2).mean(1) if size.dim() > 2 else size).sum(0)


def _scaled(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x * rows.view(*rows.shape, *[1] * (x.dim() - 2))


def _add(total: Tensors, name: str, value: Tensor) -> None:
    total[name] = total[name].add_(value) if name in total else value


def _stack(parts: list[Tensors]) -> Tensors:
    return {n: torch.stack([p[n] for p in parts]) for n in parts[0]}
