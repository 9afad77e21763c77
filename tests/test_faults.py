"""A few numerical faults; `make faults` has every method at strengths from 10⁻¹² to 10¹²."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("faults_script", ROOT / "benchmarks/faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "strength", "implicit", "ending"),
    [
        ("mas", 1e12, True, "finite"),
        ("mas", 1e12, False, "named: the penalty is not finite"),
        ("lwf", 1e12, True, "finite"),
        ("slnid", 1e-12, True, "finite"),
        ("slnid", 1e12, True, "named: "),
        ("packnet", 1e3, True, "refused: "),
    ],
)
def test_a_strength_is_finite_named_or_refused(faults: ModuleType, name: str, strength: float, implicit: bool, ending: str) -> None:
    role = "sparsifier" if name == "slnid" else "preserver"
    label = f"{'keeper' if implicit else 'explicit anchor'} {strength:g}"
    assert faults.attempt(faults.strength_cases("", role, name)[label]).startswith(ending)


@pytest.mark.parametrize(
    ("label", "ending"),
    [
        ("keeper: NaN in the data", "layer '0' has NaN"),
        ("keeper: an Ω that is NaN", "the importance of '0.weight' is not finite"),
        ("keeper: labels out of range", "a label"),
        ("run: NaN in the test data", "nan-test.npz: x_test: sample 7"),
        ("fleet: one member explodes", "the loss was not finite in epoch 1 of task 1"),
    ],
)
def test_a_fault_is_named(faults: ModuleType, tmp_path: Path, label: str, ending: str) -> None:
    found = faults.attempt(faults.other_cases(tmp_path)[label])
    assert found.startswith("named: ")
    assert ending in found


def test_the_page_has_the_recorded_cases() -> None:
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "results/reliability/faults.json").read_text(encoding="utf-8"))
    assert found["problems"] == []
    for name, ended in found["by_method"].items():
        assert f"| {name} | {' | '.join(str(ended.get(how, 0)) for how in ('finite', 'named', 'refused'))} |" in page
    assert (
        f"| all | {' | '.join(str(sum(o.get(h, 0) for o in found['by_method'].values())) for h in ('finite', 'named', 'refused'))} |"
        in page
    )
