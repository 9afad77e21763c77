"""`tune`: choose the strengths of a sparsifier and a preserver for one's own model and loop, on held-out data of the tasks seen so far.

    λ     the largest whose held-out accuracy on the first task is within `tolerance` of that without a sparsifier (the rule of thumb)
    λ_Ω   at that λ, the one with the best held-out accuracy after the newest task, averaged over all tasks seen; with a `drop`, the
          largest that is within it. Give three tasks: after two, an anchor that is too strong does not show yet. If the best one stands
          alone at an end of the grid, the next strength there is tried too.

No test data and no task to come is used. With one task λ_Ω cannot be chosen, because nothing has to be kept yet.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless.experiments.decay import EXTEND, check_tunable, choose_strength, next_strength
from selfless.importance.objectives import Loss
from selfless.keeper import Keeper, attach
from selfless.metrics import strongest_that_keeps
from selfless.network.calling import Forward, evaluating, labels_of, run_batch, to_device
from selfless.network.layers import Layers
from selfless.preserve import PRESERVERS, Preserver
from selfless.sparsify import SPARSIFIERS, NoSparsifier, Sparsifier
from selfless.terms import Term, parse

Batches = Iterable[Any]
Seen = tuple[Batches, Batches]  # the training batches and the held-out batches of a task
Fit = Callable[[nn.Module, Keeper, Batches], None]
Score = Callable[[nn.Module, Batches], float] | Callable[[nn.Module, Batches, int], float]

SPARSIFY = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
PRESERVE = (1e-2, 1e-1, 1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Trial:
    """The held-out scores of one kind of term at several strengths; the first is 0. `chosen` is the number of the chosen one.

    beside   what the chosen score is within `allowed` of: "0", the score without the term, or "the best"
    """

    term: Term
    strengths: tuple[float, ...]
    scores: tuple[float, ...]
    chosen: int
    allowed: float
    beside: str = "0"

    @property
    def result(self) -> Term:
        """The term at the chosen strength."""
        return self.term.with_strength(self.strengths[self.chosen])

    def __str__(self) -> str:
        best = self.beside == "the best" and not self.allowed
        is_share = all(0 <= score <= 1 for score in self.scores if not math.isnan(score))  # else a number of the user's own
        allowed = f"{100 * self.allowed:g} points" if is_share else f"{self.allowed:g}"
        mark = "  ← the best" if best else f"  ← the largest within {allowed} of {self.beside}"
        shown = [f"{100 * score:6.2f} %" if is_share else f"{score:10.6g}" for score in self.scores]
        rows = [f"  {s:>8g}  {one}{mark if i == self.chosen else ''}" for i, (s, one) in enumerate(zip(self.strengths, shown, strict=True))]
        if len(set(self.scores)) == 1:
            rows.append("  every score is the same, so this choice says nothing: train longer, or hold more data out")
        return "\n".join([f"{self.term.name}: held-out score by strength", *rows])


@dataclass(frozen=True)
class Tuned:
    """The chosen terms, and the trials that explain the choice. `preserve` is the given term if there was one task only."""

    preserve: Term
    sparsify: Term
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        return "\n".join([*(str(trial) for trial in self.trials), f"chosen: preserve={self.preserve}, sparsify={self.sparsify}"])


def tune(
    model_factory: Callable[[], nn.Module],
    task: Seen | Sequence[Seen],
    *,
    fit: Fit | None = None,
    score: Score | None = None,
    forward: Callable[[nn.Module, Any, int], Tensor] | None = None,
    loss: Loss | None = None,
    preserve: Preserver | Term | str = "mas",
    sparsify: Sparsifier | Term | str | None = "slnid",
    preserve_strengths: Sequence[float] = PRESERVE,
    sparsify_strengths: Sequence[float] = SPARSIFY,
    tolerance: float = 0.005,
    drop: float = 0.0,
    extend: int = EXTEND,
    layers: Layers = "auto",
    heads: Sequence[str] = (),
    epochs: int = 5,
    lr: float = 0.05,
    seed: int = 0,
) -> Tuned:
    """Return the strengths for your model, chosen on held-out data of the tasks seen so far.

    model_factory   makes a new model; torch's random numbers start from `seed` before each call
    task            (training batches, held-out batches) of the first task, or a list of such pairs; lists or DataLoaders, read often
    fit             fit(model, keeper, batches): your loop over one task, with keeper.penalty(); default: SGD and cross-entropy.
                    `keeper.tasks` is the number of the task.
    score           score(model, batches) → accuracy, or another number of which more is better, on the held-out batches of a task, for
                    every task seen; score(model, batches, task) if the model needs the number of the task, as for its head; default: the
                    share of right labels
    forward, loss   forward(model, batch, task) → output, for the end of a task and for the default loop and score, if the model takes
                    the task; loss(output, batch) of EWC, one per sample
    sparsify        None: no sparsifier, and only λ_Ω is chosen
    tolerance, drop how much λ may cost on the first task, and λ_Ω on the mean of all tasks beside the best λ_Ω, in the unit of `score`:
                    0.005 is half a point of accuracy
    extend          how many half decades (decades) may be added at each end of `preserve_strengths` while the best one stands there
    epochs, lr      of the default loop
    """
    tasks = [task] if _is_pair(task) else list(task)
    if not tasks or not all(_is_pair(one) for one in tasks):
        raise TypeError(
            "tune takes (training batches, held-out batches) of a task, or a list of such pairs; split the data of each task first"
        )
    if isinstance(model_factory, nn.Module):
        raise TypeError("tune takes a function that makes a new model for each strength, not a model; write lambda: MyModel(…)")
    if any(isinstance(batches, Iterator) for pair in tasks for batches in pair):
        raise TypeError("tune reads the batches of a task for each strength, but a generator can be read once; pass lists or DataLoaders")
    for number, pair in enumerate(tasks):
        for batches, what in zip(pair, ("training", "held-out"), strict=True):
            if isinstance(batches, Sized) and not len(batches):
                raise ValueError(f"task {number + 1} has no {what} batches: its list is empty; split its data into both")
    keep = parse(preserve, PRESERVERS, "preserve") if isinstance(preserve, str) else preserve
    spare = NoSparsifier() if sparsify is None else parse(sparsify, SPARSIFIERS, "sparsify") if isinstance(sparsify, str) else sparsify
    if len(tasks) > 1:
        check_tunable(keep, preserve_strengths)
    elif not spare.is_on:
        raise ValueError("with one task and no sparsifier there is nothing to choose; give two tasks, or a sparsifier")
    made: list[weakref.ref[nn.Module]] = []
    train, rate = fit or _default_fit(epochs, lr, forward), _with_task(score or _default_score(forward))

    def learn(preserver: Term, sparsifier: Term, seen: Sequence[Any]) -> float:
        """Return the mean held-out score on the `seen` tasks after the newest of them; NaN if training diverged."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = model_factory()
            if any(model is other() for other in made):
                raise ValueError("model_factory returned the same model again, which is trained already; make a new one in each call")
            made.append(weakref.ref(model))
            with attach(model, preserver, sparsifier, layers, heads=heads, check_finite=False) as keeper:
                for number, (batches, _) in enumerate(seen):
                    train(model, keeper, batches)
                    if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
                        return math.nan
                    if number + 1 < len(seen):
                        own = None if forward is None else partial(_of_task, forward, number)
                        keeper.consolidate(batches, own, loss=loss)
                found = 0.0
                for number, (_, held_out) in enumerate(seen):
                    with keeper.evaluating(number) if number < keeper.tasks else contextlib.nullcontext(model) as now:
                        found += float(rate(now, held_out, number))
                return found / len(seen)

    if not spare.is_on:
        only = _choose(keep, preserve_strengths, drop, lambda term: learn(term, spare, tasks), "the best", extend)
        return Tuned(only.result, spare, (only,))
    first = _choose(spare, sparsify_strengths, tolerance, lambda term: learn(keep.with_strength(0.0), term, tasks[:1]))
    if len(tasks) == 1:
        return Tuned(keep, first.result, (first,))
    second = _choose(keep, preserve_strengths, drop, lambda term: learn(term, first.result, tasks), "the best", extend)
    return Tuned(second.result, first.result, (first, second))


