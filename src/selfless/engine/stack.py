"""One architecture, many members: parameters and buffers stacked along a leading axis, one forward pass for all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfless.activations import Maxout
from selfless.engine import native
from selfless.engine.native import Inhibition
from selfless.importance.closed import power_of
from selfless.importance.layerwise import Layerwise
from selfless.importance.loop import Importance, measure
from selfless.network.calling import evaluating
from selfless.network.layers import Tap
from selfless.preserve import Preserver

Tensors = dict[str, Tensor]
Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]  # a fresh pass over x (F, B, …), y (F, B)


class Stack:
    """A module as a function of stacked parameters. `layers` are activation modules whose outputs `forward` returns too.

    `native` networks run their layers on the stack. Of others, one member is the module itself (`bound`: its tensors are views of the
    stack), and several are the module's call mapped with `vmap`. On a CPU one member of a native network is bound too: that pays nothing.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str], gated: Sequence[str] = ()) -> None:
        self.module = copy.deepcopy(module)
        self.layers = tuple(layers)
        self.gates: Tensors = {}  # layer → (F, N): what `forward` multiplies the outputs of the `gated` layers by
        self._live: Tensors = {}  # the same of the member whose module is running
        self.trainable = [n for n, p in self.module.named_parameters() if p.requires_grad]
        self.native = native.native(self.module)
        self.bound = False
        self._outputs: Tensors = {}
        self._inhibit: Mapping[str, Inhibition] = {}
        self._resized = {n for n in self.layers if isinstance(self.module.get_submodule(n), Maxout)}
        for name in dict.fromkeys((*self.layers, *gated)):
            self.module.get_submodule(name).register_forward_hook(self._layer_output(name))

    def stacked(self, modules: Sequence[nn.Module], device: torch.device) -> tuple[Tensors, Tensors]:
        """(parameters, buffers) of several modules of this architecture, stacked on the device."""
        self.module.to(device)
        params = [dict(m.named_parameters()) for m in modules]
        buffers = [dict(m.named_buffers()) for m in modules]
        stacks = (
            {n: torch.stack([p[n].detach() for p in params]).to(device) for n in params[0]},
            {n: torch.stack([b[n] for b in buffers]).to(device) for n in buffers[0]},
        )
        self.bound = len(modules) == 1 and not (self.native and device.type == "cuda")
        if self.bound:
            for own, group in ((self.module.named_parameters(), stacks[0]), (self.module.named_buffers(), stacks[1])):
                for name, tensor in own:
                    tensor.data = group[name][0]
        else:
            for name in self.trainable:
                stacks[0][name].requires_grad_()
        return stacks

    @property
    def inhibits(self) -> bool:
        """Whether `forward` can add a penalty's gradient on the way back; under `vmap` it cannot."""
        return self.native or self.bound

    def leaves(self, params: Tensors) -> Tensors:
        """The trainable tensors that `forward` differentiates, stacked: the members' parameters, or those of the one module."""
        if not self.bound:
            return {n: params[n] for n in self.trainable}
        return {n: p.unsqueeze(0) for n, p in self.module.named_parameters() if p.requires_grad}

    def gradients(
        self,
        values: Sequence[Tensor],
        given: Sequence[Tensor | None],
        params: Tensors,
        retain: bool = False,
        more: Sequence[Tensor] = (),
    ) -> list[Tensor | None]:
        """∂Σ⟨value, given⟩/∂θ for every trainable parameter and then for `more`, stacked; None where it does not matter."""
        sources = [p for p in self.module.parameters() if p.requires_grad] if self.bound else [params[n] for n in self.trainable]
        grads = torch.autograd.grad(list(values), [*sources, *more], list(given), allow_unused=True, retain_graph=retain)
        own = [g.unsqueeze(0) if self.bound and g is not None else g for g in grads[: len(sources)]]
        return [*own, *grads[len(sources) :]]

    def forward(
        self,
        params: Tensors,
        buffers: Tensors,
        x: Tensor,
        inhibit: Mapping[str, Inhibition] | None = None,
        other: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """x (F, B, …) → logits (F, B, C) and the layers' activations [(F, B, N) …]; `inhibit`: whose gradient gains that of a penalty;
        `other`: parameters, made of the `leaves`, that stand in for some."""
        if self.bound:
            self._outputs, self._inhibit, self._live = {}, inhibit or {}, {n: g.squeeze(0) for n, g in self.gates.items()}
            if other:
                logits = torch.func.functional_call(self.module, {n: p.squeeze(0) for n, p in other.items()}, (x.squeeze(0),)).unsqueeze(0)
            else:
                logits = self.module(x.squeeze(0)).unsqueeze(0)
            found, self._inhibit, self._live = [h.unsqueeze(0) for h in self._found(self._outputs)], {}, {}
            return logits, found
        params = params | dict(other or {})
        if self.native:
            asked = native.Asked(self.layers, inhibit=inhibit or {}, gates=self.gates)
            logits = native.forward(self.module, params, x, asked)
            return logits, self._found(asked.outputs)
        mapped = torch.func.vmap(self._one, randomness="different")
        result: tuple[Tensor, list[Tensor]] = mapped(params, buffers, x, self.gates)
        return result

    def outputs(self, params: Tensors, buffers: Tensors, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What `forward` gives with other parameters than the stack's own, in eval mode and without gradients."""
        with torch.no_grad(), evaluating(self.module):
            if self.native:
                asked = native.Asked(self.layers, gates=self.gates)
                logits = native.forward(self.module, params, x, asked)
                return logits, self._found(asked.outputs)
            result: tuple[Tensor, list[Tensor]] = torch.func.vmap(self._one, randomness="different")(params, buffers, x, self.gates)
            return result

    def output_layer(self, outputs: int) -> list[str]:
        """The trainable parameters of the last nn.Linear: those whose rows are the network's outputs."""
        linear = [(name, m) for name, m in self.module.named_modules() if isinstance(m, nn.Linear)]
        if not linear or linear[-1][1].out_features != outputs:
            raise ValueError(f"the last nn.Linear of the network does not give its {outputs} outputs, so a task's own head cannot be told")
        return [n for n in (f"{linear[-1][0]}.weight", f"{linear[-1][0]}.bias") if n in self.trainable]

    def _one(self, params: Tensors, buffers: Tensors, x: Tensor, gates: Tensors) -> tuple[Tensor, list[Tensor]]:
        self._outputs, self._live = {}, gates
        logits = torch.func.functional_call(self.module, (params, buffers), (x,))
        self._live = {}
        return logits, self._found(self._outputs)

    def _found(self, outputs: Tensors) -> list[Tensor]:
        """What the layers gave in the pass that just ended, in the order of their names."""
        self._outputs = {}
        lost = [name for name in self.layers if name not in outputs]
        if lost:
            raise ValueError(f"layer {lost[0]!r} was not reached by the forward pass; take it out of the network's `hidden`")
        return [outputs[name] for name in self.layers]

    def _layer_output(self, name: str) -> Callable[..., Tensor | None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if name in self._outputs:
                raise ValueError(f"activation {name!r} ran twice in one forward pass: it serves several layers; give each its own module")
            if name in self._live:
                output = native.gated(output.unsqueeze(0), self._live[name].unsqueeze(0)).squeeze(0)
            self._outputs[name] = output
            if name in self._inhibit:
                return native.inhibited(output.unsqueeze(0), self._inhibit[name]).squeeze(0)
            return output if name in self._live else None

        return hook

    def nodes(self) -> dict[str, tuple[str, ...]]:
        """{hidden linear layer or convolution: its trainable parameters, whose first axis (after the members') are its nodes}."""
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        found = [(name, module) for name, module in self.module.named_modules() if isinstance(module, kinds)]
        last = next((name for name, module in reversed(found) if isinstance(module, nn.Linear)), "")
        names = {name: tuple(n for n in (f"{name}.weight", f"{name}.bias") if n in self.trainable) for name, _ in found if name != last}
        return {name: own for name, own in names.items() if f"{name}.weight" in own}

    def weight_behind(self, layer: str) -> str:
        """The weight of the Linear or convolution registered last before an activation: what OrthReg acts on."""
        found = self._weighted_behind(layer)
        if found is None:
            raise ValueError(f"no linear layer or convolution stands before {layer!r}; orth-reg has nothing to act on")
        return next(f"{name}.weight" for name, module in self.module.named_modules() if module is found)

    def _weighted_behind(self, layer: str) -> nn.Module | None:
        last = None
        for name, module in self.module.named_modules():
            if name == layer:
                break
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                last = module
        return last

    # ------------------------------------------------------------------------------------------------------------- importance
    def importance(
        self, params: Tensors, buffers: Tensors, batches: Batches, preserve: Preserver, head: slice, positive: bool = False
    ) -> tuple[Tensors, Tensors]:
        """(Ω, α) of every member, stacked, in one pass, as the preserver measures them; Ω only if it does. f is the output in the columns
        `head`, and labels count from its first. `positive`: no input is below zero.

        A native network is measured for the whole fleet at once, any other (and any layer by layer) member by member.
        """
        with evaluating(self.module):
            if self.native and not preserve.local:
                return self._together(params, batches, preserve, head, positive)
            members = range(len(next(iter(params.values()))))
            parts = [self._alone(m, params, buffers, batches, preserve, head) for m in members]
            return _stack([p.omega for p in parts]), _stack([p.alpha for p in parts])

    def _together(self, params: Tensors, batches: Batches, preserve: Preserver, head: slice, positive: bool) -> tuple[Tensors, Tensors]:
        objective, wanted = preserve.objective, preserve.measures
        spares = preserve.spares if self.layers else None
        if spares is not None and not wanted:
            objective, spares = spares, None  # α is all there is to measure
        exact, samples, power = wanted and preserve.how == "per-sample", 0, objective.power
        leaves = {n: p.detach().requires_grad_(wanted and n in self.trainable) for n, p in params.items()}
        names = self.trainable if wanted else []
        totals: Tensors = {}  # by parameter and by layer, which share no name
        probes: Tensors = {}
        for x, y in batches():
            if not probes:
                probes = self._probes(params, x)
            measure = native.Measure(power if exact else 0)
            found = {n: g.detach() for n, g in self.gates.items()}
            asked = native.Asked(self.layers, {}, {}, measure if exact else None, measure, probes, self._resized, positive, found)
            flat = native.forward(self.module, leaves, x, asked)[..., head].flatten(0, 1).float()
            labels = (y - (head.start or 0)).flatten()
            pairs = [(objective, *pair, names, {} if spares else probes) for pair in objective.targets(flat, labels)]
            pairs += [(spares, *pair, [], probes) for pair in spares.targets(flat, labels)] if spares else []
            for k, (what, target, weight, own, seen) in enumerate(pairs):
                values, measure.rows = what.value(flat, target), None
                if weight is not None:
                    rows = weight.view(x.shape[:2])
                    measure.rows = rows if exact else None if power == 1 else rows.sqrt()  # |w^½ ∂|² carries w, and w^½·w^½ |∂n| too
                    values = values if exact else values * (weight if power == 1 else weight.sqrt())
                sources = {n: leaves[n] for n in own} | seen
                grads = torch.autograd.grad(values.sum(), list(sources.values()), retain_graph=k + 1 < len(pairs), allow_unused=True)
                for name, g in zip(sources, grads, strict=True):
                    if g is not None:
                        g = g if exact or name in probes else power_of(g, power)
                        totals[name] = g.clone() if name not in totals else totals[name].add_(g)
            samples += x.shape[1]
        omega = {n: totals[n] / samples if n in totals else torch.zeros_like(params[n]) for n in names}
        alpha = {n: totals[n] / samples if n in totals else torch.zeros_like(p) for n, p in probes.items()}
        return omega, alpha

    def _probes(self, params: Tensors, x: Tensor) -> Tensors:
        """A zero for every neuron of the layers, (F, N) each."""
        with torch.no_grad():
            found = self.widths(params, {}, x[:, :1])
        return {n: torch.zeros(len(x), width, device=x.device, requires_grad=True) for n, width in found.items()}

    def footprint(self, x: Tensor) -> int:
        """The numbers that one sample's forward pass makes, all layers together."""
        sizes: list[int] = []
        leaves = [m for m in self.module.modules() if not any(True for _ in m.children())]
        handles = [m.register_forward_hook(lambda _m, _i, o: sizes.append(o.numel() if isinstance(o, Tensor) else 0)) for m in leaves]
        try:
            with evaluating(self.module), torch.no_grad():
                self._fresh(self.module, x[0, :1])
        finally:
            self._outputs = {}
            for handle in handles:
                handle.remove()
        return x[0, 0].numel() + sum(sizes)

    def widths(self, params: Tensors, buffers: Tensors, x: Tensor) -> dict[str, int]:
        """The number of neurons (or channels) of each layer."""
        with evaluating(self.module), torch.no_grad():
            _, found = self.forward(params, buffers, x)
        for name, h in zip(self.layers, found, strict=True):
            if h.dim() > 4 and isinstance(self._weighted_behind(name), nn.Linear):
                raise ValueError(
                    f"layer {name!r} gives {tuple(h.shape[1:])} from a Linear: its neurons are the last axis, where a feature map's are "
                    "the second; flatten the positions into one axis first, (batch, positions, neurons)"
                )
        return {n: h.shape[2] if h.dim() > 4 else h.shape[-1] for n, h in zip(self.layers, found, strict=True)}

    def _fresh(self, model: nn.Module, x: Tensor) -> Any:
        self._outputs = {}
        return model(x)

    def _load(self, m: int, params: Tensors, buffers: Tensors) -> None:
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                p.copy_(params[name][m])
            for name, b in self.module.named_buffers():
                b.copy_(buffers[name][m])

    def _alone(self, m: int, params: Tensors, buffers: Tensors, batches: Batches, preserve: Preserver, head: slice) -> Importance:
        self._load(m, params, buffers)

        def forward(model: nn.Module, batch: Any) -> Tensor:
            self._live = {n: g[m].detach() for n, g in self.gates.items()}
            output: Tensor = self._fresh(model, batch[0])[:, head]
            self._live = {}
            return output

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for x, y in batches():
                yield x[m].float(), y[m] - (head.start or 0)  # a native network's may be bf16, which its module is not

        found = measure(
            self.module,
            pairs(),
            preserve.objective,
            spares=preserve.spares,
            taps={name: Tap(self.module.get_submodule(name), at_input=name not in self._resized) for name in self.layers},
            parameters=preserve.measures,
            estimator=preserve.how,
            forward=Layerwise(forward) if preserve.local else forward,
            finite=False,  # a member that diverged is a failed result, not an error
        )
        self._outputs = {}
        return found


def _stack(parts: list[Tensors]) -> Tensors:
    return {n: torch.stack([p[n] for p in parts]) for n in parts[0]}


def each(function: Any, *stacked: Any) -> Tensor:
    """function(member's arguments) for every member, stacked: directly for one member, by vmap for more."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(stacked) if isinstance(leaf, Tensor)]
    if len(leaves[0]) == 1:
        alone = torch.utils._pytree.tree_map(lambda leaf: leaf.squeeze(0) if isinstance(leaf, Tensor) else leaf, stacked)
        value: Tensor = function(*alone)
        return value.unsqueeze(0)
    axes = torch.utils._pytree.tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, stacked)
    mapped: Tensor = torch.func.vmap(function, in_dims=axes)(*stacked)
    return mapped


def column(per_member: Tensor, like: Tensor) -> Tensor:
    """(F,) shaped to broadcast over (F, …)."""
    return per_member.view(-1, *[1] * (like.dim() - 1))
