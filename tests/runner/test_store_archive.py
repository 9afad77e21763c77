"""The archive of results: read as folders are, whole or refused, and never a reason to train again."""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import selfless
from selfless import SLNID, Run, report
from selfless.cli import app
from selfless.experiments.reproduce import reproduce
from selfless.report import experiments as reporting
from selfless.report import write
from selfless.runner import Store
from selfless.runner.archive import NAME, write_archive
from selfless.spec import Result
from tests.fabricated import result as fabricated
from tests.fabricated import score, small, trainer

RUNS = [Run(seed=seed, sparsify=sparsify) for sparsify in (SLNID(1e-3), SLNID(1e-4)) for seed in (3, 1, 2)]


def record(out: Path, runs: list[Run] = RUNS, average: float = 0.9) -> list[str]:
    """Record made-up results, a second apart; return their keys in that order."""
    store = Store(out, checkpoints=False)
    for second, run in enumerate(runs):
        store.record(fabricated(run, average), dict)
        os.utime(store.folder(run) / "metrics.json", (second, second))
    return [run.key for run in runs]


def folders(out: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in out.glob("*/metrics.json")}


def same(a: Result | None, b: Result | None) -> bool:
    return a is not None and b is not None and a.as_dict() == b.as_dict()


def test_packing_keeps_every_result_and_its_order(tmp_path: Path) -> None:
    keys = record(tmp_path)
    before = {run: Store(tmp_path).load(run) for run in RUNS}
    files = folders(tmp_path)
    assert Store(tmp_path).pack() == tmp_path / NAME
    assert folders(tmp_path) == files  # they are removed only if one says so
    assert Store(tmp_path).pack(remove=True) == tmp_path / NAME
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    store = Store(tmp_path)
    assert [result.run.key for result in store.all()] == keys
    assert all(same(store.load(run), before[run]) and same(store.get(run.key), before[run]) for run in RUNS)
    assert store.load(Run(seed=99)) is None
    assert store.get("0" * 16) is None
    for key in keys:  # byte by byte what was recorded
        assert store.extract(key, tmp_path / "out") == tmp_path / "out" / key
    assert folders(tmp_path / "out") == files
    assert json.loads((tmp_path / "out" / keys[0] / "spec.json").read_text()) == RUNS[0].as_dict()


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    record(tmp_path)
    first = Store(tmp_path).pack().read_bytes()
    assert Store(tmp_path).pack(remove=True).read_bytes() == first
    assert Store(tmp_path).pack().read_bytes() == first  # from the archive alone


def test_a_folder_wins_over_the_archive(tmp_path: Path) -> None:
    keys = record(tmp_path)
    Store(tmp_path).pack(remove=True)
    record(tmp_path, RUNS[:1], average=0.5)
    store = Store(tmp_path)
    found = store.load(RUNS[0])
    assert found is not None
    assert found.average < 0.6
    assert [result.run.key for result in store.all()] == [*keys[1:], keys[0]]  # once, as the latest
    store.pack(remove=True)
    again = Store(tmp_path).all()
    assert [result.run.key for result in again] == [*keys[1:], keys[0]]
    assert same(again[-1], found)


def test_packing_leaves_tensors_and_what_is_chosen_by(tmp_path: Path) -> None:
    record(tmp_path, RUNS[:2])
    record(tmp_path / "choosing", RUNS[2:3])
    (tmp_path / RUNS[0].key / "checkpoint.safetensors").write_bytes(b"tensors")
    Store(tmp_path).pack(remove=True)
    assert {path.name for path in tmp_path.iterdir()} == {NAME, RUNS[0].key, "choosing"}
    assert (tmp_path / RUNS[0].key / "metrics.json").is_file()
    Store(tmp_path / "choosing").pack(remove=True)
    assert {result.run.key for result in Store(tmp_path).all()} == {run.key for run in RUNS[:2]}
    assert Store(tmp_path / "choosing").load(RUNS[2]) is not None


def test_archives_below_a_folder_are_found(tmp_path: Path) -> None:
    for name, run in (("b", RUNS[0]), ("a", RUNS[1])):
        record(tmp_path / name, [run])
        Store(tmp_path / name).pack(remove=True)
    assert [result.run.key for result in Store(tmp_path).all()] == [RUNS[1].key, RUNS[0].key]


def test_one_run_of_an_archive_is_read_as_its_folder_was(tmp_path: Path) -> None:
    keys = record(tmp_path)
    shown = CliRunner().invoke(app, ["capacity", str(tmp_path / keys[2])]).output
    Store(tmp_path).pack(remove=True)
    assert [result.run.key for result in Store(tmp_path / keys[2]).all()] == [keys[2]]
    assert CliRunner().invoke(app, ["capacity", str(tmp_path / keys[2])]).output == shown


def test_nothing_to_pack_and_unknown_keys_are_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no results to pack; train something first"):
        Store(tmp_path).pack()
    keys = record(tmp_path)
    with pytest.raises(ValueError, match=r"has no run 'ffff'\. Its keys: selfless capacity"):
        Store(tmp_path).extract("ffff", tmp_path / "out")
    (tmp_path / keys[0]).rename(tmp_path / "renamed")
    with pytest.raises(ValueError, match=f"holds run {keys[0]}, not renamed"):
        Store(tmp_path).pack()


# ----------------------------------------------------------------------------------------------------------------- damage
def lines(path: Path) -> list[str]:
    return lzma.decompress(path.read_bytes()).decode().splitlines()


