"""`selfless.tune`: the largest strengths that keep held-out scores, with one's own loop or the default one."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import selfless
from selfless import GPM, MAS, SLNID, Run
from selfless.experiments.decay import choose_decay, choose_strength, decay_runs, next_strength
from selfless.experiments.tuning import Trial
from selfless.metrics import strongest_that_keeps
from tests.fabricated import result


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2))


def halves(seed: int) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """A task whose label is the sign of one input: training and held-out batches."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(96, 4, generator=g)
    y = (x[:, seed] > 0).long()
    return [(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)], [(x[64:], y[64:])]


def test_the_strongest_that_keeps() -> None:
    nan = float("nan")
    assert strongest_that_keeps([0, 1, 2, 3], [0.9, 0.9, 0.89, 0.5], 0.9, 0.02) == 2
    assert strongest_that_keeps([3, 2, 1], [nan, 0.1, 0.2], 0.9, 0.02) == 2  # none keeps it: the weakest that did not fail
    assert strongest_that_keeps([1.0], [nan], 0.9, 0.0) is None


def test_both_strengths_are_chosen_by_what_they_cost() -> None:
    """A stand-in for training: λ above 1e-3 costs the first task, λ_Ω above 1 the second one."""
    seen: list[tuple[float, float, int]] = []

    def fit(model: nn.Module, keeper: Any, batches: Any) -> None:
        keeper.told = (keeper.preserve.fixed_strength, keeper.sparsify.fixed_strength)
        seen.append((*keeper.told, keeper.tasks))

    def score(model: nn.Module, batches: Any) -> float:
        keep, spare, tasks = seen[-1]
        return 0.9 - 0.1 * (spare > 1e-3) - 0.1 * (keep > 1 and tasks == 1)

    found = selfless.tune(build, [halves(0), halves(1)], fit=fit, score=score, preserve=MAS(), sparsify=SLNID(sigma=2.0))
    assert (found.preserve, found.sparsify) == (MAS(1.0), SLNID(1e-3, sigma=2.0))
    assert all(keep == 0 for keep, _, tasks in seen[:9])
    assert "← the best" in str(found)
    alone = selfless.tune(build, halves(0), fit=fit, score=score, preserve="mas:0.1")
    assert (str(alone.preserve), len(alone.trials)) == ("mas:0.1", 1)


class OwnGPM(GPM):
    name: ClassVar[str] = "gpm-of-ones-own"


GIVEN = [0.1, 1.0, 10.0]


@pytest.mark.parametrize(
    ("tried", "best", "expected"),
    [
        (GIVEN, 1.0, None),  # inside
        (GIVEN, 10.0, 100.0),
        ([*GIVEN, 100.0], 100.0, 1000.0),
        ([*GIVEN, 100.0, 1000.0], 1000.0, None),  # two were added
        (GIVEN, 0.1, 0.01),
        (GIVEN, 0.0, 0.01),  # a weaker anchor may still be better than none
        ([*GIVEN, 0.01, 0.001], 0.0, None),
        ([*GIVEN, 100.0, 1000.0], 0.1, 0.01),  # each end has its own limit
    ],
)
def test_a_grid_grows_where_the_best_stands_at_an_end(tried: list[float], best: float, expected: float | None) -> None:
    scores = {strength: 0.9 if strength == best else 0.5 for strength in (0.0, *tried)}
    assert next_strength(GIVEN, scores, 2) == expected
    assert next_strength([0.0, *GIVEN, 10.0], scores, 2) == expected  # 0 and a value that is there twice change nothing


def test_a_grid_that_cannot_grow_does_not() -> None:
    nan = math.nan
    assert next_strength([1.0, 1.0, 0.0], {0.0: 0.5, 1.0: 0.9}, 2) is None  # one value has no step
    assert next_strength([1.0, 10.0], {0.0: 0.5, 1.0: 0.9, 10.0: 0.9}, 2) is None  # stronger ones hold no more
    assert next_strength([1.0, 10.0], {0.0: nan, 1.0: nan, 10.0: nan}, 2) is None
    assert next_strength([1.0, 10.0], {0.0: 0.5, 1.0: 0.9, 10.0: nan}, 2) == 0.1
    assert next_strength([1e307, 1e308], {0.0: 0.5, 1e307: 0.6, 1e308: 0.7}, 2) is None
    assert next_strength([1e-323, 1e-322], {1e-323: 0.7, 1e-322: 0.6}, 2) is None


