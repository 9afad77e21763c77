"""`make coverage`: branch coverage of src by the whole suite, subprocesses counted. Exit status 1 if it is below the floor.

python -m tests.mutants.coverage_of_src -n 2 -m "not whole"      # the words are pytest's
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FLOOR = 92.0
OUT = Path("build/coverage").resolve()


def main(words: list[str]) -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    os.environ |= {"COVERAGE_FILE": str(OUT / "data"), "OMP_NUM_THREADS": "1"}
    coverage = [sys.executable, "-m", "coverage"]
    subprocess.run([*coverage, "erase"], check=True)
    tested = subprocess.run([*coverage, "run", "-m", "pytest", *words]).returncode
    subprocess.run([*coverage, "combine", "--quiet"], check=True)
    subprocess.run([*coverage, "json", "--quiet", "-o", str(OUT / "coverage.json")], check=True)
    subprocess.run([*coverage, "report", "--sort=cover", "--skip-covered"], check=True)
    found = json.loads((OUT / "coverage.json").read_text(encoding="utf-8"))["totals"]
    print(f"{found['percent_covered']:.1f} % of {found['num_statements']} statements and {found['num_branches']} branches")
    (OUT / "summary.json").write_text(json.dumps(summary(found, words), indent=1) + "\n", encoding="utf-8")
    return tested or (1 if found["percent_covered"] < FLOOR else 0)


def summary(found: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """Return what results/reliability/coverage.json holds, from the totals of a report."""
    numbers = {"statements": found["num_statements"], "branches": found["num_branches"]}
    missed = {"missing_statements": found["missing_lines"], "missing_branches": found["missing_branches"]}
    about = {"date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0], "pytest": words}
    return about | {"percent": round(found["percent_covered"], 2)} | numbers | missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
