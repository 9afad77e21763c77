"""Methods of one's own. A preserver with a penalty that is no Σ Ω(θ − θ*)² acts in loops, alone and in fleets, whatever the anchor;
those of a module of one's own are named, recorded and found again."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from typer.testing import CliRunner

import selfless
from selfless import MAS, SLNI, SLNID, SNI, SNID, L1Rep, Run
from selfless.cli import app
from selfless.engine.learner import Learner
from selfless.functional import Anchor
from selfless.preserve import Group, Preserver, Quadratic, State
from selfless.preserve.capabilities import Observes, Projects
from selfless.runner.store import Store
from selfless.sparsify import Sparsifier


@dataclass(frozen=True)
class Close(Preserver):
    name: ClassVar[str] = "close"
    groups: ClassVar[tuple[Group, ...]] = (Group("anchor"),)
    strength: float = 1.0

    def penalty(self, state: State, parameters: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(p - state["anchor"][n]).abs().sum() for n, p in parameters.items()]).sum()

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        return {"anchor": {n: p.detach().clone() for n, p in parameters.items()}}


@pytest.mark.slow
@pytest.mark.parametrize("anchor", ["implicit", "explicit"])
def test_it_acts_in_a_fleet(tasks_npz: str, anchor: Literal["implicit", "explicit"]) -> None:
    runs = [Run(stream=tasks_npz, model="mlp-12", preserve=Close(s), epochs=3, batch=10, lr=0.05, anchor=anchor) for s in (0.0, 1e-3, 10.0)]
    learner = Learner(runs)
    moved: list[Tensor] = []
    weight = learner.fleet.trained["fc1.weight"]
    consolidate = learner.fleet.consolidate

    def watched() -> None:
        moved.append(weight.detach().clone())
        consolidate()

    learner.fleet.consolidate = watched  # type: ignore[method-assign]
    learner.learn()
    free, held, tied = ((moved[1] - moved[0])[m].abs().sum().item() for m in range(3))
    assert free > held > 0
    assert tied != free


def test_it_acts_in_a_loop_that_is_anchored() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    keeper = selfless.attach(model, Close(0.1))
    keeper.anchor_with(torch.optim.SGD(model.parameters(), lr=0.1))
    keeper.consolidate([(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))])
    with torch.no_grad():
        model.weight.add_(1.0)
    assert keeper.penalty().item() == pytest.approx(0.1 * 8)


MINE = """
from dataclasses import dataclass
from selfless import MAS, SLNID

FACTOR = 1.0

@dataclass(frozen=True)
class Fading(MAS):
    decay: float = 0.5

    def consolidate(self, state, parameters, omega):
        faded = {name: self.decay * value for name, value in state["omega"].items()}
        return super().consolidate({**state, "omega": faded}, parameters, omega)

@dataclass(frozen=True)
class Loud(SLNID):
    def penalty(self, h, alpha=None):
        return FACTOR * super().penalty(h, alpha)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    name = "mine_of_a_test"
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / f"{name}.py"
    sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_methods_of_a_module_of_ones_own_are_named_recorded_and_found_again(tasks_npz: str, mine: Path) -> None:
    """Also in worker processes; and a subclass that inherits a name is not taken for its parent."""
    own = f"{mine.stem}:Fading:0.1,decay=0.7", f"{mine.stem}:Loud:0.001"
    run = Run(stream=tasks_npz, model="mlp-12", preserve=own[0], sparsify=own[1], epochs=1, batch=10)  # type: ignore[arg-type]
    assert (str(run.preserve), str(run.sparsify)) == own
    assert Run.from_dict(run.as_dict()) == run
    plain = dataclasses.replace(run, preserve=MAS(0.1), sparsify=SLNID(0.001))
    assert run.key != plain.key
    runs = [run, dataclasses.replace(run, seed=1), plain]
    found = selfless.train(runs, out="out", workers=2)
    assert [type(result.run.preserve).__name__ for result in found] == ["Fading", "Fading", "MAS"]
    words = ["--stream", tasks_npz, "--model", "mlp-12", "--preserve", own[0], "--sparsify", own[1], "--epochs", "1", "--batch", "10"]
    assert "1 of 1 run recorded" in CliRunner().invoke(app, ["run", *words, "--out", "out"]).output


