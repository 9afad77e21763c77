"""The main finding in one sentence computed from the results, and a second sentence on how reliable it is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from selfless.metrics import forgetting, paired_t_interval
from selfless.report.gaps import gaps
from selfless.report.groups import ON_TEST, USES_OLD_DATA, Group, Value, best, groups, number, over_seeds, rivals, signed, uses_old_data

if TYPE_CHECKING:
    from selfless.spec import Result, Run

WORDS = "no one two three four five six seven eight nine ten".split()


class Headline(NamedTuple):
    """The finding, and what supports it."""

    sentence: str
    support: str = ""

    def __str__(self) -> str:
        return f"{self.sentence} {self.support}".strip()


class Pair(NamedTuple):
    """A method with a sparsifier, and the same method without one; all else is equal."""

    method: Group
    alone: Group


def headline(results: Sequence[Result]) -> Headline:
    """Return the gain of a sparsifier if the best method ran with and without one; else the best method; else what was run."""
    found = groups(results)
    finished = [g for g in found if g.done]
    done = [g for g in finished if all(r.is_evaluated for r in g.done)]
    if finished and not done:
        return _partly_known(finished[0])
    if not done:
        return Headline("No run has finished." if not found else f"{_count(len(results), 'run').capitalize()} failed, none finished.")
    first, pairs = best(done), _pairs(done)
    if pairs and (first is None or len(done) == 2 or any(first in pair for pair in pairs)):
        shown = next((pair for pair in pairs if first in pair), pairs[0])
        return _compare(shown, sum(pair.alone is shown.alone for pair in pairs), _names(done))
    if first is None:
        many = f"{_count(len(done), 'set').capitalize()} of runs that are not comparable: see each row."
        return _single(done[0]) if len(done) == 1 else Headline(many)
    return _leading(first, done)


def _leading(first: Group, done: Sequence[Group]) -> Headline:
    """Return by how much the best group leads the next one."""
    compared, names = rivals(done), _names(done)
    rest = [g for g in done if g not in compared]
    second = max((g for g in compared if g is not first), key=lambda g: g.average.mean, default=None)
    if second is None:  # the others use old data or have failed seeds
        second = max(rest, key=lambda g: g.average.mean)
        sentence = f"{names[first]} has {_percent(first)} {_over(first)}; {names[second]} {_percent(second)}."
        return Headline(sentence, _seeds(first) + _warning(first, second))
    lacks = ["old data"] * any(uses_old_data(g.run) for g in rest) + ["failed seeds"] * any(g.failures for g in rest)
    many = _count(len(compared), "method") + f" without {' and '.join(lacks)}" * bool(lacks)
    at = f"{_percent(first)} over {_count(first.tasks, 'task')}"
    if first.average.mean == second.average.mean:
        sentence = f"{names[first]} and {names[second]} have the same average, the highest of {many}: {at}."
        return Headline(sentence, _seeds(first) + _warning(first, second))
    sentence = f"{names[first]} has the highest average of {many}: {at}; then {names[second]}, {_percent(second)}."
    support = _seeds(first)
    for gap in gaps(done):
        if gap.group is second:
            support += f" The 95 % interval of their difference is {signed(-gap.high)} to {signed(-gap.low)} points (paired t test)"
            support += ", so the order of the two is open." if gap.low <= 0 <= gap.high else "."
    return Headline(sentence, support + _warning(first, second))


def _single(group: Group) -> Headline:
    lost = _lost(group).mean
    tail = "" if math.isnan(lost) else f", after {'gaining' if round(lost, 3) < 0 else 'losing'} {number(abs(lost))} points on earlier ones"
    return Headline(
        f"{_name(group.run)} ends at {_percent(group)} {_over(group)}{tail}.",
        _seeds(group) + _guessed(group) + _warning(group),
    )


def _guessed(group: Group) -> str:
    """Return a remark if tasks are learnt hardly better than by guessing among the classes that they are told apart from."""
    described = group.done[0].data
    if described is None or len(described.tasks) < group.tasks:
        return ""
    stops, widths = ([f(task.columns) for task in described.tasks] for f in (lambda c: c.stop, len))
    seen = [max(stops[: t + 1]) for t in range(len(stops))]
    is_joint = any(len(accuracy) < accuracy.shape[1] for accuracy in group.accuracy)
    classes = ([seen[-1]] * len(seen) if is_joint else seen) if group.run.scenario == "class" else widths
    learnt = np.mean([accuracy[-1] if is_joint else np.diagonal(accuracy) for accuracy in group.accuracy], 0)
    pairs = [(float(value), 1 / count) for value, count in zip(learnt, classes, strict=False) if count > 1]
    if not pairs or any(math.isnan(value) or value > guess + min(0.02, guess / 2) for value, guess in pairs):
        return ""
    guess = sum(guess for _, guess in pairs) / len(pairs)
    return f" Guessing gives {number(guess)} %, so hardly anything was learnt: more --epochs, or another --lr."


def _partly_known(group: Group) -> Headline:
    """Return a sentence on a continued run, of whose old tasks the data were not found."""
    last = group.accuracy[:, -1]
    known = int((~np.isnan(last[0])).sum())
    return Headline(
        f"{_name(group.run)} ends at {number(float(np.nanmean(last)))} % on average over {_count(known, 'task')} of {group.tasks}, "
        "those whose data were found.",
        _seeds(group) + _warning(group),
    )


def _lost(group: Group) -> Value:
    """1/(T−1) Σ_{u<T} ( max_{u≤t<T} A[t, u] − A[T, u] ): forgetting, ignoring the accuracy on a task before it was learnt."""
    return over_seeds([forgetting(np.where(np.tri(len(A)) > 0, A, np.nan)) for A in group.accuracy if len(A) > 1])


def _pairs(done: Sequence[Group]) -> list[Pair]:
    """Return every pair, the one with the highest average first; those that use old data come last."""

    def rest(run: Run) -> str:
        return dataclasses.replace(run, seed=0, sparsify="none").canonical()

    alone = {(rest(g.run), g.tasks): g for g in done if g.run.sparsify.name == "none"}
    pairs = [Pair(g, alone[at]) for g in done if g.run.sparsify.name != "none" and (at := (rest(g.run), g.tasks)) in alone]
    return sorted(pairs, key=lambda pair: (uses_old_data(pair.method.run), -pair.method.average.mean))


def _compare(pair: Pair, rivals: int, names: Mapping[Group, str]) -> Headline:
    """Compare the two groups of a pair. `rivals` is the number of sparsifiers from which the better one was picked."""
    method, alone = pair
    name, other = names[method], f"{names[alone]} alone"
    a, b = ({r.run.seed: r.average for r in g.done} for g in pair)
    seeds = sorted(a.keys() & b.keys())
    means = [float(np.mean([of[s] for s in seeds])) for of in (a, b)] if len(seeds) > 1 else [g.average.mean for g in pair]
    gain, (first, second) = means[0] - means[1], (f"{number(mean)} %" for mean in means)
    low, high = paired_t_interval([a[s] for s in seeds], [b[s] for s in seeds]) if len(seeds) > 1 else (gain, gain)
    several = f"Best of {_count(rivals, 'sparsifier')}: " if rivals > 1 else ""
    free, before = (g.value("free_parameters").mean for g in pair)
    moved = abs(free - before) >= 0.005  # False where either is NaN
    if low <= 0 <= high:
        tail = f" The first leaves {100 * free:.0f} % of the parameters free, the second {100 * before:.0f} %." if moved else ""
        told = "cannot be told apart by these seeds" if len(seeds) > 1 else "have the same average"
        sentence = f"{name} and {other} {told}: {first} and {second} {_over(method)}.{tail}"
    else:
        joined = "and" if (free > before) == (gain > 0) else "but"
        tail = f", {joined} leaves {100 * free:.0f} % of the parameters free instead of {100 * before:.0f} %" if moved else ""
        sentence = f"{several}{name} keeps {first} {_over(method)}; {other} {second}: {signed(gain)} points{tail}."
    if len(seeds) < 2:
        support = "One seed each" if len(a) == len(b) == 1 else f"{_count(len(seeds), 'seed').capitalize()} in common"
        support += ", so the difference has no error bar."
    else:
        ahead = sum(a[s] > b[s] for s in seeds)
        support = (
            f"{name} is ahead on {ahead} of {len(seeds)} seeds; the 95 % interval of the difference is {signed(low)} to {signed(high)} "
            "points (paired t test)."
        )
    return Headline(sentence, support + _warning(*pair))


def _seeds(group: Group) -> str:
    return "One seed." if len(group.done) == 1 else f"Mean over {_count(len(group.done), 'seed')}."


def _warning(*shown: Group) -> str:
    """Return the caveats about these groups: chosen on test data, notes on the data, failed runs."""
    notes = {note for g in shown for note in g.notes}  # they may begin with the name of a folder
    texts = dict.fromkeys(text for g in shown for text in ([ON_TEST] if g.on_test else []) + list(g.notes))
    texts |= dict.fromkeys(f"{len(g.failures)} of {len(g.results)} runs of {_name(g.run)} failed" for g in shown if g.failures)
    return "".join(f" {text if text in notes else text[:1].upper() + text[1:]}." for text in texts)


def _names(done: Sequence[Group]) -> dict[Group, str]:
    """Return short names such as "MAS + SLNID" if they are all different, else the labels."""
    names = {g: _name(g.run) for g in done}
    return names if len(set(names.values())) == len(names) else {g: g.label for g in done}


def _name(run: Run) -> str:
    preserver = "no preserver" if run.preserve.name == "none" else run.preserve.label
    name = preserver if run.sparsify.name == "none" else f"{preserver} + {run.sparsify.label}"
    return f"{name} ({USES_OLD_DATA})" if uses_old_data(run) else name


def _percent(group: Group) -> str:
    return f"{number(group.average.mean)} %"


def _over(group: Group) -> str:
    return f"on average over {_count(group.tasks, 'task')}" if group.tasks > 1 else "on its one task"


def _count(n: int, what: str) -> str:
    return f"{WORDS[n] if n < len(WORDS) else n} {what}{'s' * (n != 1)}"
