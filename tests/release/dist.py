"""`make dist`: build the wheel and the sdist of the last commit twice, compare the bytes, and check what an index would show.

    python -m tests.release.dist --to dist

Both builds start from the files of the commit alone, in folders, at times and with access rights that differ. The files carry the time of
the commit (SOURCE_DATE_EPOCH), so that everybody who builds this commit gets the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.release.environments import HOME, ROOT, install, make


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the wheel and the sdist of the last commit, twice, and compare them.")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="Folder for the two files.")
    to: Path = parser.parse_args(words).to
    python = make(HOME / "build")
    install(python, "build", "hatchling", "twine")
    if git("status", "--porcelain", "--untracked-files=no"):
        print("Note: the last commit is built; changes that are not committed are left out.")
    with tempfile.TemporaryDirectory() as folder:
        first, second = (build(python, Path(folder) / name, mask) for name, mask in (("one", 0o022), ("another/place", 0o077)))
        differing = [name for name in sorted(first.keys() | second.keys()) if digest(first.get(name)) != digest(second.get(name))]
        if differing:
            print(f"Not reproducible: two builds of one commit differ in {', '.join(differing)}")
            return 1
        to.mkdir(parents=True, exist_ok=True)
        built = [Path(shutil.copy(path, to / name)) for name, path in sorted(first.items())]
    for path in built:
        print(f"{digest(path)}  {path.name}  {path.stat().st_size:,} bytes, the same in both builds")
    lost = relative_links(next(path for path in built if path.suffix == ".whl"))
    if lost:
        print(f"The description that an index shows has relative links, which lead nowhere there: {', '.join(lost)}")
        return 1
    return subprocess.run([str(python), "-m", "twine", "check", "--strict", *map(str, built)]).returncode


def relative_links(wheel: Path) -> list[str]:
    """Return the links of the wheel's description that are not addresses."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        description = files.read(name).decode("utf-8").partition("\n\n")[2]
    return re.findall(r"\]\((?!https?:)([^)\s]+)\)", description)


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"make dist builds the last commit, so it needs a git checkout: {done.stderr.strip()}")
    return done.stdout.strip()


def build(python: Path, folder: Path, mask: int) -> dict[str, Path]:
    """Build from a fresh copy of the last commit, with a mask of access rights; return the files by name."""
    source, out, before = folder / "source", folder / "out", os.umask(mask)
    try:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(source, filter="data")
        for path in source.rglob("*"):
            os.utime(path)  # now: the time of a file must not matter
        variables = {**os.environ, "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct")}
        command = [str(python), "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"The build failed:\n{done.stdout}{done.stderr}")
    finally:
        os.umask(before)
    return {path.name: path for path in out.iterdir() if path.suffix in (".whl", ".gz")}


def digest(path: Path | None) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path else "absent"


if __name__ == "__main__":
    sys.exit(main())
