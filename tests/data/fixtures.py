"""Fixtures of the data tests, for other folders too: isolation, small data sets in their published layouts, a mirror."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from selfless.data import CATALOGUE, OBJECTS
from selfless.data.sources import File, cifar
from tests.data import object_layouts as made
from tests.data.published import cifar_contents, mnist_contents


@pytest.fixture
def isolated(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a test no network, an empty cache and no data folder; one marked `real_data` keeps its cache and folder."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: tuple[str, int]) -> None:
        assert address[0] == "127.0.0.1", f"a test reached for {address}"
        connect(self, address)

    def resolve_local(host: str, *rest: object, **more: object) -> object:
        if host != "127.0.0.1":
            raise socket.gaierror(f"{host}: no network in tests")
        return resolve(host, *rest, **more)  # type: ignore[arg-type]

    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket.socket, "connect", local_only)
    monkeypatch.setattr(socket, "getaddrinfo", resolve_local)
    if request.node.get_closest_marker("real_data") is None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("SELFLESS_DATA", raising=False)
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the published checksums of the object sets, so that tests can make small ones."""
    for name, item in list(OBJECTS.items()):
        monkeypatch.setitem(OBJECTS, name, replace(item, files=tuple(replace(file, md5=None) for file in item.files)))


@pytest.fixture
def three_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with three of the eight object sets, written in another order than the paper's."""
    monkeypatch.setenv("SELFLESS_DATA", str(tmp_path / "data"))
    for name in ("svhn", "birds", "scenes"):
        made.put(tmp_path / "data", name)
    return tmp_path / "data"


@pytest.fixture
def small_mnist(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Replace MNIST in the catalogue by a small one; return .gz name → bytes. Nothing is written to disk."""
    packed, files = {}, []
    for name, content in mnist_contents().items():
        data = gzip.compress(content, mtime=0)
        packed[f"{name}.gz"] = data
        sums = (hashlib.sha256(data).hexdigest(), hashlib.sha256(content).hexdigest())
        urls = (f"https://first.invalid/{name}.gz", f"https://second.invalid/{name}.gz")
        files.append(File(f"{name}.gz", len(data), sums[0], urls, sums[1]))
    monkeypatch.setitem(CATALOGUE, "mnist", replace(CATALOGUE["mnist"], files=tuple(files)))
    return packed


@pytest.fixture
def put_mnist(small_mnist: dict[str, bytes]) -> Callable[[Path], Path]:
    """Return a function that writes the small MNIST below a data folder."""

    def put(root: Path) -> Path:
        (root / "mnist").mkdir(parents=True)
        for name, data in small_mnist.items():
            (root / "mnist" / name).write_bytes(data)
        return root

    return put


@pytest.fixture
def small_cifar(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Replace the published checksums of CIFAR-100 by those of a small one; return its files."""
    contents = cifar_contents()
    sums = {
        name: (hashlib.md5(contents[name]).hexdigest(), hashlib.sha256(contents[name]).hexdigest()) for name in ("train.bin", "test.bin")
    }
    monkeypatch.setattr(cifar, "CHECKSUMS", sums)
    return contents


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, bytes], list[str]]]:
    """Run a mirror on this machine: (address, path → bytes, requests so far)."""
    files: dict[str, bytes] = {}
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            data = files.get(self.path)
            self.send_response(200 if data is not None else 404)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            first = self.path.startswith("/cut/") and asked.count(self.path) == 1
            self.wfile.write((data or b"")[: 10 if first else None])

        def log_message(self, *_: object) -> None: ...

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{made.server_address[1]}", files, asked
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture
def served(server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Serve Flowers, Scenes and SVHN from a mirror on this machine; the other sets have none that answers. Returns the requests."""
    base, files, asked = server
    for name, item in list(OBJECTS.items()):
        folder = made.put(tmp_path / "mirror", name, packed=True)
        known = []
        for file in item.files:
            data = (folder / file.name).read_bytes()
            files[f"/{file.name}"] = data
            urls = (f"{base}/{file.name}",) if name in ("svhn", "flowers", "scenes") else ("https://far.invalid/x",) if file.urls else ()
            known.append(replace(file, size=len(data), urls=urls, md5=None if name == "scenes" else hashlib.md5(data).hexdigest()))
        monkeypatch.setitem(OBJECTS, name, replace(item, files=tuple(known)))
    return asked
