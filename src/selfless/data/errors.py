"""Errors about data files. Each message says which file, what is wrong with it and what to do."""

from __future__ import annotations


class DataError(RuntimeError):
    """Data that cannot be used."""


class MissingData(DataError, FileNotFoundError):
    """Data that is not on this machine and could not be fetched."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class Altered(DataError):
    """A file that differs from the published one: half-written, damaged or changed. It is never used."""
