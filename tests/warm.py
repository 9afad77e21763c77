"""Processes that have imported torch already: what `subprocess.Popen` starts in three seconds, `WarmProcess` starts in a few hundredths.

Python's fork server imports torch and selfless once for each worker of pytest-xdist. Every process is then a fork of it: a process of its
own, with its own pipes, environment, signals and exit status, in which `python -m MODULE` runs as it does after a start from nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any, TextIO

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["selfless.cli.run", "selfless.runner.local"])


class WarmProcess:
    """`python -m MODULE words`, with the members of `subprocess.Popen` that callers of it use. Text only."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> None:
        if list(command[:2]) != [sys.executable, "-m"]:
            raise ValueError(f"a warm process runs `python -m MODULE`, not {list(command)}")
        pipes: dict[int, int] = {}  # the file descriptor of the process, and our end of its pipe
        theirs: dict[int, int] = {}
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            if options.get(name) == subprocess.PIPE:
                read, write = os.pipe()
                theirs[number], pipes[number] = (read, write) if number == 0 else (write, read)
            elif options.get(name) == subprocess.DEVNULL:
                theirs[number] = os.open(os.devnull, os.O_RDWR)
            else:
                theirs[number] = os.dup(number)
        given = {number: DupFd(end) for number, end in theirs.items()}
        self.process = CONTEXT.Process(target=_run, args=(list(command[2:]), given, dict(os.environ if env is None else env), os.getcwd()))
        self.process.start()
        for end in theirs.values():
            os.close(end)
        self.pid = self.process.pid
        self.stdin, self.stdout, self.stderr = (
            None if number not in pipes else os.fdopen(pipes[number], "w" if number == 0 else "r", encoding="utf-8") for number in range(3)
        )

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if (status := self.process.exitcode) is None:
            raise subprocess.TimeoutExpired(["python"], timeout or 0)
        return status

    def communicate(self) -> tuple[str, str]:
        """Read standard output to its end, then standard error, which must be short enough for its pipe."""
        texts = ["" if stream is None else stream.read() for stream in (self.stdout, self.stderr)]
        self.__exit__()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.pid is not None and self.process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def _run(words: list[str], given: Mapping[int, Any], environment: Mapping[str, str], folder: str) -> None:
    """In the fork: put the pipes, the environment and the folder in their places, and run the module."""
    os.setsid()
    for number, end in given.items():
        os.dup2(end.detach(), number)
    sys.stdin, sys.stdout, sys.stderr = _text(0, "r"), _text(1, "w"), _text(2, "w")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = folder  # as `python -m` does
    sys.argv = list(words)
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _text(number: int, mode: str) -> TextIO:
    return open(number, mode, encoding="utf-8", closefd=False, errors="backslashreplace" if number == 2 else "strict")  # type: ignore[return-value]
