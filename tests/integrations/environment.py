"""`make test-integrations`: build an environment with the extras on top of .venv, and test each extra with the real library.

    python tests/integrations/environment.py FOLDER

An extra that cannot be installed is skipped, with a line that says so and why: a slow or incomplete package index is no error. The exit
status is 1 only if a test fails. torch and everything else of .venv are used from there, so nothing large is installed twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SECONDS = float(os.environ.get("INTEGRATIONS_SECONDS", "300"))  # to install, and again to test; what is not done by then is skipped
EXTRAS = ("lightning", "transformers", "ray", "tensorboard", "wandb", "mlflow", "avalanche")
# Avalanche and pytorchcv require torchvision, which has no CPU build for this torch: they are installed without their requirements, and
# tests/integrations/stubs stands in for torchvision. These are the requirements that Avalanche imports.
ALONE = {"avalanche": ("pytorchcv",)}
NEEDS = {"avalanche": ("psutil", "gputil", "scikit-learn", "qpsolvers", "gdown", "dill", "tensorboard", "wandb", "torchmetrics", "tqdm")}
GROUPS = {  # the tests that run in one process, and the extras they need
    ("test_lightning.py",): ("lightning",),
    ("test_transformers.py",): ("transformers",),
    ("test_trackers.py",): ("tensorboard", "wandb", "mlflow"),
    ("test_avalanche.py",): ("avalanche",),
    ("test_ray.py",): ("ray",),
}


def main(folder: Path) -> int:
    end = time.monotonic() + SECONDS
    try:
        python = make_environment(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"SKIPPED every integration: no virtual environment could be made in {folder}: {error}")
        return 0
    reasons = {extra: reason for extra in EXTRAS if (reason := install(extra, python, folder, end))}
    failed = _run_tests(python, reasons, time.monotonic() + SECONDS)
    for extra, reason in reasons.items():
        print(f"SKIPPED {extra}: {reason}")
    return 1 if failed else 0


def make_environment(folder: Path) -> Path:
    """Make a virtual environment that also sees the packages of this one; return its python."""
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        inner = next(folder.glob("lib/python*/site-packages"))
        (inner / "base.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")) + "\n", encoding="utf-8")
    return python


def install(extra: str, python: Path, folder: Path, end: float) -> str:
    """Install an extra; return why it could not be installed, or nothing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted, constraints = project["project"]["optional-dependencies"][extra], (ROOT / "constraints.txt").read_text(encoding="utf-8")
    asked = json.dumps([wanted, constraints, ALONE.get(extra), NEEDS.get(extra)])
    stamp = folder / f".{extra}-{hashlib.sha256(asked.encode()).hexdigest()[:16]}"
    if stamp.exists():
        return ""
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--disable-pip-version-check",
        "--constraint",
        str(ROOT / "constraints.txt"),
    ]
    alone = [[*pip, "--no-deps", *wanted, *ALONE[extra]], [*pip, *NEEDS[extra]]] if extra in ALONE else [[*pip, *wanted]]
    print(f"installing {extra} into {folder}", flush=True)
    for command in alone:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            return f"the package index was too slow: not everything could be installed in {SECONDS:.0f} seconds"
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
            return f"it could not be installed: {lines[-1] if lines else 'pip failed'}"
    stamp.touch()
    return ""


def _run_tests(python: Path, reasons: dict[str, str], end: float) -> bool:
    """Run the groups at the same time; return whether a test failed. A group whose extras are all missing is left out."""
    running = {names: _start(python, names) for names, extras in GROUPS.items() if not all(extra in reasons for extra in extras)}
    failed = False
    for names, process in running.items():
        try:
            output, _ = process.communicate(timeout=max(end - time.monotonic(), 5))  # one that has ended needs a moment to be read
            print(f"--- {' '.join(names)}\n{output}", flush=True)
            failed |= process.returncode not in (0, 5)  # 5: every test of the file was skipped
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started: those of a Ray cluster outlive it
            print(process.communicate()[0])
            reasons[" ".join(names)] = f"its tests did not end within {SECONDS:.0f} seconds"
    return failed


def _start(python: Path, names: Sequence[str]) -> subprocess.Popen[str]:
    """Start the tests of a group. torchvision's stand-in is seen by those of Avalanche alone."""
    path = [str(ROOT / "src"), *([str(HERE / "stubs")] if "test_avalanche.py" in names else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    files = [str(HERE / name) for name in names]
    options = ["-p", "no:cacheprovider", "-rs", "--show-capture=no", "--tb=short"]
    command = [str(python), "-m", "pytest", *options, *files]
    out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **out)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
