"""`make test-matrix`: test the wheel with each Python and with the oldest and the newest torch, and record what was run and what was not.

    python -m tests.release.matrix --dist dist --to results/reliability/matrix.json
    python -m tests.release.matrix --only 3.12 --newest 2.10.0 --tests tests/keeper tests/importance

A cell is one Python with one torch: an environment with that torch and the wheel, then the tests of this checkout, which import the
installed package. Each Python has a fresh environment, in which the newest torch replaces the oldest. An interpreter is `python3.12` on
the PATH, one of pyenv, or given: `--python /opt/py/bin/python3.12`. "Oldest" is the oldest torch ≥ 2.4 that the index has for that
Python, "newest" the newest. A cell that cannot be run is recorded with the reason. Cells of an earlier call stay in the file. The exit
status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.release.dist import digest
from tests.release.environments import HOME, ROOT, clean_variables, install, make
from tests.release.wheel import find_wheel

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
LOWEST = (2, 4)  # of pyproject.toml; a test compares them
# torch's own warnings about itself in old versions are no errors of ours.
WARNINGS = ("ignore::FutureWarning:torch.utils.checkpoint", "ignore:You are using `torch.load`:FutureWarning")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Test the wheel with each Python, and the oldest and the newest torch.")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="Folder with the wheel; make dist writes it.")
    parser.add_argument("--to", type=Path, default=ROOT / "results/reliability/matrix.json", help="File for the record.")
    parser.add_argument("--only", nargs="*", choices=PYTHONS, default=PYTHONS, help="These versions of Python alone.")
    parser.add_argument("--python", nargs="*", default=[], help="Interpreters that are not on the PATH.")
    parser.add_argument("--oldest", help="This version in place of the oldest torch.")
    parser.add_argument("--newest", help="This version in place of the newest torch.")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="Files and folders of tests.")
    parser.add_argument("--marks", default="not slow", help="Which tests, as of pytest -m.")
    parser.add_argument("--processes", default="2", help="Processes of pytest.")
    parser.add_argument("--keep", action="store_true", help="Keep the environments, which take 1 GB each or more.")
    given = parser.parse_args(words)
    wheel, failed = find_wheel(given.dist), False
    for version in given.only:
        for age in ("oldest", "newest"):
            cell = run_cell(version, age, wheel, given)
            failed |= cell["status"] == "failed"
            print(f"Python {version}, {age} torch: " + describe(cell), flush=True)
            record(given.to, f"{version} {age}", cell)
    return 1 if failed else 0


def run_cell(version: str, age: str, wheel: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Make the environment of one cell, run the tests in it, and return what happened."""
    python = find_python(version, given.python)
    if python is None:
        return {"status": "not run", "reason": f"there is no Python {version} on this machine"}
    inner = make(HOME / f"matrix-{version}", python, fresh=age == "oldest")
    available = torch_versions(inner)
    if not available:
        return {"status": "not run", "reason": f"the package index has no torch ≥ {'.'.join(map(str, LOWEST))} for Python {version}"}
    torch = getattr(given, age) or (available[0] if age == "oldest" else available[-1])
    if torch not in available:
        return {
            "status": "not run",
            "reason": f"the package index has no torch {torch} for Python {version}; it has {', '.join(available)}",
        }
    try:
        install(inner, f"torch=={torch}", leave_out=("torch",))
        install(inner, str(wheel), "pytest", "pytest-xdist", "hypothesis", leave_out=("torch",))
        found = {"torch": {"tested": torch, "index": [available[0], available[-1]]}, "wheel": {"name": wheel.name, "sha256": digest(wheel)}}
        return {**run_tests(inner, given), **found}
    except SystemExit as error:
        return {"status": "not run", "reason": str(error).replace(str(ROOT) + "/", "")}
    finally:
        if not given.keep and age == "newest":
            shutil.rmtree(HOME / f"matrix-{version}", ignore_errors=True)


def find_python(version: str, given: list[str]) -> str | None:
    """Return an interpreter of this version."""
    kept = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    for path in [*given, shutil.which(f"python{version}"), *map(str, kept)]:
        if path and subprocess.run([path, "--version"], capture_output=True, text=True).stdout.startswith(f"Python {version}."):
            return path
    return None


def torch_versions(python: Path) -> list[str]:
    """Return the versions of torch that the index has for this Python, from the lowest that we support, in their order."""
    done = subprocess.run([str(python), "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True)
    found = re.search(r"Available versions: (.*)", done.stdout)
    names = {name.partition("+")[0] for name in found[1].split(", ")} if found else set()
    numbers = sorted(tuple(map(int, name.split("."))) for name in names if re.fullmatch(r"\d+\.\d+\.\d+", name))
    return [".".join(map(str, number)) for number in numbers if number >= LOWEST]


def run_tests(python: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run the tests with the installed package; return the counts of pytest and what they ran with."""
    code = "import json, platform, numpy, torch; print(json.dumps([platform.python_version(), torch.__version__, numpy.__version__]))"
    versions = dict(zip(("python", "torch", "numpy"), json.loads(output([str(python), "-c", code])), strict=True))
    options = ["-p", "no:cacheprovider", "-m", given.marks, "-n", given.processes, "--tb=short", *(w for o in WARNINGS for w in ("-W", o))]
    start = time.monotonic()
    done = subprocess.run(
        [str(python), "-m", "pytest", *options, *given.tests], cwd=ROOT, env=clean_variables(), capture_output=True, text=True
    )
    counts = {
        word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout.rpartition("\n=")[2] or done.stdout)
    }
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if done.returncode:
        print(done.stdout[-6000:] + done.stderr[-2000:])
    return {
        "status": "failed" if done.returncode else "passed",
        "versions": versions,
        "machine": f"{platform.system()} {platform.machine()}",
        "tests": [*given.tests, "-m", given.marks],
        "counts": counts,
        "failed": failed,
        "seconds": round(time.monotonic() - start),
    }


def output(command: list[str]) -> str:
    return subprocess.run(command, env=clean_variables(), capture_output=True, text=True, check=True).stdout


def describe(cell: dict[str, Any]) -> str:
    if cell["status"] == "not run":
        return f"not run: {cell['reason']}"
    counts = ", ".join(f"{n} {word}" for word, n in cell["counts"].items())
    return f"{cell['status']} with Python {cell['versions']['python']} and torch {cell['versions']['torch']}: {counts}"


def record(path: Path, name: str, cell: dict[str, Any]) -> None:
    """Put one cell into the file, beside those that are there."""
    cells = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted({**cells, name: cell}.items())), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