def _of_task(forward: Callable[[nn.Module, Any, int], Tensor], task: int, model: nn.Module, batch: Any) -> Tensor:
    return forward(model, batch, task)


def _with_task(score: Score) -> Callable[[nn.Module, Batches, int], float]:
    """Return score(model, batches, task), whether or not the given one takes the task."""
    plain: Any = score
    try:
        takes_task = len(inspect.signature(plain).parameters) > 2
    except ValueError:  # a function without a signature
        takes_task = False
    return plain if takes_task else lambda model, batches, _: plain(model, batches)


def _choose(
    term: Term, strengths: Sequence[float], allowed: float, run: Callable[[Term], float], beside: str = "0", extend: int = 0
) -> Trial:
    """Score the term at strength 0 and at each of `strengths`; choose the largest that keeps the score of 0, or the best score.

    While the best one stands at an end, up to `extend` more are scored there.
    """
    scores = {strength: run(term.with_strength(strength)) for strength in sorted({0.0, *strengths})}
    while (more := next_strength(strengths, scores, extend)) is not None:
        scores[more] = run(term.with_strength(more))
        scores = dict(sorted(scores.items()))
    grid, found = tuple(scores), tuple(scores.values())
    chosen = choose_strength(scores, allowed, strengths) if beside == "the best" else strongest_that_keeps(grid, found, found[0], allowed)
    if chosen is None:
        raise ValueError(f"every strength of {term.name} failed: its score is NaN; try a smaller learning rate in fit()")
    return Trial(term, grid, found, chosen, allowed, beside)


