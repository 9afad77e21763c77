"""The pages of the documentation, for the tests that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "results/reproduction"
FOLDERS = [ROOT / name for name in ("results/README.md", "results/again/README.md", "benchmarks/peers/README.md")]  # about a folder
PAGES = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").rglob("*.md")), *FOLDERS]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def load(path: str | Path) -> Any:
    return json.loads(read(path))


every_page = pytest.mark.parametrize("page", PAGES, ids=page_name)
