"""What a CUDA graph needs of a step, checked on a CPU: it writes in place, reads nothing back, and can be undone."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from selfless import SLNID, LwF, NoSparsifier, PackNet, Run
from selfless.engine.cuda_graph import first_error, no_collection, undone
from selfless.engine.fleet import Fleet
from selfless.engine.inhibition import Slot
from selfless.engine.learner import Learner
from selfless.engine.native.options import CovarianceGradient, PairGradient
from selfless.engine.part import Part
from selfless.engine.rates import Rates
from selfless.engine.step import Step
from tests.test_contracts import PRESERVE

pytestmark = pytest.mark.slow

PASSING = ("_share", "_task_gradient", "fleet")  # made by a step for itself; the way back to the fleet
ROWS = {name: preserve for name, preserve in PRESERVE.items() if preserve.capturable}


def held(thing: Any, name: str = "fleet") -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a fleet holds on to, by where it is."""
    if isinstance(thing, Tensor):
        yield name, thing
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from held(value, f"{name}.{key}")
    elif isinstance(thing, list | tuple):
        for k, value in enumerate(thing):
            yield from held(value, f"{name}.{k}")
    elif isinstance(thing, Fleet | Part | Rates | Slot | Step | PairGradient | CovarianceGradient):
        for key, value in vars(thing).items():
            if key not in PASSING:
                yield from held(value, f"{name}.{key}")


def in_the_second_task(data: str, preserve: Any, members: int = 2) -> Fleet:
    """A fleet in the middle of its second task's first epoch, one step of which has been made."""
    kinds = [SLNID(1e-2), NoSparsifier()]
    runs = [Run(data, "mlp-12", preserve, kinds[m], epochs=2, batch=40, lr=0.05, schedule="cosine", seed=m) for m in range(members)]
    learner = Learner(runs)
    learner.learn_task(0, time.perf_counter())
    fleet, tasks = learner.fleet, [s.tasks for s in learner.streams]
    fleet.begin_task(learner.load([t[1].train for t in tasks]), tasks[0][1].heads, learner.streams[0].outputs, tasks[0][0].heads)
    fleet.begin_epoch(1, 0)
    fleet.stack.module.train()
    fleet.step(40)
    return fleet


@pytest.mark.parametrize(("name", "members"), [(name, 1 + place % 2) for place, name in enumerate(ROWS)])
def test_a_step_writes_in_place_and_can_be_undone(tasks_npz: str, name: str, members: int) -> None:
    fleet = in_the_second_task(tasks_npz, ROWS[name], members)
    places = {n: t.data_ptr() for n, t in held(fleet)}
    with undone(fleet.changing()):
        values = {n: t.detach().clone() for n, t in held(fleet)}
        moved = set[str]()
        for measures in (False, fleet.step.measures(0)):
            fleet.step(40, measures)
            moved |= {n for n, t in held(fleet) if not torch.equal(t.detach(), values[n])}
        assert {n: t.data_ptr() for n, t in held(fleet)} == places
        groups, start = fleet.parts[0].step_groups, "fleet.parts.0.state."
        for group in groups:
            assert any(n.startswith(f"{start}{group}.") for n in moved), group
        assert not [n for n in moved if n.startswith(start) and n.removeprefix(start).split(".")[0] not in groups]
    left = [n for n, t in held(fleet) if not torch.equal(t.detach(), values[n])]
    assert not left


@pytest.mark.parametrize(("name", "members"), [(name, 1 + place % 2) for place, name in enumerate(ROWS)])
def test_the_copies_of_an_epoch_undo_a_step_at_its_start(tasks_npz: str, name: str, members: int) -> None:
    """A capture at the first step of an epoch restores from them, instead of copies of its own."""
    fleet = in_the_second_task(tasks_npz, ROWS[name], members)
    fleet.begin_epoch(1, 1)
    values = {n: t.detach().clone() for n, t in held(fleet)}
    with undone(fleet.changing(), fleet.before):
        fleet.step(40, fleet.step.measures(0))
        assert any(not torch.equal(t.detach(), values[n]) for n, t in held(fleet))
    assert not [n for n, t in held(fleet) if not torch.equal(t.detach(), values[n])]


class Unread(TorchDispatchMode):
    """Raises where a tensor's value would be waited for, or a Python number turned into a tensor: neither can be captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        word = func.name().partition("::")[2].partition(".")[0]
        assert word not in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "lift_fresh", "unique_dim"), word
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ROWS)
def test_a_step_reads_nothing_back(tasks_npz: str, name: str) -> None:
    fleet = in_the_second_task(tasks_npz, ROWS[name])
    with Unread():
        fleet.step(40)
        fleet.step(40, fleet.step.measures(0))


@pytest.mark.parametrize("preserve", [LwF(1.0, warmup=1), PackNet(0.5, retrain=0.5)], ids=str)
def test_a_new_phase_is_captured_anew(tasks_npz: str, preserve: Any) -> None:
    fleet = in_the_second_task(tasks_npz, preserve)
    fleet.graphs = {40: "what was captured in the first epoch"}  # type: ignore[dict-item]
    fleet.begin_epoch(1, 1)
    assert not fleet.graphs


def test_nothing_is_collected_while_a_graph_is_captured() -> None:
    """A ring of garbage, as an old fleet is, lives until the capture is over; and a failed capture leaves the collector on."""
    gone: list[bool] = []
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with pytest.raises(RuntimeError, match="capture"):
            failing(gone)
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    gc.collect()
    assert gone


def failing(gone: list[bool]) -> None:
    with no_collection():
        ring: list[Any] = [Dying(gone)]
        ring.append(ring)
        del ring
        assert [[k] for k in range(1000)]
        assert not gone
        raise RuntimeError("capture")


class Dying:
    def __init__(self, gone: list[bool]) -> None:
        self.gone = gone

    def __del__(self) -> None:
        self.gone.append(True)


def test_a_failed_capture_frees_the_tensors_of_its_step() -> None:
    """The context of the lanes and that of the capture raise errors of their own; the first one is the reason."""
    kept: list[weakref.ref[Tensor]] = []

    def forward() -> None:
        h = torch.ones(2)
        kept.append(weakref.ref(h))
        raise RuntimeError("a value was read\nwhile the stream is captured")

    def lane() -> None:
        try:
            forward()
        finally:
            raise ValueError("the lane cannot end")

    def fail() -> None:
        try:
            lane()
        finally:
            raise RuntimeError("the capture cannot end")

    with pytest.raises(RuntimeError, match="the capture cannot end") as caught:
        fail()
    assert kept[0]() is not None
    assert str(first_error(caught.value)).startswith("a value was read")
    assert kept[0]() is None
