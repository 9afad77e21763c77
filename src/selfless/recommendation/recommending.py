"""`recommend`: the measured row with the highest average that a case allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, get_args

from selfless.preserve import PRESERVERS, Preserver
from selfless.preserve.capabilities import Phased
from selfless.recommendation.cases import CASES, Case, Heads, Inputs, nearest
from selfless.recommendation.table import TRIAL, Measured, load
from selfless.sparsify import SPARSIFIERS, Sparsifier
from selfless.terms import parse

NAME = "recommended"  # in place of a preserver: --preserve recommended, attach(model, "recommended")
MORE_TASKS = 1.5  # a case answers for up to so many times the tasks that were measured


class NotMeasured(ValueError):
    """No record answers for the case; the message names the nearest one that has a record."""


@dataclass(frozen=True)
class Recommendation:
    """What to use, and why. `attach(model, recommendation)` and `Run(**recommendation.settings)` take it.

    layers     where the sparsifier acts: "hidden" or "all"
    why        one sentence
    measured   average, forgetting, time, memory, the record and the command of the row
    """

    preserve: Preserver
    sparsify: Sparsifier
    layers: str
    why: str
    measured: Measured

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of `Run` that it sets."""
        return {"preserve": self.preserve, "sparsify": self.sparsify, "layers": self.layers}

    @property
    def strengths(self) -> dict[str, float]:
        """{name of a term: its strength}."""
        return {part.name: part.fixed_strength for term in (self.preserve, self.sparsify) for part in term.parts if part.name != "none"}

    @property
    def text(self) -> str:
        """The methods and the layers in words."""
        if self.sparsify.name == "none":
            return "no method" if self.preserve.name == "none" else f"{self.preserve} alone"
        return f"{'no preserver' if self.preserve.name == 'none' else self.preserve} with {self.sparsify} in {self.layers} layers"

    def __str__(self) -> str:
        return f"{self.text}. {self.why} Measured: {self.measured}"


def recommend(
    *,
    inputs: Inputs,
    heads: Heads,
    task_known: bool = True,
    memory: float | None = None,
    tasks: int | None = None,
    augment: bool = False,
    simple_loop: bool = False,
) -> Recommendation:
    """Return the preserver and the sparsifier with the highest measured average for a case; raise NotMeasured if there is no record of it.

    inputs      "same" if all tasks draw their inputs from one distribution, as classes of one data set; "different" if each task has
                its own, as permuted or rotated pictures
    heads       "own" if each task has its own head, "shared" if all tasks use one
    task_known  whether the task of an input is known when you predict; PackNet and HAT need it
    memory      how many copies of the parameters may be held beside the model: 1 is room for a second network; None: any number
    tasks       how many tasks there will be; None: about as many as were measured
    augment     whether training images are shifted and mirrored
    simple_loop True: only methods that need no more than `penalty`, `anchor_with` and `consolidate` in your loop. PackNet and HAT also
                need `begin_epoch`, and the task at evaluation.
    """
    for name, value, choices in (
        ("inputs", inputs, get_args(Inputs)),
        ("heads", heads, get_args(Heads)),
        ("task_known", task_known, (True, False)),
        ("augment", augment, (True, False)),
        ("simple_loop", simple_loop, (True, False)),
    ):
        if value not in choices:
            raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, choices))}")
    if tasks is not None and (not isinstance(tasks, Integral) or tasks < 1):
        raise ValueError(f"tasks is {tasks!r}; write how many tasks there will be, 1 or more")
    if memory is not None and (not isinstance(memory, Real) or not memory >= 0):
        raise ValueError(f"memory is {memory!r}; write how many copies of the parameters may be held beside the model, 0 or more")
    if heads == "own" and not task_known:
        raise NotMeasured(
            "not measured: new classes, and the task is not known. Methods without old data then remember only the newest task; the "
            "nearest is der:1, which keeps old samples (docs/choosing.md, With old data)"
        )
    cases = [c for c in CASES if (c.inputs, c.heads, c.augment) == (inputs, heads, augment)]
    if not cases:
        pictures = ", with augmentation" * augment
        near = nearest(inputs, heads, augment, tasks)
        raise _not_measured(f"tasks with {inputs} inputs and {_HEADS[heads]}{pictures}", near, task_known, simple_loop)
    case = min(cases, key=lambda c: c.distance(tasks))
    if tasks is not None and tasks > MORE_TASKS * case.tasks:
        pictures = f", {'with' if augment else 'without'} augmentation" * (heads == "own")
        raise _not_measured(f"{tasks} tasks{pictures}", nearest(inputs, heads, augment, tasks), task_known, simple_loop)
    found = _best(case, task_known, memory, simple_loop)
    if found is None:
        what = "needs no further calls in a loop" if memory is None else f"holds at most {memory:g} times the parameters"
        raise _not_measured(f"a method that {what}", case, task_known, simple_loop)
    return found