@pytest.mark.slow
@pytest.mark.parametrize("base", [SNI, SNID, SLNI, SLNID, L1Rep])
def test_a_formula_of_ones_own_is_not_the_parents(tasks_npz: str, base: type[Sparsifier]) -> None:
    """Alone in the engine, which takes R = hᵀSh by S where it may: as the parent at as much of the strength."""

    @dataclass(frozen=True)
    class Half(base):  # type: ignore[misc,valid-type]
        def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
            return 0.5 * super().penalty(x, alpha)

    ends = []
    for sparsify in (Half(0.02), base(0.01), base(0.02)):
        learner = Learner([Run(stream=tasks_npz, model="mlp-12", preserve=MAS(0.1), sparsify=sparsify, epochs=1, batch=10, lr=0.05)])
        learner.learn()
        ends.append(learner.fleet.params["fc1.weight"].detach().clone())
    assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-4)
    assert (ends[0] - ends[2]).abs().max() > 1e-3


def test_a_quadratic_penalty_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Cubic has its own penalty.*subclass selfless\.preserve\.Preserver"):

        class Cubic(MAS):
            def penalty(self, state: State, parameters: Mapping[str, Tensor]) -> Tensor:
                return super().penalty(state, parameters) ** 1.5

    class Doubled(MAS):  # with an anchor of its own it may have a penalty of its own
        def anchor(self, state: State) -> Anchor:
            return Anchor({n: 2 * omega for n, omega in state["omega"].items()}, state["anchor"])

        def penalty(self, state: State, parameters: Mapping[str, Tensor]) -> Tensor:
            return 2 * super().penalty(state, parameters)

    assert issubclass(Doubled, MAS)


def test_a_changed_method_of_ones_own_is_trained_again(tasks_npz: str, mine: Path) -> None:
    run = Run(stream=tasks_npz, model="mlp-12", sparsify=f"{mine.stem}:Loud:0.001", epochs=1, batch=10)  # type: ignore[arg-type]
    store = Store("out")
    selfless.train(run, out="out")
    assert store.load(run) is not None
    mine.write_text(MINE.replace("1.0", "2.0"))
    assert store.load(run) is None


def test_a_method_that_nobody_else_can_import_is_refused_before_it_is_recorded(tasks_npz: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Close, "__module__", "__main__")
    run = Run(stream=tasks_npz, model="mlp-12", preserve=Close(0.1), epochs=1, batch=10)
    with pytest.raises(ValueError, match=r"Close is defined in the main program.*mine\.py"):
        selfless.train(run, out="out")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere_at_all:Mine:1", "there is no module 'nowhere_at_all'"),
        ("nowhere.py:Mine:1", "write 'nowhere:Mine', without .py"),
        ("json:loads:1", "is not a sparsifier"),
        ("json:Mine", "has no 'Mine'"),
    ],
)
def test_what_is_not_there_is_said(text: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Run(sparsify=text)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Capped(Preserver, Projects):
    """Weights no larger than the strength: a function other than the penalty reads it."""

    name: ClassVar[str] = "capped"
    strength: float = 1.0

    def project(self, state: State, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: p.clamp(-self.strength, self.strength) for n, p in parameters.items()}


@pytest.mark.slow
def test_runs_of_a_method_that_reads_its_strength_do_not_share_a_fleet_with_other_strengths(tasks_npz: str) -> None:
    runs = [Run(stream=tasks_npz, model="mlp-12", preserve=Capped(s), epochs=1, batch=10) for s in (0.01, 10.0)]
    assert Capped.same_strength
    assert not Close.same_strength
    together = selfless.train(runs, workers=1)
    for run, result in zip(runs, together, strict=True):
        np.testing.assert_array_equal(selfless.train(run, workers=1).accuracy, result.accuracy)
    assert together[0].average < together[1].average


@dataclass(frozen=True)
class Unmappable(Close):
    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        return {"anchor": {n: p.detach()[p.detach() > 0] for n, p in parameters.items()}}


def test_a_method_that_cannot_be_mapped_over_members_is_named_with_the_remedy(tasks_npz: str) -> None:
    run = Run(stream=tasks_npz, model="mlp-12", preserve=Unmappable(0.1), epochs=1, batch=10)
    with pytest.raises(ValueError, match=r"Unmappable cannot be mapped over the members of a fleet.*torch\.where"):
        selfless.train(run, workers=1)


# --------------------------------------------------------------------------------------------------- groups of the state
@dataclass(frozen=True)
class Way(Quadratic, Observes):
    """Ω is the distance that each parameter moved. Subclasses differ in what they declare."""

    name: ClassVar[str] = "way"
    groups: ClassVar[tuple[Group, ...]] = (*Quadratic.groups, Group("way", changes_in_step=True))
    strength: float = 1.0

    def init(self, parameters: Mapping[str, Tensor]) -> State:
        return self.start_path(super().init(parameters), parameters)

    def start_path(self, state: State, parameters: Mapping[str, Tensor]) -> State:
        return {**state, "way": {n: torch.zeros_like(p) for n, p in parameters.items()}}

    def observe(self, state: State, before: Mapping[str, Tensor], after: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> State:
        return {**state, "way": {n: w + (after[n] - before[n]).abs() if n in gradients else w for n, w in state["way"].items()}}

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        return self.start_path(super().consolidate(state, parameters, state["way"]), parameters)


class Undeclared(Way):
    groups = (*Quadratic.groups, Group("length", changes_in_step=True))


class NothingChanges(Way):
    groups = (*Quadratic.groups, Group("way"))


class WrongGroup(Way):
    groups = (*Quadratic.groups, Group("way"), Group("length", like_parameter=False, changes_in_step=True))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Undeclared, "has the group 'way', which is not declared; add Group"),
        (NothingChanges, "none of its groups changes in a step"),
    ],
)
def test_groups_that_would_be_lost_are_refused_in_loops_and_runs(kind: type[Way], message: str, tasks_npz: str) -> None:
    with pytest.raises(ValueError, match=message):
        selfless.attach(nn.Linear(4, 2), kind(0.1))
    with pytest.raises(ValueError, match=message):
        Learner([Run(stream=tasks_npz, model="mlp-12", preserve=kind(0.1))])


