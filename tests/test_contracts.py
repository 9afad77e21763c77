"""What every preserver and every sparsifier must do: the laws of `selfless.testing`, and those below. Adding one = one row here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import selfless
from selfless import (
    AGSCL,
    EBLL,
    EWC,
    GPM,
    HAT,
    IMM,
    MAS,
    SGP,
    SI,
    SLNI,
    SLNID,
    SNI,
    SNID,
    DeCov,
    DERpp,
    L1Param,
    L1Rep,
    L2Param,
    LocalMAS,
    LwF,
    NoPreserver,
    NoSparsifier,
    OnlineEWC,
    OrthReg,
    PackNet,
    Replay,
    RWalk,
    SparingDeCov,
)
from selfless.preserve import PRESERVERS, Preserver, Quadratic
from selfless.preserve.capabilities import Distils, Gated, Replays
from selfless.sparsify import SPARSIFIERS, Sparsifier
from selfless.terms import parse
from selfless.testing import check
from selfless.testing.comparing import learn
from selfless.testing.small import small_net, small_task

PRESERVE: dict[str, Preserver] = {
    "none": NoPreserver(),
    "mas": MAS(0.5),
    "mas per-batch": MAS(0.5, estimator="per-batch"),
    "ewc": EWC(5.0),
    "ewc per-task": EWC(5.0, mode="per-task"),
    "ewc online": EWC(5.0, decay=0.5),
    "ewc exact": EWC(5.0, fisher="exact"),
    "ewc sampled": EWC(5.0, fisher="sampled"),
    "ewc function": EWC(5.0, alpha="function"),
    "si": SI(2.0),
    "rwalk": RWalk(0.5, every=2),
    "mas-local": LocalMAS(0.1),
    "ewc-online": OnlineEWC(5.0),
    "imm mean": IMM(0.5, merge="mean"),
    "imm mode": IMM(0.5),
    "imm function": IMM(0.5, alpha="function"),
    "imm drop": IMM(0.5, drop=0.5),
    "hat": HAT(0.5, s_max=50.0),
    "packnet": PackNet(0.5),
    "packnet 1/4": PackNet(0.25, retrain=0.5),
    "gpm": GPM(0.9, rise=0.02, samples=20),
    "sgp": SGP(0.9, first=0.8, alpha=3.0, samples=20),
    "ags-cl": AGSCL(0.5, mu=0.05),
    "lwf": LwF(2.0),
    "ebll": EBLL(2.0, drift=1.0, code=4, steps=9),
    "lwf cold": LwF(1.0, temperature=1.0, warmup=1),
    "replay": Replay(1.0, samples=20, batch=8),
    "der": DERpp(0.5, samples=20, batch=8),
}
SPARSIFY: dict[str, Sparsifier] = {
    "none": NoSparsifier(),
    "sni": SNI(1e-2),
    "snid": SNID(1e-2),
    "snid max": SNID(1e-2, discount="max"),
    "slni": SLNI(1e-2),
    "slnid": SLNID(1e-2),
    "slnid max": SLNID(1e-2, sigma=3.0, discount="max"),
    "l1-rep": L1Rep(1e-2),
    "decov": DeCov(1e-2),
    "decov-sparing": SparingDeCov(1e-2),
    "decov-sparing max": SparingDeCov(1e-2, sigma=3.0, discount="max"),
    "l1-param": L1Param(1e-2),
    "l2-wd": L2Param(1e-2),
    "orth-reg": OrthReg(1e-2),
}
KEEPING: dict[str, Any] = {name: preserve for name, preserve in PRESERVE.items() if isinstance(preserve, Quadratic)}


def test_the_rows_are_complete() -> None:
    assert {p.name for p in PRESERVE.values()} == {kind.name for kind in PRESERVERS.values()}
    assert {s.name for s in SPARSIFY.values()} == set(SPARSIFIERS)


def lawful() -> list[Any]:
    """The first row of each class; the others are variants, whose laws are tested with whole programs."""
    rows = [*PRESERVE.values(), *SPARSIFY.values()]
    kinds = [type(row) for row in rows]
    return [pytest.param(row, marks=() if i == kinds.index(type(row)) else pytest.mark.whole) for i, row in enumerate(rows)]


@pytest.mark.slow
@pytest.mark.parametrize("term", lawful(), ids=str)
def test_it_keeps_the_laws(term: Any) -> None:
    check(term)


@pytest.mark.parametrize("term", [*PRESERVE.values(), *SPARSIFY.values()], ids=str)
def test_an_option_that_it_does_not_have_is_refused(term: Any) -> None:
    kinds: Any = PRESERVERS if isinstance(term, Preserver) else SPARSIFIERS
    with pytest.raises(ValueError, match="not an option"):
        parse(f"{term.name}:1,nonsense=2", kinds, "term")


# -------------------------------------------------------------------------------------------------------------- preservers
@pytest.mark.parametrize("name", PRESERVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_preserver(name: str, dtype: torch.dtype) -> None:
    preserve, model = PRESERVE[name], small_net(dtype)
    keeper = selfless.attach(model, preserve)
    if not isinstance(preserve, Gated):  # whose gates cost from the first step on
        model(small_task(0, dtype)[0][0])
        assert keeper.penalty().item() == 0.0  # before the first consolidation
    batch = small_task(0, dtype)[0]
    learn(model, keeper, small_task(0, dtype), implicit=False)
    if isinstance(preserve, Gated):
        return
    if not isinstance(preserve, Replays):  # whose loss on old samples is not 0 at the end of a task
        assert keeper.penalty(batch).item() == pytest.approx(0.0, abs=1e-6 if isinstance(preserve, Distils) else 1e-9)  # at the anchor
    omega = keeper.state.get("omega", {})
    if name in KEEPING:
        assert set(omega) == {n for n, _ in model.named_parameters()}
    for n, p in model.named_parameters():
        if n in omega:
            assert (omega[n] >= 0).all()
            assert omega[n].dtype == dtype
            assert omega[n].shape == p.shape
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05)
    away = keeper.penalty(batch)
    assert away.item() > 0 if preserve.penalises or isinstance(preserve, Distils | Replays) else away.item() == 0.0


@pytest.mark.parametrize("name", [n for n in KEEPING if n != "rwalk"])  # whose Ω is scaled anew after every task
def test_importance_adds_up_over_tasks(name: str) -> None:
    preserve, model = PRESERVE[name], small_net(torch.float64)
    keeper = selfless.attach(model, preserve)
    learn(model, keeper, small_task(0, torch.float64))
    first = {n: t.clone() for n, t in keeper.state["omega"].items()}
    learn(model, keeper, small_task(1, torch.float64))
    decay = preserve.decay if isinstance(preserve, EWC) else 1.0
    for n, t in keeper.state["omega"].items():
        assert (t >= decay * first[n] - 1e-12).all()


@pytest.mark.parametrize("name", KEEPING)
def test_the_implicit_anchor_is_the_closed_form_and_a_fleet_of_three_is_three_runs(name: str) -> None:
    """θ' = (θ + cΩθ*)/(1 + cΩ); and the pure functions map over stacked states."""
    preserve, model = KEEPING[name], small_net(torch.float64)
    states, params = [], []
    for seed in range(3):
        keeper = selfless.attach(model, preserve)
        learn(model, keeper, small_task(seed, torch.float64))
        keeper.detach()
        states.append({k: keeper.state[k] for k in ("omega", "anchor")} | {"offset": {}})
        params.append({n: p.detach() + 0.1 * (seed + 1) for n, p in model.named_parameters()})
    stack = lambda trees: torch.utils._pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)  # noqa: E731
    step = {n: torch.tensor(0.3, dtype=torch.float64) for n in params[0]}

    def moved(state: Any, values: Any) -> Any:
        anchor = preserve.anchor(state)
        return {n: torch.lerp(values[n], anchor.star[n], share) for n, share in anchor.shares(step).items()}

    fleet = torch.func.vmap(moved)(stack(states), stack(params))
    costs = torch.func.vmap(preserve.penalty)(stack(states), stack(params))
    for m in range(3):
        for n, value in moved(states[m], params[m]).items():
            omega, star = states[m]["omega"][n], states[m]["anchor"][n]
            assert_close(value, (params[m][n] + 0.6 * omega * star) / (1 + 0.6 * omega))
            assert_close(fleet[n][m], value)
        want = sum((states[m]["omega"][n] * (params[m][n] - states[m]["anchor"][n]) ** 2).sum() for n in params[m])
        assert_close(costs[m], want)


