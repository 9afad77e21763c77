"""A digest of the files that a run depends on but names only by a path: custom data, networks, methods, weights, and object sets.

It is recorded with each result. A run whose digest has changed is trained again. Comments and docstrings of Python files do not count; a
digest of an older version, in which they did, has no `CODE` at its start.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import io
import sys
import tokenize
import warnings
from pathlib import Path
from types import ModuleType

from selfless.data import checksum
from selfless.data.digests import Contents, stream_contents
from selfless.inputs import is_own_file
from selfless.network.given import PREFIX as GIVEN
from selfless.spec import Run

CODE = "code-"  # begins a digest without comments


def contents_of(run: Run, data_dir: Path | str | None = None) -> Contents:
    """Return the contents of the run's stream."""
    return stream_contents(run.stream, tasks=run.tasks, options=run.stream_options, data_dir=data_dir)


def is_made_from(run: Run, digest: str, data_dir: Path | str | None = None, contents: Contents | None = None) -> bool:
    """Return whether this is the digest of the run; older versions recorded that of the files as they were written."""
    return digest == made_from(run, data_dir, contents) or digest == made_from(run, data_dir, contents, as_written=True)


def made_from(run: Run, data_dir: Path | str | None = None, contents: Contents | None = None, *, as_written: bool = False) -> str:
    """Return the digest; "" if the run depends on no such files, or if its data is not on this machine.

    as_written   count comments and docstrings of Python files too
    """
    contents = contents or contents_of(run, data_dir)
    if not contents.is_here:
        return ""
    digest = hashlib.sha256(contents.listing or b"")
    weights = Path(str(run.model_options.get("weights", "")))
    if weights.is_file():  # otherwise it is a published name, which contains a digest
        digest.update(checksum(weights).encode())
    files = [*contents.files, *_network_files(run), *_method_files(run)]
    for file in files:
        with contextlib.suppress(OSError):
            digest.update(_file_digest(Path(file), as_written))
    has_sources = bool(files) or contents.listing is not None or weights.is_file()
    kind = CODE if not as_written and any(Path(file).suffix == ".py" for file in files) else ""
    return kind + digest.hexdigest()[:16] if has_sources else ""


def _file_digest(file: Path, as_written: bool) -> bytes:
    """Return the digest of a file, of a Python file that of its code."""
    if file.suffix == ".py" and not as_written:
        content = file.read_bytes()
        with contextlib.suppress(SyntaxError, ValueError, tokenize.TokenError, RecursionError, MemoryError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's code, as of an invalid escape sequence
            content = code_of(content.decode(tokenize.detect_encoding(io.BytesIO(content).readline)[0])).encode()
        return hashlib.sha256(content).digest()
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


@functools.lru_cache(maxsize=64)  # the runs of a study share their files
def code_of(source: str) -> str:
    """Return the source of Python code without comments, docstrings, blank lines and spaces at the ends of lines."""
    if "__doc__" in source:  # docstrings are read
        return source
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    lines = source.encode().split(b"\n")
    docstrings = _docstrings(source)
    for first, start, last, end in (*_comments(source), *(_place(text) for text in docstrings)):
        lines[first : last + 1] = [lines[first][:start] + lines[last][end:], *[b""] * (last - first)]
    strings = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.JoinedStr | ast.Constant)]
    inside = {line for node in strings for line in range(node.lineno - 1, (node.end_lineno or node.lineno) - 1)}
    inside -= {line for text in docstrings for line in range(text.lineno - 1, (text.end_lineno or text.lineno) - 1)}
    kept = list[str]()
    for number, line in enumerate(lines):
        after_string, continues = number - 1 in inside, bool(kept) and kept[-1].endswith("\\")
        if number in inside or after_string or continues or line.strip():
            kept.append(line.decode() if number in inside else line.decode().rstrip())
    return "\n".join(kept)


def _comments(source: str) -> list[tuple[int, int, int, int]]:
    """Return the places of comments: first line, its byte, last line, its byte."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [(token.start[0] - 1, len(token.line[: token.start[1]].encode())) for token in tokens if token.type == tokenize.COMMENT]
    return [(row, start, row, sys.maxsize) for row, start in found]


def _docstrings(source: str) -> list[ast.Constant]:
    """Return the docstrings of a module, its classes and its functions."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    first = [node.body[0] for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and node.body]
    values = [one.value for one in first if isinstance(one, ast.Expr)]
    return [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def _place(text: ast.Constant) -> tuple[int, int, int, int]:
    """Return the place of a docstring, as `_comments` does."""
    return text.lineno - 1, text.col_offset, (text.end_lineno or text.lineno) - 1, text.end_col_offset or 0


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
