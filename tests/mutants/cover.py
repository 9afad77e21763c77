"""Which tests run which lines: a file of tests, once, under coverage. Needs `coverage`."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "--no-header", "--assert=plain")


def cover(source: Path, patterns: Sequence[str], file: str, marked: str) -> dict[str, Any]:
    """Run the tests of a file; return `{seconds: {test: seconds}, lines: {file: {line: [tests]}}}` of those that pass.

    Lines that run when a module is imported are listed with no test.
    """
    from coverage import Coverage

    watcher = Coverage(data_file=None, config_file=False, include=[str(source / pattern) for pattern in patterns])
    contexts = _Contexts(watcher)
    watcher.start()
    pytest.main([*OPTIONS, "-m", marked, file], plugins=[contexts])
    watcher.stop()
    found, lines = watcher.get_data(), {}
    for measured in found.measured_files():
        by_line = found.contexts_by_lineno(measured)
        lines[str(Path(measured).relative_to(source))] = {
            line: [name for name in names if name in contexts.seconds] for line, names in by_line.items()
        }
    return {"seconds": contexts.seconds, "failed": contexts.failed, "lines": lines}


class _Contexts:
    """A plugin of pytest that tells coverage which test is running, and notes which ones pass."""

    def __init__(self, watcher: Any) -> None:
        self.watcher, self.seconds, self.failed = watcher, dict[str, float](), list[str]()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, None, None]:
        self.watcher.switch_context(item.nodeid)
        began = time.perf_counter()
        yield
        if item.nodeid in self.seconds:
            self.seconds[item.nodeid] = round(time.perf_counter() - began, 4)
        self.watcher.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = 0.0
        elif report.failed:
            self.seconds.pop(report.nodeid, None)
            self.failed.append(report.nodeid)
