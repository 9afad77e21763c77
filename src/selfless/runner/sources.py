"""A digest of the files that a run depends on but names only by a path: custom data, networks, methods, weights, and object sets.

It is recorded with each result. A run whose digest has changed is trained again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from selfless.data import checksum
from selfless.data.digests import Contents, stream_contents
from selfless.inputs import is_own_file
from selfless.network.given import PREFIX as GIVEN
from selfless.spec import Run


def contents_of(run: Run, data_dir: Path | str | None = None) -> Contents:
    """Return the contents of the run's stream."""
    return stream_contents(run.stream, tasks=run.tasks, options=run.stream_options, data_dir=data_dir)


def made_from(run: Run, data_dir: Path | str | None = None, contents: Contents | None = None) -> str:
    """Return the digest; "" if the run depends on no such files, or if its data is not on this machine."""
    contents = contents or contents_of(run, data_dir)
    if not contents.is_here:
        return ""
    digest = hashlib.sha256(contents.listing or b"")
    weights = Path(str(run.model_options.get("weights", "")))
    if weights.is_file():  # otherwise it is a published name, which contains a digest
        digest.update(checksum(weights).encode())
    files = [*contents.files, *_network_files(run), *_method_files(run)]
    for file in files:
        with contextlib.suppress(OSError), open(file, "rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    has_sources = bool(files) or contents.listing is not None or weights.is_file()
    return digest.hexdigest()[:16] if has_sources else ""


def _network_files(run: Run) -> list[Path]:
    """Return the file of a custom network `module:function`: below the working directory, else where Python finds the module."""
    module, colon, _ = run.model.partition(":")
    if not colon or run.model.startswith(GIVEN):  # the name of a given network contains a digest
        return []
    path = module.replace(".", "/")
    if here := [file for file in (Path(f"{path}.py"), Path(path) / "__init__.py") if file.is_file()]:
        return here
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module)
        return [Path(spec.origin)] if spec is not None and spec.origin is not None and Path(spec.origin).is_file() else []
    return []


def _method_files(run: Run) -> list[Path]:
    """Return the files of custom preservers and sparsifiers, and the user's own files that they import, however indirectly."""
    custom = [type(term) for term in (*run.preserve.parts, *run.sparsify.parts) if term.is_custom()]
    files = [Path(inspect.getfile(kind)) for kind in custom if kind.__module__ != "__main__"]
    seen, names = {"__main__"}, [kind.__module__ for kind in custom]
    while names:
        name = names.pop(0)
        if name in seen or name not in sys.modules:
            continue
        seen.add(name)
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and is_own_file(file):
            files += [Path(file)] if Path(file) not in files else []
            names += sorted(_imported(sys.modules[name]))
    return files


def _imported(module: ModuleType) -> set[str]:
    """Return the names of the modules that a module imports, or takes a class or a function from."""
    values = list(vars(module).values())
    sources = [v.__module__ for v in values if inspect.isclass(v) or inspect.isfunction(v)]
    return {v.__name__ for v in values if inspect.ismodule(v)} | {name for name in sources if name}
