"""The site of the documentation: its lists are complete, its links and generated pages right. `make docs` builds it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.site import api, commands, floors, links, notebooks
from tests.pages import ROOT, read

SECTIONS = api.sections(read("docs/api.md"), set(api.public_names()))


def test_every_public_name_is_in_one_table_of_the_api() -> None:
    assert sorted(name for section in SECTIONS for name in section.names) == sorted(api.public_names())


def test_every_public_name_has_an_example() -> None:
    for section in SECTIONS:
        used = set().union(*(api.used_names(code) for code in section.snippets))
        assert [name for name in section.names if name not in used] == [], section.title


def test_an_import_alone_is_no_example() -> None:
    assert api.used_names("from selfless import MAS, EWC\nimport selfless\nEWC(1)\nselfless.train") == {"EWC", "selfless", "train"}


def test_every_page_is_in_the_navigation() -> None:
    navigation = read("mkdocs.yml").partition("\nnav:")[2]
    written = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    made = [uri for uri, _ in api.pages()] + [f"notebooks/{path.stem}.md" for path in notebooks.STORED.glob("*.ipynb")]
    named = re.findall(r"- (?:.*: )?([\w./-]+\.md)$", navigation, re.M)
    assert sorted(name for name in named if not name.startswith("repository/")) == sorted([*written, *made, "commands.md"])


def test_every_command_and_option_is_in_the_reference() -> None:
    import typer

    from selfless.cli import app

    page = commands.reference()
    for name, command in commands.commands(typer.main.get_command(app), "selfless"):
        section = re.split(r"^## ", page.partition(f"\n## {name.removeprefix('selfless ')}\n")[2], flags=re.M)[0]
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--") and option != "--help"]
        assert section
        assert [option for option in options if f"`{option}" not in section] == []


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("docs/faq.md", "[a](own-loop.md#memory)", "[a](own-loop.md#memory)"),
        ("docs/faq.md", "[a](../results/README.md)", "[a](repository/results/README.md)"),
        ("docs/faq.md", "[a](../examples/ddp.py)", "[a](repository/examples/ddp.py.md)"),
        ("docs/faq.md", "[a](../examples)", "[a](repository/examples/index.md)"),
        ("docs/faq.md", "[a](https://example.org/b.md)", "[a](https://example.org/b.md)"),
        ("docs/lab-notes/sums.md", "![a](../../results/b.png)", "![a](../repository/results/b.png)"),
        ("docs/README.md", "[a](notebooks/own-model.ipynb)", "[a](notebooks/own-model.md)"),
        ("CONTRIBUTING.md", "[a](docs/methods.md#b)", "[a](../methods.md#b)"),
        ("docs/faq.md", "`[a](../examples)`", "`[a](../examples)`"),
        ("docs/faq.md", "```python\n[a](../examples)\n```", "```python\n[a](../examples)\n```"),
    ],
)
def test_links_of_the_site(page: str, text: str, expected: str) -> None:
    assert links.rewrite(text, page) == expected


def test_files_outside_are_found_through_other_files() -> None:
    texts = {"docs/a.md": "[x](../README.md)", "README.md": "[y](CONTRIBUTING.md) [z](docs/b.md)", "CONTRIBUTING.md": "[x](README.md)"}
    assert links.outside(["docs/a.md"], texts.__getitem__) == ["CONTRIBUTING.md", "README.md"]


@pytest.mark.parametrize("path", sorted(notebooks.STORED.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert cells[0]["source"][2].startswith("After this page you ")
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_outputs_of_a_notebook_are_shown() -> None:
    outputs = [{"text": ["\x1b[31mone\x1b[0m\n", "two\n"]}, {"data": {"image/png": "aGk=", "text/plain": "<Figure>"}}]
    cells = [{"cell_type": "markdown", "source": ["# T"]}, {"cell_type": "code", "source": "1 + 1", "outputs": outputs}]
    text, pictures = notebooks.to_markdown({"cells": cells}, "name")
    (file,) = pictures
    assert text == f'# T\n\n```python\n1 + 1\n```\n\n```text title="Output"\none\ntwo\n```\n\n![Output of the cell above]({file})\n'
    assert pictures[file] == b"hi"


def test_drawing_has_every_room() -> None:
    drawing = floors.draw({"cli": {"runner"}, "runner": set()})
    rooms = [path for path in (ROOT / "src/selfless").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    names = [path.stem for path in rooms if not path.name.startswith("__")]
    assert [name for name in names if not re.search(rf">{name}/?</text>", drawing)] == []
    assert drawing.count("<path") == 1