@pytest.mark.parametrize(("drop", "score", "chosen"), [(0.0, 0.8, 2), (0.0, 0.7, 2), (0.0, 0.9, 3), (0.1, 0.79, 2), (0.5, 0.9, 3)])
def test_an_added_strength_is_chosen_only_if_it_is_better(drop: float, score: float, chosen: int) -> None:
    assert choose_strength({0.0: 0.5, 1.0: 0.7, 10.0: 0.8, 100.0: score}, drop, [1.0, 10.0]) == chosen


@pytest.mark.parametrize(("best", "tried"), [(12.0, [0, 1, 3, 10, 30]), (0.02, [0, 0.1, 0.3, 1, 3, 10]), (4.0, [0, 1, 3, 10])])
def test_tune_tries_stronger_and_weaker_anchors(best: float, tried: list[float]) -> None:
    """A stand-in for training, whose score falls with the distance of λ_Ω from `best` in decades; the grid is 1, 3, 10."""
    told: list[float] = []

    def score(model: nn.Module, batches: Any) -> float:
        return 0.9 - 0.1 * abs(math.log10((told[-1] or 1e-9) / best))

    def strengths(**settings: Any) -> tuple[float, ...]:
        fit = lambda model, keeper, batches: told.append(keeper.preserve.fixed_strength)  # noqa: E731
        tuned = selfless.tune(
            build, [halves(0), halves(1)], fit=fit, score=score, sparsify=None, preserve_strengths=[1.0, 3.0, 10.0], **settings
        )
        return tuned.trials[0].strengths

    assert strengths() == tuple(tried)
    assert strengths(extend=0) == (0, 1, 3, 10)


def test_a_preserver_that_costs_the_new_task_much_is_better_than_none() -> None:
    """Without a preserver the second task is learned best and the first one is lost: no anchor must not be the choice."""
    base = Run(preserve="mas:1", tasks=5)
    tried = decay_runs(base, [3.0, 10.0, 100.0], 2, [0])
    after = {0.0: (0.40, 0.59), 3.0: (0.65, 0.52), 10.0: (0.645, 0.523), 100.0: (0.65, 0.30)}  # first and second task
    rows = {run: np.array([[0.65, 0.1], after[float(run.preserve.fixed_strength)]]) for run in tried}
    results = {run: dataclasses.replace(result(run, 0.5), held_out=rows[one]) for one, (run,) in tried.items()}
    found = choose_decay(tried, results, 0.5)
    assert found.index == 2  # mas:10
    assert [score for (score,) in found.scores] == pytest.approx([49.5, 58.5, 58.4, 47.5])
    assert choose_decay(tried, results, 0.0).index == 1
    failed = {run: dataclasses.replace(one, status="failed") for run, one in results.items()}
    assert choose_decay(tried, failed, 0.5).index is None


def test_old_tasks_are_scored_with_their_own_number() -> None:
    """A model with a head for each task: `score` gets the number of the task."""
    asked: list[tuple[int, int]] = []

    def score(model: nn.Module, batches: Any, task: int) -> float:
        asked.append((task, 0 if batches is first[1] else 1))
        return 0.5

    first, second = halves(0), halves(1)
    grids: Any = {"sparsify_strengths": [1e-3], "preserve_strengths": [0.1]}
    found = selfless.tune(build, [first, second], fit=lambda *_: None, score=score, **grids)
    assert asked == [(0, 0)] * 2 + [(0, 0), (1, 1)] * 2
    assert "every score is the same, so this choice says nothing" in str(found)
    for odd in ("packnet", "none", "mas:1+hat:0.5"):
        with pytest.raises(ValueError, match="tune cannot choose the strength of"):
            selfless.tune(build, [first, second], preserve=odd)
    with pytest.raises(ValueError, match="tune cannot choose the strength of gpm-of-ones-own"):
        selfless.tune(build, [first, second], preserve=OwnGPM())
    asked.clear()
    with pytest.raises(ValueError, match="strength"):
        selfless.tune(build, [first, second], preserve_strengths=[0.1, -1.0])
    assert not asked  # the grid is checked before anything is trained


