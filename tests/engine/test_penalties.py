"""The penalties in a record are those of the formulas, and a run trains to the same bits without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from selfless import EWC, MAS, SLNID, DeCov, LwF, NoPreserver, NoSparsifier
from selfless.engine import learner
from selfless.engine.learner import Learner
from selfless.engine.penalties import penalty_tensors, read_penalties
from selfless.engine.stack import by_member
from selfless.functional import slnid
from tests.engine.small_runs import small


def test_both_penalties_are_those_of_the_formulas(tasks_npz: str) -> None:
    """Oracle: λ R of the hidden layers on the first batch, and λ Σ Ω(θ − θ*)², member by member."""
    runs = [small(tasks_npz, seed=s, preserve=MAS(strength), sparsify=SLNID(1e-2), tasks=2) for s, strength in ((0, 0.1), (1, 0.7))]
    trained = Learner(runs)
    trained.learn()
    fleet, step = trained.fleet, trained.fleet.step
    with torch.no_grad():  # a step away from θ*
        for p in fleet.params.values():
            p += 0.01
    found = read_penalties(penalty_tensors(fleet))
    assert set(found) == {"inhibition", "anchor"}
    for m, run in enumerate(runs):
        own = {n: p[m].detach() for n, p in fleet.params.items()}
        gaps = [(fleet.state["omega"][n][m] * (own[n] - fleet.state["anchor"][n][m]).square()).sum() for n in fleet.state["omega"]]
        assert_close(found["anchor"][m], run.preserve.strength * float(torch.stack(gaps).sum()))
        x = step.data.batch(step.order[:, : run.batch])[0][m].flatten(1)
        hidden = []
        for layer in ("fc1", "fc2"):
            x = torch.relu(x @ own[f"{layer}.weight"].T + own[f"{layer}.bias"])
            hidden.append(x)
        sizes = [slnid(h, fleet.alpha[name][m]) for name, h in zip(fleet.stack.layers, hidden, strict=True)]
        assert_close(found["inhibition"][m], 1e-2 * float(torch.stack(sizes).sum()), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("methods", [{"preserve": LwF(1) + MAS(0.1), "sparsify": SLNID("auto")}, {"preserve": EWC(1), "model": "mlp-12"}])
def test_a_run_trains_to_the_same_bits_without_them(methods: dict[str, Any], tasks_npz: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [small(tasks_npz, seed=s, tasks=2, **methods) for s in (0, 1)]
    with_them = Learner(runs)
    measured = with_them.learn()
    monkeypatch.setattr(learner, "penalty_tensors", lambda fleet: {})
    without = Learner(runs)
    plain = without.learn()
    for name, tensor in with_them.fleet.tensors().items():
        assert torch.equal(tensor, without.fleet.tensors()[name]), name
    more = {name for task in measured[0].history for epoch in task for name in epoch} - set(plain[0].history[0][0])
    assert {"inhibition", "anchor"} <= more <= {"inhibition", "anchor", "distillation"}
    assert [r.run.key for r in measured] == [r.run.key for r in plain]


def test_only_what_a_run_has_is_recorded(tasks_npz: str) -> None:
    (result,) = Learner([small(tasks_npz, preserve=NoPreserver(), sparsify=NoSparsifier(), tasks=2, epochs=1)]).learn()
    assert all(set(epoch) == {"loss", "accuracy"} for task in result.history for epoch in task)
    (result,) = Learner([small(tasks_npz, sparsify=DeCov(1e-2), tasks=2, epochs=1)]).learn()
    assert [set(task[0]) - {"loss", "accuracy"} for task in result.history] == [{"inhibition"}, {"inhibition", "anchor"}]


def test_a_formula_that_vmap_cannot_map_is_measured_member_by_member() -> None:
    h = torch.tensor([[[1.0, 2.0]], [[-3.0, 1.0]]])
    assert by_member(lambda x, alpha: x.sum() if x.sum() > 0 else x.sum() * 0, h, None).tolist() == [3.0, 0.0]
