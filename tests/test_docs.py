"""The documentation: its snippets run, its links lead somewhere, its pages stay short and plain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pages import FOLDERS, PAGES, ROOT, every_page, page_name, read

# ------------------------------------------------------------------------------------------------------------------ snippets


def snippets(page: Path) -> list[str]:
    """The Python snippets of a page, except those marked `no-run`."""
    found = re.findall(r"^```python([^\n]*)\n(.*?)^```", read(page), re.S | re.M)
    return [code for info, code in found if "no-run" not in info]


PRINTED = ROOT / "docs/five-minutes.md"  # has a test of its own, which runs it
SNIPPETS = [
    pytest.param(code, id=f"{page_name(page)}:{number}") for page in PAGES if page != PRINTED for number, code in enumerate(snippets(page))
]


def run_snippet(code: str) -> dict[str, Any]:
    """Run a snippet as a program and return its names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "snippet", "exec"), names)
    return names


@pytest.mark.parametrize("code", SNIPPETS)
@pytest.mark.slow
def test_snippet_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_snippet(code)


@pytest.mark.slow
def test_five_minutes_shows_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """To three points: another processor rounds other last digits."""
    (code,) = snippets(PRINTED)
    run_snippet(code)
    printed, shown = (
        re.findall(r"^ *(\S.*?) +task 1: +(\d+)% +task 2: +(\d+)% +task 3: +(\d+)%", t, re.M)
        for t in (capsys.readouterr().out, read(PRINTED))
    )
    assert [row[0] for row in printed] == [row[0] for row in shown] == ["nothing", "mas:1", "mas:1 + slnid:3e-3"]
    assert all(
        abs(int(a) - int(b)) <= 3 for one, other in zip(printed, shown, strict=True) for a, b in zip(one[1:], other[1:], strict=True)
    )


METHODS = [
    pytest.param(code, id=match.group(1))
    for page in ("write-your-own", "capabilities")
    for code in snippets(ROOT / f"docs/{page}.md")
    if (match := re.search(r"^class (\w+)\((?:MAS|Preserver|Quadratic|Sparsifier)\b", code, re.M))
]


@pytest.mark.slow
@pytest.mark.parametrize("code", METHODS)
def test_example_method_keeps_the_laws(code: str, request: pytest.FixtureRequest) -> None:
    from selfless.testing import check

    check(run_snippet(code)[request.node.callspec.id]())


def test_every_capability_has_an_example() -> None:
    text = read("docs/capabilities.md")
    table = re.findall(r"^\| \[`(\w+)`\]\(#[\w-]+\) \| `", text, re.M)
    assert table
    assert [name for name in table if not re.search(rf"^class \w+\(.*\b{name}\b", text, re.M)] == []


# --------------------------------------------------------------------------------------------------------------------- links


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|^(?: {4}|\t).*?$", "", text, flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(read(page)), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", without_code(read(page))):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page_name(page)} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(file), f"{page_name(page)} links to #{anchor}, which {file.name} does not have"


def test_every_page_is_linked_from_the_index() -> None:
    index = read("docs/README.md") + read("docs/lab-notes.md")
    pages = [page.relative_to(ROOT / "docs") for page in PAGES if page.is_relative_to(ROOT / "docs") and page.name != "README.md"]
    assert [str(page) for page in pages if f"({page}" not in index] == []


def test_architecture_names_files_that_exist() -> None:
    named = re.findall(r"`((?!tests/|src/)(?:\w+/)+(?:\w+\.py)?|\w+\.py)`", read("docs/architecture.md"))
    assert named
    assert [name for name in named if not (ROOT / "src/selfless" / name).exists()] == []


