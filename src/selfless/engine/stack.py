"""One architecture, many members: parameters and buffers stacked along a leading axis, one forward pass for all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfless.activations import Maxout
from selfless.engine.native.forward import forward, gated, inhibited, is_native
from selfless.engine.native.options import ForwardOptions, PairGradient
from selfless.network.calling import evaluating
from selfless.network.roles import layer_before, nodes, output_layer

Tensors = dict[str, Tensor]


class Stack:
    """A module as a function of stacked parameters. `layers` are activation modules whose outputs `forward` returns too.

    `native` networks run their layers on the stack. For others, one member is the module itself (`bound`: its tensors are views of the
    stack), and several members are the module mapped with `vmap`. On a CPU one member of a native network is bound too: it costs nothing.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str], gated: Sequence[str] = ()) -> None:
        self.module = copy.deepcopy(module)
        self.layers = tuple(layers)
        self.gates: Tensors = {}  # layer → (F, N): factors of the outputs of the `gated` layers
        self.live_gates: Tensors = {}  # the same for the member whose module is running
        self.trainable = [n for n, p in self.module.named_parameters() if p.requires_grad]
        self.native = is_native(self.module)
        self.bound = False
        self._outputs: Tensors = {}  # of the pass that is running
        self._inhibit: Mapping[str, Sequence[PairGradient]] = {}
        self.resized = {n for n in self.layers if isinstance(self.module.get_submodule(n), Maxout)}
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
        """True if `forward` can add a penalty's gradient on the way back; under `vmap` it cannot."""
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
        inhibit: Mapping[str, Sequence[PairGradient]] | None = None,
        other: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """x (F, B, …) → logits (F, B, C) and the layers' activations [(F, B, N) …].

        `inhibit` adds the gradients of penalties to those of the layers it names; `other` are parameters, made of the `leaves`, that
        replace some.
        """
        if self.bound:
            self._outputs, self._inhibit, self.live_gates = {}, inhibit or {}, {n: g.squeeze(0) for n, g in self.gates.items()}
            if other:
                logits = torch.func.functional_call(self.module, {n: p.squeeze(0) for n, p in other.items()}, (x.squeeze(0),)).unsqueeze(0)
            else:
                logits = self.module(x.squeeze(0)).unsqueeze(0)
            found, self._inhibit, self.live_gates = [h.unsqueeze(0) for h in self._found(self._outputs)], {}, {}
            return logits, found
        params = params | dict(other or {})
        if self.native:
            options = ForwardOptions(self.layers, inhibit=inhibit or {}, gates=self.gates)
            logits = forward(self.module, params, x, options)
            return logits, self._found(options.outputs)
        mapped = torch.func.vmap(self._one, randomness="different")
        result: tuple[Tensor, list[Tensor]] = mapped(params, buffers, x, self.gates)
        return result

    def outputs(self, params: Tensors, buffers: Tensors, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run `forward` with other parameters than the stack's own, in eval mode and without gradients."""
        with torch.no_grad(), evaluating(self.module):
            if self.native:
                options = ForwardOptions(self.layers, gates=self.gates)
                logits = forward(self.module, params, x, options)
                return logits, self._found(options.outputs)
            result: tuple[Tensor, list[Tensor]] = torch.func.vmap(self._one, randomness="different")(params, buffers, x, self.gates)
            return result

    def output_parameters(self, outputs: int) -> list[str]:
        """The trainable parameters of the output layer: those whose rows are the network's outputs."""
        name = output_layer(self.module)
        if not name or getattr(self.module.get_submodule(name), "out_features", 0) != outputs:
            raise ValueError(f"the last nn.Linear of the network does not give its {outputs} outputs, so a task's own head cannot be told")
        return [n for n in (f"{name}.weight", f"{name}.bias") if n in self.trainable]

    def _one(self, params: Tensors, buffers: Tensors, x: Tensor, gates: Tensors) -> tuple[Tensor, list[Tensor]]:
        self._outputs, self.live_gates = {}, gates
        logits = torch.func.functional_call(self.module, (params, buffers), (x,))
        self.live_gates = {}
        return logits, self._found(self._outputs)

    def _found(self, outputs: Tensors) -> list[Tensor]:
        """The layers' outputs in the pass that just ended, in the order of their names."""
        self._outputs = {}
        lost = [name for name in self.layers if name not in outputs]
        if lost:
            raise ValueError(f"layer {lost[0]!r} was not reached by the forward pass; take it out of the network's `hidden`")
        return [outputs[name] for name in self.layers]

    def _layer_output(self, name: str) -> Callable[..., Tensor | None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if name in self._outputs:
                raise ValueError(f"activation {name!r} ran twice in one forward pass: it serves several layers; give each its own module")
            if name in self.live_gates:
                output = gated(output.unsqueeze(0), self.live_gates[name].unsqueeze(0)).squeeze(0)
            self._outputs[name] = output
            if name in self._inhibit:
                return inhibited(output.unsqueeze(0), self._inhibit[name]).squeeze(0)
            return output if name in self.live_gates else None

        return hook

    def nodes(self) -> dict[str, tuple[str, ...]]:
        """{hidden linear layer or convolution: its trainable parameters, whose first axis (after the members') are its nodes}."""
        names = {name: tuple(n for n in (f"{name}.weight", f"{name}.bias") if n in self.trainable) for name in nodes(self.module)}
        return {name: own for name, own in names.items() if f"{name}.weight" in own}

    def weight_before(self, layer: str) -> str:
        """The weight of the layer before an activation: what OrthReg acts on."""
        name = layer_before(self.module, layer)
        if not name:
            raise ValueError(f"no linear layer or convolution stands before {layer!r}; orth-reg has nothing to act on")
        return f"{name}.weight"

    def footprint(self, x: Tensor) -> int:
        """How many numbers one sample's forward pass makes, in all layers."""
        sizes: list[int] = []
        leaves = [m for m in self.module.modules() if not any(True for _ in m.children())]
        handles = [m.register_forward_hook(lambda _m, _i, o: sizes.append(o.numel() if isinstance(o, Tensor) else 0)) for m in leaves]
        try:
            with evaluating(self.module), torch.no_grad():
                self.run_module(self.module, x[0, :1])
        finally:
            for handle in handles:
                handle.remove()
        return x[0, 0].numel() + sum(sizes)

    def widths(self, params: Tensors, buffers: Tensors, x: Tensor) -> dict[str, int]:
        """The number of neurons (or channels) of each layer."""
        with evaluating(self.module), torch.no_grad():
            _, found = self.forward(params, buffers, x)
        for name, h in zip(self.layers, found, strict=True):
            if h.dim() > 4 and isinstance(self.module.get_submodule(layer_before(self.module, name)), nn.Linear):
                raise ValueError(
                    f"layer {name!r} gives {tuple(h.shape[1:])} from a Linear: its neurons are the last axis, where a feature map's are "
                    "the second; flatten the positions into one axis first, (batch, positions, neurons)"
                )
        return {n: h.shape[2] if h.dim() > 4 else h.shape[-1] for n, h in zip(self.layers, found, strict=True)}

    def run_module(self, model: nn.Module, x: Tensor) -> Any:
        """Call the module itself, for one member; its layers' outputs are not kept."""
        self._outputs = {}
        try:
            return model(x)
        finally:
            self._outputs = {}

    def load_member(self, m: int, params: Tensors, buffers: Tensors) -> None:
        """Copy one member's parameters and buffers into the module."""
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                p.copy_(params[name][m])
            for name, b in self.module.named_buffers():
                b.copy_(buffers[name][m])


def each(function: Any, *stacked: Any) -> Tensor:
    """Return function(a member's arguments) for every member, stacked: directly for one member, by vmap for more."""
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
