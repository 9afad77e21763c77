"""Hooks of mkdocs: what the site has besides the pages in docs/.

    on_files            add generated pages (commands, API, notebooks) and the files of the repository that pages link to
    on_page_markdown    change links to files outside docs/; draw the rooms of the package, for which a forge has Mermaid
    on_post_page        forbid the browser to load anything from elsewhere (a content security policy)

mkdocs is run from the root of the repository: python -m mkdocs build --strict
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files

from docs.site import api, commands, floors, links, notebooks

MERMAID = re.compile(r"^```mermaid\n.*?^```$", re.S | re.M)
INLINE = re.compile(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)[^>]*>(.*?)</script>", re.S)


def on_files(files: Files, config: Any) -> Files:
    """Add every page and file that the site has and docs/ has not."""
    written = [f"docs/{file.src_uri}" for file in files.documentation_pages() if file.src_uri.endswith(".md")]
    nav = [f"{name}" for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples")]
    found = sorted({*links.outside([*written, *nav[:3]]), *nav})
    examples = [str(path.relative_to(links.ROOT)) for path in (links.ROOT / "examples").glob("*.py")]
    for path in sorted({*found, *examples}):
        _add_outside(files, config, path)
    files.append(File.generated(config, "commands.md", content=commands.reference()))
    for uri, text in api.pages():
        files.append(File.generated(config, uri, content=text))
    for notebook in sorted(notebooks.STORED.glob("*.ipynb")):
        text, pictures = notebooks.to_markdown(notebooks.read(notebook), notebook.stem)
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def _add_outside(files: Files, config: Any, path: str) -> None:
    """Add one file or folder of the repository."""
    uri, here = links.place(path), links.ROOT / path
    if files.get_file_from_path(uri):
        return
    if uri.endswith("README.md") and here.is_dir():
        here = here / "README.md"
    if uri.endswith("/index.md") or path.endswith(".py"):
        files.append(File.generated(config, uri, content=links.as_page(path)))
    else:
        files.append(File.generated(config, uri, abs_src_path=str(here)))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change what a forge shows and the site cannot."""
    uri = page.file.src_uri
    if uri == "architecture.md":
        markdown = MERMAID.sub(lambda _: floors.draw(), markdown)
    generated = uri.startswith("api/") or uri == "commands.md" or uri.startswith("notebooks/")
    if generated or uri.endswith((".py.md", "/index.md")):
        return markdown
    markdown = re.sub(r"^```python no-run$", "```python", markdown, flags=re.M)  # a word for the tests
    inside = uri.startswith(f"{links.FOLDER}/")
    return links.rewrite(markdown, uri.removeprefix(f"{links.FOLDER}/") if inside else posixpath.join("docs", uri))


def on_post_page(output: str, **_: Any) -> str:
    """Add a policy to the page: scripts and everything else from this site alone; of inline scripts, those that were built."""
    digests = [hashlib.sha256(text.encode()).digest() for text in INLINE.findall(output)]
    scripts = " ".join(dict.fromkeys(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests))
    policy = f"default-src 'self'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
    return output.replace("<head>", f'<head>\n    <meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
