"""Help: fast, complete, and made from the fields of `Run`."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import time
from typing import Annotated, get_args, get_origin

import pytest
from typer.testing import CliRunner

from selfless import Run
from selfless.cli import app
from selfless.cli.app import Commands
from selfless.cli.run import run

runner = CliRunner()


LIST = """
import sys
from typer.main import get_command
from typer.testing import CliRunner
from selfless.cli import app
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
modules = sorted(name for name in sys.modules if name.startswith("selfless.cli."))
assert modules == ["selfless.cli.app", "selfless.cli.flags"], modules      # the list of commands imports none of them
assert len([get_command(app).commands[name] for name in get_command(app).commands]) == 14
assert not {"torch", "numpy"} & set(sys.modules)                            # nor do all commands together load torch
"""


def test_the_list_of_commands_has_the_first_paragraph_of_each() -> None:
    for name, later in Commands.later.items():
        command = later.load(name)
        assert command.name == name
        assert later.help == " ".join(str(command.help).split("\n\n")[0].split())


def test_help_is_quick_and_does_not_load_torch() -> None:
    assert subprocess.run([sys.executable, "-c", LIST]).returncode == 0
    begun = time.process_time()
    done = runner.invoke(app, ["run", "--help"])
    assert done.exit_code == 0
    assert "selfless run" in done.output
    assert time.process_time() - begun < 5


def test_every_field_of_a_run_is_a_flag_with_its_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    shown = runner.invoke(app, ["run", "--help"]).output
    for field in dataclasses.fields(Run):
        option = field.metadata["option"]
        line = next(line for line in shown.splitlines() if (option.flag or f"--{field.name.replace('_', '-')}") + " " in line)
        assert option.help[:100] in line


def test_flags_that_are_not_given_are_none() -> None:
    """Their default is that of the field, or of the TOML file."""
    kinds = {}
    for name, parameter in inspect.signature(run).parameters.items():
        assert get_origin(parameter.annotation) is Annotated
        kinds[name] = get_args(parameter.annotation)[0]
        assert parameter.default is None or name in ("engine", "force", "as_json")
    assert set(kinds) >= {field.name for field in dataclasses.fields(Run)}
    assert (kinds["epochs"], kinds["lr"], kinds["preserve"]) == (int | None, float | None, str | None)
    assert kinds["stream_options"] == list[str] | None


@pytest.mark.parametrize("module", ["selfless", "selfless.cli"])
def test_the_command_line_as_a_module(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("selfless ")


@pytest.mark.slow
def test_every_command_has_help_with_an_example() -> None:
    for words in (
        "run",
        "demo",
        "reproduce",
        "tune",
        "report",
        "capacity",
        "predict",
        "export",
        "bench",
        "watch",
        "data list",
        "data fetch",
        "data prepare",
    ):
        done = runner.invoke(app, [*words.split(), "--help"])
        assert done.exit_code == 0
        assert f"selfless {words}" in done.output


@pytest.mark.slow
def test_a_flag_is_shown_as_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for words in ([], ["run"], ["demo"], ["watch"], ["data"], ["data", "list"], ["data", "prepare"], ["results", "pack"]):
        assert "bool" not in runner.invoke(app, [*words, "--help"]).output
    assert runner.invoke(app, ["demo", "--no-quick"]).exit_code == 2
