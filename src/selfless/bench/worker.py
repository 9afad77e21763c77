"""A worker of the peers' benchmark: runs on standard input, "ready", then on "go" one fleet in one thread and its figures as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from selfless.bench.peers import ours
from selfless.spec import Run


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")  # whatever else is printed goes to standard error
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())

    def ready() -> None:
        print("ready", file=answers, flush=True)
        if not sys.stdin.readline():
            sys.exit(1)  # nobody listens any more

    runs = [Run.from_dict(r) for r in job["runs"]]
    print(json.dumps(ours(runs, Path(job["data_dir"]) if job["data_dir"] else None, ready)), file=answers, flush=True)


if __name__ == "__main__":
    main()
