"""The step size of the implicit anchor, read from the optimizer: how far a constant gradient of 1 moves a parameter per iteration.

The explicit penalty adds G = 2λΩ(θ − θ*) to the gradient. After many iterations with a constant G, each one moves θ by

    SGD                          lr · G
    SGD with momentum μ          lr · (1 − dampening)/(1 − μ) · G        (Nesterov: the same)
    Adam, AdamW (also NAdam …)   lr / (√v̂ + ε) · G, per entry, with v̂ the second-moment estimate of the optimizer
    RMSprop, Adagrad             lr / (√v + ε) · G, per entry (RMSprop with momentum: divided by 1 − μ)
    Adadelta                     lr √(u + ε) / √(v + ε) · G, per entry, with u its average of squared steps
    Muon                         lr · G: its momentum is an average
    any other                    lr · G, or lr/(1 − μ) · G with a momentum; only a guess for those that rescale steps (Rprop, Adamax)

The implicit anchor takes this step once per iteration. With Adam the explicit gradient would also increase v̂ and so weaken itself. The
implicit anchor does not enter v̂, so the two agree only as λ → 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from selfless.distributed.shards import is_sharded, local
from selfless.functional import Anchor, anchor_share
from selfless.functional.anchor import LARGEST
from selfless.functional.shapes import wide
from selfless.keeper.pieces import is_large, piece_of, piece_size, pieces_of

_Entry = tuple[Tensor, Tensor, Tensor, Tensor | float]  # pieces of θ, Ω and θ*; c = 2 · step · λ


class Pull:
    """The implicit anchor after an optimizer step, θ ← θ + share · (θ* − θ), piece by piece.

    Where a gradient is sparse, an optimizer changes only the rows that were read. All others are at θ* and stay there, so they are skipped.
    """

    def __init__(self) -> None:
        self._away: dict[str, Tensor] = {}  # rows of a parameter that may differ from θ*
        self._plans: WeakKeyDictionary[torch.optim.Optimizer, _Plan] = WeakKeyDictionary()  # a model may have several optimizers

    def forget(self) -> None:
        """Forget which rows were read: θ* is another one now."""
        self._away = {}
        self._plans.clear()

    def is_ready(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], anchor: Anchor) -> bool:
        """Return True if nothing has changed since the last step but the learning rates. Call this before each move."""
        if optimizer in self._plans and not self._plans[optimizer].fits(optimizer, names, anchor):
            del self._plans[optimizer]
        return optimizer in self._plans

    def __call__(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], anchor: Anchor, strength: float) -> None:
        """Move every parameter of the optimizer that has an Ω."""
        plan = self._plans.get(optimizer)
        if plan is None and (plan := _prepare(optimizer, names, anchor)) is not None:
            self._plans[optimizer] = plan
            for name in plan.names:
                self._away.pop(name, None)  # these steps change all rows
        if plan is not None:
            plan.move(strength)
            return
        bucket: list[_Entry] = []
        for group, parameter, name in _parameters_of(optimizer, names):
            if name not in anchor.omega:
                continue
            omega, star, state = local(anchor.omega[name]), local(anchor.star[name]), optimizer.state.get(parameter, {})
            if is_sharded(parameter):
                state = {key: local(t) if isinstance(t, Tensor) else t for key, t in state.items()}
                parameter = local(parameter)
            if parameter.grad is not None and parameter.grad.is_sparse and parameter.dim() > 1:
                rows = self._rows(name, parameter, star)
                step = step_of(group, state, parameter, rows)
                near, far, now = (t.index_select(0, rows.to(t.device)) for t in (omega, star, parameter))
                _move([(now, near, far, 2 * strength * step)])
                parameter.index_copy_(0, rows, now)
                continue
            self._away.pop(name, None)
            for piece in pieces_of(parameter, omega, star, *(t for t in state.values() if _is_like(t, parameter))):
                step = step_of(group, state, parameter, piece)
                entry = (piece_of(parameter, piece), piece_of(omega, piece), piece_of(star, piece), 2 * strength * step)
                if bucket and (not _are_alike(bucket[0], entry) or is_large(*(e[0] for e in bucket), entry[0])):
                    _move(bucket)
                    bucket = []
                bucket.append(entry)
        if bucket:
            _move(bucket)

    def _rows(self, name: str, parameter: Tensor, star: Tensor) -> Tensor:
        """Return the rows that may differ from θ*: those that do, and those that were read since."""
        assert parameter.grad is not None
        if name not in self._away:
            self._away[name] = (parameter != star.to(parameter.device, parameter.dtype)).flatten(1).any(1)
        self._away[name][parameter.grad._indices()[0]] = True
        return self._away[name].nonzero()[:, 0]


class _Plan:
    """The move of all parameters, prepared once for many steps: dense gradients, and one step size for each group of the optimizer.

    entries   (number of the group, name, parameter, Ω, θ*); Ω and θ* have the device and precision of the parameter
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[Tensor, str],
        anchor: Anchor,
        entries: Sequence[tuple[int, str, Tensor, Tensor, Tensor]],
    ) -> None:
        self._parameter_names, self._groups = names, [(group, list(group["params"])) for group in optimizer.param_groups]
        self._states = len(optimizer.state)  # it grows when a parameter gets its first gradient
        self.names = [name for _, name, *_ in entries]
        self._entries = [(name, p, p.data_ptr(), omega, star, omega._version) for _, name, p, omega, star in entries]
        self._largest = _largest([omega for *_, omega, _ in entries])
        self._buckets: list[tuple[list[int], list[Tensor], list[Tensor], list[Tensor]]] = []  # groups, θ, Ω, θ*
        size = 0
        for number, _, p, omega, star in entries:
            for piece in pieces_of(p, omega, star):
                theta = piece_of(p, piece)
                if not self._buckets or (size := size + theta.numel()) > piece_size(p):
                    self._buckets.append(([], [], [], []))
                    size = theta.numel()
                numbers, thetas, omegas, stars = self._buckets[-1]
                numbers.append(number)
                thetas.append(theta)
                omegas.append(piece_of(omega, piece))
                stars.append(piece_of(star, piece))

    def fits(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], anchor: Anchor) -> bool:
        """Return True if the model, this optimizer and the anchor have the same tensors as before, and no gradient is sparse."""
        groups = optimizer.param_groups
        if self._parameter_names is not names or len(groups) != len(self._groups) or len(optimizer.state) != self._states:
            return False
        for group, (old, params) in zip(groups, self._groups, strict=True):
            if group is not old or len(group["params"]) != len(params) or not all(map(is_, group["params"], params)):
                return False
            if not isinstance(group["lr"], float | int):
                return False
        for name, p, place, omega, star, version in self._entries:
            if anchor.omega.get(name) is not omega or anchor.star.get(name) is not star or p.data_ptr() != place:
                return False
            if omega._version != version:
                return False
            if p.grad is not None and p.grad.is_sparse:
                return False
        return True

    def move(self, strength: float) -> None:
        """θ ← θ + share · (θ* − θ) with the learning rates of now."""
        steps = [float(2 * strength * step_of(group, {}, self._entries[0][1])) for group, _ in self._groups]
        is_small = max(steps) * self._largest < LARGEST
        for numbers, thetas, omegas, stars in self._buckets:
            _move_together(thetas, omegas, stars, [steps[k] for k in numbers], is_small)


