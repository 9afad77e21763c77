"""The command line: `app` is the typer application, one file a command; `options` makes the flags of `run` from the fields of `Run`.

It may import every other room, and none imports it. Commands import torch only inside their functions, so that `selfless --help` is fast.
"""

from selfless.cli.app import app, main

__all__ = ["app", "main"]
