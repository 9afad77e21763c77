"""Links of the pages, for the site: a page links to files of the whole repository, and the site has only what is put into it.

On a forge a link such as `../results/README.md` works as it stands. For the site every file outside docs/ that a page links to gets a
place under `repository/`: Markdown and Python files and folders become pages, all others are copied. `rewrite` changes the links to match.
The functions here are pure; `docs/site/hooks.py` calls them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs/"
FOLDER = "repository"
LINK = re.compile(r"(\]\()(?!https?:|mailto:)([^)#\s]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"(^```.*?^```[ \t]*$|`[^`\n]+`)", re.S | re.M)


def targets(text: str, page: str) -> list[str]:
    """Return the files and folders that a page links to, as paths in the repository. `page` is the page's own path."""
    return [_resolve(page, target) for part in CODE.split(text)[::2] for _, target, _ in LINK.findall(part)]


def rewrite(text: str, page: str) -> str:
    """Return the text of a page with the links that the site needs; code stays as it is."""
    start = posixpath.dirname(place(page))

    def change(link: re.Match[str]) -> str:
        return link[1] + posixpath.relpath(place(_resolve(page, link[2])), start or ".") + link[3]

    parts = CODE.split(text)
    parts[::2] = [LINK.sub(change, part) for part in parts[::2]]
    return "".join(parts)


def place(path: str, root: Path = ROOT) -> str:
    """Return where a file or folder of the repository is in the site, as the path of its source: a page ends with .md."""
    if path.startswith(DOCS):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix(DOCS))
    if (root / path).is_dir():
        return posixpath.join(FOLDER, path, "README.md" if (root / path / "README.md").is_file() else "index.md")
    return posixpath.join(FOLDER, path + (".md" if path.endswith(".py") else ""))


def outside(pages: Iterable[str], read: Callable[[str], str] | None = None) -> list[str]:
    """Return the files and folders outside docs/ that these pages link to, and those that these link to in turn."""
    read = read or (lambda path: (ROOT / path).read_text(encoding="utf-8"))
    found: list[str] = []
    waiting = list(pages)
    while waiting:
        page = waiting.pop()
        for target in targets(read(page), page):
            if not target.startswith(DOCS) and target not in found:
                found.append(target)
                readme = posixpath.join(target, "README.md")
                waiting += [name for name in (target, readme) if name.endswith(".md") and (ROOT / name).is_file()]
    return sorted(found)


def as_page(path: str, root: Path = ROOT) -> str:
    """Return the Markdown of a page for a Python file or for a folder without a page of its own."""
    here = root / path
    if here.is_file():
        return f"# {here.name}\n\n`{path}`\n\n```python\n{here.read_text(encoding='utf-8').rstrip()}\n```\n"
    rows = [f"| {_name(file, path)} | {_summary(file)} |" for file in sorted(here.iterdir()) if not file.name.startswith(("_", "."))]
    return "\n".join([f"# {path}", "", "| file | what it is |", "| --- | --- |", *rows, ""])


def _name(file: Path, folder: str) -> str:
    return f"[{file.name}]({file.name}.md)" if file.suffix == ".py" else f"`{file.name}{'/' if file.is_dir() else ''}`"


def _summary(file: Path) -> str:
    """Return the first line of the docstring of a Python file; nothing for other files."""
    text = file.read_text(encoding="utf-8") if file.suffix == ".py" else ""
    return text.split("\n")[0].strip('" ') if text.startswith('"""') else ""


def _resolve(page: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
