"""Where the numbers of a member stopped being finite. It is looked up after an epoch or a task; no step waits for the device.

One step spreads NaN to all layers, so the steps before it are taken again to find the layer in which it began.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    """Return what is wrong with the members whose parameters or importances are not finite after a task."""
    tensors = dict(fleet.params)
    for part in fleet.parts:
        tensors |= {f"the importance of {name}": omega for name, omega in (part.term.importance(part.state) or {}).items()}
    tensors |= {f"α of {name}": alpha for name, alpha in fleet.alpha.items()}
    is_finite = torch.ones(fleet.size, dtype=torch.bool, device=fleet.device)
    for tensor in tensors.values():
        is_finite &= torch.isfinite(tensor.detach()).flatten(1).all(1)
    bad = {m: _not_finite(tensors, m) for m, fine in enumerate(is_finite.tolist()) if not fine}
    return {m: f"parameters or importances were not finite after {task}: {names}; {_remedy(fleet.runs[m])}" for m, names in bad.items()}


def _not_finite(tensors: Mapping[str, Tensor], m: int) -> str:
    """Return the names of a member's tensors that are not finite: all, or the first few."""
    names = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor[m].detach()).all())]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _remedy(run: Run) -> str:
    """Return what to change in a run that diverged."""
    remedies = [f"a learning rate below {run.lr:g}"]
    remedies += [f"a smaller strength than {run.sparsify}"] if run.sparsify.is_on else []
    remedies += [f"a smaller strength than {term}" for term in run.preserve.parts if term.is_on and isinstance(term, Distils | Replays)]
    remedies += [f"a smaller weight decay than {run.weight_decay:g}"] if run.weight_decay > 0 else []
    remedies += ["anchor='implicit'"] if run.preserve.is_on and run.anchor == "explicit" else []
    return "use " + " or ".join([", ".join(remedies[:-1]), remedies[-1]] if len(remedies) > 1 else remedies)
