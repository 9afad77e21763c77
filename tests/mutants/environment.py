"""Run Python in an environment with coverage and mutmut on top of .venv: `python -m tests.mutants.environment FOLDER -m MODULE words`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.integrations.environment import SECONDS, install, make_environment


def main(folder: Path, words: list[str]) -> int:
    python = make_environment(folder)
    if reason := install("proof", python, folder, time.monotonic() + SECONDS):
        print(f"coverage and mutmut are missing: {reason}", file=sys.stderr)
        return 2
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2] / "src")  # the checkout; its own .pth file is not read there
    os.execv(python, [str(python), *words])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