def _is_pair(task: Any) -> bool:
    """Return True for (training batches, held-out batches): a tuple of two iterables that are no tensors."""
    return isinstance(task, tuple) and len(task) == 2 and all(isinstance(b, Iterable) and not isinstance(b, Tensor) for b in task)


def _default_score(forward: Callable[[nn.Module, Any, int], Tensor] | None) -> Score:
    def score(model: nn.Module, batches: Batches, task: int) -> float:
        return accuracy(model, batches, None if forward is None else partial(_of_task, forward, task))

    return score


def _default_fit(epochs: int, lr: float, forward: Callable[[nn.Module, Any, int], Tensor] | None) -> Fit:
    def fit(model: nn.Module, keeper: Keeper, batches: Batches) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        keeper.anchor_with(optimizer)
        model.train()
        own = None if forward is None else partial(_of_task, forward, keeper.tasks)
        for epoch in range(epochs):
            keeper.begin_epoch(epoch, epochs)
            for batch in batches:
                given = to_device(batch, model)
                labels = labels_of(given)
                if labels is None or labels.is_floating_point():
                    what = "has no labels" if labels is None else "has labels that are no class numbers"
                    raise ValueError(f"a batch {what}, which the default loop of tune needs; pass fit= and score= of your own")
                loss = F.cross_entropy(run_batch(model, given, own), labels) + keeper.penalty(given)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    return fit


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches, forward: Forward | None = None) -> float:
    """Return the share of samples whose largest output is their label."""
    hits = count = 0
    with evaluating(model):
        for batch in batches:
            given = to_device(batch, model)
            labels = labels_of(given)
            if labels is None or labels.is_floating_point():
                what = "has no labels" if labels is None else "has labels that are no class numbers"
                raise ValueError(f"a held-out batch {what}; pass score= of your own, where more is better: minus the error of a regression")
            hits += int((run_batch(model, given, forward).argmax(-1) == labels).sum())
            count += labels.numel()
    return hits / count if count else float("nan")
