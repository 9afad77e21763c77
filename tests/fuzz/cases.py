"""Run cases: each is one kind and one number, ends within some seconds, and raises nothing but errors with a clear message."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.targets import TARGETS
from tests.fuzz.world import Traceback, Vague, World, complain

SECONDS = 20.0  # a case that takes longer counts as a hang
EXPECTED = (ValueError, TypeError, OSError, RuntimeError)  # what the command line prints as one message


class Hang(BaseException):
    """A case that did not end."""


@dataclass
class Tally:
    """How many cases of each kind ended well, and what was found: (kind, number, traceback)."""

    counts: Counter[str] = field(default_factory=Counter)
    found: list[tuple[str, int, str]] = field(default_factory=list)


@contextlib.contextmanager
def world() -> Iterator[World]:
    """Work in a temporary folder with a small world in it. A file that a case leaves in its parent folder is an error."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="selfless-fuzz-") as place:
        folder = Path(place) / "inside" / "world"
        folder.mkdir(parents=True)
        os.chdir(folder)
        try:
            with quiet():
                made = World(folder)
            yield made
            assert [path.name for path in Path(place).iterdir()] == ["inside"], "a case wrote outside of its folder"
            assert [path.name for path in (Path(place) / "inside").iterdir()] == ["world"], "a case wrote outside of its folder"
        finally:
            os.chdir(here)
            with quiet():
                gc.collect()  # files that a refused case left open are closed here, where warnings are ignored


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run_case(made: World, kind: str, number: int) -> str | None:
    """Run one case; return its traceback if it is a find, else None."""

    def stop(*_: Any) -> None:
        raise Hang(f"more than {SECONDS} s")

    rng = random.Random(f"{kind}:{number}")
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with quiet():
            TARGETS[kind](made, rng)
    except (Hang, Traceback, Vague):
        return traceback.format_exc()
    except EXPECTED as error:
        try:
            complain(str(error))
        except Vague:
            return traceback.format_exc()
    except Exception:
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


def run_cases(kinds: Iterable[str], first: int, cases: int, seconds: float) -> Tally:
    """Run cases of all kinds in turn: at most so many, for at most so many seconds."""
    tally, kinds = Tally(), list(kinds)
    with world() as made:
        started = time.monotonic()
        for number in range(first, first + cases):
            for kind in kinds:
                if time.monotonic() - started > seconds:
                    return tally
                tally.counts[kind] += 1
                if (found := run_case(made, kind, number)) is not None:
                    tally.found.append((kind, number, found))
    return tally
