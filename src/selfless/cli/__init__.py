"""The command line: `app` is the typer application, with one file per command; `options` makes the flags of `run` from the fields of `Run`.

Commands import torch only inside their functions, so that `selfless --help` is fast.

Imports bench, capacity, data, engine, experiments, fields, files, inputs, integrations, metrics, preserve, report, runner, sparsify, spec,
terms, testing and trained.
Imported by nothing.
"""

from selfless.cli.app import app, main

__all__ = ["app", "main"]
