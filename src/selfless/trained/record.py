"""What a recorded run keeps for its network: the tensors, and which task is meant. `Result.model` is `model_of`."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from selfless.data import DataDescription, checksum
from selfless.inputs import check_recorded
from selfless.network.given import PREFIX, name_network
from selfless.trained.network import TrainedNetwork, restore

AGAIN = "train it again with selfless run --force --checkpoints, or train(run, out=DIR, force=True, checkpoints=True)"


class Record(Protocol):
    """The parts of a `Result` that are used here."""

    @property
    def run(self) -> Any: ...
    @property
    def history(self) -> Sized: ...
    @property
    def status(self) -> str: ...
    @property
    def error(self) -> str: ...
    @property
    def about(self) -> Mapping[str, Any]: ...
    @property
    def data(self) -> DataDescription | None: ...
    @property
    def weights(self) -> Path | Mapping[str, Tensor] | None: ...


def model_of(record: Record, task: int | str | None = None, network: Any = None) -> TrainedNetwork:
    """Return the trained network as a task is evaluated; see `Result.model`."""
    run, data, tensors = record.run, described(record), read_tensors(record)
    name, held = name_network(run.model if network is None else network)
    if name.startswith(PREFIX) and held is None:
        raise ValueError(
            f"the network of run {run.key} was passed as an object; pass it again, or a function that makes it: result.model(network=…). "
            "To use it from the command line, put the function into a module (mynet.py) and train with --model mynet:function"
        )
    if network is None and ":" in name and held is None:
        check_recorded(name)
    options, terms, chosen = run.model_options, run.preserve.parts, find_task(record, task)
    return restore(name, options, terms, tensors, data, task=chosen, learned=len(record.history), scenario=run.scenario)


def find_task(record: Record, task: int | str | None) -> int | None:
    """Return the number of a task, counted from 0, from its number or name; None for None."""
    names = [one.name for one in described(record).tasks]
    if isinstance(task, str):
        same = [t for t, name in enumerate(names) if name == task]
        if len(same) > 1:
            raise ValueError(
                f"run {record.run.key} has {len(same)} tasks named {task!r}: {', '.join(map(str, same))}, from 0; give a number"
            )
        found: Any = same[0] if same else task
    else:
        found = task
    if found is None or (isinstance(found, int) and not isinstance(found, bool) and 0 <= found < len(names)):
        return found
    shown = ", ".join(f"{t} ({name})" for t, name in enumerate(names))
    raise ValueError(f"run {record.run.key} has no task {task!r}; its tasks, from 0: {shown}")


def described(record: Record) -> DataDescription:
    """Return the description of a record's data. Raise ValueError if it has none."""
    if record.data is None:
        raise ValueError(f"run {record.run.key} was recorded before records described their data; {AGAIN}")
    return record.data


def digest(record: Record) -> str:
    """Return the first twelve digits of the SHA-256 of the file of a run's tensors."""
    if record.status == "done" and isinstance(record.weights, Mapping):
        raise ValueError(f"run {record.run.key} is not recorded, so it cannot be continued; train it with out=DIR")
    read_tensors(record)  # says why, if there are none
    assert isinstance(record.weights, Path)
    return checksum(record.weights)[:12]


def read_tensors(record: Record) -> Mapping[str, Tensor]:
    """Return the recorded parameters, buffers, states and α by name. Raise ValueError if there are none."""
    key = record.run.key
    if record.status != "done":
        raise ValueError(f"run {key} has no trained network, because it failed: {record.error}")
    if record.weights is None:
        raise ValueError(f"run {key} has no recorded weights: packed results and checkpoints=False keep none; {AGAIN}")
    if isinstance(record.weights, Mapping):
        return record.weights
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if record.about.get("checkpoint") not in (None, checksum(record.weights)):
            raise ValueError("its checksum is not the recorded one")
        found: dict[str, Tensor] = load_file(record.weights)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{record.weights} is damaged ({error}); {AGAIN}") from error
    return found
