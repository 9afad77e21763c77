"""Imports go one way, and importing is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "selfless"
ORDER = """own terms workers files functional layers metrics capacity anchor activations closed persample importance sparsify preserve
path recording distilling saved keeper models data spec engine runner report experiments bench
cli __main__""".split()


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The rooms a file imports from, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("selfless"):
            names = [node.module] if node.module != "selfless" else [f"selfless.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("selfless")]
        found |= {name.split(".")[1] for name in names if "." in name}
    return found & set(ORDER)


def test_every_room_is_in_the_order() -> None:
    rooms = {room(path) for path in SOURCE.rglob("*.py")} - {"__init__", "py"}
    assert rooms == set(ORDER)


def test_imports_go_one_way() -> None:
    for path in SOURCE.rglob("*.py"):
        here = room(path)
        if here == "__init__":
            continue
        for other in imports(path) - {here}:
            assert ORDER.index(other) < ORDER.index(here), f"{path.relative_to(SOURCE)} imports {other}, which comes after {here}"


def test_data_comes_in_layers() -> None:
    """The object sets stand on the rest of data; of data, only the streams by name and the package itself know them."""
    objects = SOURCE / "data" / "objects"
    for path in (SOURCE / "data").glob("*.py"):
        knows = "selfless.data.objects" in path.read_text(encoding="utf-8")
        assert knows == (path.name in ("__init__.py", "named.py")), path.name
    order = (
        "matlab shelf listing flowers scenes birds cars aircraft actions letters svhn published fitting preparing finding stream".split()
    )
    assert {path.stem for path in objects.glob("*.py")} - {"__init__"} == set(order)
    for path in objects.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("selfless.data.objects"):
                below = node.module.split(".")[3:4] if node.module else []
                for other in below or [alias.name for alias in node.names]:
                    assert order.index(other) < order.index(path.stem), f"{path.name} imports {other}, which comes after it"


def test_a_worker_needs_nothing_of_the_package() -> None:
    """It is run by its path, in a tenth of a second."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit(any(m.split('.')[0] in ('torch', 'selfless') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code, str(SOURCE / "data/objects/fitting.py")]).returncode == 0


def test_the_report_and_the_experiments_do_not_know_each_other() -> None:
    for room_name, other in (("report", "experiments"), ("experiments", "report")):
        for path in (SOURCE / room_name).glob("*.py"):
            assert other not in imports(path), f"{path.name} imports {other}: the report reads records, experiments write them"


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
