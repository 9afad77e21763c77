"""The pool: jobs are handed out, messages come back, a worker that dies is reported, and none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from selfless.workers import Pool, WorkerDied

WORKER = """
import os, signal, sys, time
from pathlib import Path
from selfless.workers import serve
pipe = os.dup(1)
def work(job, send):
    print("this goes to standard error")
    try:  # before the first message: after it, a test may stop this process
        send(pid=os.getpid(), threads=os.environ["OMP_NUM_THREADS"])
        if job["do"] == "add":
            send(sum=job["a"] + job["b"])
        if job["do"] == "die in a message":
            os.write(pipe, b'{"event": {"task": 1')
            os.kill(os.getpid(), signal.SIGKILL)
        if job["do"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if job["do"] == "raise":
            raise KeyError("a bug")
        if job["do"] == "sleep":
            time.sleep(60)
    finally:
        if "file" in job:
            Path(job["file"]).write_text("cleared")
serve(work)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return [sys.executable, str(script)]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text() if Path(f"/proc/{pid}").exists() else False


def test_every_job_is_done_by_one_of_the_workers(command: list[str]) -> None:
    sums: dict[int, int] = {}
    processes: set[int] = set()

    def receive(job: int, message: dict[str, Any]) -> None:
        if "sum" in message:
            sums[job] = message["sum"]
        else:
            processes.add(message["pid"])
            assert message["threads"] == "1"

    Pool(command, 2).run([{"do": "add", "a": i, "b": 10} for i in range(7)], receive)
    assert sums == {i: i + 10 for i in range(7)}
    assert len(processes) == 2
    assert not any(map(is_running, processes))


def test_no_jobs_and_fewer_jobs_than_workers(command: list[str]) -> None:
    Pool(command, 2).run([], lambda job, message: pytest.fail("there was no job"))
    seen: list[int] = []
    Pool(command, 5).run([{"do": "add", "a": 1, "b": 2}], lambda job, message: seen.append(message.get("sum", 0)))
    assert seen == [0, 3]


@pytest.mark.parametrize(("what", "status"), [("die", -signal.SIGKILL), ("die in a message", -signal.SIGKILL), ("raise", 1)])
def test_a_worker_that_dies_stops_all_and_is_named(command: list[str], tmp_path: Path, what: str, status: int) -> None:
    jobs = [{"do": "sleep", "file": str(tmp_path / "file")}, {"do": what}]
    processes: set[int] = set()
    with pytest.raises(WorkerDied, match=f"ended with status {status}") as found:
        Pool(command, 2).run(jobs, lambda job, message: processes.add(message["pid"]))
    assert (found.value.job, found.value.status) == (1, status)
    assert not any(map(is_running, processes))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_of_the_receiver_stops_all(command: list[str], tmp_path: Path, error: type[BaseException]) -> None:
    """A worker that is stopped leaves its `finally` blocks in order."""
    processes: list[int] = []

    def receive(job: int, message: dict[str, Any]) -> None:
        processes.append(message["pid"])
        if len(processes) == 2:
            raise error("enough")

    jobs = [{"do": "sleep", "file": str(tmp_path / f"file{i}")} for i in range(2)]
    with pytest.raises(error, match="enough"):
        Pool(command, 2).run(jobs, receive)
    assert not any(map(is_running, processes))
    assert [(tmp_path / f"file{i}").read_text() for i in range(2)] == ["cleared", "cleared"]


PARENT = """
import sys
from selfless.workers import Pool
jobs = [{"do": "sleep", "file": sys.argv[2]}]
Pool([sys.executable, sys.argv[1]], 1).run(jobs, lambda job, message: print(message["pid"], flush=True))
"""


def test_a_worker_does_not_outlive_its_parent(command: list[str], tmp_path: Path) -> None:
    words = [sys.executable, "-c", PARENT, command[1], str(tmp_path / "file")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        parent.kill()
    deadline = time.monotonic() + 20
    while is_running(worker):
        assert time.monotonic() < deadline, "the worker still runs"
        time.sleep(0.02)
    assert (tmp_path / "file").read_text() == "cleared"


def test_workers_do_not_get_the_ctrl_c_of_the_terminal(command: list[str]) -> None:
    """A terminal interrupts every process of its group. Only the parent must answer; a worker could print a traceback."""
    groups: list[int] = []
    Pool(command, 1).run([{"do": "add", "a": 1, "b": 2}], lambda _, m: groups.append(os.getpgid(m["pid"])) if "pid" in m else None)
    assert groups != [os.getpgid(0)]


def test_a_pool_needs_nothing_heavy() -> None:
    code = "import sys, selfless.workers; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
