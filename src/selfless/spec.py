"""A run as a value, its result, and the key that names both.

The key is a hash of everything that decides the numbers (and of nothing else: not the device, not the folder). `results/<key>/` is
therefore a cache: the same run is never trained twice, and a changed one never mistaken for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from selfless import metrics
from selfless.preserve import MAS, PRESERVERS, Preserver
from selfless.sparsify import SPARSIFIERS, NoSparsifier, Sparsifier
from selfless.terms import Term, parse

FORMAT = 1  # of the canonical form: raised when the same fields come to mean other numbers
NETWORKS = {"vgg-slim": 3}  # the same for one network alone: vgg-slim starts from He's weights since 2, from a head of zeros since 3
AUGMENTATIONS = {"resized": 2}  # and for one augmentation: mirroring does not follow from the size of the crop since 2

Schedule = Literal["constant", "cosine", "plateau"]
Select = Literal["last", "held-out", "best-on-test"]
Augmentation = Literal["none", "flip", "crop-flip", "resized"]
Precision = Literal["tf32", "fp32", "bf16"]
Scenario = Literal["task", "domain", "class"]
CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": ("constant", "cosine", "plateau"),
    "select": ("last", "held-out", "best-on-test"),
    "anchor": ("implicit", "explicit"),
    "alpha": ("sum", "mean"),
    "augment": ("none", "flip", "crop-flip", "resized"),
    "layers": ("hidden", "all"),
    "precision": ("tf32", "fp32", "bf16"),
    "scenario": ("task", "domain", "class"),
}


@dataclass(frozen=True)
class Run:
    """One training sequence. Everything here is also a flag of `selfless run` and a key of its TOML file.

    stream, model   names of `selfless.data.stream` and `selfless.models.build`; `options` of the stream as stream_options
    preserve        MAS(0.1), EWC(10), LwF(1) and the others of `selfless.preserve`, or their spelling "mas:0.1"
    sparsify        SLNID(1e-3) and the others of `selfless.sparsify`, or "slnid:1e-3"
    tasks           the first so many tasks (None: five of a permuted or rotated stream, all of any other)
    layers          where the sparsifier acts: the "hidden" fully connected layers, or "all" with the convolutions
    ramp            epochs of each task over which the sparsifier's λ grows from 0 to its strength; 0: it is there at once
    anchor          "implicit" (stable at any strength) or "explicit" (the paper's penalty in the loss)
    alpha           neuron importance over tasks: "sum" (the paper) or "mean" (the authors' Tiny ImageNet code)
    schedule        lr "constant", "cosine" to 0 within each task, or "plateau": ×0.1 after 5 stalled epochs, stop after 10
    select          the epoch that is kept: "last", the best on "held-out" data, or "best-on-test" (marked in every table)
    held_out        share of the training data kept aside; a tenth when the run needs one and none is given
    scenario        what is known when a task is judged: "task" which one it is; "domain" nothing, tasks share their outputs; "class"
                    nothing, an image is one of all the classes seen so far (`selfless.engine.scenario`)
    precision       of products on a GPU: "tf32", "fp32" or "bf16"; a CPU computes in float32, but takes "bf16" where it has units for it
    """

    later: ClassVar[Mapping[str, Any]] = {"scenario": "task", "ramp": 0}  # fields that came later: at these values they are not named

    stream: str = "permuted-mnist"
    model: str = "mlp-128"
    preserve: Preserver = field(default_factory=MAS)
    sparsify: Sparsifier = field(default_factory=NoSparsifier)
    tasks: int | None = None
    epochs: int = 10
    batch: int = 200
    lr: float = 1e-2
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: Schedule = "constant"
    ramp: int = 0
    anchor: Literal["implicit", "explicit"] = "implicit"
    alpha: Literal["sum", "mean"] = "sum"
    layers: Literal["hidden", "all"] = "hidden"
    select: Select = "last"
    held_out: float = 0.0
    augment: Augmentation = "none"
    precision: Precision = "tf32"
    scenario: Scenario = "task"
    stream_options: Mapping[str, Any] = field(default_factory=dict)
    model_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)  # frozen for everybody else

        for name, kinds, what in (("preserve", PRESERVERS, "preserver"), ("sparsify", SPARSIFIERS, "sparsifier")):
            if isinstance(getattr(self, name), str):
                put(name, parse(getattr(self, name), kinds, what))
        if not isinstance(self.preserve, Preserver) or not isinstance(self.sparsify, Sparsifier):
            raise TypeError(f"preserve= takes a preserver and sparsify= a sparsifier, not {self.preserve!r} and {self.sparsify!r}")
        for name in ("stream_options", "model_options"):
            if not isinstance(getattr(self, name), Mapping):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be a table of options, as {{classes_per_task = 5}}")
            put(name, dict(getattr(self, name)))
        for name in ("epochs", "batch", "seed", "tasks", "ramp"):
            if isinstance(getattr(self, name), numbers.Integral) and not isinstance(getattr(self, name), bool):
                put(name, int(getattr(self, name)))
        if self.seed >= 2**63:
            raise ValueError(f"seed is {self.seed}; it must be below 2**63")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        for name, low in (("epochs", 1), ("batch", 1), ("seed", 0), ("ramp", 0)):
            _whole(name, getattr(self, name), low)
        if self.ramp >= self.epochs:
            raise ValueError(f"ramp is {self.ramp} of {self.epochs} epochs: λ would never reach its strength; it must be below epochs")
        if self.tasks is None and self.stream.removeprefix("joint-").startswith(("permuted-", "rotated-")):
            put("tasks", 5)
        if self.tasks is not None:
            _whole("tasks", self.tasks, 1)
        for name in ("lr", "momentum", "weight_decay", "held_out"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} is {value!r}; it must be a number ≥ 0")
            put(name, float(value))
        for name in ("momentum", "held_out"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be below 1")
        if self.held_out == 0 and (self.select == "held-out" or self.schedule == "plateau"):
            put("held_out", 0.1)

    @property
    def key(self) -> str:
        """16 hexadecimal digits that name this run."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:16]

    def canonical(self) -> str:
        """The run as JSON with sorted keys and full-precision floats: equal runs, equal text."""
        version = {"format": FORMAT} | ({"network": NETWORKS[self.model]} if self.model in NETWORKS else {})
        version |= {"augmentation": AUGMENTATIONS[self.augment]} if self.augment in AUGMENTATIONS else {}
        return json.dumps(self.as_dict() | version, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def as_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, usual in self.later.items():
            if plain[name] == usual:
                del plain[name]  # runs recorded before keep their names
        return {k: _term_dict(v) if isinstance(v, Term) else dict(v) if isinstance(v, Mapping) else v for k, v in plain.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Run:
        known = {f.name for f in dataclasses.fields(cls)}
        fields = {k: v for k, v in values.items() if k in known}
        for name, kinds in (("preserve", PRESERVERS), ("sparsify", SPARSIFIERS)):
            if isinstance(fields.get(name), Mapping):
                term = dict(fields[name])
                kind = type(parse(str(term.pop("name")), kinds, name))
                known_options = [f.name for f in dataclasses.fields(kind)]
                unknown = [k for k in term if k not in known_options]
                if unknown:
                    raise ValueError(f"{name}: {kind.spelling()} has no option {unknown[0]!r}; it has {', '.join(known_options)}")
                fields[name] = kind(**term)
        return cls(**fields)

    def __hash__(self) -> int:
        return hash(self.canonical())

    @property
    def method(self) -> str:
        """How people call it: "mas:0.1 + slnid:0.001"."""
        return str(self.preserve) if self.sparsify.name == "none" else f"{self.preserve} + {self.sparsify}"


def _whole(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} is {value!r}; it must be a whole number ≥ {low}")


def _term_dict(term: Term) -> dict[str, Any]:
    told = [f for f in dataclasses.fields(term) if f.name not in term.later or getattr(term, f.name) != f.default]
    return {"name": term.spelling()} | {f.name: getattr(term, f.name) for f in told}


Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Result:
    """What a run gave. accuracy[t, u] is the accuracy (0 to 1) on task u after learning task t, tasks not yet learned included.

    baseline      accuracy on each task before any training
    accuracy_all  the same judged against every output column, where a task's classes share a wider head (else None)
    held_out      the same on the part of each task's training data that was kept aside (None where none was): what to choose settings by
    history       per task, per epoch: {"loss", "accuracy", "held_out"?, "test"?}: task loss and accuracy on training batches
    capacity      per task: free parameters and neurons by layer
    status        "done", or "failed" with the reason in `error`
    about         hardware, versions, commit, seconds, notes (such as a reduced data set)
    """

    run: Run
    accuracy: Matrix
    baseline: Matrix
    history: list[list[dict[str, float]]]
    capacity: list[dict[str, Any]]
    accuracy_all: Matrix | None = None
    held_out: Matrix | None = None
    status: Literal["done", "failed"] = "done"
    error: str = ""
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def average(self) -> float:
        """Average accuracy over all tasks after the last one."""
        return metrics.average(self.accuracy) if self.status == "done" else math.nan

    def summary(self) -> dict[str, float]:
        """average, learning_accuracy, forgetting, backward_transfer, forward_transfer, free_parameters, free_neurons."""
        if self.status != "done":
            return {}
        last = self.capacity[-1] if self.capacity else {}
        free = {name: math.nan if last.get(name) is None else float(last[name]) for name in ("free_parameters", "free_neurons")}
        return metrics.summary(self.accuracy, self.baseline) | free

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.run.key,
            "run": self.run.as_dict(),
            "status": self.status,
            "error": self.error,
            "summary": {k: _number(v) for k, v in self.summary().items()},
            "accuracy": [[_number(v) for v in row] for row in self.accuracy.tolist()],
            "accuracy_all": None if self.accuracy_all is None else self.accuracy_all.tolist(),
            "held_out": None if self.held_out is None else self.held_out.tolist(),
            "baseline": [_number(v) for v in self.baseline.tolist()],
            "history": self.history,
            "capacity": self.capacity,
            "about": self.about,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        def matrix(rows: Any) -> Matrix:
            return np.array([[math.nan if v is None else v for v in row] for row in rows], dtype=np.float64)

        return cls(
            run=Run.from_dict(values["run"]),
            accuracy=matrix(values["accuracy"]),
            baseline=matrix([values["baseline"]])[0],
            history=values["history"],
            capacity=values["capacity"],
            accuracy_all=None if values.get("accuracy_all") is None else matrix(values["accuracy_all"]),
            held_out=None if values.get("held_out") is None else matrix(values["held_out"]),
            status=values["status"],
            error=values["error"],
            about=values["about"],
        )


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
