"""`attach(..., inject=True)`: add the gradient of the penalty in the backward pass of the user's own loss.

After `loss.backward()` every parameter that the loss reaches has the gradient of `(loss + keeper.penalty()).backward()`. Three places:

    activations   a hook on the node that computed h (or n) adds s · ∂(λR)/∂h. The passes since the last backward pass are one batch.
    parameters    a hook on each parameter adds s · ∂(explicit anchor, penalties on weights, distillation)/∂θ, once in a backward pass
    gates         the same for the gates of a task

s is `keeper.scale`: the factor of the loss, which a backward pass does not show (a GradScaler, 1/accumulated batches).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfless.keeper.activations import MOST_PASSES, Activation
from selfless.keeper.hook import Hook, is_forward_pass
from selfless.keeper.inhibition import add_up, check_layers, layer_costs, layer_sizes, weight_costs
from selfless.keeper.padding import Counted
from selfless.keeper.ready import ReadyLayer, needs_penalty, prepare_layer
from selfless.network.calling import batch_size, to_device
from selfless.preserve.capabilities import Distils, Gated

if TYPE_CHECKING:
    from selfless.keeper.keeper import Keeper
    from selfless.keeper.part import Part


def read_scale(scale: Any) -> float | Tensor:
    """Return the factor that `keeper.scale` stands for: a number, a function that returns one, or a GradScaler."""
    found = getattr(scale, "get_scale", scale)
    found = found() if callable(found) else found
    if not isinstance(found, (int, float, Tensor)):
        raise TypeError(f"keeper.scale takes a number, a function that returns one, or a GradScaler, not {scale!r}")
    return found


@dataclass(eq=False)
class _Pass:
    """One forward pass of a layer: h, or n and the activation to apply; and λ ∂R/∂h once it is known.

    The hook that holds a pass belongs to the graph, and a cycle through a graph is never collected. So `tensor` has no graph, and `source`,
    the same with its graph, is forgotten when it has been differentiated or the step is over.
    """

    layer: str
    tensor: Tensor
    source: Tensor | None  # for path integrals
    activation: Activation | None
    counted: Counted | None
    version: int
    gradient: Tensor | None = None
    batch: list[_Pass] | None = None  # the passes that are one batch with this one
    alone: bool = False  # True if it is a batch of its own


class Injector:
    """The hooks of one keeper in inject mode."""

    def __init__(self, keeper: Keeper) -> None:
        if keeper.sparsifiers.found:
            raise ValueError(
                f"inject=True cannot measure the strength of {keeper.sparsify}, because it sees one layer at a time; write a number, or "
                "attach without inject=True and add keeper.penalty() to the loss"
            )
        self._keeper = weakref.ref(keeper)
        self._pending: dict[str, list[_Pass]] = {}  # by layer: passes without a backward pass yet
        self._has_rows = False  # True if a layer of these passes has samples
        self._distilled: list[
            tuple[int, Tensor, dict[str, Tensor]]
        ] = []  # (samples, cost, ∂ cost/∂θ) of passes without a backward pass yet
        self._gradients: dict[str, Tensor] = {}  # ∂ (penalties on θ, distillation)/∂θ in this backward pass
        self._task, self._scale = -1, torch.ones(())
        self._handles: dict[int, tuple[Any, Any]] = {}
        self._followed: Mapping[str, nn.Parameter] | None = None  # the parameters that have their hooks
        self._ready: dict[str, ReadyLayer | None] = {}  # by layer: for the next backward pass, if it is like the last
        self._known: tuple[float, torch.device] | None = None  # the number that self._scale was made of
        self._stopped = False
        keeper.collector.on_pass = torch.compiler.disable(self._note_pass)
        self._model = keeper.model
        self._model_handles = [self._model.register_forward_hook(Hook(torch.compiler.disable(self._distil)), with_kwargs=True)]
        for part in keeper.parts:
            if part.gates is not None:
                part.gates.on_leaves = self._hook_gates(part)
        self.follow(keeper.trainable())

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add the hooks of parameters that are new."""
        if parameters is self._followed:
            return
        self._followed = parameters
        new = {name: parameter for name, parameter in parameters.items() if id(parameter) not in self._handles}
        sparse = (
            {id(m.weight) for m in self._model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse} if new else set()
        )
        for name, parameter in new.items():
            if id(parameter) in sparse:  # a hook may not make a sparse gradient dense before it is accumulated
                handle = parameter.register_post_accumulate_grad_hook(self._hook_sparse(name))
            else:
                handle = parameter.register_hook(self._hook_parameter(name))
            self._handles[id(parameter)] = (handle, parameter)

    def drop(self) -> None:
        """Forget the passes that had no backward pass: the step is over."""
        _forget_sources(one for passes in self._pending.values() for one in passes)
        self._pending, self._distilled, self._task = {}, [], -1

    def stop(self) -> None:
        """Remove the hooks; those of passes whose graph still lives do nothing from now on."""
        self._stopped = True
        for handle in (*self._model_handles, *(handle for handle, _ in self._handles.values())):
            handle.remove()
        self.drop()

    @property
    def _active(self) -> Keeper | None:
        """The keeper; None if there is nothing to inject: it was detached, or it runs the model or autograd itself."""
        keeper = None if self._stopped else self._keeper()
        return None if keeper is None or keeper.collector.paused else keeper

    # ------------------------------------------------------------------------------------------------------------- backward pass
    def _begin(self, keeper: Keeper) -> None:
        """Prepare a backward pass, at its first hook: read the scale, follow the path, compute the gradients of penalties on θ."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        scale, device = read_scale(keeper.scale), next(keeper.model.parameters()).device
        if isinstance(scale, Tensor) or self._known != (scale, device):  # a number becomes a tensor once: that waits for a GPU
            self._scale = torch.as_tensor(scale, dtype=torch.float32, device=device).detach()
            self._known = None if isinstance(scale, Tensor) else (scale, device)
        keeper.begin_penalty(keeper.trainable())
        self._gradients = self._differentiate_parameters(keeper)
        for part in keeper.parts:
            if part.path is not None:
                part.path.begin_backward(self._scale)
                part.path.add_penalty({n: self._scale * g for n, g in self._gradients.items()})
            if part.gates is not None:
                part.gates.note_scale(self._scale)

    def _add(self, gradient: Tensor | None, own: Tensor, like: Tensor) -> Tensor:
        """Return gradient + s · own, in the precision of the gradient."""
        own = (self._scale.to(own.device) * own).to(like.dtype if gradient is None else gradient.dtype)
        return own if gradient is None else own + gradient  # a sparse gradient has to come second

    # --------------------------------------------------------------------------------------------------------------- activations
    def _note_pass(self, layer: str, tensor: Tensor, activation: Activation | None, counted: Counted | None) -> None:
        """Collect one forward pass of a layer. A tensor with an activation is a copy of n; its only input is n itself."""
        keeper = self._active
        if keeper is None:
            return
        keeper.collector.reached.add(layer)
        if not tensor.requires_grad or tensor.grad_fn is None:
            return
        if not self._pending:
            self.follow(keeper.trainable())
            self._has_rows = False
        self._has_rows |= bool(tensor.numel())
        if tensor.dtype == torch.float16 and isinstance(keeper.scale, (int, float)) and keeper.scale == 1:
            keeper.notices.once(
                "scale",
                "activations are float16, where a GradScaler usually multiplies the loss, but keeper.scale is 1: "
                "write keeper.scale = scaler, so that injected gradients are multiplied too",
            )
        passes = self._pending.setdefault(layer, [])
        if len(passes) == MOST_PASSES:
            remedy = "use model.eval() or torch.no_grad() for them"
            warnings.warn(f"{MOST_PASSES} forward passes in training mode had no backward pass; {remedy}", stacklevel=2)
            _forget_sources(passes)
            passes.clear()
        node, index = (tensor.grad_fn, tensor.output_nr) if activation is None else tensor.grad_fn.next_functions[0]
        if node is None:
            return
        source = tensor if any(part.path is not None for part in keeper.parts) else None
        one = _Pass(layer, tensor.detach(), source, activation, counted, tensor._version)
        passes.append(one)
        node.register_prehook(self._hook_pass(one, index))

    def _hook_pass(self, one: _Pass, index: int) -> Callable[..., Any]:
        def hook(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            keeper = self._active
            if keeper is None:
                return None
            self._begin(keeper)
            if (changed := self._add_ready(keeper, one, gradients[index])) is not None:
                return tuple(changed if k == index else g for k, g in enumerate(gradients))
            if one.gradient is None:
                self._differentiate(keeper, one)
            own, one.gradient = one.gradient, None
            assert own is not None
            return tuple(self._add(g, own, one.tensor) if k == index else g for k, g in enumerate(gradients))

        return hook

    def _add_ready(self, keeper: Keeper, one: _Pass, gradient: Tensor | None) -> Tensor | None:
        """Return gradient + s · λ ∂R/∂h in an ordinary backward pass: one forward pass of the layer, as the last one; else None."""
        ready, passes = self._ready.get(one.layer), self._pending.get(one.layer, ())
        if ready is None or len(passes) != 1 or passes[0] is not one or one.activation is not None or one.counted is not None:
            return None
        _check_unchanged(one)
        waiting, one.alone = self._pending.pop(one.layer), True  # also if an error is raised: this pass is no part of the next batch
        changed = ready.add(keeper, gradient, one.tensor)
        if changed is None:
            self._pending[one.layer], one.alone = waiting, False
        return changed

    def _differentiate(self, keeper: Keeper, one: _Pass) -> None:
        """Compute λ ∂R/∂h of all passes of a layer that are one batch."""
        batch = [one] if one.alone else one.batch if one.batch is not None else self._pending.pop(one.layer, [one])
        for each in batch:
            each.batch = batch
            _check_unchanged(each)
        if self._has_rows and keeper.ranks.is_alone and not any(each.tensor.numel() for each in batch):  # an expert without samples
            for each in batch:
                each.gradient = torch.zeros_like(each.tensor)
            return
        leaves = [each.tensor.detach().requires_grad_() for each in batch]
        collector = keeper.collector
        with torch.enable_grad():
            check_layers(collector)
            joined = [(leaf, each.activation, each.counted) for leaf, each in zip(leaves, batch, strict=True)]
            h = collector.join(one.layer, joined)
            sizes = layer_sizes(keeper.sparsifiers, {one.layer: h}, keeper.alpha, keeper.ranks)
            cost = add_up(layer_costs(keeper.sparsifiers, {one.layer: h}, sizes, keeper.step_log))
            gradients = torch.autograd.grad(cost, leaves)
        keeper.notices.check_sign({one.layer: h})
        keeper.check_penalty({one.layer: h.detach()}, cost)
        for each, gradient in zip(batch, gradients, strict=True):
            each.gradient = gradient
        self._note_path(keeper, batch)
        self._ready[one.layer] = prepare_layer(keeper, one.layer, [(each.tensor, each.activation, each.counted) for each in batch])

    def _note_path(self, keeper: Keeper, batch: list[_Pass]) -> None:
        """Tell path integrals the share of the gradient that comes from these activations; nodes before h have not run yet."""
        paths = [part.path for part in keeper.parts if part.path is not None]
        if not paths:
            return
        parameters = keeper.trainable()
        sources = [each.source for each in batch if each.source is not None]
        if len(sources) < len(batch):
            raise RuntimeError(
                f"a path integral ({keeper.preserve}) with inject=True needs one backward pass for each forward pass, before the next step "
                "of the optimizer; use keeper.penalty() without inject=True"
            )
        with keeper.collector.pausing():
            own = [each.gradient for each in batch]
            grads = torch.autograd.grad(sources, list(parameters.values()), own, retain_graph=True, allow_unused=True)
        found = {n: self._scale * g for n, g in zip(parameters, grads, strict=True) if g is not None}
        for path in paths:
            path.add_penalty(found)
        _forget_sources(batch)

    # ---------------------------------------------------------------------------------------------------------------- parameters
    def _hook_parameter(self, name: str) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor) -> Tensor | None:
            keeper = self._active
            if keeper is None:
                return None
            self._begin(keeper)
            own = self._gradients.pop(name, None)
            return None if own is None else self._add(gradient, own, gradient)

        return hook

    def _hook_sparse(self, name: str) -> Callable[[Tensor], None]:
        add = self._hook_parameter(name)

        def hook(parameter: Tensor) -> None:
            changed = add(parameter.grad) if parameter.grad is not None else None
            parameter.grad = parameter.grad if changed is None else changed

        return hook

    def _differentiate_parameters(self, keeper: Keeper) -> dict[str, Tensor]:
        """Return the gradient of the penalties on θ, of the loss on old samples, and of distillation in the forward passes."""
        reads_weights = keeper.sparsifiers.reading("weights", "parameters")
        if not reads_weights and not self._distilled and not any(needs_penalty(p, keeper.tasks, keeper.implicit) for p in keeper.parts):
            return {}
        parameters = keeper.trainable()
        with keeper.collector.pausing(), torch.enable_grad():
            costs = weight_costs(keeper.sparsifiers, keeper.collector, parameters, keeper.step_log, training=True)
            preserved = keeper.preserved()
            costs += [c for p in keeper.parts for c in p.penalty(preserved, keeper.tasks, keeper.implicit, keeper.step_log)]
            costs += [c for p in keeper.parts for c in p.replay(keeper.tasks, keeper.forwards, keeper.step_log)]
            live = [cost for cost in costs if cost.requires_grad]
            grads = torch.autograd.grad(live, list(parameters.values()), allow_unused=True) if live else ()
        found = {n: g for n, g in zip(parameters, grads, strict=False) if g is not None}
        samples = sum(count for count, _, _ in self._distilled)
        for count, cost, distilled in self._distilled:
            keeper.step_log.add("distillation", count / samples * cost)
            for n, g in distilled.items():
                found[n] = found[n] + count / samples * g if n in found else count / samples * g
        self._distilled = []
        return found

    def _distil(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        """Forward hook of the whole model: differentiate distillation on the inputs of this pass."""
        keeper = self._active
        if keeper is None or module is not keeper.model or not module.training or not torch.is_grad_enabled() or not is_forward_pass():
            return
        self.follow(keeper.trainable())
        terms = [part for part in keeper.parts if isinstance(part.term, Distils) and part.is_on]
        if not keeper.tasks or not terms:
            return
        batch: Any = to_device(kwargs if kwargs and not args else args, keeper.model)
        parameters = keeper.trainable()
        with keeper.collector.pausing():
            try:
                costs = [part.distillation(parameters, keeper.forwards, batch) for part in terms]
            except (IndexError, KeyError, TypeError, AttributeError) as error:
                if any(keeper.forwards):
                    error.add_note(
                        "with inject=True, the forward= of consolidate() is also called with the arguments of the model's own call, as a "
                        "tuple or dict, instead of the loader's batch; make it work for both, or use keeper.penalty((x, y))"
                    )
                raise
            grads = torch.autograd.grad(costs, list(parameters.values()), allow_unused=True)
        found = {n: g for n, g in zip(parameters, grads, strict=True) if g is not None}
        self._distilled.append((batch_size(batch), torch.stack(costs).sum().detach(), found))

    # --------------------------------------------------------------------------------------------------------------------- gates
    def _hook_gates(self, part: Part) -> Callable[[dict[str, Tensor]], None]:
        """Return a function that adds hooks to the gates of a step."""

        def on_leaves(leaves: dict[str, Tensor]) -> None:
            for name, leaf in leaves.items():
                leaf.register_hook(hook_of(name, leaves))

        def hook_of(name: str, leaves: dict[str, Tensor]) -> Callable[[Tensor], Tensor | None]:
            def hook(gradient: Tensor) -> Tensor | None:
                keeper, term = self._active, part.term
                if keeper is None or not isinstance(term, Gated):
                    return None
                self._begin(keeper)
                values = {n: leaf.detach().requires_grad_() for n, leaf in leaves.items()}
                with torch.enable_grad():
                    cost = part.strength * term.gate_penalty(part.state, values)
                keeper.step_log.set("gates", cost)
                (own,) = torch.autograd.grad(cost, [values[name]], allow_unused=True)
                return None if own is None else self._add(gradient, own, gradient)

            return hook

        return on_leaves


def _check_unchanged(one: _Pass) -> None:
    if one.tensor._version != one.version:
        raise RuntimeError(
            f"the activations of layer {one.layer!r} were changed in place after they were computed; write the operation after it "
            "out of place (x = x + y instead of x += y), or use keeper.penalty() without inject=True"
        )


def _forget_sources(passes: Iterable[_Pass]) -> None:
    """Let the graphs of these passes go."""
    for one in passes:
        one.source = None
