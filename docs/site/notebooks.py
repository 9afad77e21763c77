"""The notebooks of the documentation: run them, and turn them into pages.

Notebooks are stored without outputs. `run` executes them and stores the result in build/notebooks; the site shows that, or the stored
notebook where it has not been run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STORED, EXECUTED = ROOT / "docs" / "notebooks", ROOT / "build" / "notebooks"
SECONDS = 300  # a cell that takes longer is an error


def run() -> None:
    """Execute every notebook; an error in a cell is an error of the build."""
    import nbformat
    from nbclient import NotebookClient

    EXECUTED.mkdir(parents=True, exist_ok=True)
    for path in sorted(STORED.glob("*.ipynb")):
        print(f"running {path.relative_to(ROOT)}", flush=True)
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(EXECUTED)}}).execute()
        nbformat.write(notebook, EXECUTED / path.name)


def read(path: Path) -> dict[str, Any]:
    """Return the executed notebook if it is up to date with the stored one, else the stored one."""
    stored, executed = json.loads(path.read_text(encoding="utf-8")), EXECUTED / path.name
    if executed.is_file():
        made = json.loads(executed.read_text(encoding="utf-8"))
        if [_text(cell["source"]) for cell in made["cells"]] == [_text(cell["source"]) for cell in stored["cells"]]:
            return dict(made)
    return dict(stored)


def to_markdown(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """Return the notebook as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(_text(cell["source"]))
            continue
        parts.append(f"```python\n{_text(cell['source'])}\n```")
        for output in cell.get("outputs", []):
            parts += _output(output, name, pictures)
    return "\n\n".join(parts) + "\n", pictures


def _output(output: dict[str, Any], name: str, pictures: dict[str, bytes]) -> list[str]:
    """Return one output of a cell: a picture, or text."""
    data = output.get("data", {})
    if "image/png" in data:
        content = base64.b64decode(_text(data["image/png"]))
        file = f"{name}-{hashlib.sha256(content).hexdigest()[:8]}.png"
        pictures[file] = content
        return [f"![Output of the cell above]({file})"]
    text = _text(output.get("text", data.get("text/plain", "")))
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip()
    return [f'```text title="Output"\n{text}\n```'] if text else []


def _text(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)


if __name__ == "__main__":
    run()
