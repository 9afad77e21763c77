"""A user's own modules: their errors in one sentence, and none that only a stranger's record names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import selfless
from selfless import Run
from selfless.inputs import check_recorded, import_custom
from selfless.spec import Result
from tests.fabricated import result as fabricated


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("syntax", "def f(:\n", r"custom_syntax.py, line 1: SyntaxError: invalid syntax"),
        ("zero", "\n1 / 0\n", r"custom_zero.py, line 2: ZeroDivisionError: division by zero"),
        (
            "lacks",
            "import no_such_module\n",
            r"custom_lacks.py, line 1: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("ends", "import sys; sys.exit(3)\n", r"custom_ends.py, line 1: SystemExit: 3"),
    ],
)
def test_a_module_that_fails_is_named_with_its_line(
    name: str, text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"custom_{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=rf"custom_{name}:f cannot be imported: .*{words}"):
        import_custom(f"custom_{name}:f")


@pytest.mark.parametrize("name", ["torch.hub:load", "os:system", "subprocess:call", "sys:exit", "numpy:load"])
def test_a_record_cannot_name_an_installed_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"a record names {name}, which is an installed module"):
        check_recorded(name)
    values = fabricated(Run(), 0.9).as_dict()
    values["run"]["preserve"] = {"name": name, "strength": 1.0}
    with pytest.raises(ValueError, match="a record names"):
        Result.from_dict(json.loads(json.dumps(values)))
    monkeypatch.setenv("SELFLESS_TRUST", name.partition(":")[0].partition(".")[0])
    check_recorded(name)


def test_a_record_may_name_the_users_own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_own.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_recorded("custom_own:f")  # looks for it, and does not run it
    check_recorded("custom_nowhere:f")


def test_damaged_files_of_a_result_are_found(tasks_npz: str, tmp_path: Path) -> None:
    """One bit of the metrics or of the weights is enough."""
    result = selfless.train(Run(stream=tasks_npz, model="mlp-8", epochs=1, tasks=1), out=tmp_path, workers=1)
    place = tmp_path / result.run.key
    assert selfless.load(place).about == result.about
    weights = bytearray((place / "checkpoint.safetensors").read_bytes())
    weights[-1] ^= 1
    (place / "checkpoint.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"checkpoint.safetensors is damaged \(its checksum is not the recorded one\)"):
        selfless.load(place).model()
    text = (place / "metrics.json").read_text()
    (place / "metrics.json").write_text(text.replace('"epochs": 1', '"epochs": 2'))
    with pytest.raises(ValueError, match="its checksum is wrong: it was damaged, or edited by hand"):
        selfless.load(place)
