"""Groups of runs that differ only in the seed. Every table, figure and page is made from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfless.metrics import spread

if TYPE_CHECKING:
    from selfless.spec import Result, Run

FREE = ("free_parameters", "free_neurons")
Matrix = NDArray[np.float64]
CONTEXT = ("stream", "model", "tasks", "scenario", "epochs", "batch")  # named in a label whenever groups differ in it


class Value(NamedTuple):
    """Mean and standard deviation over seeds, as fractions; NaN where there is none."""

    mean: float
    std: float = math.nan

    def text(self, digits: int = 2, *, std: bool = True) -> str:
        """Return percent: "95.83 ± 0.21", without spread "95.83", unknown "–"."""
        if math.isnan(self.mean):
            return "–"
        return number(self.mean, digits) + (f" ± {100 * self.std:.{digits}f}" if std and not math.isnan(self.std) else "")


def number(share: float, digits: int = 1) -> str:
    """Return 0.958 as "95.8", with a true minus sign and never "−0.0"."""
    return f"{round(100 * share, digits) + 0.0:.{digits}f}".replace("-", "−")


def signed(share: float, digits: int = 1) -> str:
    """Return a difference of 0.012 as "+1.2"."""
    return ("+" if share > 0 else "") + number(share, digits)


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one method, one per seed. `label` differs from those of the other groups."""

    label: str
    results: tuple[Result, ...]

    @property
    def run(self) -> Run:
        """The first run: all runs of the group have its settings, except for the seed."""
        return self.results[0].run

    @cached_property
    def failures(self) -> dict[int, str]:
        """Seed → reason, for runs that failed or whose accuracy matrix has holes."""
        return {r.run.seed: why for r in self.results if (why := _failure(r))}

    @cached_property
    def done(self) -> tuple[Result, ...]:
        return tuple(r for r in self.results if r.run.seed not in self.failures)

    @property
    def tasks(self) -> int:
        return len(self.results[0].baseline)

    @property
    def select(self) -> str:
        return self.run.select

    @property
    def on_test(self) -> bool:
        """True if epochs were chosen on test data."""
        return self.run.select == "best-on-test"

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Notes on the data that every table must show, such as that a set is reduced."""
        return tuple(dict.fromkeys(str(note) for r in self.results for note in r.about.get("notes") or ()))

    @cached_property
    def accuracy(self) -> Matrix:
        """Accuracy matrices of the finished runs: (seeds, T, T), or (seeds, 1, T) for joint training."""
        return np.stack([r.accuracy for r in self.done]) if self.done else np.empty((0, 0, 0))

    @cached_property
    def summary(self) -> dict[str, Value]:
        """Mean ± std over seeds of each value of `Result.summary`."""
        rows = [_summary(r) for r in self.done]
        return {name: over_seeds([row[name] for row in rows]) for name in (rows[0] if rows else ())}

    def value(self, name: str) -> Value:
        return self.summary.get(name, Value(math.nan))

    @property
    def average(self) -> Value:
        return self.value("average")

    @cached_property
    def held_out(self) -> Value:
        """Average accuracy on the held-out data of the tasks, after the last one."""
        return over_seeds([float(r.held_out[-1].mean()) for r in self.done if r.held_out is not None])

    @cached_property
    def per_task(self) -> tuple[Value, ...]:
        """Accuracy on each task after the last one."""
        return tuple(over_seeds(self.accuracy[:, -1, u]) for u in range(self.tasks)) if self.done else (Value(math.nan),) * self.tasks

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """Footnotes: chosen on test data, other versions of a user's files, failed runs, what it is told, notes on the data."""
        texts = [ON_TEST] if self.on_test else []
        if (count := _count_versions([str(r.about.get("made_from", "")) for r in self.results])) > 1:
            texts.append(f"its seeds were trained with {count} versions of your data, network or method: train all of them again")
        if self.failures:
            seeds = {why: [str(s) for s, w in self.failures.items() if w == why] for why in self.failures.values()}
            reasons = "; ".join(f"seed{'s' * (len(which) > 1)} {', '.join(which)}: {why}" for why, which in seeds.items())
            texts.append(f"{len(self.failures)} of {len(self.results)} runs failed ({reasons})")
        if any(term.needs_task for term in self.run.preserve.parts):
            if self.run.scenario != "task":
                texts.append("the task is not known in this scenario: every input is classified by the network of the newest task")
            elif self.done and _shares_head(self.done[0]):
                texts.append("is told the task of each input, although the tasks share one head; methods without this mark are not")
        unknown = [name.replace("_", " ") for name in FREE if self.done and math.isnan(self.value(name).mean)]
        if "free parameters" in unknown:
            texts.append(f"{' and '.join(unknown)}: not measured, because {self.run.preserve} measures no importance")
        return (*texts, *self.notes)


