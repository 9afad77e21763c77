"""Imports go one way, and importing is cheap."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "selfless"

spec = importlib.util.spec_from_file_location("rooms", ROOT / "docs" / "rooms.py")
assert spec is not None
assert spec.loader is not None
rooms = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rooms)


@functools.cache
def arrows() -> Any:
    return rooms.arrows_of(SOURCE)


def test_imports_go_one_way_from_layer_to_layer() -> None:
    assert rooms.violations(SOURCE) == []


def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    assert rooms.main(["--check"]) == 0, "run: python docs/rooms.py"


def test_the_root_holds_formulas_and_values_only() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 11


def test_files_can_be_held_in_the_head() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    assert max(lengths.values()) <= 400
    assert sum(n > 250 for n in lengths.values()) <= len(lengths) // 8  # most files are under 250 lines


FOLDERS = sorted({path.parent for path in SOURCE.rglob("*.py")} - {SOURCE})


def docstring(folder: Path) -> str:
    return ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(SOURCE)))
def test_every_folder_says_what_lives_there_and_who_imports_it(folder: Path) -> None:
    text = docstring(folder)
    assert len(text.splitlines()) >= 3, "say in three lines what lives there"
    assert re.search(r"import(s|ed)\b", text, re.I), "say what it imports and what imports it"


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder.parent == SOURCE], ids=lambda folder: folder.name)
def test_a_room_says_truly_who_imports_it(folder: Path) -> None:
    assert rooms.sentences(folder.name, arrows()) in docstring(folder), "write 'Imports x. Imported by y.', then: python docs/rooms.py"


def strings(tree: ast.Module) -> list[tuple[int, str]]:
    """The line and text of every string that is not a docstring, parts of f-strings included."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [(node.lineno, node.value) for node in constants if isinstance(node.value, str)]


@pytest.mark.parametrize("room", ["keeper", "engine", "runner"])
def test_a_runtime_asks_for_capabilities_and_names_no_method(room: str) -> None:
    """Neither a class of a method, nor its name, nor a group of its state, nor a stream; messages included."""
    from selfless.data.streams import KINDS
    from selfless.preserve import PRESERVERS
    from selfless.sparsify import SPARSIFIERS

    kinds = {*PRESERVERS.values(), *SPARSIFIERS.values()} - {PRESERVERS["none"], SPARSIFIERS["none"]}
    classes = {kind.__name__ for kind in kinds} | {"Quadratic"}
    names = "|".join(map(re.escape, sorted({kind.name for kind in kinds} | classes, key=len, reverse=True)))
    named = re.compile(rf"(?<![\w-])({names})(?![\w-])|\b({'|'.join(KINDS)}|joint)-\w|\bwarmup=")
    for path in (SOURCE / room).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not used & classes, f"{path.name} names {used & classes}"
        for line, text in strings(tree):
            assert not named.search(text), f"{path.name}:{line} names a method or a stream: {text}"
        for node in ast.walk(tree) if path.name != "anchor.py" else ():  # which reads an optimizer's state
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and ast.unparse(node.value).endswith("state"):
                raise AssertionError(f"{path.name}:{node.lineno} names a group of a state: {ast.unparse(node)}")


# The layers of data above its tools; a module that is not named here is a tool. In each: lower layers, and its own without circles.
DATA = (
    "sources",  # the data sets
    "verify fetch cache objects weights",  # their files
    "part tasks description streams custom object_stream",  # tasks made of them
    "given carrying named traits digests",  # streams by name
)


def test_data_comes_in_layers() -> None:
    """Sources know no streams, streams know no names."""
    level = {module: i for i, layer in enumerate(DATA, 1) for module in layer.split()}
    arrows = data_imports(SOURCE / "data")
    for here, others in arrows.items():
        for other in others:
            assert level.get(other, 0) <= level.get(here, 0), f"data/{here} imports data/{other}, which is in a higher layer"
    assert tuple(graphlib.TopologicalSorter(arrows).static_order())  # raises CycleError if there is a circle


def data_imports(folder: Path) -> dict[str, set[str]]:
    """Return the modules of data that each of its modules imports; a folder is one module, and `__init__` none."""
    arrows: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        here = path.relative_to(folder).parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("selfless.data."):
                rest = (node.module or "").removeprefix("selfless.data").strip(".")
                arrows.setdefault(here, set()).update({rest.split(".")[0]} if rest else {alias.name for alias in node.names})
        arrows.setdefault(here, set()).discard(here)
    return arrows