_HEADS = {"own": "a head each", "shared": "one head"}


def _best(case: Case, task_known: bool, memory: float | None = None, simple_loop: bool = False) -> Recommendation | None:
    """Return the best row of a case that these conditions allow; None if there is none."""
    rows, joint = load()
    of_case = [(row, parse(row.preserve, PRESERVERS, "preserver")) for row in rows if row.case == case.name]
    allowed = [
        (row, term)
        for row, term in of_case
        if (task_known or not any(part.needs_task for part in term.parts))
        and not (simple_loop and any(part.needs_task or (isinstance(part, Phased) and part.warms_up(1)) for part in term.parts))
        and (memory is None or row.memory <= memory)
    ]
    if not allowed:
        return None
    best, preserve = max(allowed, key=lambda pair: pair[0].average)
    sparsify = parse(best.sparsify, SPARSIFIERS, "sparsifier")
    wanted = ["need no task at evaluation"] * (not task_known) + ["need no further calls in a loop"] * simple_loop
    wanted += [] if memory is None else [f"hold at most {memory:g} times the parameters"]
    conditions = ["that " + " and ".join(wanted)] if wanted else []
    label = preserve.label if sparsify.name == "none" else f"{preserve.label} with {sparsify.label}"
    bound = joint[case.name]
    beside = "" if bound.sparsify == "none" else f" with {parse(bound.sparsify, SPARSIFIERS, 'sparsifier').label}"
    count = sum(term.name != "none" for _, term in allowed)
    first = f"On {case.title} {label} has the highest average of the {' '.join([f'{count} preservers measured', *conditions])}"
    if not count:
        without = "Training without any has" if sparsify.name == "none" else f"{sparsify.label} without one has"
        first = f"On {case.title} no preserver was measured that holds so little. {without}"
    trial = " (a trial with one held-out seed)" * (best.chosen_on == TRIAL)
    why = f"{first}{':' * bool(count)} {best.average:.1f} %{trial}; joint training{beside} has {bound.average:.1f} %."
    return Recommendation(preserve, sparsify, best.layers, why, best)


def _not_measured(what: str, case: Case, task_known: bool, simple_loop: bool) -> NotMeasured:
    """Return the error that names what is missing and the nearest case."""
    known = task_known or case.heads == "own"
    best = _best(case, known, simple_loop=simple_loop)
    assert best is not None, f"{case.name} has no measured row"
    like = [c for c in CASES if (c.inputs, c.heads, c.augment) == (case.inputs, case.heads, case.augment)]
    more = ", task_known=False" * (not known) + ", simple_loop=True" * simple_loop + ", augment=True" * case.augment
    more += "" if case is like[0] else f", tasks={case.tasks}"
    call = f"recommend(inputs={case.inputs!r}, heads={case.heads!r}{more})"
    flags = f"--preserve {best.preserve} --sparsify {best.sparsify} --layers {best.layers}"
    return NotMeasured(f"not measured: {what}; the nearest is {case.title}, where {best.text} is best: {call}, or {flags}")


# ------------------------------------------------------------------------------------------------------------------ from a run
def recommend_for_stream(values: Mapping[str, Any]) -> Recommendation:
    """Return the recommendation for the settings of a run: its stream, scenario, augmentation and, if it is given, number of tasks."""
    stream, scenario = str(values.get("stream", "permuted-mnist")), values.get("scenario", "task")
    kind = stream.partition("-")[0]
    if kind not in ("permuted", "rotated", "split"):
        raise NotMeasured(
            f"not measured: the stream {stream!r}; 'recommended' answers for permuted-, rotated- and split- streams. For another one call "
            "selfless.recommend(inputs=…, heads=…) and name the methods that it returns"
        )
    own = kind == "split" and scenario != "domain"
    tasks = values.get("tasks")
    return recommend(
        inputs="same" if kind == "split" else "different",
        heads="own" if own else "shared",
        task_known=scenario == "task",
        tasks=tasks if isinstance(tasks, int) else None,
        augment=values.get("augment", "none") != "none",
    )
