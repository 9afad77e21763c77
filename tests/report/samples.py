"""Results made up for tests of tables, figures and pages; and the forms that results are shown in."""

import dataclasses
import io

import numpy as np
import pytest
from rich.console import Console

from selfless import MAS, SLNID, report
from selfless.spec import Result, Run

PLAIN, SPARSE = Run(preserve=MAS(0.1), tasks=3), Run(preserve=MAS(0.1), sparsify=SLNID(1e-3), tasks=3)
NOTE = "tiny-imagenet is reduced: 20 of 200 classes"
NASTY = "<script>alert('x')</script>&\"$a_b$[red]|"


def made(run, seed=0, *, drop=0.05, tasks=3, free=0.4, **fields):
    """Return a result whose accuracy falls by `drop` per task; task u starts at 0.97 − u/100, and seeds differ a little."""
    A = np.full((tasks, tasks), 0.1)
    for t in range(tasks):
        for u in range(t + 1):
            A[t, u] = 0.97 - 0.01 * u - drop * (t - u) + 0.001 * seed * (u + 1)
    room = [
        {"tasks": t + 1, "threshold": 0.01, "free_parameters": 1 - (1 - free) * (t + 1) / tasks, "free_neurons": 0.2} for t in range(tasks)
    ]
    about = {"seconds": 1.5, "hardware": "a machine", "torch": "2.13.0", "commit": "abc1234", "tasks": [f"task {u}" for u in range(tasks)]}
    values = {"accuracy": A, "baseline": np.full(tasks, 0.1), "history": [], "capacity": room, "about": about} | fields
    return Result(dataclasses.replace(run, seed=seed), **values)


def failed(run, seed=0, error="the loss was not finite in epoch 1 of task 1"):
    return made(run, seed, accuracy=np.empty((0,)), capacity=[], status="failed", error=error)


def noted(run, seed=0, note=NOTE):
    return made(run, seed, about={"notes": [note]})


def shown(results, width=80):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(report.terminal(results))
    return console.file.getvalue()


def page(results, folder, **options):
    return report.write(results, folder / "report.html", date="today", **options).read_text(encoding="utf-8")


PAIR = [made(PLAIN, s) for s in range(3)] + [made(SPARSE, s, drop=0.01, free=0.6) for s in range(3)]


EVERY = {
    "terminal": lambda results, folder: shown(results, 200),
    "markdown": lambda results, folder: report.markdown(results),
    "latex": lambda results, folder: report.latex(results),
    "csv": lambda results, folder: report.csv(results),
    "page": page,
}
FORMS = [form if form != "page" else pytest.param(form, marks=pytest.mark.slow) for form in EVERY]  # a page draws its figures
