"""Opens and checks a wheelhouse made by `make wheelhouse`: all files of an installation, each with its hash.

    wheelhouse.py platform                                   prints the platform name of this machine's wheelhouses
    wheelhouse.py open SOURCE SCRATCH [--sha256 HEX] [--insecure]   prints the directory of a checked wheelhouse
    wheelhouse.py requirements DIRECTORY                     prints the requirements file for this Python

SOURCE is a directory, an archive (tar) or a URL of one; a URL may end in #sha256=HEX. Archives are unpacked in SCRATCH.
The installers run this before they run or install anything else of a wheelhouse. It only needs Python's standard
library, so that a hub can serve it inside a shell script.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import ipaddress
import json
import platform
import shutil
import sys
import tarfile
import urllib.request
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import urlsplit

FORMAT = 1
MANIFEST = "manifest.json"
MOST_BYTES = 4 * 2**30
MOST_FILES = 5_000
MOST_MANIFEST_BYTES = 2**20
PATIENCE_S = 60.0
PIECE_BYTES = 2**20


class Refused(Exception):
    """Error for a wheelhouse that cannot be used; its text says why and what to do."""


def this_platform() -> str:
    """Return the platform name, such as linux-x86_64, darwin-arm64 or win32-amd64."""
    return f"{sys.platform}-{platform.machine().lower()}"


def this_python() -> str:
    """Return the Python version, such as 3.11."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def open_wheelhouse(source: str, scratch: Path, *, sha256: str = "", insecure: bool = False) -> Path:
    """Return the checked directory: `source` itself, or its archive unpacked below `scratch`. Raises Refused."""
    address, _, fragment = source.partition("#sha256=")
    wanted = sha256 or fragment
    if "://" in source:
        archive = scratch / "wheelhouse.tar"
        fetch(address, archive, insecure=insecure)
    else:
        archive = Path(source)
    if archive.is_dir():
        if wanted:
            raise Refused(f"Only an archive or a URL can have a SHA-256, and {source} is a directory.")
        return check(archive)
    if not archive.is_file():
        raise Refused(f"{source} does not exist.")
    if wanted and (found := hash_of(archive)) != wanted.lower():
        raise Refused(f"{source} has the wrong content: its SHA-256 is {found}, not {wanted}. Fetch it again.")
    directory = unpack(archive, scratch / "unpacked")
    if "://" in source:
        archive.unlink()
    return check(directory)


def fetch(url: str, target: Path, *, insecure: bool = False) -> None:
    """Download `url` over https, or http from this machine; the same rule applies to redirects. Raises Refused."""
    _allow(url, insecure=insecure)
    handlers: list[urllib.request.BaseHandler] = [_Redirects(insecure=insecure)]
    if _is_loopback(url):
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=PATIENCE_S) as answer, target.open("wb") as file:
            _copy(answer, file, MOST_BYTES)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Refused(f"{url} cannot be fetched: {error}") from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, *, insecure: bool) -> None:
        self._insecure = insecure

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _allow(newurl, insecure=self._insecure)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _allow(url: str, *, insecure: bool) -> None:
    scheme = urlsplit(url).scheme
    if scheme == "https" or (scheme == "http" and (insecure or _is_loopback(url))):
        return
    raise Refused(f"{url} is not https. In a network that you trust, add --insecure (http).")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def unpack(archive: Path, target: Path) -> Path:
    """Unpack and return the archive's only directory. Raises Refused for links, devices and paths outside of it."""
    target.mkdir(parents=True)
    left, tops = MOST_BYTES, set()
    try:
        with tarfile.open(archive, "r:*") as tar:
            for number, member in enumerate(tar):
                if number >= MOST_FILES:
                    raise Refused(f"{archive} holds more than {MOST_FILES} files.")
                path = target.joinpath(*(parts := _parts(member.name)))
                tops.add(parts[0])
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                    continue
                content = tar.extractfile(member) if member.isreg() else None
                if content is None:
                    raise Refused(f"{archive} holds {member.name!r}, which is neither a file nor a directory.")
                path.parent.mkdir(parents=True, exist_ok=True)
                with content, path.open("xb") as file:
                    left -= _copy(content, file, left)
                path.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise Refused(f"{archive} cannot be unpacked: {error}") from error
    if len(tops) != 1:
        raise Refused(f"{archive} is no wheelhouse: it holds {len(tops)} directories, not one.")
    return target / tops.pop()


