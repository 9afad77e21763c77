"""A few kills at random moments; `make kills` is the long form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_killed_commands_end_with_the_same_bits(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "benchmarks/kills.py"), "--kills", "1", "--seconds", "60", "--kind", "fleet"]
    done = subprocess.run([*words, "--to", str(tmp_path / "kills.json")], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "kills.json").read_text())["problems"] == []


def test_the_page_has_the_recorded_counts() -> None:
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    kills, fuzz = (json.loads((ROOT / f"results/reliability/{name}.json").read_text()) for name in ("kills", "fuzz"))
    for kind, ended in kills["kills"].items():
        assert f"| {kind} | {' | '.join(str(ended.get(how, 0)) for how in ('SIGKILL', 'SIGTERM', 'SIGINT'))} |" in page
    assert f"| all | {fuzz['cases']:,} |" in page
    assert sum(fuzz["by_kind"].values()) == fuzz["cases"]
    assert kills["problems"] == []
