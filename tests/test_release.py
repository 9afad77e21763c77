"""A release: one version, names that type checkers see, and the same gate everywhere."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import tomllib
from collections.abc import Callable
from types import ModuleType

import pytest

import selfless
from tests.pages import ROOT, load, read
from tests.release import matrix

PROJECT = tomllib.loads(read("pyproject.toml"))


def test_the_version_is_written_in_one_place() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/selfless/__init__.py"
    spelled = [p for p in (ROOT / "src").rglob("*.py") if re.search(rf"[\"']{re.escape(selfless.__version__)}[\"']", read(p))]
    assert spelled == [ROOT / "src/selfless/__init__.py"]
    assert not re.search(r"^version:", read("CITATION.cff"), re.M)


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.M)
    assert next(heading for heading in headings if heading.lower() != "unreleased") == selfless.__version__


def test_type_checkers_see_every_public_name() -> None:
    """They read `__all__` and the imports under TYPE_CHECKING as text; both must have the names that load at run time."""
    tree = ast.parse(read("src/selfless/__init__.py"))
    (written,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    assert ast.literal_eval(written) == selfless.__all__
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imported = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported | {"__version__"} == set(selfless.__all__)
    assert (ROOT / "src/selfless/py.typed").exists()


def test_hosted_ci_runs_the_gate_and_nothing_else() -> None:
    steps = re.findall(r"^\s+- (?:name: .*\n\s+)?run: (.*)$", read(".github/workflows/ci.yml"), re.M)
    assert steps == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o100  # it can be executed


def test_the_citation_names_the_paper() -> None:
    text = read("CITATION.cff")
    assert text.startswith("cff-version: 1.2.0")
    assert all(word in text for word in ("Selfless Sequential Learning", "Aljundi", "Rohrbach", "Tuytelaars", "year: 2019"))
    assert PROJECT["project"]["urls"]["Paper"] in text


# ---------------------------------------------------------------------------------------------------------- the page of an index


@pytest.fixture
def describe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str | None], str]:
    """`describe` of hatch_build.py, with a stand-in for the interface of hatchling, which only a build has."""
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin", "hatchling.metadata.plugin.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["hatchling.metadata.plugin.interface"], "MetadataHookInterface", object, raising=False)
    found: Callable[[str, str | None], str] = runpy.run_path(str(ROOT / "hatch_build.py"))["describe"]
    return found


def test_the_page_of_an_index_has_no_relative_link(describe: Callable[[str, str | None], str]) -> None:
    readme = read("README.md")
    relative = re.findall(r"\]\((?!https?:)([^)\s]+)\)", readme)
    assert relative
    assert all((ROOT / target.partition("#")[0]).exists() for target in relative)
    for address in (None, "https://example.org/us/selfless"):
        assert not re.findall(r"\]\((?!https?:)", describe(readme, address))
    linked = describe(readme, "https://example.org/us/selfless/")
    assert all(f"/HEAD/{target})" in linked for target in relative)
    assert "![Accuracy" in linked
    assert "https://example.org/us/selfless/raw/HEAD/results/equal/figures/fig-3a-equal.png" in linked
    assert describe("[a](b.md) ![c](d.png) [e](https://f.org) `[g](h)`", None) == "a  [e](https://f.org) `[g](h)`"
    assert "    print(keeper.capacity())  " in describe(readme, None)  # code is the same


# ------------------------------------------------------------------------------------------------------------------- versions


def test_the_matrix_tests_the_versions_that_are_promised() -> None:
    assert f"torch>={'.'.join(map(str, matrix.LOWEST))}" in PROJECT["project"]["dependencies"]
    assert PROJECT["project"]["requires-python"] == f">={matrix.PYTHONS[0]}"


def test_the_page_shows_the_recorded_matrix() -> None:
    cells = load("results/reliability/matrix.json")
    assert set(cells) <= {f"{python} {age}" for python in matrix.PYTHONS for age in ("oldest", "newest")}
    page = read("docs/reliability.md")
    for name, cell in cells.items():
        if cell["status"] != "not run":
            versions, counts = cell["versions"], cell["counts"]
            failed = counts.get("failed", 0) + counts.get("error", 0)
            shown = f"{counts['passed']}" + f"; {failed} failed" * bool(failed)
            wheel = cell["wheel"]["sha256"][:8] if isinstance(cell["wheel"], dict) else "earlier"  # the first records had no digest
            assert f"| {versions['python']} | {versions['torch']} | {shown} | {wheel} |" in page, name
