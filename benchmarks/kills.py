"""Kill commands at random moments, start them again, and compare what they record with an undisturbed run, bit for bit.

    python benchmarks/kills.py --kills 200 --seed 1 --to kills.json

The counts are written after every trial; the same command continues after the last one.

A trial kills one command one to three times (SIGKILL, sometimes SIGTERM or SIGINT), at moments drawn from its whole duration, then lets it
end. It requires: the numbers of every run are those of the undisturbed command, the log has the same lines, and the folder holds the same
files: no temporary file, no state of a fleet, no note. `data fetch` downloads from a slow server on this machine, and every file that it or
`data prepare` writes has the same bytes. A command starts by a fork of this process, which has imported everything, so that
a trial takes about a second; worker processes start as usual. SIGTERM and SIGINT must end with status 143 and 130.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import local_mirror
import numpy as np
import torch

from selfless.files import write_json

NUMBERS = ("accuracy", "accuracy_all", "held_out", "baseline", "history", "capacity", "summary", "status", "error")
SIGNALS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}


def commands(data: str) -> dict[str, list[str]]:
    """Return the commands that are killed; OUT is the folder that they write."""
    small = ["--stream", data, "--model", "mlp-12", "--epochs", "6", "--batch", "10", "--out", "OUT"]
    return {
        "run": ["run", *small, "--sparsify", "slnid:1e-2"],
        "held-out": ["run", *small, "--preserve", "ewc:1", "--select", "held-out", "--schedule", "plateau"],
        "fleet": ["run", *small, "--seeds", "4", "--workers", "1", "--preserve", "si:1"],
        "workers": ["run", *small, "--seeds", "4", "--workers", "2"],
        "two processes": ["run", *small, "--seeds", "3", "--workers", "1", "--preserve", "ewc:1"],
        "tune": ["tune", *small, "--strengths", "1e-3,1e-2", "--seeds", "1", "--workers", "1"],
        "reproduce": ["reproduce", "locality", "--quick", "--seeds", "1", "--workers", "1", "--out", "OUT"],
        "data fetch": ["data", "fetch", "mnist", "letters", "--data-dir", "OUT/data"],
        "data prepare": ["data", "prepare", "letters", "--workers", "2"],
    }


def make_data(folder: Path) -> str:
    """Write three small tasks of two classes; return the name of their stream."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(6), 65)
    x = np.clip(rng.integers(0, 200, (6, 1, 6, 6))[y] + rng.normal(0, 60, (len(y), 1, 6, 6)), 0, 255).astype(np.uint8)
    np.savez(folder / "tasks.npz", x_train=x, y_train=y, x_test=x[::3], y_test=y[::3], task=y // 2, task_test=y[::3] // 2)
    return f"arrays:{folder / 'tasks.npz'}"


def start(words: list[str], out: Path) -> int:
    """Fork a process that runs a command with the folder `out` in place of OUT; return its number."""
    process = os.fork()
    if process:
        return process
    status = 130  # of a Ctrl-C before the command begins
    try:
        os.setsid()
        os.environ["XDG_CACHE_HOME"] = str(out / "cache")
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from selfless.cli import app

        status = 1
        app([word.replace("OUT", str(out)) for word in words])
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        os._exit(status)
    return 0


def wait(process: int) -> int:
    """Return the exit status of a process; negative: the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def content(out: Path) -> dict[str, Any]:
    """Return what must be equal after a kill: numbers and logs of all runs, and the names of all files."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if path.name == "metrics.json":
            values = json.loads(path.read_text())
            found[name] = {key: values.get(key) for key in NUMBERS}
        elif path.name == "log.jsonl":
            found[name] = path.read_text()
        elif path.parent.name == "experiments":
            record = json.loads(path.read_text())
            found[name] = [record[key] for key in ("cells", "choices", "claims")]
        elif path.is_file():
            is_data = name.startswith(("data/", "cache/"))
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if is_data else None
    return found


def trial(
    words: list[str], seconds: float, expected: dict[str, Any], out: Path, rng: random.Random, is_shared: bool
) -> tuple[list[str], Counter[str]]:
    """Kill a command a few times, let it end, and return (what is wrong, how often it was ended by which signal).

    is_shared   another process runs the same command all the time, and is not killed
    """
    wrong, kills = [], Counter[str]()
    others = [start(words, out)] if is_shared else []
    for _ in range(rng.choice([1, 1, 2, 3])):
        how = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        process = start(words, out)
        time.sleep(rng.uniform(0, 1.1 * seconds))
        os.kill(process, how)
        status = wait(process)
        if status == 0:
            kills["ended before"] += 1
        else:
            kills[how.name] += 1
            if status not in (SIGNALS[how], -how):  # a signal before the handler is set ends the process by itself
                wrong.append(f"{how.name} gave status {status}")
    for process in [*others, start(words, out)]:
        if (status := wait(process)) != 0:
            wrong.append(f"a process that was not killed gave status {status}")
    got = content(out)
    wrong += [f"{name} differs" for name in expected.keys() & got.keys() if expected[name] != got[name]]
    wrong += [f"{name} is missing" for name in expected.keys() - got.keys()] + [f"{name} is left" for name in got.keys() - expected.keys()]
    return wrong, kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="stop after so many")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so many seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=sorted(commands("")))
    parser.add_argument("--to", type=Path, help="write the counts there as JSON, and continue from there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    import pooch  # noqa: F401  # all are imported before the forks

    import selfless.cli.app
    import selfless.experiments.reproduce
    import selfless.runner.local  # noqa: F401

    local_mirror.offer()
    found = {"seed": given.seed, "kinds": given.kind or sorted(commands("")), "trials": 0, "kills": {}, "problems": []}
    if given.to and given.to.is_file():
        before = json.loads(given.to.read_text())
        if [before["seed"], before["kinds"]] != [found["seed"], found["kinds"]]:
            parser.error(f"{given.to} has other trials; choose another --to, or delete it")
        found = before
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="selfless-kills-") as place:
        os.environ["SELFLESS_DATA"] = str(local_mirror.write_letters(Path(place, "given")))
        every = {kind: words for kind, words in commands(make_data(Path(place))).items() if kind in found["kinds"]}
        whole: dict[str, tuple[float, dict[str, Any]]] = {}
        for kind, words in every.items():
            began = time.monotonic()
            out = Path(place, f"whole-{kind.replace(' ', '-')}")
            assert wait(start(words, out)) == 0, f"{kind} fails undisturbed"
            whole[kind] = time.monotonic() - began, content(out)
            print(f"{kind}: {whole[kind][0]:.1f} s, {len(whole[kind][1])} files", file=sys.stderr)
        while count_kills(found["kills"]) < given.kills and time.monotonic() - started < given.seconds:
            kind = list(every)[found["trials"] % len(every)]
            out = Path(place, "out")
            rng = random.Random(f"{given.seed}:{found['trials']}")
            wrong, kills = trial(every[kind], *whole[kind], out, rng, kind == "two processes")
            found["kills"][kind] = dict(Counter(found["kills"].get(kind, {})) + kills)
            found["problems"] += [f"trial {found['trials']} ({kind}): {one}" for one in wrong]
            found["trials"] += 1
            shutil.rmtree(out, ignore_errors=True)
            if given.to:
                write_json(given.to, found)
    print(json.dumps(found, indent=1))
    return 1 if found["problems"] else 0


def count_kills(kills: dict[str, dict[str, int]]) -> int:
    """Return how many processes were ended by a signal; those that ended before it do not count."""
    return sum(number for one in kills.values() for how, number in one.items() if how != "ended before")


if __name__ == "__main__":
    sys.exit(main())