def _largest(omegas: Sequence[Tensor]) -> float:
    """Return the largest Ω; infinity where a CUDA graph is captured, which cannot read it."""
    if omegas[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return math.inf
    return float(torch.stack([omega.max() for omega in omegas if omega.numel()] or [torch.zeros(())]).max())


def _prepare(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], anchor: Anchor) -> _Plan | None:
    """Return the plan for the parameters of an optimizer that have an Ω; None if one of them needs more than a common step size."""
    entries: list[tuple[int, str, Tensor, Tensor, Tensor]] = []
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            name = names.get(p)
            if name is None or name not in anchor.omega:
                continue
            omega, star, state = anchor.omega[name], anchor.star[name], optimizer.state.get(p, {})
            if is_sharded(p) or (p.grad is not None and p.grad.is_sparse) or not isinstance(group["lr"], float | int):
                return None
            if _second_moment(state) is not None or p.dtype not in (torch.float32, torch.float64):
                return None
            if any((t.device, t.dtype, t.shape) != (p.device, p.dtype, p.shape) for t in (omega, star)):
                return None
            if entries and (p.device, p.dtype) != (entries[0][2].device, entries[0][2].dtype):
                return None
            entries.append((number, name, p, omega, star))
    return _Plan(optimizer, names, anchor, entries) if entries else None


def _move(bucket: Sequence[_Entry]) -> None:
    """θ ← θ + share · (θ* − θ) for some pieces at once, in place; share = cΩ / (1 + cΩ), as in `functional.anchor_share`."""
    thetas, omegas, stars, cs = (list(column) for column in zip(*bucket, strict=True))
    omegas, stars = ([wide(t.to(p.device)) for t, p in zip(ts, thetas, strict=True)] for ts in (omegas, stars))
    is_mixed = any(len({t.dtype for t in some}) > 1 for some in zip(thetas, omegas, stars, strict=True))
    if is_mixed or any(isinstance(c, Tensor) for c in cs):
        for p, omega, star, c in zip(thetas, omegas, stars, cs, strict=True):
            p.copy_(torch.lerp(p.to(star.dtype), star, anchor_share(omega, torch.as_tensor(c, device=p.device)).to(star.dtype)))
        return
    _move_together(thetas, omegas, stars, cs)