def _ended_without(result: Result) -> bool:
    """Return True for a run that failed before it had results: its matrix has one unknown entry, whatever its tasks."""
    return result.status == "failed" and result.accuracy.shape == (1, 1) and bool(np.isnan(result.accuracy).all())


def _with_tasks(results: Sequence[Result]) -> Iterator[Result]:
    """Yield the results; those of runs that failed before they had any with an unknown accuracy for each task."""
    known = {_stream(r.run): r for r in results if not _ended_without(r)}
    for result in results:
        like = known.get(_stream(result.run))
        tasks = result.run.tasks or 1 if like is None else len(like.baseline)
        shape = (tasks, tasks) if like is None else like.accuracy.shape
        unknown = np.full(shape, math.nan)
        yield dataclasses.replace(result, accuracy=unknown, baseline=unknown[0]) if _ended_without(result) else result


def _stream(run: Run) -> tuple[str, str, int | None]:
    return run.stream, str(run.stream_options), run.tasks


USES_OLD_DATA = "uses old data"
ON_TEST = "best-on-test: the epoch was chosen on the test data, so the accuracy is optimistic"


def groups(results: Sequence[Result]) -> list[Group]:
    """Return the groups in order of first appearance. Of a run that was recorded twice, the later result counts."""
    found: dict[tuple[str, int], list[Result]] = {}
    for result in _with_tasks(list({r.run.key: r for r in results}.values())):
        found.setdefault((dataclasses.replace(result.run, seed=0).canonical(), len(result.baseline)), []).append(result)
    made = [sorted(members, key=lambda r: r.run.seed) for members in found.values()]
    return [Group(label, tuple(members)) for label, members in zip(_labels([m[0] for m in made]), made, strict=True)]


