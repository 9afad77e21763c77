"""Many members of one architecture: parameters and buffers are stacked along a leading axis F, and one forward pass runs all members."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from selfless.activations import Maxout
from selfless.engine.batches import Numbers
from selfless.engine.draws import Draws, default_generator
from selfless.engine.lanes import Lanes
from selfless.engine.native.forward import apply_gates, forward, inhibited, is_native
from selfless.engine.native.hardware import prefers_native
from selfless.engine.native.options import ForwardOptions, Penalty
from selfless.network.calling import evaluating
from selfless.network.describing import watch_pass
from selfless.network.layers import Tap, resolve
from selfless.network.roles import layer_before, nodes, output_layer, output_width

Tensors = dict[str, Tensor]
BACKEND = "inductor"
IN_TURN: bool | None = None  # run the members of any network on a GPU in turn, or none; None: as `_fills_a_gpu` says
LARGE = 2**20  # parameters of a network whose members run in turn


class Stack:
    """A module as a function of stacked parameters. `forward` also returns the outputs of `layers`, which are activation modules.

    native   The layers run on stacked tensors (`selfless.engine.native`).
    bound    There is one member, and it is the module itself: its tensors are views of the stack. Used for one member of a network that
             is not native, and on a CPU also of a native one, where it has no overhead (but see `prefers_native`).
    in turn  The module runs with the parameters of one member after the other, on a GPU each on a stream of its own (`Lanes`). Used on a
             GPU for a network that fills it or that `vmap` cannot run, and on any device for one that draws random numbers in training
             (`Draws`). If `compiles`, the pass of a member is compiled; this is off.
    else     The module is mapped over the members with `vmap`.
    """

    def __init__(
        self, module: nn.Module, layers: Sequence[str], gated: Sequence[str] = (), is_mapped: bool = True, is_random: bool = False
    ) -> None:
        self.is_mapped = is_mapped  # False if `vmap` cannot run the module
        self.is_random = is_random  # True if training passes draw random numbers, and there are several members
        self.draws: Draws | None = None  # their generators
        self.device = torch.device("cpu")
        self.module = copy.deepcopy(module)
        self.layers = tuple(layers)
        self.gates: Tensors = {}  # layer of `gated` → factors of its outputs (F, N)
        self.live_gates: Tensors = {}  # the same for the member that the module currently runs, (N,)
        self.trainable = [n for n, p in self.module.named_parameters() if p.requires_grad]
        self.native = is_native(self.module)
        self.bound = self.in_turn = self.compiles = False
        self.lanes = Lanes()
        norms = [m for m in self.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.normalises = bool(norms)
        self.mixes_samples = any(norm.running_mean is None for norm in norms)  # True if evaluation, too, uses statistics of the batch
        self._outputs: Tensors = {}  # outputs of the layers in the current forward pass
        self._places: dict[str, Tap] = {}  # layer → its place in the network, as a forward pass shows it
        self._inhibit: Mapping[str, Sequence[Penalty]] = {}
        self.resized = {n for n in self.layers if isinstance(self.module.get_submodule(n), Maxout)}
        for name in dict.fromkeys((*self.layers, *gated)):
            self.module.get_submodule(name).register_forward_hook(self._layer_output(name))

    def stack_modules(self, modules: Sequence[nn.Module], device: torch.device) -> tuple[Tensors, Tensors]:
        """Return (parameters, buffers) of modules of this architecture, stacked on the device."""
        self.device = device
        self.module.to(device)
        params = [dict(m.named_parameters()) for m in modules]
        buffers = [dict(m.named_buffers()) for m in modules]
        stacks = (
            {n: torch.stack([p[n].detach() for p in params]).to(device) for n in params[0]},
            {n: torch.stack([b[n] for b in buffers]).to(device) for n in buffers[0]},
        )
        self.bound = len(modules) == 1 and not (self.native and prefers_native(self.module, device))
        fills = device.type == "cuda" and (not self.is_mapped or self._fills_a_gpu())
        self.in_turn = not self.bound and not self.native and (fills or self.is_random)
        self.draws = Draws(len(modules), device) if self.is_random else None
        if len(modules) == 1:  # one copy of a large network instead of two
            for named, group in ((self.module.named_parameters(), stacks[0]), (self.module.named_buffers(), stacks[1])):
                for name, tensor in named:
                    tensor.data = group[name][0]
        if not self.bound:
            for name in self.trainable:
                stacks[0][name].requires_grad_()
        return stacks

    def _fills_a_gpu(self) -> bool:
        """Return True if one member keeps a GPU busy: it convolves, which `vmap` makes slow, or is large."""
        convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in self.module.modules())
        return IN_TURN if IN_TURN is not None else convolves or sum(p.numel() for p in self.module.parameters()) >= LARGE

    @property
    def inhibits(self) -> bool:
        """True if `forward` can add the gradient of a penalty in the backward pass; under `vmap` it cannot."""
        return self.native or self.bound or self.in_turn

    def begin_training(self, seeds: Sequence[int]) -> None:
        """Set training mode, and start the random numbers of an epoch, such as dropout: one seed for each member that has its own."""
        self.module.train()
        for generator in (torch.default_generator, default_generator(self.device)):  # torch.manual_seed may take a millisecond
            generator.manual_seed(seeds[0])
        if self.draws is not None:
            self.draws.seed(seeds)

    def leaves(self, params: Tensors) -> Tensors:
        """Return the trainable tensors that autograd differentiates, stacked: `params`, or the parameters of the bound module."""
        if not self.bound:
            return {n: params[n] for n in self.trainable}
        return {n: p.unsqueeze(0) for n, p in self.module.named_parameters() if p.requires_grad}

    def gradients(
        self,
        values: Sequence[Tensor],
        weights: Sequence[Tensor | None],
        params: Tensors,
        retain: bool = False,
        more: Sequence[Tensor] = (),
    ) -> list[Tensor | None]:
        """Return ∂Σ⟨value, weight⟩/∂θ for every trainable parameter, then for `more`, stacked; None where the gradient is zero.

        A `weight` of None means 1, for a scalar value.
        """
        sources = [p for p in self.module.parameters() if p.requires_grad] if self.bound else [params[n] for n in self.trainable]
        grads = torch.autograd.grad(list(values), [*sources, *more], list(weights), allow_unused=True, retain_graph=retain)
        stacked = [g.unsqueeze(0) if self.bound and g is not None else g for g in grads[: len(sources)]]
        return [*stacked, *grads[len(sources) :]]

    def forward(
        self,
        params: Tensors,
        buffers: Tensors,
        x: Tensor,
        inhibit: Mapping[str, Sequence[Penalty]] | None = None,
        other: Mapping[str, Tensor] | None = None,
        differentiable: Collection[str] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the logits (F, B, C) of x (F, B, …) and the outputs of the layers, [(F, B, N), …].

        inhibit          gradients of penalties to add to those of a layer, in the backward pass
        other            parameters computed from `leaves` that replace some of `params`
        differentiable   the layers whose outputs the caller differentiates; None: all
        """
        if self.bound:
            self._outputs, self._inhibit, self.live_gates = {}, inhibit or {}, {n: g.squeeze(0) for n, g in self.gates.items()}
            if other:
                logits = torch.func.functional_call(self.module, {n: p.squeeze(0) for n, p in other.items()}, (x.squeeze(0),)).unsqueeze(0)
            else:
                logits = self.module(x.squeeze(0)).unsqueeze(0)
            hidden, self._inhibit, self.live_gates = [h.unsqueeze(0) for h in self._in_order(self._outputs)], {}, {}
            return logits, hidden
        return self._run(params | dict(other or {}), buffers, x, inhibit or {}, differentiable, self.draws)

    def outputs(self, params: Tensors, buffers: Tensors, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return what `forward` does, with any parameters, in eval mode and without gradients."""
        with torch.no_grad(), evaluating(self.module):
            return self._run(params, buffers, x, {})

    def _run(
        self,
        params: Tensors,
        buffers: Tensors,
        x: Tensor,
        inhibit: Mapping[str, Sequence[Penalty]],
        differentiable: Collection[str] | None = None,
        draws: Draws | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all members with these parameters: by kernels, in turn or mapped."""
        if self.native:
            options = ForwardOptions(
                self.layers, differentiable=differentiable, inhibit=inhibit, gates=self.gates, buffers=buffers, draws=draws
            )
            logits = forward(self.module, params, x, options)
            return logits, self._in_order(options.outputs)
        if self.in_turn:
            return self._run_in_turn(params, buffers, x, inhibit)
        mapped = torch.func.vmap(self._run_member, randomness="different")
        result: tuple[Tensor, list[Tensor]] = mapped(params, buffers, x, self.gates)
        return result

    def output_parameters(self, outputs: int) -> list[str]:
        """Return the trainable parameters of the output layer; their rows are the outputs of the network."""
        name = output_layer(self.module)
        if not name or output_width(self.module.get_submodule(name)) != outputs:
            raise ValueError(
                f"the last nn.Linear of the network does not have its {outputs} outputs, so the head of a task is unknown; "
                "define the output layer last"
            )
        return [n for n in (f"{name}.weight", f"{name}.bias") if n in self.trainable]

    def _run_member(self, params: Tensors, buffers: Tensors, x: Tensor, gates: Tensors) -> tuple[Tensor, list[Tensor]]:
        """Run the module with the parameters of one member."""
        self._outputs, self.live_gates = {}, gates
        logits = torch.func.functional_call(self.module, (params, buffers), (x,))
        self.live_gates = {}
        return logits, self._in_order(self._outputs)

    @cached_property
    def _member(self) -> Any:
        """`_run_member`, compiled if `compiles`."""
        return torch.compile(self._run_member, backend=BACKEND, dynamic=False) if self.compiles else self._run_member

    def _run_in_turn(
        self, params: Tensors, buffers: Tensors, x: Tensor, inhibit: Mapping[str, Sequence[Penalty]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the module for each member; the backward pass of `unbind` stacks their gradients."""
        own = {name: p.unbind() for name, p in params.items()}
        found, run = [], self._member if torch.is_grad_enabled() else self._run_member
        with self.lanes.fork(len(x), x):
            for m in range(len(x)):
                with self.lanes.lane(m), self.draws.member(m) if self.draws is not None and self.module.training else nullcontext():
                    self._inhibit = {name: [penalty.member(m) for penalty in penalties] for name, penalties in inhibit.items()}
                    mine = {n: p[m] for n, p in own.items()}, {n: b[m] for n, b in buffers.items()}
                    found.append(run(*mine, x[m], {n: g[m] for n, g in self.gates.items()}))
                    self._inhibit = {}
        return torch.stack([logits for logits, _ in found]), [torch.stack(hs) for hs in zip(*(hidden for _, hidden in found), strict=True)]

    def forget(self) -> None:
        """Forget the outputs of a forward pass that was interrupted, and free what it computed."""
        self._outputs, self._inhibit, self.live_gates = {}, {}, {}
        gc.collect()

    def _in_order(self, outputs: Tensors) -> list[Tensor]:
        """Return the outputs of a forward pass in the order of `layers`, and forget them."""
        self._outputs = {}
        missing = [name for name in self.layers if name not in outputs]
        if missing:
            raise ValueError(f"layer {missing[0]!r} was not reached by the forward pass; remove it from `hidden` of the network")
        return [outputs[name] for name in self.layers]

    def _layer_output(self, name: str) -> Callable[..., Tensor | None]:
        """Return a forward hook that keeps the output of a layer and applies its gates and inhibition."""

        def hook(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if name in self._outputs:
                raise ValueError(f"activation {name!r} ran twice in one forward pass: it serves several layers; give each its own module")
            if name in self.live_gates:
                output = apply_gates(output.unsqueeze(0), self.live_gates[name].unsqueeze(0)).squeeze(0)
            self._outputs[name] = output
            if name in self._inhibit:
                return inhibited(output.unsqueeze(0), self._inhibit[name]).squeeze(0)
            return output if name in self.live_gates else None

        return hook

    def nodes(self) -> dict[str, tuple[str, ...]]:
        """Return {hidden linear layer or convolution: its trainable parameters}; their second axis, after F, is its nodes."""
        names = {name: tuple(n for n in (f"{name}.weight", f"{name}.bias") if n in self.trainable) for name in nodes(self.module)}
        return {name: trainable for name, trainable in names.items() if f"{name}.weight" in trainable}

    def weight_before(self, layer: str) -> str:
        """Return the name of the weight before an activation, for sparsifiers that read weights."""
        found = self._places[layer].weighted if layer in self._places else None
        name = next((n for n, module in self.module.named_modules() if module is found), "") or layer_before(self.module, layer)
        if not name:
            raise ValueError(f"there is no linear layer or convolution before {layer!r}, so the sparsifier has no weights to act on")
        return f"{name}.weight"

    def numbers(self, x: Tensor, size: int) -> Numbers:
        """Return how many numbers of `size` bytes the forward pass of one sample of x (F, B, …) computes."""
        sizes = [x[0, 0].numel()]
        leaves = [m for m in self.module.modules() if not any(True for _ in m.children())]
        handles = [m.register_forward_hook(lambda _m, _i, o: sizes.append(o.numel() // 2 if isinstance(o, Tensor) else 0)) for m in leaves]
        try:
            with evaluating(self.module), torch.no_grad():
                self.run_module(self.module, x[0, :1].repeat(2, *[1] * (x.dim() - 2)))  # batch statistics need two
        finally:
            for handle in handles:
                handle.remove()
        return Numbers(sum(sizes), max(sizes), size)

    def widths(self, params: Tensors, buffers: Tensors, x: Tensor) -> dict[str, int]:
        """Return the number of neurons (or channels) of each layer."""
        self.watch(x)
        with evaluating(self.module), torch.no_grad():
            _, hidden = self.forward(params, buffers, x)
        for name, h in zip(self.layers, hidden, strict=True):
            if h.dim() > 4 and self._places[name].axis == -1:
                raise ValueError(
                    f"layer {name!r} gives {tuple(h.shape[1:])} from a Linear: its neurons are the last axis, but those of a feature map "
                    "are the second; flatten the positions into one axis first, (batch, positions, neurons)"
                )
        return {n: h.shape[2] if h.dim() > 4 else h.shape[-1] for n, h in zip(self.layers, hidden, strict=True)}

    def watch(self, x: Tensor) -> None:
        """Note the place of each layer in the network, as the first forward pass of one member on x (F, B, …) shows it."""
        if self.layers and not self._places:
            sample = x[0, :1].float().repeat(2, *[1] * (x.dim() - 2))  # batch statistics need two
            found = watch_pass(self.module, sample, self.run_module)
            self._places = {name: found.complete(name, tap) for name, tap in resolve(self.module, self.layers).items()}

    def run_module(self, model: nn.Module, x: Tensor) -> Any:
        """Call the module itself, for one member, without keeping the outputs of its layers."""
        self._outputs = {}
        try:
            return model(x)
        finally:
            self._outputs = {}

    def first_not_finite(self, m: int, params: Tensors, buffers: Tensors, x: Tensor) -> str:
        """Return the first module of member m, in running order, whose output for x (F, B, …) is not finite; "" if there is none."""
        found: list[str] = []
        leaves = [(name, module) for name, module in self.module.named_modules() if not any(True for _ in module.children())]

        def note(name: str, output: Any) -> None:
            values = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
            if not all(bool(torch.isfinite(t).all()) for t in values):
                found.append(name)

        handles = [module.register_forward_hook(lambda _m, _i, output, name=name: note(name, output)) for name, module in leaves]
        try:
            with torch.no_grad():
                own = ({n: t[m] for n, t in tensors.items()} for tensors in (params, buffers, self.gates))
                self._run_member(next(own), next(own), x[m].float(), next(own))
        finally:
            for handle in handles:
                handle.remove()
        return found[0] if found else ""

    def load_member(self, m: int, params: Tensors, buffers: Tensors) -> None:
        """Copy one member's parameters and buffers into the module."""
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                p.copy_(params[name][m])
            for name, b in self.module.named_buffers():
                b.copy_(buffers[name][m])


def each(function: Any, *stacked: Any) -> Tensor:
    """Return function(arguments of a member) for every member, stacked: by a plain call for one member, by vmap for more."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(stacked) if isinstance(leaf, Tensor)]
    if len(leaves[0]) == 1:
        arguments = torch.utils._pytree.tree_map(lambda leaf: leaf.squeeze(0) if isinstance(leaf, Tensor) else leaf, stacked)
        value: Tensor = function(*arguments)
        return value.unsqueeze(0)
    axes = torch.utils._pytree.tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, stacked)
    mapped: Tensor = torch.func.vmap(function, in_dims=axes)(*stacked)
    return mapped


def mapping_error(error: RuntimeError, what: str) -> ValueError | None:
    """Return the error that names `what` vmap cannot map, and the remedy; None if the error is about something else."""
    text = str(error).strip()
    if "vmap" not in text and "functorch" not in text:
        return None
    reason = text.splitlines()[0].partition(". We don't support")[0]
    return ValueError(
        f"{what} cannot be mapped over the members of a fleet ({reason}). Write it without boolean indexing, .item() and `if tensor`: "
        "torch.where, masks and topk do the same (docs/write-your-own.md)"
    )


def by_member(function: Any, *stacked: Any) -> Tensor:
    """Return the same as `each`, also of a function that vmap cannot map: then by a plain call for each member."""
    try:
        return each(function, *stacked)
    except RuntimeError as error:
        if mapping_error(error, "") is None:
            raise
        size = next(len(leaf) for leaf in torch.utils._pytree.tree_leaves(stacked) if isinstance(leaf, Tensor))
        members = [torch.utils._pytree.tree_map(lambda t, m=m: t[m : m + 1] if isinstance(t, Tensor) else t, stacked) for m in range(size)]
        return torch.cat([each(function, *own) for own in members])


def column(per_member: Tensor, like: Tensor) -> Tensor:
    """Return a tensor (F,) as (F, 1, …), so that it broadcasts over `like` (F, …)."""
    return per_member.view(-1, *[1] * (like.dim() - 1))


def add_weighted(gradient: Tensor | None, more: Tensor | None, weights: Tensor) -> Tensor | None:
    """Return gradient + weights · more, with a weight for each member; None is zero."""
    if more is None:
        return gradient
    weighted = more * column(weights, more)
    return weighted if gradient is None else gradient + weighted
