"""The memory of old samples in runs and fleets: whose samples it holds, what they are classified among, and the same bits alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from selfless import SLNID, DERpp, NoPreserver, NoSparsifier, Replay
from selfless.data import stream
from selfless.engine.learner import Learner
from selfless.engine.memory import replay_cost
from tests.engine.small_runs import small

TERMS: list[Any] = [Replay(1.0, samples=30, batch=20), DERpp(0.5, samples=30, batch=20)]


def memory(learner: Learner) -> dict[str, torch.Tensor]:
    return learner.fleet.state["memory"]


@pytest.mark.parametrize("term", TERMS, ids=str)
def test_a_member_has_the_same_bits_alone(tasks_npz: str, term: Any) -> None:
    kinds = [SLNID(1e-2), NoSparsifier(), SLNID(1e-3)]
    runs = [small(tasks_npz, seed=s, preserve=term, sparsify=kind, epochs=1) for s, kind in enumerate(kinds)]
    fleet, alone = Learner(runs), Learner(runs[1:2])
    fleet.learn()
    alone.learn()
    together = fleet.fleet.tensors()
    for name, t in alone.fleet.tensors().items():
        if name != "step_number":  # which all members share
            assert torch.equal(together[name][1], t[0]), name
    assert not torch.equal(memory(fleet)["key"][0], memory(fleet)["key"][1])  # every seed draws its own samples


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_every_row_is_a_sample_of_its_task(tasks_npz: str, scenario: Any) -> None:
    learner = Learner([small(tasks_npz, preserve=TERMS[1], epochs=1, scenario=scenario)])
    learner.learn()
    rows = {n: t[0] for n, t in memory(learner).items()}
    assert len(rows["key"]) == 30
    assert set(rows["task"].tolist()) == {0, 1, 2}  # 130 samples each: one of three would be missing once in 60,000 draws
    for t, task in enumerate(stream(tasks_npz).tasks):
        x, y = task.train.resident().batch(torch.arange(len(task.train)))
        for i in (rows["task"] == t).nonzero().flatten():
            same = (x == rows["input.x"][i]).flatten(1).all(1)
            assert rows["label"][i] in y[same]
            assert (int(rows["first"][i]), int(rows["last"][i])) == ((2 * t, 2 * t + 2) if scenario == "task" else (0, 2 * t + 2))


def test_the_stored_logits_are_those_of_the_end_of_the_task(tasks_npz: str) -> None:
    learner = Learner([small(tasks_npz, preserve=TERMS[1], epochs=1)])
    learner.learn_task(0, 0.0)
    x = memory(learner)["input.x"]
    assert_close(learner.fleet.stack.outputs(learner.fleet.params, {}, x)[0], memory(learner)["logits"])


@pytest.mark.parametrize(("head", "among"), [(slice(4, 6), range(2, 4)), (slice(0, 6), range(6)), (slice(0, 4), range(4))])
def test_a_sample_is_classified_among_its_own_columns_or_the_head_that_contains_them(head: slice, among: range) -> None:
    rows = {"first": torch.tensor([[2]]), "last": torch.tensor([[4]]), "label": torch.tensor([[3]])}
    z = torch.randn(1, 1, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = replay_cost(Replay(1.0), z, rows, head, torch.tensor([0.25]))
    assert_close(got, 0.25 * (z[0, 0, list(among)].logsumexp(0) - z[0, 0, 3]))


@pytest.mark.slow
def test_replay_keeps_old_classes_where_nothing_else_does(tasks_npz: str) -> None:
    """In the class scenario fine-tuning gives every image a class of the newest task."""
    settings: dict[str, Any] = {"epochs": 8, "scenario": "class", "sparsify": NoSparsifier()}
    kept, lost = (Learner([small(tasks_npz, preserve=term, **settings)]).learn()[0] for term in (Replay(1.0, samples=60), NoPreserver()))
    assert lost.accuracy[-1, :2].max() < 0.3
    assert kept.accuracy[-1, :2].mean() > lost.accuracy[-1, :2].mean() + 0.3