def test_a_data_set_knows_no_other() -> None:
    """Among the object sets, the file of one set imports what they share, and never another set."""
    objects = SOURCE / "data" / "sources" / "objects"
    sets = {path.stem for path in objects.glob("*.py") if "ObjectSet(" in path.read_text(encoding="utf-8")} - {"base", "__init__"}
    assert len(sets) == 8
    for path in (objects / f"{name}.py" for name in sets):
        names = set(re.findall(r"from selfless\.data\.sources\.objects\.(\w+) import", path.read_text(encoding="utf-8")))
        assert names <= {"files", "listing", "base", "matlab"}, f"{path.name} imports {names}"


def test_a_worker_needs_nothing_of_the_package() -> None:
    """It is run by its path, in a tenth of a second."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit(any(m.split('.')[0] in ('torch', 'selfless') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code, str(SOURCE / "data/sources/objects/fitting.py")]).returncode == 0


def test_no_pickle_and_no_code_from_files() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for word in ("pickle.load", "yaml.load", "shell=True", "allow_pickle=True"):
            assert word not in text, f"{path.name} has {word}"
        assert "torch.load(" not in text or "weights_only=True" in text


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, selfless; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'matplotlib', 'typer')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    code = "import sys, selfless.report; sys.exit(any(m in sys.modules for m in ('torch', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_public_names_exist() -> None:
    import selfless

    for name in selfless.__all__:
        assert getattr(selfless, name) is not None


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "selfless", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("selfless ")


# --------------------------------------------------------------------------------------------------------------------- tests
NOT_OURS = {"_forward_hooks", "_forward_pre_hooks", "_pytree", "_python_dispatch", "_dynamo", "_exit"}  # torch's, and os._exit


def private_names(tree: ast.Module) -> list[str]:
    """Names with one leading underscore that a test takes from anything but itself: attributes, imports, patches by name."""

    def is_private(name: str) -> bool:
        return name.startswith("_") and not name.startswith("__") and name not in NOT_OURS

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom):
            words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [f"{node.lineno}: {ast.unparse(node)}" for word in words if is_private(word)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("setattr", "getattr", "delattr", "hasattr"):
            named = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            words = [part for name in named for part in name.split(".")]
            found += [f"{node.lineno}: {ast.unparse(node)}" for word in words if is_private(word)]
    return found


def test_no_test_reaches_into_a_private_name() -> None:
    found = {path: private_names(ast.parse(path.read_text(encoding="utf-8"))) for path in sorted((ROOT / "tests").rglob("*.py"))}
    assert [f"{path.relative_to(ROOT)}:{place}" for path, places in found.items() for place in places] == []


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("keeper._parts", 1),
        ("from selfless.keeper.keeper import _after", 1),
        ("from selfless.keeper._part import Part", 1),
        ("monkeypatch.setattr('selfless.engine.learner.Learner._start', None)", 1),
        ("getattr(keeper, '_parts')", 1),
        ("self._mine, model._forward_hooks, torch._dynamo.reset(), path.__class__", 0),
    ],
)
def test_the_search_for_private_names_finds_them(code: str, count: int) -> None:
    assert len(private_names(ast.parse(code))) == count


def test_tests_mirror_the_package() -> None:
    """A folder of tests is a folder of the package, and most folders of the package have one."""
    rooms_tested = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")} - {"."}
    packages = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("__init__.py")} - {"."}
    assert rooms_tested <= packages
    assert {package for package in packages if "/" not in package} <= rooms_tested


def test_test_files_are_short() -> None:
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 400 for path in (ROOT / "tests").rglob("*.py"))


def test_help_says_what_the_package_is_and_dir_shows_public_names_alone() -> None:
    import pydoc

    import selfless

    shown = pydoc.render_doc(selfless, renderer=pydoc.plaintext)
    assert shown.splitlines()[3].startswith("    selfless - Continual learning that leaves room")
    in_order = ("selfless.attach(", "anchor_with(", "penalty()", "consolidate(", "selfless.Run(", "selfless.train(")
    places = [shown.index(name) for name in in_order]
    assert places == sorted(places)
    assert dir(selfless) == sorted(selfless.__all__)
    for name in dir(selfless):
        assert getattr(selfless, name) is not None
