"""The small stream of tests/engine: three tasks of two classes each, six by six pixels."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PLACE = Path(__file__).resolve().parent.parent / "engine" / "conftest.py"
found = importlib.util.spec_from_file_location("engine_conftest", PLACE)
assert found is not None
assert found.loader is not None
engine = importlib.util.module_from_spec(found)  # by its place: every folder of tests may have a conftest
found.loader.exec_module(engine)
tasks_npz = engine.tasks_npz
