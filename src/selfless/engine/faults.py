"""Where the numbers of a member stopped being finite. It is looked up after an epoch or a task; no step waits for the device.

One step spreads NaN to all layers, so the steps before it are taken again to find the layer in which it began.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from selfless.engine.fleet import Fleet
from selfless.preserve.capabilities import Distils, Replays
from selfless.spec import Run

SHOWN = 3  # names of a message


def loss_fault(fleet: Fleet, m: int, task: int, epoch: int, name: str) -> str:
    """Return what is wrong with member m, whose loss was not finite in the epoch that has just ended: the step, the layer, the remedy."""
    sums = fleet.loss_sums[:, m].clone()
    step = int(torch.isfinite(sums).cumprod(0).sum()) + 1  # a sum that is not finite stays so
    where = f"in epoch {epoch + 1} of {name}, from step {step} of {len(sums)} on"
    return f"the loss was not finite {where}{_origin(fleet, m, task, epoch, step)}; {_remedy(fleet.runs[m])}"


def _origin(fleet: Fleet, m: int, task: int, epoch: int, step: int) -> str:
    """Return the place of the first number that was not finite, as the end of a sentence: a parameter, the data, a layer.

    A gradient that is not finite spreads from a layer to those before it, so the last parameter is named.
    """
    with fleet.rewound(task, epoch, step - 1):
        wrong = [name for name, p in fleet.params.items() if not bool(torch.isfinite(p[m].detach()).all())]
        if wrong:
            return f", first in {wrong[-1]!r} {f'after step {step - 1}' if step > 1 else 'before this epoch'}"
        x, _ = fleet.step.batch(min(fleet.run.batch, fleet.step.data.n - (step - 1) * fleet.run.batch))
        if not bool(torch.isfinite(x[m]).all()):
            return ", first in the data"
        layer = fleet.stack.first_not_finite(m, fleet.params, fleet.buffers, x)
        return f", first in the output of layer {layer!r}" if layer else ""


def state_faults(fleet: Fleet, task: str) -> dict[int, str]:
    """Return what is wrong with members after a task: parameters or importances that are not finite, negative importances."""
    omegas: dict[str, Tensor] = {}
    for part in fleet.parts:
        omegas |= {f"the importance of {name}": omega for name, omega in (part.term.importance(part.state) or {}).items()}
    tensors = fleet.params | omegas | {f"α of {name}": alpha for name, alpha in fleet.alpha.items()}
    found = {}
    for m, names in _wrong(tensors, lambda t: ~torch.isfinite(t)).items():
        found[m] = f"parameters or importances were not finite after {task}: {names}; {_remedy(fleet.runs[m])}"
    for m, names in _wrong(omegas, lambda t: t < 0).items():
        found.setdefault(m, f"importances were negative after {task}: {names}; return values that are not, such as omega.abs()")
    return found


def _wrong(tensors: Mapping[str, Tensor], is_wrong: Callable[[Tensor], Tensor]) -> dict[int, str]:
    """Return {member: the names of its tensors with an entry that is wrong, all or the first few}, without the members that have none."""
    if not tensors:
        return {}
    places = torch.stack([is_wrong(tensor.detach()).flatten(1).any(1) for tensor in tensors.values()]).tolist()  # [tensor][member]
    found = {}
    for m in range(len(places[0])):
        names = [name for name, wrong in zip(tensors, places, strict=True) if wrong[m]]
        if names:
            found[m] = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return found


def _remedy(run: Run) -> str:
    """Return what to change in a run that diverged."""
    remedies = [f"a learning rate below {run.lr:g}"]
    remedies += [f"a smaller strength than {run.sparsify}"] if run.sparsify.is_on else []
    remedies += [f"a smaller strength than {term}" for term in run.preserve.parts if term.is_on and isinstance(term, Distils | Replays)]
    remedies += [f"a smaller weight decay than {run.weight_decay:g}"] if run.weight_decay > 0 else []
    remedies += ["anchor='implicit'"] if run.preserve.is_on and run.anchor == "explicit" else []
    own = [term.spelling() for term in (*run.preserve.parts, *run.sparsify.parts) if term.is_custom()]
    look = f"look at what {' and '.join(own)} computes (selfless check), or " if own else ""
    return look + "use " + " or ".join([", ".join(remedies[:-1]), remedies[-1]] if len(remedies) > 1 else remedies)
