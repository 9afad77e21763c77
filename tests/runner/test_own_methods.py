"""A method of the user's: an error in it ends its own runs alone, and a change in a file that it imports is noticed."""

from __future__ import annotations

import importlib
import shutil
import sys
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

import selfless
from selfless import NoSparsifier, Run
from selfless.cli import app
from selfless.data import DataError
from selfless.inputs import import_custom
from selfless.runner import Store
from selfless.runner.jobs import is_only_theirs
from tests.runner.small_runs import BASE

FAILS = """
from dataclasses import dataclass
from selfless.sparsify import Sparsifier

@dataclass(frozen=True)
class Fails(Sparsifier):
    strength: float = 1.0
    def penalty(self, x, alpha=None):
        raise KeyError("no such place")
"""
USES = """
from dataclasses import dataclass
from ourshares import share
from selfless import MAS

@dataclass(frozen=True)
class Halved(MAS):
    def consolidate(self, state, parameters, omega):
        return super().consolidate(state, parameters, {n: share() * o for n, o in omega.items()})
"""


def methods(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Two seeds of a sparsifier that raises, and of none."""
    (tmp_path / "ourfault.py").write_text(FAILS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ourfault", raising=False)
    fails = import_custom("ourfault:Fails")(1e-2)
    shared = BASE | {"stream": data, "epochs": 1}
    return [Run(**(shared | {"sparsify": kind, "seed": seed})) for kind in (fails, NoSparsifier()) for seed in (0, 1)]


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_method_that_raises_fails_alone(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    runs = methods(tasks_npz, tmp_path, monkeypatch)
    with pytest.warns(RuntimeWarning, match=r"2 of 4 runs failed; the first: .*ourfault\.py, line 9: KeyError"):
        results = selfless.train(runs, out=tmp_path / "out", device="cpu", workers=workers)
    assert [result.status for result in results] == ["failed", "failed", "done", "done"]
    (alone,) = selfless.train(runs[2:3], device="cpu")
    assert (results[2].accuracy == alone.accuracy).all()


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory. Tried …"), OSError(28, "No space left"), MemoryError(), DataError("gone")]
)
def test_what_is_no_fault_of_a_method_does_not_fail_its_runs(
    tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    broken, sound = (methods(tasks_npz, tmp_path, monkeypatch)[i : i + 2] for i in (0, 2))
    assert not is_only_theirs(error, broken, [broken, sound])
    assert is_only_theirs(RuntimeError("shapes"), broken, [broken, sound])
    assert not is_only_theirs(RuntimeError("shapes"), broken, [broken, broken])
    assert not is_only_theirs(RuntimeError("shapes"), sound, [broken, sound])


def test_without_other_methods_the_error_is_raised(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = methods(tasks_npz, tmp_path, monkeypatch)[:2]
    with pytest.raises(KeyError, match="no such place"):
        selfless.train(runs, out=tmp_path / "out", device="cpu", workers=1)


def test_a_change_in_a_file_that_a_method_imports_is_noticed(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ourhalves.py").write_text(USES)
    (tmp_path / "ourshares.py").write_text("def share():\n    return 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = []
    for share in ("0.5", "0.5", "0.0"):
        (tmp_path / "ourshares.py").write_text(f"def share():\n    return {share}\n")
        for name in ("ourshares", "ourhalves"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        kind = import_custom("ourhalves:Halved")
        made.append(selfless.train(Run(**(BASE | {"stream": tasks_npz, "epochs": 1, "preserve": kind(0.1)})), out=tmp_path / "out"))
    first, again, changed = (result.about["made_from"] for result in made)
    assert first == again != changed


def test_a_record_of_a_method_that_has_changed_says_so(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ourshares.py").write_text("def share():\n    return 0.5\n")
    (tmp_path / "ourhalves.py").write_text(USES.replace("class Halved(MAS):", "class Halved(MAS):\n    decay: float = 0.5"))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("ourshares", "ourhalves"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    kind = import_custom("ourhalves:Halved")
    selfless.train(Run(**(BASE | {"stream": tasks_npz, "epochs": 1, "preserve": kind(0.1, decay=0.7)})), out=tmp_path / "out")
    monkeypatch.delitem(sys.modules, "ourhalves")
    (tmp_path / "ourhalves.py").write_text(USES.replace("class Halved(MAS):", "class Halved(MAS):\n    gamma: float = 0.5"))
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match=r"was made by ourhalves:Halved as it was then .*decay.*move the folder of this run away"):
        Store(tmp_path / "out").all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("what", ["module", "class"])
def test_runs_of_a_method_that_is_gone_are_left_out_of_a_report(
    tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool, what: str
) -> None:
    (tmp_path / "ourshares.py").write_text("def share():\n    return 0.5\n")
    (tmp_path / "ourhalves.py").write_text(USES)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("ourshares", "ourhalves"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    theirs = import_custom("ourhalves:Halved")(0.1)
    runs = [Run(**(BASE | {"stream": tasks_npz, "epochs": 1, "preserve": term})) for term in (theirs, selfless.MAS(0.1))]
    out = tmp_path / "out"
    selfless.train(runs, out=out, device="cpu", workers=1)
    if packed:
        Store(out).pack()
        for run in runs:
            shutil.rmtree(out / run.key)
    monkeypatch.delitem(sys.modules, "ourhalves")
    (tmp_path / "ourhalves.py").unlink() if what == "module" else (tmp_path / "ourhalves.py").write_text("")
    importlib.invalidate_caches()
    message = r"1 of 2 runs are left out: .*ourhalves"
    with pytest.warns(UserWarning, match=message):
        assert [result.run.preserve.name for result in Store(out).all(skip=True)] == ["mas"]
    with pytest.raises(ValueError, match="ourhalves"):
        Store(out).all()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        told = CliRunner().invoke(app, ["report", str(out), "--format", "md"])
    assert (told.exit_code, told.stdout.count("\n| ")) == (0, 2)
    assert "note: 1 of 2 runs are left out" in told.stderr