def rewrite(path: Path, changed: list[str]) -> None:
    path.write_bytes(lzma.compress("\n".join([*changed, ""]).encode()))


def swap_runs(path: Path) -> None:
    head, *rest = lines(path)
    rewrite(path, [head, *reversed(rest)])


def change_settings(path: Path) -> None:
    head, first, *rest = lines(path)
    rewrite(path, [head, first.replace('"epochs":10', '"epochs":11'), *rest])


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "a bit flipped": lambda path: path.write_bytes(path.read_bytes()[:200] + b"\xff" + path.read_bytes()[201:]),
    "empty": lambda path: path.write_bytes(b""),
    "not xz": lambda path: path.write_text("results"),
    "a line lost": lambda path: rewrite(path, lines(path)[:-1]),
    "another format": lambda path: rewrite(path, ['{"format":99,"keys":[]}']),
    "no keys": lambda path: rewrite(path, ["[]"]),
    "lines swapped": swap_runs,
    "settings edited": change_settings,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_archive_is_one_message_with_the_remedy(how: str, tmp_path: Path) -> None:
    record(tmp_path)
    archive = Store(tmp_path).pack(remove=True)
    DAMAGE[how](archive)
    for read in (lambda: Store(tmp_path).load(RUNS[0]), lambda: Store(tmp_path).all()):
        with pytest.raises(ValueError, match=r"runs\.jsonl\.xz is not a readable archive of results \(.+\)\. Restore it from a copy"):
            read()
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 1
    assert "Traceback" not in done.output


def test_an_archive_is_whole_or_absent(tmp_path: Path) -> None:
    record(tmp_path)
    path = Store(tmp_path).pack()
    before = path.read_bytes()
    broken = [fabricated(RUNS[0], 0.9).as_dict() | {"summary": {"average": float("nan")}}]
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_archive(path, broken)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob(".runs*"))


# --------------------------------------------------------------------------------------------------------------- training
def arrays(folder: Path, seed: int = 0) -> Run:
    import numpy as np

    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(4), 20)
    np.savez(folder / "tasks.npz", x_train=rng.random((80, 6), dtype=np.float32), y_train=y, x_test=rng.random((80, 6)), y_test=y)
    return Run(stream=f"arrays:{folder / 'tasks.npz'}", stream_options={"kind": "permuted"}, model="mlp-8", tasks=2, epochs=1, batch=40)


def test_an_archived_result_is_not_trained_again_unless_forced(tmp_path: Path) -> None:
    run, out = arrays(tmp_path), tmp_path / "out"
    first = selfless.train(run, out=out, checkpoints=False)
    Store(out).pack(remove=True)
    before = (out / NAME).read_bytes()
    assert same(selfless.train(run, out=out), first)
    assert [path.name for path in out.iterdir()] == [NAME], "something was trained"
    again = selfless.train(run, out=out, force=True)
    assert (again.accuracy == first.accuracy).all()
    assert (out / run.key / "metrics.json").is_file()
    assert (out / NAME).read_bytes() == before


def test_an_archived_result_of_other_data_is_trained_again(tmp_path: Path) -> None:
    run, out = arrays(tmp_path), tmp_path / "out"
    first = selfless.train(run, out=out, checkpoints=False)
    Store(out).pack(remove=True)
    arrays(tmp_path, seed=1)
    second = selfless.train(run, out=out, checkpoints=False)
    assert second.about["made_from"] != first.about["made_from"]
    assert (out / run.key / "metrics.json").is_file()


# ---------------------------------------------------------------------------------------------------------------- reports
@pytest.mark.slow
def test_reports_are_the_same_from_an_archive(tmp_path: Path) -> None:
    reproduce(small(), seeds=3, out=tmp_path, train=trainer(score))
    other = fabricated(dataclasses.replace(RUNS[0], model="mlp-9"), 0.7)
    Store(tmp_path, checkpoints=False).record(other, dict)

    def forms() -> list[str]:
        records, results = [reporting.marked(found) for found in reporting.load(tmp_path)], Store(tmp_path).all()
        texts = [form(records) for form in (reporting.markdown, reporting.csv, reporting.latex)]
        texts += [form(sorted(results, key=lambda r: r.run.key)) for form in (report.markdown, report.csv, report.latex)]
        return [*texts, CliRunner().invoke(app, ["report", str(tmp_path), "--format", "md"]).output]

    before = forms()
    Store(tmp_path).pack(remove=True)
    assert forms() == before
    records = [reporting.marked(found) for found in reporting.load(tmp_path)]
    assert not any("missing" in cell["marks"] for cell in records[0]["cells"])
    page = write(Store(tmp_path).all(), tmp_path / "report.html", experiments=records).read_text(encoding="utf-8")
    assert "metrics.json" not in page
    for key in (*reporting.keys(records), other.run.key):
        assert f'href="{NAME}"' in page
        assert key in page
    assert "(no record)" not in page


def test_a_run_that_an_archive_has_not_is_marked(tmp_path: Path) -> None:
    reproduce(small(), seeds=2, out=tmp_path, train=trainer(score))
    (found,) = reporting.load(tmp_path)
    keys = [run["key"] for run in next(cell for cell in found["cells"] if cell["row"] == "SLNID")["runs"]]
    for path in (tmp_path / keys[0]).iterdir():
        path.unlink()
    Store(tmp_path).pack(remove=True)
    marks = {cell["row"]: cell["marks"] for cell in reporting.marked(found)["cells"]}
    assert marks["SLNID"] == ["missing"]
    assert marks["No-Reg"] == []
