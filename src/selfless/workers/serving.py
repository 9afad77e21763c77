"""The worker: read jobs from standard input, do them, answer on standard output; stop when the parent dies."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

Send = Callable[..., None]  # send(error="…", …): one message with these fields


def serve(work: Callable[[dict[str, Any], Send], None]) -> None:
    """Call `work(job, send)` for every job until standard input ends.

    Only messages may use the pipe, so anything else that is printed to standard output goes to standard error. SIGTERM runs `finally`
    blocks, which release locks and remove temporary files. The same happens when the parent dies during a job.
    """
    messages = os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, _exit)
    jobs, busy = queue.SimpleQueue[bytes | None](), threading.Event()
    threading.Thread(target=_read, args=(jobs, busy), daemon=True).start()

    def send(**message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:  # a signal can interrupt a write
            data = data[os.write(messages, data) :]

    while (line := jobs.get()) is not None:
        busy.set()
        work(json.loads(line), send)
        busy.clear()  # before the answer, because afterwards the parent may close the pipe
        send(finished=True)


def _read(jobs: queue.SimpleQueue[bytes | None], busy: threading.Event) -> None:
    """Queue the jobs, then None. If standard input ends during a job, the parent died."""
    for line in _lines(0):
        jobs.put(line)
    jobs.put(None)
    if busy.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _lines(descriptor: int) -> Iterator[bytes]:
    """Yield the lines of a file descriptor. Python cannot exit while a thread waits in sys.stdin, so this reads the descriptor."""
    rest = b""
    while chunk := os.read(descriptor, 65536):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _exit(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the clean-up
    sys.exit(1)