def test_ewc_per_task_is_the_sum_over_tasks() -> None:
    """Three tasks kept apart, against the merged parabola: values and gradients."""
    preserve, model = EWC(1.0, mode="per-task"), small_net(torch.float64)
    keeper = selfless.attach(model, preserve)
    kept = []
    for seed in range(3):
        learn(model, keeper, small_task(seed, torch.float64))
        kept.append(
            (
                {n: p.detach().clone() for n, p in model.named_parameters()},
                selfless.importance.ewc(model, small_task(seed, torch.float64)),
            )
        )
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    want = sum((o[n] * (p - star[n]).square()).sum() for star, o in kept for n, p in model.named_parameters())
    got = preserve.penalty(keeper.state, dict(model.named_parameters()))
    assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, list(model.parameters())), torch.autograd.grad(want, list(model.parameters())), strict=True):
        assert_close(a, b)


# ------------------------------------------------------------------------------------------------------------- sparsifiers
@pytest.mark.parametrize("name", SPARSIFY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sparsifier(name: str, dtype: torch.dtype) -> None:
    sparsify, model = SPARSIFY[name], small_net()
    keeper = selfless.attach(model, MAS(0.1), sparsify)
    learn(model, keeper, small_task(0))
    h = torch.randn(7, 10, generator=torch.Generator().manual_seed(0)).relu().to(dtype).requires_grad_()
    for alpha in (None, torch.rand(10, generator=torch.Generator().manual_seed(1))):
        value = sparsify.penalty(h, alpha)
        assert value.shape == ()
        assert value.device == h.device
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) or name == "none"
        assert torch.isfinite(value)
        if name != "none":
            (g,) = torch.autograd.grad(value, h)
            assert g.dtype == dtype
            assert g.abs().max() > 0
    if name in ("snid", "slnid", "decov-sparing"):
        assert sparsify.penalty(h, torch.full((10,), 3.0)) < sparsify.penalty(h, None)


# ------------------------------------------------------------------------------------------------------ pairs, by a covering set
def covering(rows: list[str], columns: list[str], each: int = 2) -> list[tuple[str, str]]:
    """Every row with `each` columns, the columns in turn: every one of them stands in several pairs."""
    return [(row, columns[(each * i + 5 * k) % len(columns)]) for i, row in enumerate(rows) for k in range(each)]


@pytest.mark.parametrize(("preserve", "sparsify"), covering(list(PRESERVE), list(SPARSIFY)))
@pytest.mark.slow
def test_preserver_and_sparsifier_train_together(preserve: str, sparsify: str) -> None:
    model = small_net()
    keeper = selfless.attach(model, PRESERVE[preserve], SPARSIFY[sparsify])
    for seed in range(2):
        learn(model, keeper, small_task(seed), epochs=1)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert set(keeper.alpha) == {"0", "2"}
    assert keeper.capacity().tasks == 2
