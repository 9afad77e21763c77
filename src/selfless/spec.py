"""A run as a value, its result, and the key that identifies both.

The key is a hash of every setting that changes the numbers, and of nothing else: not the device, not the folder. So `results/<key>/` is a
cache: the same run is never trained twice, and a changed run never gets the result of another run.

Every field of `Run` carries an `Option` with its help and its checks; `selfless run` takes its flags from them. The command line reads
the fields before it needs torch, so this module imports torch and numpy only inside functions.
"""

# ruff: noqa: RUF009  (`option` and `chosen_from` are dataclasses.field with metadata)
from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from selfless.fields import chosen_from, naming_unknown, option
from selfless.inputs import check_result, collecting, raise_all
from selfless.terms import Term, parse, term_dict, term_from_dict

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from selfless.data import DataDescription
    from selfless.fields import Converted
    from selfless.trained import TrainedNetwork

FORMAT = 1  # version of the canonical form; a higher number if the same fields give other numbers
NETWORKS = {"vgg-slim": 3}  # version of a network. vgg-slim: He initialisation since 2, a head of zeros since 3
AUGMENTATIONS = {"resized": 2}  # version of an augmentation. resized: since 2 the mirroring does not depend on the size of the crop

PARENT = re.compile("[0-9a-f]{16}@[0-9a-f]{12}")  # the key of a finished run, and the first digits of the SHA-256 of its tensors

Optimizer = Literal["sgd", "adam", "adamw"]
Schedule = Literal["constant", "cosine", "step", "plateau", "halving"]
ON_HELD_OUT = ("plateau", "halving")  # schedules that follow held-out data; a task may end before its last epoch
Select = Literal["last", "held-out", "best-on-test"]
Augmentation = Literal["none", "flip", "crop-flip", "resized"]
Precision = Literal["tf32", "fp32", "bf16"]
Scenario = Literal["task", "domain", "class"]
Anchor = Literal["implicit", "explicit"]
Alpha = Literal["sum", "mean"]
Layers = Literal["hidden", "all"]


