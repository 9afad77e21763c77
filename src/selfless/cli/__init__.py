"""The command line: `app` is the typer application, with one file per command; `options` makes the flags of `run` from the fields of `Run`.

It may import everything else, and nothing imports it. Commands import torch only inside their functions, so that `selfless --help` is fast.
"""

from selfless.cli.app import app, main

__all__ = ["app", "main"]
