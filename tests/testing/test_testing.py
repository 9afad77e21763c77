"""`selfless.testing`: methods that keep every law, and for each law one that breaks it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from selfless import EWC, MAS, SLNI, SLNID, DeCov, L1Rep, LwF
from selfless.cli import app
from selfless.functional import PairForm
from selfless.preserve import Group, State
from selfless.preserve.base import Splits
from selfless.sparsify import Sparsifier
from selfless.terms import Term
from selfless.testing import check, find
from selfless.testing.laws import LAWS

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Own(Sparsifier):
    """A formula of one's own, right in every way."""

    name: ClassVar[str] = "own"
    strength: float = 1e-2

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        weights = 1.0 if alpha is None else torch.exp(-alpha)
        return (weights * x.float().square()).sum(-1).mean() if x.dtype != torch.float64 else (weights * x.square()).sum(-1).mean()


@dataclass(frozen=True)
class Careless(Own):
    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class Listed(Own):
    layers: Any = (1, 2)


@dataclass(frozen=True)
class Rooted(Own):
    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return x.float().square().sum(0).sqrt().mean()


@dataclass(frozen=True)
class Stuck(Own):
    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return x.detach().float().square().mean()


@dataclass(frozen=True)
class Doubled(Own):
    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return self.fixed_strength * super().penalty(x, alpha)


@dataclass(frozen=True)
class Looking(Own):
    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return super().penalty(x, alpha) * (2.0 if x.max().item() > 1 else 1.0)


@dataclass(frozen=True)
class NoMean(Own):
    is_mean: ClassVar[bool] = True

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return super().penalty(x, alpha) * len(x)


@dataclass(frozen=True)
class WrongPairs(SLNI):
    def pair_form(self, n: int, alpha: Tensor | None = None) -> PairForm | None:
        return PairForm(n)


@dataclass(frozen=True)
class Moving(MAS):
    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        found = super().consolidate(state, parameters, omega)
        return {**found, "anchor": {n: a + 0.1 for n, a in found["anchor"].items()}}


@dataclass(frozen=True)
class Repelled(MAS):
    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        return super().consolidate(state, parameters, {n: -0.7 * o - 1e-6 for n, o in omega.items()})


@dataclass(frozen=True)
class Narrow(MAS):
    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        found = super().consolidate(state, parameters, omega)
        return {**found, "omega": {n: o.float() for n, o in found["omega"].items()}}


@dataclass(frozen=True)
class Split(MAS):
    splits: ClassVar[Splits] = "entries"

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        return super().consolidate(state, parameters, {n: o / o.mean().clamp(min=1e-12) for n, o in omega.items()})


SEEN: dict[str, int] = {}


@dataclass(frozen=True)
class Hidden(MAS):
    """Keeps something outside of its state: each call of `consolidate` in this process raises Ω."""

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        SEEN["calls"] = SEEN.get("calls", 0) + 1
        return super().consolidate(state, parameters, {n: SEEN["calls"] * o for n, o in omega.items()})


@dataclass(frozen=True)
class Forgetful(MAS):
    """Marks a tensor of its state in a way that `state_dict` does not hold."""

    groups: ClassVar[tuple[Group, ...]] = (*MAS.groups, Group("mark", like_parameter=False))

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        mark = state["mark"].get("all")
        boost = 1.0 if mark is None or hasattr(mark, "seen") else 50.0
        mark = torch.zeros(())
        mark.seen = True  # type: ignore[attr-defined]
        return {**super().consolidate(state, parameters, {n: boost * o for n, o in omega.items()}), "mark": {"all": mark}}