@naming_unknown
@dataclass(frozen=True)
class Run:
    """One training on a sequence of tasks. Every field is also a flag of `selfless run` and a key of its TOML file.

    `preserve` and `sparsify` take a term, such as MAS(0.1) or LwF(1) + MAS(0.1), or its text form, "mas:0.1" or "lwf:1+mas:0.1".
    `stream` and `model` also take objects: a Stream or a list of tasks, a function that makes a network or an nn.Module. The run holds
    their names (`selfless.data.given`, `selfless.network.given`).
    The scenarios are explained in `selfless.engine.scenario`. "best-on-test" is marked in every table.
    """

    # Fields that were added later. At these values they are left out of the key.
    later: ClassVar[Mapping[str, Any]] = {"scenario": "task", "ramp": 0, "optimizer": "sgd", "outputs": None, "parent": ""}
    _has_default_tasks: ClassVar[bool] = False

    stream: Converted[str, Any] = option(
        "permuted-mnist", "What", "Tasks: permuted-mnist, split-cifar-100, …, folders:PATH, arrays:FILE.npz."
    )
    model: Converted[str, Any] = option(
        "mlp-128", "What", "Network: mlp-N[-maxout, -lwta], cnn-N, vgg-slim, alexnet, alexnet-cifar, module:factory."
    )
    preserve: Converted[Term, Term | str] = option(
        "mas",
        "What",
        "Preserver, which keeps old tasks: mas:0.1, mas-local, ewc:10, ewc-online, si:1, rwalk, lwf:1, ebll:1, imm, packnet:0.5, hat:0.75, "
        "gpm:0.97, sgp:0.97, ags-cl:1,mu=0.01, none; with a memory of old data: replay:1,samples=200, der:1; as "
        "name[:strength[,option=value]]; module:Class for a custom one; a sum as lwf:1+mas:0.1; recommended: the best measured one.",
        kind=Term,
        shown="mas:0.1",
    )
    sparsify: Converted[Term, Term | str] = option(
        "none",
        "What",
        "Sparsifier, which leaves room for new tasks: slnid:1e-3, slni, snid, sni, l1-rep, decov, …; module:Class for a custom one; "
        "a sum as slnid:1e-3+decov:1e-3.",
        kind=Term,
    )
    tasks: int | None = option(
        None,
        "What",
        "How many tasks of the stream to learn, from the first.",
        kind=int,
        low=1,
        below=10_001,
        shown="5 permuted or rotated ones, else all",
    )
    epochs: int = option(10, "Training", "Epochs per task.", low=1, below=1_000_001)
    batch: int = option(200, "Training", "Samples per step.", low=1, below=2**31)
    optimizer: Optimizer = chosen_from(
        Optimizer, "Training", "Optimizer, new in each task: sgd (with momentum), adam, adamw; Adam wants a smaller lr, as 1e-3."
    )
    lr: float = option(1e-2, "Training", "Learning rate.")
    momentum: float = option(0.9, "Training", "Momentum of SGD, β₁ of Adam.", below=1)
    weight_decay: float = option(0.0, "Training", "Weight decay; decoupled in AdamW.", shown="0")
    schedule: Schedule = chosen_from(
        Schedule,
        "Training",
        "Learning rate over a task: constant, cosine (to 0), step (×0.1 in the last tenth), plateau or halving (on held-out data).",
    )
    ramp: int = option(
        0,
        "Training",
        "Epochs at the start of each task over which the sparsifier grows to its strength; fewer than --epochs.",
        shown="0, full strength at once",
    )
    anchor: Anchor = chosen_from(Anchor, "Training", "Penalty of the preserver: implicit (stable at any strength), explicit (the paper's).")
    alpha: Alpha = chosen_from(Alpha, "Training", "Neuron importance over tasks: sum (the paper's), mean.")
    layers: Layers = chosen_from(Layers, "What", "Where the sparsifier acts: hidden (fully connected layers), all (convolutions as well).")
    select: Select = chosen_from(
        Select, "Training", "Epoch that is kept: last, held-out (the best on held-out data), best-on-test (marked in every table)."
    )
    held_out: float = option(
        0.0, "Training", "Share of the training data that is held out.", below=1, shown="0; 0.1 if the run needs held-out data"
    )
    augment: Augmentation = chosen_from(Augmentation, "Training", "Augmentation of training images: none, flip, crop-flip, resized.")
    precision: Precision = chosen_from(
        Precision, "Training", "Precision of products on a GPU: tf32, fp32, bf16. A CPU uses float32, or bf16 if it supports it."
    )
    scenario: Scenario = chosen_from(
        Scenario,
        "What",
        "At evaluation: the task of an image is known (task); it is not, and tasks share their outputs (domain); it is not, and an image "
        "is one of all classes seen so far (class).",
    )
    stream_options: Mapping[str, Any] = option(
        {}, "What", "key=value for the stream, repeatable: classes_per_task=5.", flag="--stream-option"
    )
    model_options: Mapping[str, Any] = option({}, "What", "key=value for the network, repeatable: dropout=0.5.", flag="--model-option")
    outputs: int | None = option(
        None,
        "What",
        "Output columns of the network; more than the tasks need are kept for tasks to come.",
        kind=int,
        low=1,
        below=1_000_001,
        shown="those of the tasks",
    )
    parent: str = option(
        "", "What", "DIR/KEY of a finished run: its network learns the tasks of --stream next.", flag="--continue", shown="a new network"
    )
    seed: int = option(0, "Training", "The first seed.", below=2**63)

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)  # the dataclass is frozen

        (stream, _), (model, _) = given = _name_objects(self)
        put("stream", stream)
        put("model", model)
        put("_given", given)  # not a field: it keeps the objects alive as long as the run
        problems: list[Exception] = []  # all wrong settings are named at once
        for name, (kinds, what) in _term_kinds().items():
            with collecting(problems):
                term = getattr(self, name)
                put(name, parse(term, kinds, what) if isinstance(term, str) else term)
                if not isinstance(getattr(self, name), Term) or getattr(self, name).role != what:
                    raise TypeError(f"{name}= takes a {what}, or its text form name:strength, not {getattr(self, name)!r}")
        for f in dataclasses.fields(self):
            try:
                put(f.name, f.metadata["option"].check(f.name, getattr(self, f.name)))
            except (ValueError, TypeError) as error:
                problems.append(error)
        raise_all(problems)
        if self.parent and not PARENT.fullmatch(self.parent):
            raise ValueError(f"parent is {self.parent!r}; load('DIR/KEY').continued(stream=…) makes the run that continues DIR/KEY")
        for name in ("seed", "tasks", "held_out"):
            if name in self.stream_options:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{name} is a setting of the run, not an option of its stream: {name}={self.stream_options[name]!r}, or {flag}"
                )
        if self.ramp >= self.epochs:
            raise ValueError(f"ramp is {self.ramp} of {self.epochs} epochs, so λ would never reach its strength; ramp must be below epochs")
        if self.tasks is None and self.stream.removeprefix("joint-").startswith(("permuted-", "rotated-")):
            put("tasks", 5)
            put("_has_default_tasks", True)  # not a field: another stream for this run has its own number
        if self.held_out == 0 and (self.select == "held-out" or self.schedule in ON_HELD_OUT):
            put("held_out", 0.1)

    @property
    def key(self) -> str:
        """The identifier of this run: 16 hexadecimal digits."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:16]

    def canonical(self) -> str:
        """Return the run as JSON with sorted keys and floats at full precision: equal runs give equal text."""
        return self._canonical

    @functools.cached_property  # a study asks for the key of each run many times
    def _canonical(self) -> str:
        version = {"format": FORMAT} | ({"network": NETWORKS[self.model]} if self.model in NETWORKS else {})
        version |= {"augmentation": AUGMENTATIONS[self.augment]} if self.augment in AUGMENTATIONS else {}
        return json.dumps(self.as_dict() | version, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values. A field in `later` at its first value is left out, so that older runs keep their keys."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, first in self.later.items():
            if values[name] == first:
                del values[name]
        return {k: term_dict(v) if isinstance(v, Term) else dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, recorded: bool = True) -> Run:
        """Return the run that `as_dict` describes. Keys that are not fields are ignored.

        recorded   an option that is missing has the value of the time before it existed (`later`); otherwise it has its default
        """
        known = {f.name for f in dataclasses.fields(cls)}
        fields = {k: v for k, v in values.items() if k in known}
        for name, (kinds, _) in _term_kinds().items():
            if isinstance(fields.get(name), Mapping):
                fields[name] = term_from_dict(fields[name], kinds, name, recorded)
        return cls(**fields)

    def __hash__(self) -> int:
        return hash(self.canonical())

    def replace(self, **changes: Any) -> Run:
        """Return the run with some fields changed. A new stream has its own number of tasks, unless this run was given one."""
        if "stream" in changes and self._has_default_tasks:
            changes = {"tasks": None, **changes}
        return dataclasses.replace(self, **changes)

    @property
    def method(self) -> str:
        """The name of the method in tables: "mas:0.1 + slnid:0.001"."""
        return str(self.preserve) if self.sparsify.name == "none" else f"{self.preserve} + {self.sparsify}"


def _name_objects(run: Run) -> tuple[tuple[str, Any], tuple[str, Any]]:
    """Return (name, object) of the stream and of the network of a run; the object is None where a name was given."""
    stream: tuple[str, Any] = (run.stream, None)
    model: tuple[str, Any] = (run.model, None)
    if not isinstance(run.stream, str) or run.stream.startswith("given:"):
        from selfless.data import name_stream

        stream = name_stream(run.stream)
    if not isinstance(run.model, str) or run.model.startswith("given:"):
        from selfless.network.given import name_network

        model = name_network(run.model)
    return stream, model


def _term_kinds() -> dict[str, tuple[Mapping[str, type[Term]], str]]:
    """Return {field of Run: (the terms it accepts, by name; the word for them in messages)}."""
    from selfless.preserve import PRESERVERS
    from selfless.sparsify import SPARSIFIERS

    return {"preserve": (PRESERVERS, "preserver"), "sparsify": (SPARSIFIERS, "sparsifier")}


FREE = ("free_parameters", "free_neurons")
Matrix: TypeAlias = "npt.NDArray[np.float64]"


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a run.

    accuracy      accuracy[t, u] is the accuracy (0 to 1) on task u after training task t, also for tasks that are not trained yet
    baseline      accuracy on each task before any training
    accuracy_all  accuracy among all output columns, if the classes of a task share a wider head (else None)
    held_out      accuracy on the held-out part of each task's training data, by which settings are chosen (None without such a part)
    history       per task, per epoch: {"loss", "accuracy", "held_out"?, "test"?, and the penalties of `selfless.engine.penalties`};
                  task loss and accuracy are of the training batches; −1 is a number that was not finite
    capacity      per task: free parameters and neurons by layer
    status        "done", or "failed" with the reason in `error`
    about         hardware, versions, commit, seconds, notes (such as a reduced data set)
    data          input shape, normalisation, class names and output columns by task (None in records of before this field)
    weights       the file of trained parameters and states, or its tensors by name; None if they were not recorded
    """

    run: Run
    accuracy: Matrix
    baseline: Matrix = field(repr=False)
    history: list[list[dict[str, float]]] = field(repr=False)
    capacity: list[dict[str, Any]] = field(repr=False)
    accuracy_all: Matrix | None = field(default=None, repr=False)
    held_out: Matrix | None = field(default=None, repr=False)
    status: Literal["done", "failed"] = "done"
    error: str = ""
    about: dict[str, Any] = field(default_factory=dict, repr=False)
    data: DataDescription | None = field(default=None, repr=False)
    weights: Path | Mapping[str, Tensor] | None = field(default=None, repr=False)

    def model(self, task: int | str | None = None, *, network: Any = None) -> TrainedNetwork:
        """Return the trained network in eval mode. It takes images as the data set has them and returns logits.

        task      a number, counted from 0, or a name: the network as that task is evaluated, with the outputs of its classes alone. None:
                  as the newest task is evaluated, with the outputs of all classes
        network   a module or a function that makes it, if the run's network was passed as an object in another program
        """
        from selfless.trained import model_of

        return model_of(self, task, network)

    def continued(self, stream: Any, **changes: Any) -> Run:
        """Return the run that continues this one with the tasks of `stream`. All other settings are the same, except for `changes`."""
        from selfless.trained import digest

        own: dict[str, Any] = {"tasks": None, "stream_options": {}, "outputs": None, "parent": f"{self.run.key}@{digest(self)}"}
        return dataclasses.replace(self.run, **(own | changes), stream=stream)

    @property
    def average(self) -> float:
        """Average accuracy over all tasks after the last one."""
        from selfless import metrics

        return metrics.average(self.accuracy) if self.status == "done" and self.is_evaluated else math.nan

    @property
    def is_evaluated(self) -> bool:
        """False if the accuracy on some task is unknown: an old task of a continued run, whose data were not found."""
        return not self.run.parent or not any(math.isnan(value) for t, row in enumerate(self.accuracy.tolist()) for value in row[: t + 1])

    def summary(self) -> dict[str, float]:
        """Return average, learning_accuracy, forgetting, backward_transfer, forward_transfer, free_parameters and free_neurons.

        The last two are absent where nothing was measured: without importances (as with no preserver) it is not known what is free.
        """
        from selfless import metrics

        if self.status != "done":
            return {}
        last = self.capacity[-1] if self.capacity else {}
        free = {name: float(last[name]) for name in FREE if last.get(name) is not None}
        if not self.is_evaluated:
            known = {"learning_accuracy": float(self.accuracy.diagonal().mean())}
            return dict.fromkeys(("average", "forgetting", "backward_transfer", "forward_transfer"), math.nan) | known | free
        return metrics.summary(self.accuracy, self.baseline) | free

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON values; NaN becomes None."""
        return {
            "key": self.run.key,
            "run": self.run.as_dict(),
            "status": self.status,
            "error": self.error,
            "summary": self._recorded_summary(),
            "accuracy": [[_number(v) for v in row] for row in self.accuracy.tolist()],
            "accuracy_all": None if self.accuracy_all is None else self.accuracy_all.tolist(),
            "held_out": None if self.held_out is None else self.held_out.tolist(),
            "baseline": [_number(v) for v in self.baseline.tolist()],
            "history": self.history,
            "capacity": self.capacity,
            "about": self.about,
        } | ({} if self.data is None else {"data": self.data.as_dict()})

    def _recorded_summary(self) -> dict[str, float | None]:
        """Return the summary as JSON values; what was not measured is None."""
        found = self.summary()
        known = {k: _number(v) for k, v in found.items() if k not in FREE}
        return known | {name: _number(found.get(name, math.nan)) for name in FREE if found}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        """Return the result that `as_dict` describes. Raise ValueError, with the place, if the values are no such result."""
        import numpy as np

        from selfless.data import DataDescription

        check_result(values)

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
            data=None if values.get("data") is None else DataDescription.from_dict(values["data"]),
        )


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