def test_a_step_may_change_only_groups_that_are_declared_so(tasks_npz: str) -> None:
    """Otherwise the engine would drop what was observed."""
    run = Run(stream=tasks_npz, model="mlp-12", preserve=WrongGroup(0.1), epochs=1, batch=50)
    with pytest.raises(ValueError, match=r"WrongGroup.observe\(\) changes the group 'way'"):
        Learner([run]).learn()
    learner = Learner([dataclasses.replace(run, preserve=Way(0.1))])
    learner.learn()
    assert all(omega.max() > 0 for omega in learner.fleet.parts[0].state["omega"].values())


class Undocumented(Preserver):
    """As the first interface had it: `init` names the groups, and nothing declares them."""

    name = "undocumented"

    def init(self, parameters: Mapping[str, Tensor]) -> State:
        return {"anchor": {}, "count": {"tasks": torch.zeros(())}}


def test_a_class_without_groups_still_works_for_one_release() -> None:
    with pytest.warns(DeprecationWarning, match=r'write groups = \(Group\("anchor"\), Group\("count", like_parameter=False\),\)'):
        keeper = selfless.attach(nn.Linear(4, 2), Undocumented(0.1))
    keeper.load_state_dict(keeper.state_dict())


@dataclass(frozen=True)
class Shaped(Close):
    """Returns a state whose tensors have lost an axis, or none at all."""

    returns_none: bool = False

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        if self.returns_none:
            return None  # type: ignore[return-value]
        return {"anchor": {n: p.detach().mean(-1, keepdim=True) for n, p in parameters.items()}}


@pytest.mark.parametrize("returns_none", [False, True])
def test_what_consolidate_returns_is_checked_in_a_run_and_in_a_loop(tasks_npz: str, returns_none: bool) -> None:
    told = r"^Shaped\.consolidate returned "
    told += r"None; return the new state" if returns_none else r"anchor of '.*weight' with shape \(12, 1\); it must have that of the param"
    with pytest.raises(ValueError, match=told):
        Learner([Run(stream=tasks_npz, model="mlp-12", preserve=Shaped(1.0, returns_none), epochs=1, batch=50)]).learn()
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
    keeper = selfless.attach(model, Shaped(1.0, returns_none), None)
    with pytest.raises(ValueError, match=told):
        keeper.consolidate([(torch.rand(4, 6), torch.tensor([0, 1, 0, 1]))])
    assert keeper.tasks == 0