@every_page
def test_paths_of_the_repository_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks|results)/[\w./-]*)`", read(page))
    made_by_a_command = ("results/bench/here", "results/tune", "results/KEY", "results/mine", "results/report.html")
    assert [name for name in named if not name.startswith(made_by_a_command) and not (ROOT / name).exists()] == []


# ------------------------------------------------------------------------------------------------------------------ reference


def test_every_option_is_on_the_page_of_the_command_line() -> None:
    import typer

    from selfless.cli import app

    def commands(command: Any) -> Iterator[Any]:
        yield from (found for sub in command.commands.values() for found in commands(sub)) if hasattr(command, "commands") else [command]

    page = read("docs/cli.md")
    for command in commands(typer.main.get_command(app)):
        options = [name for parameter in command.params for name in parameter.opts if name.startswith("--") and name != "--help"]
        assert [name for name in options if not re.search(rf"{name}\b", page)] == [], command.name


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    import selfless

    page = read("docs/api.md")
    names = [name for name in selfless.__all__ if not name.startswith("__")]
    assert [name for name in names if not re.search(rf"`(?:selfless\.)?{name}\b", page)] == []


def test_every_method_is_on_the_page_of_methods() -> None:
    from selfless.preserve import PRESERVERS
    from selfless.sparsify import SPARSIFIERS

    page = read("docs/methods.md")
    assert [name for name in {**PRESERVERS, **SPARSIFIERS} if f"`{name}" not in page] == []


# -------------------------------------------------------------------------------------------------------------------- limits

LONGEST = {"README.md": 130, "CHANGELOG.md": 60, "docs/results.md": 200, "docs/architecture.md": 130}
LINE, PARAGRAPH = 120, 6


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page that are neither code, nor table, nor image, nor comment; blank ones included."""
    fenced = False
    for number, line in enumerate(read(page).splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, "" if line.startswith(("|", "![", "<!--", "#", "    ", "```")) else line


@every_page
def test_lines_of_prose_are_short(page: Path) -> None:
    assert [(number, len(line)) for number, line in prose(page) if len(line) > LINE] == []


@every_page
def test_lines_of_code_are_short(page: Path) -> None:
    lines = enumerate(read(page).splitlines(), 1)
    assert [number for number, line in lines if line.startswith("    ") and len(line) > LINE] == []


@every_page
def test_paragraphs_are_short(page: Path) -> None:
    count = 0
    for number, line in prose(page):
        item = re.match(r"\s*(?:[-*]|\d+\.) ", line) is not None
        count = 0 if not line.strip() else 1 if item else count + 1
        assert count <= PARAGRAPH, f"{page_name(page)}:{number}: a paragraph of more than {PARAGRAPH} lines; cut it or make a table of it"


@pytest.mark.parametrize("name", LONGEST)
def test_page_is_short(name: str) -> None:
    written = re.sub(r"(<!-- rooms -->\n).*?(<!-- /rooms -->)", r"\1\2", read(name), flags=re.S)  # the picture is generated
    assert len(written.splitlines()) <= LONGEST[name]


@every_page
def test_page_says_what_the_reader_can_do_after_it(page: Path) -> None:
    if page in FOLDERS or (page.name in ("README.md", "CHANGELOG.md") and page.parent == ROOT):
        return
    title, _, first = read(page).split("\n", 2)
    assert title.startswith("# ")
    assert first.startswith("After this page you ")


MAKING = (
    r"\b(?:sessions?|issues?|helpers?|agents?|reviewers?|this round|first round|next round|method notes|judged|judging)\b"
    r"|(?<!\w)/(?:home|root|work)/"  # paths of one machine
)


@every_page
def test_page_speaks_of_the_project_not_of_its_making(page: Path) -> None:
    text = read(page)
    if page.name == "results.md":
        text = text.partition("<!-- claims -->")[0]
    assert re.findall(MAKING, text, re.I) == []


def test_code_speaks_of_no_notes_that_readers_do_not_have() -> None:
    assert [path.name for path in (ROOT / "src").rglob("*.py") if "method notes" in read(path)] == []


def test_picture_of_the_readme_has_one_sentence() -> None:
    caption = re.search(r"^!\[[^\]]*\]\([^)]*\)\n\n\*(.*?)\*$", read("README.md"), re.M)
    assert caption
    assert len(re.findall(r"[.!?](?:\s|$)", caption.group(1))) == 1
