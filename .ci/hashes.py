"""Write requirements-ci.txt: every package of an environment but torch, with its version and the SHA-256 of its wheels.

    python .ci/hashes.py .venv/bin/python > requirements-ci.txt

`.ci/run` installs from it with `pip --require-hashes`. The wheels are those for Python 3.11 on Linux, x86-64 and ARM. torch is left out:
the same version has different wheels on different indexes, with CUDA and without. Its version is in constraints.txt. The index is that of
pip's own settings.
"""

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

PYTHON = "3.11"
MACHINES = ("x86_64", "aarch64")
TAGS = (
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_17",
    "manylinux2014",
    "manylinux_2_12",
    "manylinux2010",
    "manylinux_2_5",
    "manylinux1",
)
LEFT_OUT = {"torch", "pip"}
BUILD = ("hatchling", "tomlkit", "trove-classifiers", "editables")  # what building the package needs, which an environment need not hold


def main(python: str) -> int:
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    listed = subprocess.run([*pip, "list", "--format=json", "--exclude-editable"], capture_output=True, text=True, check=True).stdout
    wanted = {p["name"].lower().replace("_", "-"): f"{p['name']}=={p['version']}" for p in json.loads(listed)}
    names = [line for name, line in sorted(wanted.items()) if name not in LEFT_OUT] + [name for name in BUILD if name not in wanted]
    hashes: dict[str, set[str]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as folder:
        for machine in MACHINES:
            report = Path(folder, f"{machine}.json")
            platforms = [word for tag in TAGS for word in ("--platform", f"{tag}_{machine}")]
            options = ["--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--target", folder, "--report", str(report)]
            chosen = ["--constraint", "constraints.txt", "--python-version", PYTHON, "--implementation", "cp", *platforms]
            subprocess.run([*pip, "install", "--quiet", *options, *chosen, *names], check=True, stdout=sys.stderr)
            for one in json.loads(report.read_text(encoding="utf-8"))["install"]:
                about = one["metadata"]
                hashes[f"{about['name'].lower()}=={about['version']}"].add(one["download_info"]["archive_info"]["hashes"]["sha256"])
    print(f"# Written by .ci/hashes.py: wheels for Python {PYTHON} on Linux, {' and '.join(MACHINES)}. torch is in constraints.txt alone.")
    for name, found in sorted(hashes.items()):
        print(" \\\n    ".join([name, *(f"--hash=sha256:{one}" for one in sorted(found))]))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
