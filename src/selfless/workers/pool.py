"""The parent: start worker processes, send them jobs, receive their messages, stop them.

A worker is any command that follows this protocol, one JSON object per line:

    standard input    jobs; the next job comes after the last one is finished; end of file means: exit
    standard output   any number of messages while a job runs, then {"finished": true}

Nothing is pickled, and a worker never runs the caller's main module. When the parent dies, the standard input of a worker ends and its
standard output is closed. The worker must then stop (`selfless.workers.serve` does).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FINISHED = {"finished": True}  # the message that ends a job
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # one process per core; more threads would compete
STOP_SECONDS = 10.0  # how long a worker may take to stop before it is killed

Receive = Callable[[int, dict[str, Any]], None]
Replace = Callable[[int, int], bool]


class WorkerDied(RuntimeError):
    """A worker ended during job number `job` with exit status `status` (negative: the signal that killed it)."""

    def __init__(self, job: int, status: int) -> None:
        super().__init__(f"a worker process ended with status {status} during its job; see its message above")
        self.job, self.status = job, status


class Pool:
    """At most `count` processes of one command; each does one job at a time."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self.command, self.count = list(command), count

    def run(self, jobs: Sequence[Mapping[str, Any]], receive: Receive, replace: Replace | None = None) -> None:
        """Do all jobs. Call `receive(number of the job, message)` in this thread for every message.

        If a worker dies, call `replace(number of its job, exit status)`, and start another worker, which does that job again if the answer
        is True. Without `replace`, raise WorkerDied. On any exception (from `receive`, or Ctrl-C) all workers are stopped first.
        """
        waiting, lines = list(enumerate(jobs)), queue.SimpleQueue[tuple[_Worker, str]]()
        workers: list[_Worker] = []
        try:
            for _ in range(min(self.count, len(jobs))):
                workers.append(_Worker(self.command, lines))
                workers[-1].give(waiting.pop(0))
            while any(worker.job is not None for worker in workers):
                worker, line = lines.get()
                if worker.job is None:
                    continue  # the end of a worker that finished its last job
                if not line:
                    if replace is None:
                        raise WorkerDied(worker.job, worker.process.wait())
                    if replace(worker.job, worker.process.wait()):
                        waiting.insert(0, (worker.job, jobs[worker.job]))
                    worker.job = None
                    if waiting:
                        workers.append(_Worker(self.command, lines))
                        workers[-1].give(waiting.pop(0))
                    continue
                message = json.loads(line)
                if message != FINISHED:
                    receive(worker.job, message)
                else:
                    worker.give(waiting.pop(0) if waiting else None)
        finally:
            for worker in workers:
                worker.stop()


class _Worker:
    """One process, the number of its current job (None after the last), and the thread that reads its answers."""

    def __init__(self, command: list[str], lines: queue.SimpleQueue[tuple[_Worker, str]]) -> None:
        self.job: int | None = None
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
        # In its own session a worker does not get the Ctrl-C of the terminal, which would print a traceback; the parent stops it.
        self.process = subprocess.Popen(command, **pipes, env=os.environ | ONE_THREAD, start_new_session=True)
        self.reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self.reader.start()

    def give(self, job: tuple[int, Mapping[str, Any]] | None) -> None:
        """Send a job. None closes the standard input, so that the process ends."""
        assert self.process.stdin is not None
        self.job = None if job is None else job[0]
        with contextlib.suppress(BrokenPipeError):  # the process died, which `_read` reports
            if job is None:
                self.process.stdin.close()
            else:
                self.process.stdin.write(json.dumps(job[1]) + "\n")
                self.process.stdin.flush()

    def stop(self) -> None:
        """Interrupt the current job and wait for the process to end; kill it after STOP_SECONDS."""
        if self.job is not None:
            self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def _read(self, lines: queue.SimpleQueue[tuple[_Worker, str]]) -> None:
        """Queue every whole line of the worker, and an empty line at its end. A worker that is killed may leave half a line."""
        assert self.process.stdout is not None
        try:
            with self.process.stdout:
                for line in self.process.stdout:
                    if line.endswith("\n"):
                        lines.put((self, line))
        finally:
            lines.put((self, ""))