def _parts(name: str) -> tuple[str, ...]:
    """Return the parts of a member's path. Raises Refused if it could leave the target directory on any system."""
    path = PurePosixPath(name)
    is_plain = all(part not in ("..", "") and not set(part) & set('\\:*?"<>|\0') for part in path.parts)
    if path.is_absolute() or not path.parts or not is_plain:
        raise Refused(f"The archive holds {name!r}, which does not stay inside it.")
    return path.parts


def check(directory: Path) -> Path:
    """Return `directory` if its manifest fits this platform and matches its files exactly. Raises Refused."""
    manifest = read_manifest(directory)
    if manifest["platform"] != this_platform():
        raise Refused(f"This wheelhouse is for {manifest['platform']}, and this machine is {this_platform()}.")
    needed, here = manifest["glibc"], platform.libc_ver()[1]
    if needed and here and _numbers(here) < _numbers(needed):
        raise Refused(f"This wheelhouse needs glibc {needed}, and this machine has {here}. Install from the source.")
    files = manifest["files"]
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() or not (path.is_dir() or name in files or name == MANIFEST):
            raise Refused(f"{directory} holds {name}, which its manifest does not name.")
    for name, sha256 in files.items():
        path = directory.joinpath(*_parts(name))
        if not path.is_file():
            raise Refused(f"{directory} lacks {name}, which its manifest names.")
        if hash_of(path) != sha256:
            raise Refused(f"{path} is damaged: its SHA-256 is not the manifest's. Fetch the wheelhouse again.")
    return directory


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest. Raises Refused if it is missing or has an unknown format."""
    path = directory / MANIFEST
    try:
        if path.stat().st_size > MOST_MANIFEST_BYTES:
            raise Refused(f"{path} is too large.")
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise Refused(
                f"{path} has format {manifest['format']}, and this installer knows {FORMAT}. Use the wheelhouse's own."
            )
        text = [manifest[key] for key in ("platform", "glibc", "release", "extra")]
    except FileNotFoundError as error:
        raise Refused(f"{directory} is no wheelhouse: it has no {MANIFEST}. `make wheelhouse` makes one.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"{path} cannot be read: {error}") from error
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(one, str) for one in [*text, *files.values()]):
        raise Refused(f"{path} is no manifest of a wheelhouse.")
    return dict(manifest)


def requirements(directory: Path) -> Path:
    """Return the requirements file for this Python; it has a hash for each wheel. Raises Refused if there is none."""
    path = directory / f"requirements-{this_python()}.txt"
    if not path.is_file():
        there = sorted(one.stem.removeprefix("requirements-") for one in directory.glob("requirements-*.txt"))
        raise Refused(f"This wheelhouse is for Python {', '.join(there)}, and {sys.executable} is {this_python()}.")
    return path


def hash_of(path: Path) -> str:
    """Return the file's SHA-256, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: Any, target: BinaryIO, most: int) -> int:
    copied = 0
    while piece := source.read(PIECE_BYTES):
        copied += len(piece)
        if copied > most:
            raise Refused("The archive is too large.")
        target.write(piece)
    return copied


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="wheelhouse.py")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("platform")
    opening = commands.add_parser("open")
    opening.add_argument("source")
    opening.add_argument("scratch", type=Path)
    opening.add_argument("--sha256", default="")
    opening.add_argument("--insecure", action="store_true")
    commands.add_parser("requirements").add_argument("directory", type=Path)
    given = parser.parse_args(arguments)
    try:
        if given.command == "platform":
            print(this_platform())
        elif given.command == "open":
            print(open_wheelhouse(given.source, given.scratch, sha256=given.sha256, insecure=given.insecure))
        else:
            print(requirements(given.directory))
    except Refused as refused:
        if given.command == "open":
            shutil.rmtree(given.scratch / "unpacked", ignore_errors=True)
        print(f"error: {refused}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
