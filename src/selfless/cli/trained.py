"""`selfless predict` and `selfless export`: use the trained network of a recorded run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfless.cli.errors import reporting_errors
from selfless.cli.options import AsJson

if TYPE_CHECKING:
    from selfless.spec import Result
    from selfless.trained import Prediction

Place = Annotated[Path, typer.Argument(metavar="DIR/KEY", help="The folder of a recorded run; selfless run prints it.")]
TASK_RULE = (
    "A task, by its number from 1 or its name. Where the number of one task is the name of another: number:1 or name:1. "
    "In Python, tasks are numbered from 0."
)
TaskOption = Annotated[str | None, typer.Option("--task", metavar="N|NAME", help=TASK_RULE, show_default="all classes")]

PREDICT_EXAMPLES = """[bold]Examples[/bold]

  selfless predict results/KEY picture.png                  [dim]# among all classes[/dim]
  selfless predict results/KEY --task 2 a.png b.png --json  [dim]# as task 2 is evaluated, among its classes[/dim]
  selfless predict results/KEY --task night picture.png     [dim]# a task by its name[/dim]"""

EXPORT_EXAMPLES = """[bold]Examples[/bold]

  selfless export results/KEY --format safetensors          [dim]# the weights of the plain network[/dim]
  selfless export results/KEY --format onnx --task 2        [dim]# images in, logits of task 2 out; needs onnx and onnxscript[/dim]
  selfless export results/KEY --format torch-export --out model.pt2"""


def predict(
    place: Place,
    pictures: Annotated[list[Path], typer.Argument(metavar="PICTURE…", help="Image files.")],
    task: TaskOption = None,
    top: Annotated[int, typer.Option(min=1, help="How many classes to show of each picture.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Classify pictures with a trained network: the most probable classes and their probabilities.

    A picture of another size is scaled and cropped at the centre, as training does with pictures of several sizes; the output shows both.
    """
    with reporting_errors(as_json):
        from selfless.runner import load
        from selfless.trained import predict

        result = load(place)
        chosen = _find_task(result, task)
        notes = _check_task(result, chosen)
        found = predict(result.model(chosen), pictures, top=top)
        if as_json:
            about = {"key": result.run.key, "task": _name(result, chosen), "task_number": None if chosen is None else chosen + 1}
            typer.echo(json.dumps({**about, "notes": notes, "pictures": _as_json(found)}))
            return
        for note in notes:
            typer.echo(f"note: {note}", err=True)
        for one in found:
            shown = "  ".join(f"{name} {100 * chance:.1f} %" for name, chance in one.classes)
            height, width = one.size
            fitted = f"  ({width}×{height}, scaled and cropped to {one.taken[1]}×{one.taken[0]})" if one.is_fitted else ""
            typer.echo(f"{one.path}: {shown}{fitted}")


def export(
    place: Place,
    form: Annotated[str, typer.Option("--format", help="safetensors, onnx or torch-export.")] = "safetensors",
    task: TaskOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write.", show_default="DIR/KEY/model[-task-N] with the format's ending")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a trained network into a file for other programs.

    The file is read again, and its outputs for random images are compared with those of the network, before success is printed.
    """
    with reporting_errors(as_json):
        from selfless.runner import load
        from selfless.trained import FORMATS, export

        if form not in FORMATS:
            raise ValueError(f"there is no format {form!r}; choose one of {', '.join(FORMATS)}")
        result = load(place)
        chosen = _find_task(result, task)
        file = out or place / f"model{'' if chosen is None else f'-task-{chosen + 1}'}{FORMATS[form][0]}"
        model = result.model(chosen)
        difference = export(model, file, form)
        if as_json:
            classes = {"task": _name(result, chosen), "classes": model.classes}
            typer.echo(json.dumps({"file": str(file), "format": form, "largest_difference": difference, **classes}))
            return
        typer.echo(file)
        typer.echo(f"read again: the outputs differ by at most {difference:.1g}", err=True)


def _find_task(result: Result, task: str | None) -> int | None:
    """Return the number of a task, counted from 0, from what the command line says of it (`TASK_RULE`)."""
    from selfless.trained import described, find_task

    if task is None:
        return None
    names = [one.name for one in described(result).tasks]
    shown = "; its tasks: " + ", ".join(f"{n} ({name})" for n, name in enumerate(names, 1))
    kind, _, rest = task.partition(":")
    by_name = rest if kind == "name" else task if kind != "number" else None
    by_number = rest if kind == "number" else task if kind != "name" else ""
    named = [t for t, name in enumerate(names) if name == by_name]
    numbered = [int(by_number) - 1] if by_number.isdecimal() and 1 <= int(by_number) <= len(names) else []
    found = {*named, *numbered}
    if len(found) == 1:
        return find_task(result, found.pop())
    if named and numbered:
        raise ValueError(
            f"--task {task} is the number of the task {names[numbered[0]]!r}, and the name of task {named[0] + 1}; write "
            f"--task number:{task} or --task name:{task}"
        )
    if named:
        raise ValueError(f"run {result.run.key} has {len(named)} tasks named {by_name!r}; give the number{shown}")
    raise ValueError(f"run {result.run.key} has no task {task!r}{shown}")


def _check_task(result: Result, task: int | None) -> list[str]:
    """Return notes about what a prediction means. Raise ValueError where it would mean nothing."""
    tasks = () if result.data is None else result.data.tasks
    if result.run.scenario != "task" or len(tasks) < 2:
        return []
    needy = [term.label for term in result.run.preserve.parts if term.needs_task]
    if task is not None:
        if tasks[task].transform:
            raise ValueError(f"{tasks[task].name} was learned on images with {tasks[task].transform}; a plain picture is not one of them")
        return [f"task {task + 1} of {len(tasks)}: {tasks[task].name}"]
    if needy:
        raise ValueError(f"{needy[0]} keeps a network for each task, so a picture needs its task: --task 1 … {len(tasks)}, or a name")
    if len({one.columns for one in tasks}) > 1:
        return ["each task was trained among its own classes alone, so classes of different tasks compare badly; --task names the task"]
    return []


def _name(result: Result, task: int | None) -> str | None:
    return None if task is None or result.data is None else result.data.tasks[task].name


def _as_json(found: list[Prediction]) -> list[dict[str, object]]:
    return [
        {
            "path": str(one.path),
            "classes": [{"name": name, "probability": chance} for name, chance in one.classes],
            "size": list(one.size),
            "fitted_to": list(one.taken) if one.is_fitted else None,
        }
        for one in found
    ]
