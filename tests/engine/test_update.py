"""The update of a fleet in one kernel is the plain one. A stand-in written in tensor operations takes the place of the kernel, so that the
choice of what it is given is tested without a GPU; the kernel itself is tested in `test_kernels`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from selfless.engine import update
from selfless.engine.fleet import Fleet
from selfless.engine.learner import Learner
from selfless.engine.stack import column
from tests.engine.small_runs import small


def update_(p: Tensor, u: Tensor, g: Tensor, ratio: Tensor, momentum: float, *rest: Any) -> None:
    """What the kernel computes: momentum, parameters, the anchor, held entries."""
    omega, star, pull, held = rest
    u.mul_(column(ratio * momentum, u)).add_(g)
    p.sub_(u)
    if omega is not None:
        c = column(pull, p) * omega
        p.lerp_(star, c / (1 + c))
    if held is not None:
        mask, value = held
        p.copy_(torch.where(mask.bool(), value, p))


def learn(data: str, **changes: Any) -> Fleet:
    learner = Learner([small(data, seed=seed, tasks=2, **changes) for seed in range(2)])
    learner.learn()
    return learner.fleet


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("preserve", ["none", "mas:0.1", "mas:1e9", "mas:0.1+ewc:10", "packnet:0.5", "lwf:1", "lwf:1+mas:0.1"])
def test_the_kernel_is_given_what_the_plain_update_uses(
    tasks_npz: str, monkeypatch: pytest.MonkeyPatch, preserve: str, schedule: str
) -> None:
    """One anchor is the kernel's; a second one, a projection beside others and distillation are not."""
    plain = learn(tasks_npz, preserve=preserve, schedule=schedule)
    calls = []
    stand_in = SimpleNamespace(update_=lambda *given: (calls.append(given), update_(*given)))
    monkeypatch.setattr(update, "kernels", lambda _: stand_in)
    fused = learn(tasks_npz, preserve=preserve, schedule=schedule)
    assert calls
    assert any(given[5] is not None for given in calls) == ("mas" in preserve)
    assert any(given[8] is not None for given in calls) == (preserve == "packnet:0.5")
    for name, p in plain.params.items():
        assert_close(fused.params[name], p, rtol=1e-4, atol=1e-5)
