"""`make test-wheel`: install the wheel alone into a bare environment, and use it in an empty folder as somebody without the repository.

    python -m tests.release.wheel --dist dist

It runs the demo and `selfless run`, asks for data that cannot be had, runs a user's program, and checks that program with mypy --strict and
pyright. MNIST comes from SELFLESS_DATA or is fetched. Every step prints one line; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.release.environments import HOME, ROOT, clean_variables, install, make

USER = Path(__file__).with_name("user.py")
SMALL = ["--tasks", "2", "--epochs", "1", "--sparsify", "slnid:1e-3"]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Use the wheel in a bare environment, without the repository.")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="Folder with the wheel; make dist writes it.")
    parser.add_argument("--environment", type=Path, default=HOME / "bare", help="Folder of the bare environment; made anew.")
    given = parser.parse_args(words)
    python = make(given.environment, fresh=True)
    install(python, "torch")
    install(python, str(find_wheel(given.dist)))
    tools = make(HOME / "types")
    install(tools, "mypy", "pyright")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(USER, folder)
        failed = [check for check in (*USES, *TYPES) if not report(check, python, tools, Path(folder))]
    return 1 if failed else 0


def find_wheel(folder: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        raise SystemExit(f"There is no wheel in {folder}. Build it: make dist")
    return wheels[-1]


def report(check: Callable[[Path, Path, Path], str], python: Path, tools: Path, folder: Path) -> bool:
    """Run one check; print what it found, or what it did."""
    trouble = check(python, tools, folder)
    print(f"{'FAILED' if trouble else 'ok':<7} {(check.__doc__ or '').splitlines()[0]}" + (f"\n{trouble}" if trouble else ""), flush=True)
    return not trouble


def call(command: list[str], folder: Path, expect: int = 0, **variables: str) -> tuple[str, str]:
    """Run a command in a folder; return its trouble, if its exit status is another one than expected, and its output."""
    done = subprocess.run(command, cwd=folder, env=clean_variables(**variables), capture_output=True, text=True)
    trouble = "" if done.returncode == expect else f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return trouble or ("a traceback:\n" + done.stderr if "Traceback" in done.stderr else ""), done.stdout + done.stderr


def selfless(python: Path) -> str:
    return str(python.with_name("selfless"))


# --------------------------------------------------------------------------------------------------------------- without the repository


def comes_from_the_wheel(python: Path, _tools: Path, folder: Path) -> str:
    """The package is that of the wheel, and its version that of the file's name."""
    code = "import importlib.metadata as m, selfless; print(selfless.__file__, selfless.__version__, m.version('selfless-learning'))"
    trouble, output = call([str(python), "-c", code], folder)
    file, *versions = output.split() or [""]
    return trouble or ("" if file.startswith(str(python.parents[1])) and len(set(versions)) == 1 else f"found {output}")


def demo(python: Path, _tools: Path, folder: Path) -> str:
    """selfless demo --quick writes a table, pictures and a report."""
    trouble, output = call([selfless(python), "demo", "--quick"], folder)
    missing = [name for name in ("report.html", "accuracy.png", "capacity.png") if not (folder / "demo" / name).exists()]
    return trouble or (f"missing: {missing}\n{output}" if missing else "")


def run(python: Path, _tools: Path, folder: Path) -> str:
    """selfless run trains; the same command reads the record; predict, export and report use it."""
    command = [selfless(python), "run", *SMALL, "--out", "mine", "--json"]
    for _ in range(2):
        trouble, _ = call(command, folder)
        if trouble:
            return trouble
    keys = [path.parent.name for path in folder.glob("mine/*/metrics.json")]
    if len(keys) != 1:
        return f"one record was expected, found {keys}"
    for words in (["report", "mine"], ["export", f"mine/{keys[0]}", "--format", "safetensors"], ["capacity", "mine"]):
        trouble, _ = call([selfless(python), *words], folder)
        if trouble:
            return trouble
    return "" if (folder / "mine/report.html").exists() else "selfless report wrote no mine/report.html"


def without_data(python: Path, _tools: Path, folder: Path) -> str:
    """Without data and network, one clear message says which files to put where."""
    nowhere = "http://127.0.0.1:9"  # nothing listens there
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")
    empty = {**dict.fromkeys(names, nowhere), "PIP_CONFIG_FILE": "/dev/null", "PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "2"}
    for place in ("HOME", "XDG_CACHE_HOME", "SELFLESS_DATA"):
        empty[place] = str(folder / "empty")
    (folder / "empty").mkdir(exist_ok=True)
    for words in (["demo", "--quick", "--out", "other"], ["run", *SMALL, "--out", "other"]):
        trouble, output = call([selfless(python), *words], folder, expect=1, **empty)
        absent = [word for word in ("mnist", "SELFLESS_DATA", "--data-dir") if word not in output]
        if trouble or absent:
            return trouble or f"{' '.join(words)} does not mention {absent}:\n{output}"
    return ""


def program(python: Path, _tools: Path, folder: Path) -> str:
    """A user's program runs."""
    return call([str(python), USER.name], folder, PYTHONWARNINGS="error::DeprecationWarning:__main__")[0]


# --------------------------------------------------------------------------------------------------------------------------- its types


def mypy(python: Path, tools: Path, folder: Path) -> str:
    """mypy --strict accepts the user's program."""
    options = ["--strict", "--untyped-calls-exclude", "torch", "--python-executable", str(python)]
    return call([str(tools), "-m", "mypy", *options, USER.name], folder)[0]


def pyright(python: Path, tools: Path, folder: Path) -> str:
    """pyright, in its strict mode, accepts the user's program."""
    settings = {"typeCheckingMode": "strict", "include": [USER.name], "reportUnknownMemberType": "none"}  # torch's are incomplete
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    return call([str(tools), "-m", "pyright", "--pythonpath", str(python)], folder)[0]


USES = (comes_from_the_wheel, demo, run, without_data, program)
TYPES = (mypy, pyright)

if __name__ == "__main__":
    sys.exit(main())
