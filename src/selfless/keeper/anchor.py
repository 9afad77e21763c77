"""The step size of the implicit anchor, read from the optimizer: how far a constant gradient of 1 moves a parameter per iteration.

The explicit penalty adds G = 2λΩ(θ − θ*) to the gradient. After many iterations with a constant G, each one moves θ by

    SGD                          lr · G
    SGD with momentum μ          lr · (1 − dampening)/(1 − μ) · G        (Nesterov: the same)
    Adam, AdamW (also NAdam …)   lr / (√v̂ + ε) · G, per entry, with v̂ the second-moment estimate of the optimizer
    RMSprop, Adagrad             lr / (√v + ε) · G, per entry (RMSprop with momentum: divided by 1 − μ)
    any other                    lr · G, which is only a guess for optimizers that rescale steps differently (Rprop, Adadelta, Adamax)

The implicit anchor takes this step once per iteration. With Adam the explicit gradient would also increase v̂ and so weaken itself. The
implicit anchor does not enter v̂, so the two agree only as λ → 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from selfless.distributed.shards import is_sharded, local
from selfless.functional import Anchor, anchor_share
from selfless.functional.anchor import LARGEST
from selfless.functional.shapes import wide
from selfless.keeper.pieces import is_large, piece_of, pieces_of

_Entry = tuple[Tensor, Tensor, Tensor, Tensor | float]  # pieces of θ, Ω and θ*; c = 2 · step · λ


def nominal_step(optimizer: torch.optim.Optimizer) -> float:
    """Return lr/(1 − μ) of the optimizer's first group, with μ its momentum or Adam's β₁: the step size for damped distillation."""
    group = optimizer.param_groups[0]
    momentum = group.get("momentum") or group.get("betas", (0.0,))[0]
    return float(group["lr"]) / (1 - float(momentum))


class Pull:
    """The implicit anchor after an optimizer step, θ ← θ + share · (θ* − θ), piece by piece.

    Where a gradient is sparse, an optimizer changes only the rows that were read. All others are at θ* and stay there, so they are skipped.
    """

    def __init__(self) -> None:
        self._away: dict[str, Tensor] = {}  # rows of a parameter that may differ from θ*

    def forget(self) -> None:
        """Forget which rows were read: θ* is another one now."""
        self._away = {}

    def __call__(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], anchor: Anchor, strength: float) -> None:
        """Move every parameter of the optimizer that has an Ω."""
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
                step = _step(group, state, parameter, rows)
                near, far, now = (t.index_select(0, rows.to(t.device)) for t in (omega, star, parameter))
                _move([(now, near, far, 2 * strength * step)])
                parameter.index_copy_(0, rows, now)
                continue
            self._away.pop(name, None)
            for piece in pieces_of(parameter, omega, star, *(t for t in state.values() if _is_like(t, parameter))):
                step = _step(group, state, parameter, piece)
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


def _move(bucket: Sequence[_Entry]) -> None:
    """θ ← θ + share · (θ* − θ) for some pieces at once, in place; share = cΩ / (1 + cΩ), as in `functional.anchor_share`."""
    thetas, omegas, stars, cs = (list(column) for column in zip(*bucket, strict=True))
    omegas, stars = ([wide(t.to(p.device)) for t, p in zip(ts, thetas, strict=True)] for ts in (omegas, stars))
    if any(isinstance(c, Tensor) for c in cs) or any(p.dtype != star.dtype for p, star in zip(thetas, stars, strict=True)):
        for p, omega, star, c in zip(thetas, omegas, stars, cs, strict=True):
            p.copy_(torch.lerp(p.to(star.dtype), star, anchor_share(omega, torch.as_tensor(c, device=p.device)).to(star.dtype)))
        return
    shares = torch._foreach_mul(omegas, cs)  # one kernel for many small parameters
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


def _parameters_of(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[dict[str, Any], Tensor, str]]:
    """Yield (group, parameter, name) of the optimizer's parameters that belong to the model."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in names:
                yield group, parameter, names[parameter]


def step_sizes(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor | float]:
    """Return {parameter name: step size} for the parameters of the optimizer; a step size is a scalar or has the parameter's shape."""
    return {name: _step(group, optimizer.state.get(p, {}), p) for group, p, name in _parameters_of(optimizer, names)}


def plain_steps(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """Return {parameter name: step size} without what Adam and others rescale: lr, divided by 1 − μ for SGD with momentum μ."""
    found = ((name, p, _step(group, {}, p)) for group, p, name in _parameters_of(optimizer, names))
    return {name: torch.as_tensor(step, device=p.device) for name, p, step in found}


def has_parameters(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> bool:
    """Return True if the optimizer has a parameter of the model."""
    return any(True for _ in _parameters_of(optimizer, names))


def _is_like(tensor: Any, parameter: Tensor) -> bool:
    return isinstance(tensor, Tensor) and tensor.shape == parameter.shape


def _step(group: Mapping[str, Any], state: Mapping[str, Any], parameter: Tensor, part: slice | Tensor | None = None) -> Tensor | float:
    """Return the step size of one parameter, from its group and its state in the optimizer; `part`: of a flat piece or of some rows."""
    lr: Tensor | float = group["lr"]
    lr = lr.to(parameter.device, torch.float32) if isinstance(lr, Tensor) else float(lr)
    second = next((state[k] for k in ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum") if k in state), None)
    if second is not None and _is_like(second, parameter):
        if part is not None:
            second = second.index_select(0, part) if isinstance(part, Tensor) else piece_of(second, part)
        if "betas" in group:
            steps = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)
            second = second / (1 - torch.as_tensor(group["betas"][1], dtype=torch.float32) ** steps)
        lr = lr / (second.float().sqrt() + group.get("eps", 1e-8))
    momentum = float(group.get("momentum") or 0.0)
    return lr * (1 - float(group.get("dampening") or 0.0)) / (1 - momentum) if momentum else lr
