"""README.md as the description of the package. A package index has none of the repository's files, so its relative links are changed.

With an address `Repository` in [project.urls] of pyproject.toml they point to the files there. Without one a link becomes its text, and a
picture is left out. Links to other sites stay as they are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```[ \t]*$|^ {4}[^\n]*$|`[^`\n]+`)", re.S | re.M)


class Description(MetadataHookInterface):
    """Sets `readme` of the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": describe(text, metadata.get("urls", {}).get("Repository"))}


def describe(text: str, address: str | None) -> str:
    """Return the text of README.md without relative links. `address` is that of the repository, or None. Code stays as it is."""

    def change(link: re.Match[str]) -> str:
        is_picture, words, target = bool(link[1]), link[2], link[3]
        if address is None:
            return "" if is_picture else words
        return f"{link[1]}[{words}]({address.rstrip('/')}/{'raw' if is_picture else 'blob'}/HEAD/{target})"

    parts = CODE.split(text)
    parts[::2] = [LINK.sub(change, part) for part in parts[::2]]
    return re.sub(r"\n{3,}", "\n\n", "".join(parts))
