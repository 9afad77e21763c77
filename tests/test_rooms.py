"""The script that draws the rooms, on a small package made for the purpose."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "rooms.py"
FILES = {
    "__init__.py": "from pack import base, top",
    "__main__.py": "from pack.top import main",
    "base.py": "import os\nimport packed\n",
    "mid/__init__.py": '"""Middle. Imports nothing. Imported by mistake."""',
    "mid/one.py": "from pack.base import x\nfrom pack.mid import two",
    "mid/two.py": "def late():\n    from .. import side\n    from ..base import x\n    from . import one",
    "side.py": "import pack.base",
    "top/__init__.py": "from pack import base, mid as middle, missing",
    "top/deep/leaf.py": "from ...mid.one import x\nfrom ..deep import leaf",
}
LAYERS = (("base", "side"), ("mid",), ("top",))


@pytest.fixture(scope="module")
def rooms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rooms", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "pack"


def test_a_room_is_a_folder_or_a_root_file(rooms: ModuleType, source: Path) -> None:
    found = rooms.rooms_of(source)
    assert list(found) == ["base", "mid", "side", "top"]
    assert [path.name for path in found["top"]] == ["__init__.py", "leaf.py"]


def test_imports_inside_functions_and_relative_ones_count(rooms: ModuleType, source: Path) -> None:
    assert rooms.arrows_of(source) == {"base": set(), "side": {"base"}, "mid": {"base", "side"}, "top": {"base", "mid"}}
    assert rooms.imports_of(source / "mid" / "two.py", source) == {"side", "base"}
    assert rooms.imports_of(source / "top" / "deep" / "leaf.py", source) == {"mid"}
    assert rooms.heights(rooms.arrows_of(source)) == {"base": 0, "side": 1, "mid": 2, "top": 3}


def test_only_arrows_that_no_path_implies_are_drawn(rooms: ModuleType, source: Path) -> None:
    assert rooms.reduce_arrows(rooms.arrows_of(source)) == {"base": set(), "side": {"base"}, "mid": {"side"}, "top": {"mid"}}
    lines = rooms.picture(source, LAYERS).splitlines()
    assert lines[0] == "4 rooms, 5 imports between them on 4 levels. The picture leaves out the 2 imports that others imply."
    nodes = ['    top[["top/"]]', '    mid[["mid/"]]', '    base["base"]', '    side["side"]']
    assert lines[2:] == ["```mermaid", "flowchart TD", *nodes, "    top --> mid", "    mid --> side", "    side --> base", "```"]


def test_a_circle_keeps_what_can_be_reached(rooms: ModuleType) -> None:
    arrows = {"a": {"b", "c"}, "b": {"c"}, "c": {"a"}, "d": {"a", "c"}}
    assert rooms.circles(arrows) == [["a", "c", "a"], ["b", "c", "a", "b"]]
    assert rooms.reduce_arrows(arrows) == {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"c"}}
    assert set(rooms.heights(arrows)) == set(arrows)


def test_violations_name_the_file(rooms: ModuleType, source: Path) -> None:
    assert rooms.violations(source, LAYERS, apart=()) == []
    assert rooms.violations(source, LAYERS, apart=(("base", "side"),)) == ["side.py imports base; side and base must not import each other"]
    (source / "base.py").write_text("from pack.top import x")
    upward, *circles = rooms.violations(source, LAYERS, apart=())
    assert upward == "base.py imports top, which is in a higher layer than base"
    assert circles[0] == "the imports go in a circle: base -> top -> base"
    assert "side is in no layer" in rooms.violations(source, (("base",), ("mid",), ("top",)), apart=())


def test_the_page_is_written_checked_and_found_out_of_date(
    rooms: ModuleType, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    words = ["--source", str(source), "--page", str(page)]
    page.write_text("no markers")
    assert rooms.main(words) == 1
    assert "needs the lines <!-- rooms --> and <!-- /rooms -->" in capsys.readouterr().err
    page.write_text("# Title\n\n<!-- rooms -->\n<!-- /rooms -->\n\nafter\n")
    assert rooms.main([*words, "--check"]) == 1
    assert "is out of date" in capsys.readouterr().err
    assert rooms.main(words) == 0
    shown = capsys.readouterr().out
    assert "root files              4" in shown
    assert "files over 250 lines    0" in shown
    text = page.read_text()
    assert text.startswith("# Title\n\n<!-- rooms -->\n\n4 rooms, ")
    assert text.endswith("```\n\n<!-- /rooms -->\n\nafter\n")
    assert (source / "mid/__init__.py").read_text() == '"""Middle. Imports base and side. Imported by top."""'
    assert rooms.main([*words, "--check"]) == 0
    (source / "side.py").write_text("")
    assert rooms.main([*words, "--check"]) == 1
    assert page.read_text() == text


def test_every_layer_of_the_package_is_named_once(rooms: ModuleType) -> None:
    named = [room for layer in rooms.LAYERS for room in layer]
    assert len(named) == len(set(named))
    assert all(room in named for pair in rooms.APART for room in pair)
