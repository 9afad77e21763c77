"""Virtual environments for the checks of a release, apart from .venv. Only the standard library is needed to run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".venv-release"  # where all of them are, unless a check is told otherwise
CONSTRAINTS = ROOT / "constraints.txt"


def make(folder: Path, python: str = sys.executable, *, fresh: bool = False) -> Path:
    """Make a virtual environment of `python` in a folder, unless it is there; return its interpreter."""
    inner = folder.absolute() / "bin" / "python"
    if fresh or not inner.exists():
        if python == sys.executable:
            venv.create(folder, with_pip=True, clear=True)
        else:
            subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    return inner


def install(python: Path, *packages: str, constraints: Path | None = CONSTRAINTS, leave_out: tuple[str, ...] = ()) -> None:
    """Install packages with pip, in the versions of constraints.txt except those of `leave_out`; stop with pip's own message."""
    options = ["--quiet", "--disable-pip-version-check", "--no-compile"]  # a module is compiled when it is imported: most never are
    if constraints is not None:
        kept = [line for line in constraints.read_text(encoding="utf-8").splitlines() if re.split("[=<>#]", line)[0] not in leave_out]
        trimmed = python.parents[1] / "constraints.txt"
        trimmed.write_text("\n".join(kept) + "\n", encoding="utf-8")
        options += ["--constraint", str(trimmed)]
    done = subprocess.run([str(python), "-m", "pip", "install", *options, *packages], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
        raise SystemExit(f"{' '.join(packages)} could not be installed into {python.parents[1]}: {errors[-1] if errors else 'pip failed'}")


def clean_variables(**more: str) -> dict[str, str]:
    """Return the environment variables without those that show a process this checkout or another environment."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in hidden} | {"PYTHONSAFEPATH": "1"} | more