def footnotes(found: Sequence[Group]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the marks of each group ("†", "¹ ²"), and what each mark means."""
    texts = dict.fromkeys(text for group in found for text in group.remarks)
    numbers = iter(range(1, len(texts) + 1))
    marks = {text: "†" if text == ON_TEST else str(next(numbers)).translate(SUPERSCRIPT) for text in texts}
    return [" ".join(marks[text] for text in texts if text in group.remarks) for group in found], [(m, text) for text, m in marks.items()]


SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def comparable(found: Sequence[Group]) -> bool:
    """Return whether averages can be compared: same stream, scenario, tasks and epochs, and at least two finished groups."""
    return bool(found) and not _differing(found) and len([g for g in found if g.done]) > 1


def why_not_compared(found: Sequence[Group]) -> str:
    """Return why the averages of several finished groups are not compared; "" if they are."""
    other = _differing(found) if len([g for g in found if g.done]) > 1 else []
    what = f"Not compared with each other, because the {' and '.join(other)} differ; put runs of one kind into a folder of their own."
    return what if other else ""


def _differing(found: Sequence[Group]) -> list[str]:
    """Return what groups must have in common to be compared, and do not."""
    done = [g for g in found if g.done]
    values: dict[str, set[Any]] = {
        "streams": {(g.run.stream, str(g.run.stream_options)) for g in done},
        "scenarios": {g.run.scenario for g in done},
        "numbers of tasks": {g.tasks for g in done},
        "epochs": {g.run.epochs for g in done},
    }
    return [name for name, different in values.items() if len(different) > 1]


def _count_versions(digests: Sequence[str]) -> int:
    """Return how many versions of a user's files these digests show. One with comments and one without cannot be compared."""
    newer = {digest for digest in digests if digest.startswith("code-")}
    return max(len(newer), len({*digests} - newer))


def _shares_head(result: Result) -> bool:
    """Return whether all tasks of a run have the same output columns; False if that was not recorded."""
    return result.data is not None and len(result.data.tasks) > 1 and len({task.columns for task in result.data.tasks}) == 1


def uses_old_data(run: Run) -> bool:
    """Return True if a preserver of the run keeps samples of old tasks."""
    return any(term.keeps_data for term in run.preserve.parts)


def rivals(found: Sequence[Group]) -> list[Group]:
    """Return the finished groups of which one is the best: those that do not use old data, and of these those without failed seeds.

    A condition that no group meets is dropped.
    """
    done = [g for g in found if g.done]
    plain = [g for g in done if not uses_old_data(g.run)] or done
    return [g for g in plain if not g.failures] or plain


def best(found: Sequence[Group]) -> Group | None:
    """Return the group with the highest average of `rivals`, if the groups can be compared."""
    known = [g for g in rivals(found) if not math.isnan(g.average.mean)]
    return max(known, key=lambda g: g.average.mean, default=None) if comparable(found) else None


def differences(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ."""
    keys = dict.fromkeys(key for values in found for key in values)
    return [key for key in keys if len({repr(values.get(key)) for values in found}) > 1]


def settings(result: Result) -> dict[str, Any]:
    """Return the run without its seed as a flat dictionary: {"stream": …, "preserve.strength": …}; `tasks` is how many there were."""

    def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            if isinstance(value, Mapping):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    found = {k: v for k, v in flat(result.run.as_dict()) if k != "seed"}
    return {**result.run.later, **found} | {"tasks": len(result.baseline)}


def over_seeds(values: Sequence[float] | Matrix) -> Value:
    """Return mean and standard deviation of the known values."""
    known = [float(v) for v in values if not math.isnan(v)]
    return Value(*spread(known)) if known else Value(math.nan)


def measured(capacity: Mapping[str, Any], name: str) -> float:
    """Return a share of free capacity; NaN if no importance was measured, so that free capacity is unknown."""
    by_layer = capacity.get(name.removeprefix("free_"), True)
    return float(capacity.get(name, math.nan)) if by_layer else math.nan


def _summary(result: Result) -> dict[str, float]:
    last = result.capacity[-1] if result.capacity else {}
    return result.summary() | {name: measured(last, name) for name in FREE}


def _failure(result: Result) -> str:
    if result.status != "done":
        return result.error or "no reason was recorded"
    try:
        result.summary()
    except ValueError as error:
        return str(error)
    return ""


def _labels(first: Sequence[Result]) -> list[str]:
    """Name each group by its method, with the settings of CONTEXT that differ, and with other settings if two names are equal.

    A method that uses old data is marked.
    """
    flat = [settings(r) for r in first]
    context = [key for key in differences(flat) if key in CONTEXT]
    plain = [(r.run.method, *(str(f[key]) for key in context)) for r, f in zip(first, flat, strict=True)]
    labels = []
    for result, name, values in zip(first, plain, flat, strict=True):
        namesakes = [f for n, f in zip(plain, flat, strict=True) if n == name]
        details = [USES_OLD_DATA] if uses_old_data(result.run) else []
        details += [_phrase(key, values[key]) for key in context]
        details += [_phrase(key, values.get(key)) for key in differences(namesakes) if key not in context]
        labels.append(f"{name[0]} ({', '.join(details)})" if details else name[0])
    return labels


def _phrase(key: str, value: Any) -> str:
    if key in ("stream", "model"):
        return str(value)
    if key == "tasks":
        return f"{value} task{'s' * (value != 1)}"
    return f"{key.rsplit('.', 1)[-1].replace('_', ' ')} {'default' if value is None else value}"
