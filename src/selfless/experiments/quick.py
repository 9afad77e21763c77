"""The quick version of an experiment: two tasks of one epoch, a few images, a narrow network, at most two candidates per cell.

Networks with convolutions, which are slow on a CPU, have two candidates for SLNID and one for other rows. An autoencoder is fitted in a few
steps. A quick version runs all of the code in seconds and proves nothing; every table says that the data was limited.
"""

from __future__ import annotations

import dataclasses

from selfless.experiments.base import Cell, Experiment
from selfless.spec import Run

LIMIT = {"permuted-mnist": 200, "split-cifar-100": 20, "blurred-cifar-100": 20, "split-tiny-imagenet": 4, "objects": 6}  # images per task

WIDE = "selfless.experiments.wide_networks:"
STEPS = 20  # of a preserver that fits something between tasks


def shrink(experiment: Experiment) -> Experiment:
    """Return the quick version of an experiment."""
    return dataclasses.replace(experiment, quick=True, cells=tuple(_cell(cell) for cell in experiment.cells))


def _cell(cell: Cell) -> Cell:
    slow = any(not run.model.startswith("mlp") for run in cell.candidates) and not cell.row.startswith("SLNID")
    ends = cell.candidates if len(cell.candidates) < 3 else (cell.candidates[0], cell.candidates[-1])
    ends = ends[:1] if slow else ends
    full = cell.choice
    choice = dataclasses.replace(
        full, seeds=full.seeds[:1], rounds=tuple((min(2, n), seeds[:1]) for n, seeds in full.rounds[:1]), extend=min(1, full.extend)
    )
    return dataclasses.replace(cell, candidates=tuple(_run(run, cell.then.get("tasks")) for run in ends), choice=choice)


def _run(run: Run, tasks: int | None) -> Run:
    stream = run.stream.removeprefix("joint-")
    limit = {**run.stream_options, "limit": LIMIT.get(stream.partition(":")[0], 20)}
    first = min(2, run.tasks or 2) if tasks is None else run.tasks
    narrow = {"stream_options": limit, "epochs": 1, "ramp": 0, "tasks": first, "batch": 40, "precision": "fp32"}
    if run.model.startswith("cnn"):
        narrow["model"] = "cnn-16"
    if run.model == "mlp-2000":
        narrow["model"] = "mlp-200"
    if run.model == "vgg-slim":
        narrow["model_options"] = {"fc_units": 16}
    if run.model == "alexnet-cifar":
        narrow["model_options"] = {**run.model_options, "fc_units": 16}
    if run.model == "alexnet":
        narrow["model_options"] = {**run.model_options, "fc": "random", "fc_units": 16}
    if run.model.startswith(WIDE):
        name = run.model.removeprefix(WIDE)
        narrow["model_options"] = {"width": 8} | ({"depth": 1} if name != "resnet18" else {}) | ({"steps": 2} if name == "lora_vit" else {})
    if "steps" in {field.name for field in dataclasses.fields(run.preserve)}:
        narrow["preserve"] = dataclasses.replace(run.preserve, **{"steps": STEPS})
    return dataclasses.replace(run, **narrow)  # type: ignore[arg-type]
