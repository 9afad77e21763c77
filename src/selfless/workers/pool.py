"""The parent's side: start worker processes, hand out jobs, pass their messages on, stop them.

A worker is any command that keeps to this protocol, one JSON object a line:

    standard input    jobs, the next one only when the last is finished; its end means: exit
    standard output   any number of messages while a job runs, then {"finished": true}

Nothing is pickled, and a worker never runs the caller's main module again. When the parent dies, a worker's standard input ends and its
standard output breaks: it must stop then (`selfless.workers.serve` does).
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
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # processes share the cores; threads within them would compete
STOP_SECONDS = 10.0  # a worker that was told to stop may take so long to let go of its files

Receive = Callable[[int, dict[str, Any]], None]


class WorkerDied(RuntimeError):
    """A worker ended while it did the job number `job`, with exit status `status` (negative: by that signal)."""

    def __init__(self, job: int, status: int) -> None:
        super().__init__(f"a worker process ended with status {status} during its job; its message is above")
        self.job, self.status = job, status


class Pool:
    """At most `count` processes of one command, which do one job at a time each."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self.command, self.count = list(command), count

    def run(self, jobs: Sequence[Mapping[str, Any]], receive: Receive) -> None:
        """Do all jobs. Call `receive(number of the job, message)` in this thread for every message.

        A worker that dies raises WorkerDied. This and any other exception, from `receive` or Ctrl-C, stops all workers before it is raised.
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
                    continue  # the end of a worker that has nothing left to do
                if not line:
                    raise WorkerDied(worker.job, worker.process.wait())
                message = json.loads(line)
                if message != FINISHED:
                    receive(worker.job, message)
                else:
                    worker.give(waiting.pop(0) if waiting else None)
        finally:
            for worker in workers:
                worker.stop()


class _Worker:
    """One process, the number of the job it does (None: none any more), and the thread that reads its answers."""

    def __init__(self, command: list[str], lines: queue.SimpleQueue[tuple[_Worker, str]]) -> None:
        self.job: int | None = None
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8", env=os.environ | ONE_THREAD)
        self.reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self.reader.start()

    def give(self, job: tuple[int, Mapping[str, Any]] | None) -> None:
        """Send a job; None: there is no other, the process may end."""
        assert self.process.stdin is not None
        self.job = None if job is None else job[0]
        with contextlib.suppress(BrokenPipeError):  # it died: `_read` reports it
            if job is None:
                self.process.stdin.close()
            else:
                self.process.stdin.write(json.dumps(job[1]) + "\n")
                self.process.stdin.flush()

    def stop(self) -> None:
        """Interrupt the job, if there is one, and wait for the end of the process; kill one that does not end."""
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
        """Queue every line of the worker, and an empty one at its end."""
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                lines.put((self, line))
        lines.put((self, ""))