def _move_together(thetas: list[Tensor], omegas: list[Tensor], stars: list[Tensor], cs: list[float], is_small: bool = False) -> None:
    """θ ← θ + share · (θ* − θ), with one kernel for many small parameters; `is_small`: no cΩ is above LARGEST."""
    shares = torch._foreach_mul(omegas, cs)
    if not is_small:
        torch._foreach_clamp_max_(shares, LARGEST)
    torch._foreach_div_(shares, torch._foreach_add(shares, 1.0))
    torch._foreach_lerp_(thetas, stars, shares)


def _are_alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return True if two entries can be moved together: the same precision, device and kind of step."""
    return all(isinstance(x, Tensor) == isinstance(y, Tensor) for x, y in zip(a, b, strict=True)) and all(
        (x.dtype, x.device) == (y.dtype, y.device) for x, y in zip(a[:3], b[:3], strict=True)
    )


def distances(parameters: Mapping[str, Tensor], star: Mapping[str, Tensor], omega: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return {"penalty": Σ Ω(θ − θ*)², "drift": Σ (θ − θ*)², "size": Σ θ*²} over the parameters that have a θ*, piece by piece.

    Of sharded parameters, over the rows of this rank.
    """
    total: dict[str, Tensor] = {}
    for name, p in parameters.items():
        if name not in star:
            continue
        near, far, weight = local(p.detach()), local(star[name]), None if omega is None else local(omega[name])
        for piece in pieces_of(near, far, *([] if weight is None else [weight])):
            held = wide(piece_of(far, piece).to(p.device))
            square = (piece_of(near, piece).to(held.dtype) - held).square()
            found = {"drift": square.sum(), "size": held.square().sum()}
            if weight is not None:
                found["penalty"] = (wide(piece_of(weight, piece).to(p.device)) * square).sum()
            for key, value in found.items():
                total[key] = total[key] + value.double() if key in total else value.double()
    return total


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer whose steps the anchor would spoil."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS learns the curvature from its own steps, and the implicit anchor would move weights between them; leave "
            "anchor_with() out: keeper.penalty() then has the anchor (in an integration anchor='explicit'). Distillation is not damped then"
        )


def _parameters_of(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[dict[str, Any], Tensor, str]]:
    """Yield (group, parameter, name) of the optimizer's parameters that belong to the model."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in names:
                yield group, parameter, names[parameter]


def step_sizes(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor | float]:
    """Return {parameter name: step size} for the parameters of the optimizer; a step size is a scalar or has the parameter's shape."""
    return {name: step_of(group, optimizer.state.get(p, {}), p) for group, p, name in _parameters_of(optimizer, names)}


def plain_steps(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """Return {parameter name: step size} without what Adam and others rescale: lr, divided by 1 − μ for SGD with momentum μ."""
    found = ((name, p, step_of(group, {}, p)) for group, p, name in _parameters_of(optimizer, names))
    return {name: torch.as_tensor(step, device=p.device) for name, p, step in found}


def _is_like(tensor: Any, parameter: Tensor) -> bool:
    return isinstance(tensor, Tensor) and tensor.shape == parameter.shape


def momentum_of(group: Mapping[str, Any]) -> float:
    """Return the momentum by which steps add up, as in SGD; 0 for Muon, known by its `ns_steps`, whose momentum is an average."""
    return 0.0 if "ns_steps" in group else float(group.get("momentum") or 0.0)


def _second_moment(state: Mapping[str, Any]) -> Tensor | None:
    """Return the second moment of the gradient of a parameter, if the optimizer has one."""
    return next((state[k] for k in ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum") if k in state), None)


def step_of(group: Mapping[str, Any], state: Mapping[str, Any], parameter: Tensor, part: slice | Tensor | None = None) -> Tensor | float:
    """Return the step size of one parameter, from its group and its state in the optimizer; `part`: of a flat piece or of some rows."""
    lr: Tensor | float = group["lr"]
    lr = lr.to(parameter.device, torch.float32) if isinstance(lr, Tensor) else float(lr)
    second = _second_moment(state)
    if second is not None and _is_like(second, parameter):
        if part is not None:
            second = second.index_select(0, part) if isinstance(part, Tensor) else piece_of(second, part)
        if "betas" in group:
            steps = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)
            second = second / (1 - torch.as_tensor(group["betas"][1], dtype=torch.float32) ** steps)
        epsilon = group.get("eps", 1e-8)
        if "acc_delta" in state:  # Adadelta
            moved = state["acc_delta"]
            moved = moved if part is None else moved.index_select(0, part) if isinstance(part, Tensor) else piece_of(moved, part)
            lr = lr * ((moved.float() + epsilon) / (second.float() + epsilon)).sqrt()
        else:
            lr = lr / (second.float().sqrt() + epsilon)
    momentum = momentum_of(group)
    return lr * (1 - float(group.get("dampening") or 0.0)) / (1 - momentum) if momentum else lr
