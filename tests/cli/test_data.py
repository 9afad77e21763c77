"""`selfless data`: tables, JSON, one clear message for an error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfless.cli import app
from tests.data.published import tiny_contents, write_zip

pytestmark = pytest.mark.usefixtures("isolated")


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["data", *words])
    assert result.exit_code == code, result.output
    return result.output


def test_list(tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    root = str(put_mnist(tmp_path / "d"))
    assert "mnist" in run("list", "--data-dir", root)
    found = json.loads(run("list", "--json", "--data-dir", root))
    assert {s["name"]: s["here"] for s in found["sets"]} == {
        "mnist": True,
        "fashion-mnist": False,
        "cifar-100": False,
        "tiny-imagenet": False,
    }
    assert "permuted-mnist" in found["streams"]


@pytest.mark.filterwarnings("always:.*is damaged or another file")
def test_list_with_damaged_weights(tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    """The sets are listed, and a note names the file; a script sees that there are none."""
    root = put_mnist(tmp_path / "d")
    (root / "alexnet").mkdir()
    (root / "alexnet" / "alexnet-owt-7be5be79.pth").write_bytes(b"not this")
    shown = run("list", "--data-dir", str(root))
    assert "ImageNet weights: damaged." in " ".join(shown.split())
    assert "note: " in shown
    assert "alexnet-owt-7be5be79.pth is damaged or another file" in " ".join(shown.split())
    assert "flowers" in shown
    found = CliRunner().invoke(app, ["data", "list", "--json", "--data-dir", str(root)])
    assert json.loads(found.stdout)["weights"] == {"alexnet": None}


def test_list_reads_well_at_80_columns(tmp_path: Path, put_mnist: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No word is cut: names and sizes stand whole in a row, and the folder in a line of its own."""
    from selfless.data import CATALOGUE, OBJECTS

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = put_mnist(tmp_path / "a-rather-long-name-of-a-folder-of-data")
    first, *lines = run("list", "--data-dir", str(root)).splitlines()
    assert first == f"data folder: {root}"
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.rstrip() for line in lines if line.strip()}
    for item in (*CATALOGUE.values(), *OBJECTS.values()):
        assert item.title in rows[item.name]
        assert f"{item.size / 1e6:.0f} MB" in rows[item.name]
    assert rows["mnist"].endswith(" here")
    assert not rows["mnist"].endswith("not here")
    assert rows["cifar-100"].endswith("not here")
    put_mnist(tmp_path / "cache" / "selfless" / "data")
    note, *elsewhere = run("list", "--data-dir", str(tmp_path / "empty")).splitlines()
    assert note.startswith(f"note: there is no folder {tmp_path / 'empty'}")
    assert elsewhere[0] == f"data folder: {tmp_path / 'empty'}; in cache: {tmp_path / 'cache' / 'selfless' / 'data'}"
    assert next(line for line in elsewhere if line.startswith("mnist")).endswith("in cache")


def test_verify(tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    root = put_mnist(tmp_path / "d")
    write_zip(root / "tiny-imagenet-200-mini.zip", tiny_contents())
    found = json.loads(run("verify", "--json", "--data-dir", str(root)))
    assert found["ok"] is True
    assert [s["status"] for s in found["sets"]] == ["ok", "absent", "absent", "reduced"]
    run("verify", "cifar-100", "--data-dir", str(root), code=1)
    (root / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"half")
    assert "altered" in run("verify", "--data-dir", str(root), code=1)
    assert json.loads(run("verify", "mnist", "--json", "--data-dir", str(root), code=1))["ok"] is False


def test_fetch(tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    root = str(put_mnist(tmp_path / "d"))
    assert run("fetch", "mnist", "--data-dir", root).strip() == f"mnist: {Path(root) / 'mnist'}"
    assert json.loads(run("fetch", "mnist", "--json", "--data-dir", root)) == {"fetched": {"mnist": f"{root}/mnist"}}
    output = run("fetch", "cifar-100", "--data-dir", root, code=1)
    assert "offline" in output
    assert f"Put this file into {root}" in output
    assert "Traceback" not in output
    assert "did you mean 'mnist'" in run("fetch", "mnits", code=1)
    assert "did you mean" in json.loads(run("fetch", "mnits", "--json", code=1))["error"]


def test_help_has_examples_and_costs_nothing() -> None:
    for command in ("list", "fetch", "verify", "prepare"):
        assert "Examples" in run(command, "--help")
    code = "import sys, selfless.cli.data; sys.exit(bool({'torch', 'numpy', 'pooch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
