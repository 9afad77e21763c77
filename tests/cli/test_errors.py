"""Errors, warnings and closed pipes: one message, never a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from selfless.cli import app
from selfless.cli.errors import reporting_errors
from tests.cli.small_commands import small

runner = CliRunner()


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line_without_a_path(stream: str, tmp_path: Path) -> None:
    """Two runs that are no fleet warn twice; a person is told once. The same in workers: tests/runner/test_resuming.py."""
    words = ["--preserve", "packnet:0.5", "--scenario", "class", "--seeds", "2", "--workers", "1", "--json"]
    done = runner.invoke(app, small(stream, tmp_path, *words))
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["runs"]) == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("note: PackNet evaluates a task with the parameters it keeps for that task")
    assert ".py" not in line


@pytest.mark.parametrize("write", ["print", "open_console().print"])
def test_a_reader_that_stops_reading_sees_no_error(write: str) -> None:
    """`selfless … | head`: no error, no traceback."""
    code = (
        "import typer; from selfless.cli.errors import reporting_errors; from selfless.cli.terminal import open_console\n"
        f"def f():\n  write = {write}\n  with reporting_errors():\n    for i in range(10**6): write(i)\ntyper.run(f)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b"0\n"
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == 141


def raising(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("action", "status"),
    [
        (raising(ValueError("wrong")), 1),
        (raising(KeyboardInterrupt()), 130),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 143),
        (raising(typer.Exit(7)), 7),
        (lambda: None, 0),
    ],
)
def test_exit_statuses(action: Callable[[], None], status: int) -> None:
    wrapped = typer.Typer()

    @wrapped.command()
    def command() -> None:
        with reporting_errors(stopped="stopped here"):
            action()

    done = runner.invoke(wrapped, [])
    assert done.exit_code == status
    assert ("stopped here" in done.output) == (status in (130, 143))
    assert ("error: wrong" in done.output) == (status == 1)


def test_a_bug_keeps_its_traceback() -> None:
    wrapped = typer.Typer()

    @wrapped.command()
    def command() -> None:
        with reporting_errors():
            raise KeyError("a bug")

    assert isinstance(runner.invoke(wrapped, []).exception, KeyError)


@pytest.mark.parametrize(("words", "status"), [(["run", "--foo"], 2), (["predict"], 2), (["rnu"], 2), (["run", "--epochs", "0"], 1)])
def test_the_exit_status_is_that_of_the_documentation(words: list[str], status: int) -> None:
    assert runner.invoke(app, words).exit_code == status
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert f"| {status} |" in page


def test_two_methods_of_one_kind_are_refused() -> None:
    """Only the last one would be trained, without a word. Of other options the last one counts."""
    done = runner.invoke(app, ["run", "--preserve", "mas:1", "--preserve=lwf:1"])
    assert done.exit_code == 2
    assert "--preserve is given 2 times, but takes one method" in " ".join(done.output.split()).replace("│ ", "").replace(" │", "")
    assert "nowhere" in runner.invoke(app, ["run", "--stream", "permuted-mnist", "--stream", "nowhere"]).output
