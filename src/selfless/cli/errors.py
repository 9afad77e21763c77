"""How commands report errors, warnings and interruptions."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops a command as Ctrl-C does, with the exit status 143."""


USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError)


@contextmanager
def reporting_errors(as_json: bool = False, stopped: str = "stopped; the same command goes on from what was saved") -> Iterator[None]:
    """Report user errors as one message with exit status 1, and stop cleanly on Ctrl-C and SIGTERM with the message `stopped`.

    Only a bug gives a traceback. With `as_json` the message is {"error": …} on standard output.
    """

    def stop(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the clean-up
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with _ending_with_the_pipe(), _printing_warnings():
            yield
    except typer.Exit:  # which is a RuntimeError
        raise
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        if as_json:
            typer.echo(json.dumps({"error": message}))
        else:
            print_error(f"error: {message}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt as interruption:
        typer.secho(stopped, err=True)
        raise typer.Exit(143 if isinstance(interruption, Terminated) else 130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _message(error: Exception) -> str | None:
    """Return what to print of an error that a user can correct; None for a bug. An error of the user's own code names its file."""
    from selfless.inputs import describe_error, own_place

    if own_place(error) is not None:
        return describe_error(error)
    if not isinstance(error, USER_ERRORS) or (type(error) is RuntimeError and "CUDA" in str(error)):
        return None
    return str(error) or type(error).__name__


def print_error(message: str) -> None:
    """Print a message to standard error; in red on a terminal with colours."""
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    typer.secho(message, fg=typer.colors.RED, err=True, color=False if plain else None)


@contextmanager
def _printing_warnings() -> Iterator[None]:
    """Print each warning once, as a line on standard error, without its place in the code, which only helps callers of the library."""
    printed = set[str]()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in printed:
            print("note:", *str(message).split(), file=sys.stderr)
        printed.add(str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def _ending_with_the_pipe() -> Iterator[None]:
    """Exit quietly, as by SIGPIPE, when the reader of standard output (for example `head`) has closed it."""
    try:
        yield
    except BrokenPipeError:
        watch = select.poll()
        watch.register(sys.stdout.fileno(), 0)
        if not watch.poll(0):  # standard output is still read: another pipe broke
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the last flush would raise an error
        raise typer.Exit(141) from None
