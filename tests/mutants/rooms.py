"""The rooms whose code is changed, and the tests that must notice it: tests mirror src."""

from __future__ import annotations

FILES = (
    "selfless/functional/*.py",
    "selfless/importance/*.py",
    "selfless/preserve/*.py",
    "selfless/keeper/*.py",
    "selfless/runner/store.py",
    "selfless/files.py",
)
TESTS = (
    "tests/functional",
    "tests/importance",
    "tests/preserve",
    "tests/keeper",
    "tests/test_contracts.py",
    "tests/test_sums.py",
    "tests/test_samples.py",
    "tests/test_files.py",
    "tests/runner",
    "tests/capacity",
    "tests/distributed",
)
