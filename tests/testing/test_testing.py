"""`selfless.testing`: methods that keep every law, and for each law one that breaks it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import selfless
from selfless import EWC, MAS, SI, SLNID, DeCov, L1Rep, LwF
from selfless.cli import app
from selfless.preserve import Preserver, State
from selfless.terms import Term, parse
from selfless.testing import check, find
from selfless.testing.checking import finding
from selfless.testing.laws import LAWS
from tests.testing.methods import (
    Careless,
    Doubled,
    Forgetful,
    Halved,
    Hidden,
    Idle,
    Later,
    Lazy,
    Listed,
    Looking,
    Moving,
    Narrow,
    NoMean,
    Optional,
    Own,
    Repelled,
    Rising,
    Rooted,
    Share,
    Signed,
    SoftTargets,
    Split,
    Strict,
    Stuck,
    Summed,
    Turned,
    TurnedAnchor,
    Twice,
    Unfilled,
    Vector,
    WrongCovariance,
    WrongPairs,
    change,
    in_place,
    negative,
    step_in_place,
    touched,
)

pytestmark = pytest.mark.slow


GOOD: list[Term] = [
    Own(),
    Later(),
    SoftTargets(1.0),
    Share(0.5),
    MAS(1 / 3),
    MAS(0.1),
    LwF(1.0) + MAS(0.1),
    SLNID(1e-2) + DeCov(1e-2),
    EWC(5.0, fisher="sampled"),
    MAS("auto"),
    SLNID("auto"),
]
PURE = "its functions are pure"
BROKEN: list[tuple[Term, str, str]] = [
    (change(penalty=lambda self, s, p: super(MAS, self).penalty(touched(s), p)), PURE, "changes the state"),
    (change(penalty=lambda self, s, p: 2 * MAS.penalty(self, s, p)), PURE, r"anchor\(\) must describe penalty\(\)"),
    (change(consolidate=lambda self, s, p, omega: None), PURE, r"consolidate\(\) returned None; return the new state"),
    (change(consolidate=lambda self, s, p, omega: {**s, "odd": {}}), PURE, r"add Group\('odd'\) to groups"),
    (change(consolidate=lambda self, s, p, omega: {**s, "omega": omega, "anchor": p}), PURE, "the parameter itself"),
    (change(consolidate=lambda self, s, p, omega: negative(s, p, omega)), PURE, "Ω must be ≥ 0"),
    (change(consolidate=lambda self, s, p, omega: {**s, "omega": in_place(omega)}), PURE, "changes what it gets"),
    (change(measures=False, consolidate=lambda self, s, p, omega: {"omega": {n: omega[n] for n in p}}), PURE, "measures: ClassVar"),
    (
        change(consolidate=lambda self, s, p, omega: {**s, "omega": {n: o / 0 for n, o in omega.items()}}),
        PURE,
        "values that are not finite",
    ),
    (change(penalty=lambda self, s, p: s["omega"]["fc1.wieght"]), PURE, r"line \d+: KeyError: 'fc1.wieght'"),
    (change(penalty=lambda self, s, p: s["velocity"]), PURE, r"declare it: groups = \(Group\('velocity'\),\)"),
    (Twice(), PURE, "the runtime multiplies"),
    (change(observe=lambda self, s, before, after, gradients: s), PURE, r"has observe\(\), which nothing calls; inherit Observes"),
    (change(SI, observe=step_in_place), PURE, r"observe\(\) changes what it gets"),
    (Summed(), "does not depend on the size of a batch", "the same samples twice"),
    (Careless(), "it is a frozen value", r"takes the strength nan; call super\(\).__post_init__"),
    (Listed(layers=[1]), "it is a frozen value", "numbers, text, True, False or None, not lists"),
    (Listed(layers=(3, 4)), "its text form is read back", "layers"),
    (Stuck(), "one finite number", "does not depend on what it gets"),
    (Idle(), "one finite number", r"the gradient of penalty\(\) is 0"),
    (Turned(), "a step against its gradient", r"makes penalty\(\) larger"),
    (TurnedAnchor(0.1), "its functions are pure", r"makes penalty\(\) larger"),
    (Rooted(), "all neurons are silent", "is not finite if all activations are 0"),
    (Doubled(), "grows with its strength", r"leave the strength out of penalty\(\)"),
    (Looking(), "mapped over the members", r"calling \.item\(\) on a Tensor"),
    (NoMean(), "it is a mean over samples", "is_mean = True, but the mean over the halves"),
    (WrongCovariance(1e-4), "its covariance form is its penalty", "decorrelates = True, but"),
    (WrongCovariance(1e-4), "a run trains it as a loop does", "beside that of a loop differs by"),
    (WrongPairs(1e-2), "its pair form has the gradient", r"the gradient of pair_form\(\) differs by"),
    (Signed(0.1), "its functions are pure", "has it the wrong sign"),
    (Unfilled(0.1), "its functions are pure", r"left the group 'anchor' empty; return it with an entry for each parameter"),
    (Moving(1e-5), "where a task ended", r"pulls at θ\*.*detach\(\)\.clone\(\)"),
    (Repelled(0.1), "nothing diverges", "not finite|is negative"),
    (Narrow(0.1), "precision of the network", r"omega\['1\.weight'\] is float32, the network float64"),
    (Split(0.1), "consolidated in pieces", r'splits = "entries", but omega'),
    (Hidden(0.1), "a run trains it as a loop does", "beside that of a loop differs by"),
    (Halved(0.3), "a fleet trains it as single runs do", "of member 2 of a fleet, beside the same run alone differs by"),
    (Lazy(0.05), "a run trains it as a loop does", "at no strength from .* a parameter differs from training without it"),
    (Rising(), "a run trains it as a loop does", "the accuracy of a run"),
    (Hidden(0.1), "a fleet trains it as single runs do", "beside the same run alone differs by"),
    (Forgetful(), "it goes on from a saved state", "began with a saved state differs by"),
]


@pytest.mark.parametrize("term", GOOD, ids=str)
def test_a_method_that_keeps_the_laws(term: Term) -> None:
    found = find(term)
    assert [str(one) for one in found if one.broken is not None] == []
    assert len(found) >= (3 if len(term.parts) > 1 else 7)


@pytest.mark.parametrize(("term", "law", "message"), BROKEN, ids=[f"{type(t).__name__}-{law}" for t, law, _ in BROKEN])
def test_a_method_that_breaks_one(term: Term, law: str, message: str) -> None:
    (tested,) = [one for one in LAWS if law in one.says and one.holds_for(term)]
    found = finding(tested, term)
    assert re.search(message, str(found.broken))
    assert str(found).startswith(f"✗ {tested.says}: ")


def test_settings_of_the_caller_do_not_matter_and_stay() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            check(MAS(0.1))
            check(SLNID(1e-3))
            assert not torch.is_grad_enabled()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_assertion_of_ones_own_names_its_place() -> None:
    (law,) = [one for one in LAWS if "one finite number" in one.says]
    assert re.search(r"methods\.py, line \d+: AssertionError", str(finding(law, Strict()).broken))


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
    (one,) = json.loads(bad.stdout)["methods"]
    laws = one["laws"]
    assert one["method"] == "checked_by_a_test:Louder"
    assert "line 7" in laws["its penalty can be mapped over the members of a fleet"]
    assert laws["it is a frozen value, and refuses a strength that is none"] is None
    assert CliRunner().invoke(app, ["check", "nonsense"]).exit_code == 1


def test_a_penalty_without_alpha_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match=r"Short\.penalty takes \(self, x\).*write penalty\(self, x, alpha=None\)"):

        class Short(Own):
            def penalty(self, x: Tensor) -> Tensor:  # type: ignore[override]
                return x.mean()


@pytest.mark.parametrize(("text", "options"), [("k=5", (5, True)), ("square=False", (3, False)), ("square=true,k=4", (4, True))])
def test_options_keep_their_kinds(text: str, options: tuple[int, bool]) -> None:
    """What the command line gives is what Python gives: `topk` refuses 5.0, and the text "False" would be true."""
    found: Any = parse(f"{Optional.spelling()}:1,{text}", {}, "sparsifier")
    assert (found.k, found.square) == options
    assert [type(value) for value in (found.k, found.square)] == [int, bool]
    with pytest.raises(ValueError, match="square is true or false, not 'perhaps'"):
        parse(f"{Optional.spelling()}:1,square=perhaps", {}, "sparsifier")
    with pytest.raises(ValueError, match="k is a number, not 'many'"):
        parse(f"{Optional.spelling()}:1,k=many", {}, "sparsifier")


def test_arguments_in_another_order_are_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match=r"Swapped\.consolidate takes \(self, state, omega, parameters\); write consolidate\(self, sta"):

        class Swapped(MAS):
            def consolidate(self, state: State, omega: Any, parameters: Any) -> State:  # type: ignore[override]
                return state

    with pytest.raises(TypeError, match=r"Few\.penalty takes \(self, parameters\); write penalty\(self, state, parameters\)"):

        class Few(Preserver):
            def penalty(self, parameters: Any) -> Tensor:  # type: ignore[override]
                return torch.zeros(())


def test_a_penalty_of_a_preserver_that_is_no_number_is_refused_in_loops() -> None:
    keeper = selfless.attach(torch.nn.Linear(4, 2), Vector(0.1))
    keeper.consolidate([(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))])
    with pytest.raises(ValueError, match=r"Vector\.penalty returned a tensor of shape \(2,\); it must return a tensor with one number"):
        keeper.penalty()
