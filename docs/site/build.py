"""`make docs`: build the documentation site in an environment of its own.

    python -m docs.site.build FOLDER

The environment sees the packages of this one and has mkdocs besides. If mkdocs cannot be installed, the site is skipped, with a line that
says so and why. The exit status is 1 if a notebook or the build fails; links that lead nowhere are errors.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from docs.site.links import ROOT
from tests.integrations.environment import SECONDS, install, make_environment

COMMANDS = (("docs.site.notebooks",), ("mkdocs", "build", "--strict", "--quiet"))


def main(folder: Path) -> int:
    try:
        python = make_environment(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"SKIPPED the site: no virtual environment could be made in {folder}: {error}")
        return 0
    if reason := install("docs", python, folder, time.monotonic() + SECONDS):
        print(f"SKIPPED the site: {reason}")
        return 0
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "NO_MKDOCS_2_WARNING": "1",
    }
    for command in COMMANDS:
        if subprocess.run([str(python), "-m", *command], cwd=ROOT, env=environment).returncode:
            return 1
    print("the site is in build/site; to read it: python -m http.server --directory build/site")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
