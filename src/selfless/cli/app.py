"""The typer application: every command, and the options before them. A command is imported when it is used: `selfless --help` is fast."""

from __future__ import annotations

from typing import Annotated, ClassVar

import typer

from selfless import __version__
from selfless.cli.flags import App, Later, LazyGroup


class Commands(LazyGroup):
    """Every command, in the order of its help: its module in this folder, its function, the first paragraph of its help.

    A test compares the texts with those of the commands.
    """

    later: ClassVar[dict[str, Later]] = {
        "run": Later("run", "run", "Train a sequence of tasks and report accuracy, forgetting and the capacity that is left."),
        "compare": Later(
            "compare", "compare", "Train several methods with the same settings and seeds, and show how far each is from the best one."
        ),
        "demo": Later("demo", "demo", "Compare MAS with MAS + SLNID on five permuted-MNIST tasks: a table, pictures and a report."),
        "reproduce": Later(
            "reproduce",
            "reproduce",
            "Regenerate tables and figures of the paper beside its published values, and say for each claim whether it holds.",
        ),
        "tune": Later(
            "tune",
            "tune",
            "Choose λ by the paper's rule of thumb, and with --preserve λ_Ω too: train several strengths, compare held-out accuracies.",
        ),
        "check": Later(
            "check",
            "check",
            "Test a method of your own in seconds: the same results in a loop, a run and a fleet, a state that can be saved, …",
        ),
        "watch": Later(
            "watch",
            "watch",
            "Follow a study that another process trains: which runs are done, running, waiting, failed and why; speed and time left.",
        ),
        "report": Later(
            "report",
            "report",
            "Make one self-contained HTML page of everything recorded in DIR, or its tables. Experiments come first.",
        ),
        "capacity": Later(
            "capacity",
            "capacity",
            "Show how much room each recorded run has left after each task, and forecast how many more tasks fit.",
        ),
        "predict": Later(
            "trained",
            "predict",
            "Classify pictures with a trained network: the most probable classes and their probabilities.",
            "PREDICT_EXAMPLES",
        ),
        "export": Later("trained", "export", "Write a trained network into a file for other programs.", "EXPORT_EXAMPLES"),
        "bench": Later(
            "bench",
            "bench",
            "Measure time and memory on this machine, as ratios to plain PyTorch in the same rounds; a time is the minimum over rounds.",
        ),
        "data": Later("data", "app", "List, fetch, check and prepare published data sets."),
        "results": Later("records", "app", "Pack recorded runs into one file, take one out by its key, join folders."),
    }


app = App(
    cls=Commands,
    help="Continual learning that leaves room for later tasks: MAS, EWC, SI, … with SLNID (Selfless Sequential Learning, ICLR 2019).",
    epilog="Examples:  selfless run --sparsify slnid:1e-3  ·  selfless run --help  ·  selfless report results",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"selfless {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None: ...


def main() -> None:
    """The entry point `selfless`."""
    app()