GOOD: list[Term] = [Own(), MAS(0.1), LwF(1.0) + MAS(0.1), SLNID(1e-2) + DeCov(1e-2), EWC(5.0, fisher="sampled"), MAS("auto"), SLNID("auto")]
BROKEN: list[tuple[Term, str, str]] = [
    (Careless(), "it is a frozen value", r"takes the strength nan; call super\(\).__post_init__"),
    (Listed(layers=[1]), "it is a frozen value", "unhashable"),
    (Listed(layers=(3, 4)), "its text form is read back", "layers"),
    (Stuck(), "one finite number", "does not depend on what it gets"),
    (Rooted(), "all neurons are silent", "is not finite if all activations are 0"),
    (Doubled(), "grows with its strength", r"leave the strength out of penalty\(\)"),
    (Looking(), "mapped over the members", r"calling \.item\(\) on a Tensor"),
    (NoMean(), "it is a mean over samples", "is_mean = True, but the mean over the halves"),
    (WrongPairs(1e-2), "its pair form has the gradient", r"the gradient of pair_form\(\) differs by"),
    (Moving(0.1), "where a task ended", r"at θ\*.*detach\(\)\.clone\(\)"),
    (Repelled(0.1), "nothing diverges", "not finite|is not finite"),
    (Narrow(0.1), "precision of the network", r"omega\['0\.weight'\] is float32, the network float64"),
    (Split(0.1), "consolidated in pieces", r'splits = "entries", but omega'),
    (Hidden(0.1), "a run trains it as a loop does", "beside that of a loop differs by"),
    (Hidden(0.1), "a fleet trains it as single runs do", "beside the same run alone differs by"),
    (Forgetful(), "it goes on from a saved state", "began with a saved state differs by"),
]


@pytest.mark.parametrize("term", GOOD, ids=str)
def test_a_method_that_keeps_the_laws(term: Term) -> None:
    found = find(term)
    assert [str(one) for one in found if one.broken is not None] == []
    assert len(found) >= 3


@pytest.mark.parametrize(("term", "law", "message"), BROKEN, ids=[f"{type(t).__name__}-{law}" for t, law, _ in BROKEN])
def test_a_method_that_breaks_one(term: Term, law: str, message: str) -> None:
    (test,) = [one.test for one in LAWS if law in one.says and one.holds_for(term)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as `find` does
        with pytest.raises(Exception, match=message):
            test(term)


def test_all_broken_laws_are_listed() -> None:
    with pytest.raises(
        AssertionError, match=r"Split breaks 1 of the laws of a preserver:\n✗ it can be consolidated in pieces if it says so: "
    ):
        check(Split(0.1))
    assert str(find(L1Rep(1e-3))[0]) == "✓ it is a frozen value, and refuses a strength that is none"


def test_what_is_no_method_is_refused() -> None:
    with pytest.raises(TypeError, match=r"not the class MAS: make one, as MAS\(0\.1\)"):
        check(MAS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not 'mas'"):
        check("mas")  # type: ignore[arg-type]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checked_by_a_test.py").write_text(
        "from dataclasses import dataclass\n"
        "from selfless import L1Rep\n\n"
        "@dataclass(frozen=True)\n"
        "class Louder(L1Rep):\n"
        "    def penalty(self, x, alpha=None):\n"
        "        return 2 * super().penalty(x, alpha) + (x.sum().item() > 0)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    good = CliRunner().invoke(app, ["check", "l1-rep:1e-3"])
    assert good.exit_code == 0
    assert "✓ a fleet trains it as single runs do" in good.output
    assert good.output.rstrip().endswith("laws hold")
    bad = CliRunner().invoke(app, ["check", "checked_by_a_test:Louder", "--json"])
    assert bad.exit_code == 1
    laws = json.loads(bad.stdout)["checked_by_a_test:Louder:1e-05"]
    assert "line 7" in laws["its penalty can be mapped over the members of a fleet"]
    assert laws["it is a frozen value, and refuses a strength that is none"] is None
    assert CliRunner().invoke(app, ["check", "nonsense"]).exit_code == 1


def test_a_penalty_without_alpha_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match=r"Short\.penalty takes \(self, x\).*write penalty\(self, x, alpha=None\)"):

        class Short(Own):
            def penalty(self, x: Tensor) -> Tensor:  # type: ignore[override]
                return x.mean()
