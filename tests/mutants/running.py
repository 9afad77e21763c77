"""Jobs in forks of this process, which has imported torch. Each has its own copy of src, its own group of processes and a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.cover import OPTIONS

FIRST = 40  # the quickest tests of a fault run first: most faults are found by one of them


@dataclass
class Job:
    """`work(source)` in a fork; `source` is the fork's copy of src. `change` is a file of it with its text for this job."""

    name: str
    work: Callable[[Path], dict[str, Any]]
    seconds: float
    change: tuple[str, str] | None = None


@dataclass
class _Running:
    job: Job
    slot: Path
    began: float


def run_jobs(
    jobs: Iterator[Job], source: Path, place: Path, workers: int, end: float
) -> Iterator[tuple[Job, dict[str, Any] | None, float]]:
    """Yield every job with what its work returned and its seconds; None stands for a job that ran out of time or died.

    No job is started after `end` (of `time.monotonic`); those that run then may end, up to their limit or 20 seconds.
    """
    free = [place / f"slot{number}" for number in range(workers)]
    for slot in free:
        shutil.rmtree(slot, ignore_errors=True)
        shutil.copytree(source, slot / "src")
    running: dict[int, _Running] = {}
    while True:
        while free and time.monotonic() < end and (job := next(jobs, None)) is not None:
            slot = free.pop()
            running[_fork(job, slot)] = _Running(job, slot, time.monotonic())
        if not running:
            return
        time.sleep(0.005)
        for pid, one in list(running.items()):
            ended, _ = os.waitpid(pid, os.WNOHANG)
            seconds = time.monotonic() - one.began
            late = seconds > one.job.seconds
            given_up = time.monotonic() > end + 20
            if not ended and not late and not given_up:
                continue
            _end(pid, bool(ended))
            del running[pid]
            if one.job.change is not None:
                shutil.copy2(source / one.job.change[0], one.slot / "src" / one.job.change[0])
            answer = one.slot / "answer.json"
            found = json.loads(answer.read_text(encoding="utf-8")) if ended and answer.exists() else None
            free.append(one.slot)
            if ended or late:
                yield one.job, found, seconds


def run_tests(tests: list[str]) -> dict[str, Any]:
    """Run tests until the first failure, the first few in a session of their own; return the test that failed, if one did."""
    for part in (tests[:FIRST], tests[FIRST:]):
        if part:
            seen = _FirstFailure()
            status = pytest.main([*OPTIONS, "-x", *part], plugins=[seen])
            if status != pytest.ExitCode.OK:
                return {"status": "killed", "by": seen.name or f"exit status {int(status)}"}
    return {"status": "survived"}


class _FirstFailure:
    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = f"import of {report.nodeid}"


def _fork(job: Job, slot: Path) -> int:
    answer, source = slot / "answer.json", slot / "src"
    answer.unlink(missing_ok=True)
    if job.change is not None:
        (source / job.change[0]).write_text(job.change[1], encoding="utf-8")
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.setsid()
        log = os.open(slot / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(source))
        path = [str(source), *(os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
        os.environ |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(_temporary(slot))}
        answer.write_text(json.dumps(job.work(source)), encoding="utf-8")
        status = 0
    except BaseException as error:  # nothing may leave the fork
        os.write(2, repr(error).encode())
    finally:
        os._exit(status)


def _temporary(slot: Path) -> Path:
    """Return an empty folder for the temporary files of a fork."""
    folder = slot / "tmp"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _end(pid: int, ended: bool) -> None:
    """End a fork with all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