def test_the_default_loop_learns_and_leaves_random_numbers_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    grids: Any = {"sparsify_strengths": [1e-3, 1e4], "preserve_strengths": [0.1, 1e6]}
    found = selfless.tune(build, [halves(0), halves(1)], **grids, epochs=4, lr=0.1, tolerance=0.1)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.trials[0].scores[0] > 0.8
    assert math.isnan(found.trials[0].scores[2])
    assert found.sparsify.fixed_strength == 1e-3  # 1e4 diverges
    assert found.preserve.fixed_strength < 1e6  # 1e6 learns nothing new


def test_what_is_no_pair_is_refused() -> None:
    with pytest.raises(TypeError, match="training batches, held-out batches"):
        selfless.tune(build, [torch.zeros(3)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="every strength of slnid failed"):
        selfless.tune(build, halves(0), fit=lambda *_: None, score=lambda *_: float("nan"))


def test_batches_and_models_that_cannot_be_used_again_are_refused() -> None:
    train, held_out = halves(0)
    with pytest.raises(TypeError, match="a generator can be read once; pass lists or DataLoaders"):
        selfless.tune(build, ((batch for batch in train), held_out))
    with pytest.raises(TypeError, match="a function that makes a new model"):
        selfless.tune(build(), (train, held_out))  # type: ignore[arg-type]
    model = build()
    with pytest.raises(ValueError, match="returned the same model again"):
        selfless.tune(lambda: model, (train, held_out), epochs=1)
    with pytest.raises(ValueError, match="there is nothing to choose"):
        selfless.tune(build, (train, held_out), sparsify=None)


@pytest.mark.parametrize(("pair", "words"), [(([1], []), "task 2 has no held-out batches"), (([], [1]), "task 2 has no training batches")])
def test_an_empty_list_of_batches_is_refused(pair: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        selfless.tune(lambda: nn.Linear(2, 2), [([1], [1]), pair])


class Heads(nn.Module):
    """A head for each task; the model needs to know which."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Sequential(nn.Linear(4, 12), nn.ReLU()), nn.ModuleList([nn.Linear(12, 2), nn.Linear(12, 2)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        return torch.as_tensor(self.heads[task](self.body(x)))


@pytest.mark.parametrize("preserve", ["mas", "ewc", "lwf"])
def test_a_model_that_takes_the_task_is_tuned_by_forward(preserve: str) -> None:
    """`forward` calls it when a task ends; `fit` finds the task in `keeper.tasks`."""

    def fit(model: nn.Module, keeper: Any, batches: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keeper.anchor_with(optimizer)
        for x, y in batches:
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x, keeper.tasks), y) + keeper.penalty((x, y))).backward()
            optimizer.step()

    def score(model: nn.Module, batches: Any, task: int) -> float:
        return float(torch.cat([model(x, task).argmax(1) == y for x, y in batches]).float().mean())

    def forward(model: nn.Module, batch: Any, task: int) -> Tensor:
        return torch.as_tensor(model(batch[0], task))

    heads: Any = {"heads": ["heads.0", "heads.1"], "preserve": preserve, "preserve_strengths": [0.1, 1.0]}
    for own in ({"fit": fit, "score": score}, {"epochs": 2}):  # the default loop and score call the model by `forward`, too
        found = selfless.tune(Heads, [halves(0), halves(1)], forward=forward, sparsify=None, **own, **heads)  # type: ignore[arg-type]
        assert [trial.term.name for trial in found.trials] == [preserve]
        assert found.sparsify.name == "none"


def test_tuning_draws_no_random_numbers_and_keeps_no_models() -> None:
    alive: list[weakref.ref[nn.Module]] = []
    count: list[int] = []

    def factory() -> nn.Module:
        gc.collect()
        count.append(sum(ref() is not None for ref in alive))
        model = build()
        alive.append(weakref.ref(model))
        return model

    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    before = torch.get_rng_state()
    selfless.tune(factory, (loader, loader), epochs=1, sparsify_strengths=[1e-4, 1e-3])
    assert torch.equal(torch.get_rng_state(), before)
    assert max(count) <= 1


@pytest.mark.parametrize(("scores", "shown"), [((0.9, 0.81), ("81.00 %", "0.5 points of 0")), ((-3.5, -10.25), ("-10.25", "0.005 of 0"))])
def test_a_score_that_is_no_share_is_shown_as_it_is(scores: tuple[float, float], shown: tuple[str, str]) -> None:
    text = str(Trial(SLNID(1.0), (0.0, 0.1), scores, 1, 0.005))
    assert all(words in text for words in shown)
    assert ("%" in text) == (scores[0] > 0)
