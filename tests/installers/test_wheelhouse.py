"""Opening a wheelhouse: it must be complete, made for this machine and safely fetched, and no path in it may lead out
of its directory.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "installers" / "wheelhouse.py"


@pytest.fixture
def archive(small_wheelhouse: Any, maker: ModuleType, tmp_path: Path) -> Path:
    made = tmp_path / "served" / "echo-swarm-1.0-some-where.tar"
    maker.archive(small_wheelhouse("1.0"), made)
    return made


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Yield a function that starts an HTTP server and returns its address. The server serves a directory, or answers by
    `handler`.
    """
    servers: list[ThreadingHTTPServer] = []

    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    def start(directory: Path | None = None, *, handler: type[BaseHTTPRequestHandler] | None = None) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler or partial(Silent, directory=str(directory)))
        servers.append(server)
        threading.Thread(target=server.serve_forever).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def redirecting(target: str) -> type[BaseHTTPRequestHandler]:
    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", target)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    return Redirecting


def packed(path: Path, *members: tarfile.TarInfo, content: bytes = b"x") -> Path:
    with tarfile.open(path, "w") as tar:
        for member in members:
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, linkname: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, linkname
    return made


def everything(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*")}


def test_a_directory_is_opened_in_place(small_wheelhouse: Any, opener: ModuleType, tmp_path: Path) -> None:
    directory = small_wheelhouse("1.0")
    assert opener.open_wheelhouse(str(directory), tmp_path / "scratch") == directory
    assert opener.requirements(directory).name == f"requirements-{opener.this_python()}.txt"


def test_an_archive_and_its_address_hold_the_same(
    archive: Path, small_wheelhouse: Any, opener: ModuleType, serve: Any, tmp_path: Path
) -> None:
    here = opener.open_wheelhouse(str(archive), tmp_path / "a")
    (tmp_path / "b").mkdir()
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    there = opener.open_wheelhouse(f"{serve(archive.parent)}/{archive.name}#sha256={sha256}", tmp_path / "b")
    assert everything(here) == everything(there) == everything(tmp_path / "wheelhouse-1.0")
    assert not list((tmp_path / "b").glob("*.tar"))


def test_an_archive_with_a_wrong_hash_is_not_unpacked(
    archive: Path, opener: ModuleType, serve: Any, tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    for source in (str(archive), f"{serve(archive.parent)}/{archive.name}"):
        with pytest.raises(opener.Refused, match="has the wrong content"):
            opener.open_wheelhouse(source, tmp_path / "scratch", sha256="0" * 64)
        assert not (tmp_path / "scratch" / "unpacked").exists()


@pytest.mark.parametrize(
    "url", ["http://192.0.2.1/x.tar", "ftp://127.0.0.1/x.tar", "file:///etc/passwd", "http://localhost.example/x.tar"]
)
def test_only_https_or_this_machine(opener: ModuleType, tmp_path: Path, url: str) -> None:
    with pytest.raises(opener.Refused, match="is not https"):
        opener.open_wheelhouse(url, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["http://192.0.2.1/x.tar", "ftp://127.0.0.1/x.tar"])
def test_redirects_to_unsafe_addresses_are_refused(opener: ModuleType, serve: Any, tmp_path: Path, target: str) -> None:
    with pytest.raises(opener.Refused, match="is not https"):
        opener.open_wheelhouse(f"{serve(handler=redirecting(target))}/x.tar", tmp_path)


def test_a_missing_archive_is_reported(opener: ModuleType, serve: Any, tmp_path: Path) -> None:
    with pytest.raises(opener.Refused, match=r"cannot be fetched: HTTP Error 404"):
        opener.open_wheelhouse(f"{serve(tmp_path)}/x.tar", tmp_path)
    with pytest.raises(opener.Refused, match="does not exist"):
        opener.open_wheelhouse(str(tmp_path / "x.tar"), tmp_path)


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        ([member("../out")], "does not stay inside"),
        ([member("a/../../out")], "does not stay inside"),
        ([member("/out")], "does not stay inside"),
        ([member("a\\..\\out")], "does not stay inside"),
        ([member("C:out")], "does not stay inside"),
        ([member("a/link", tarfile.SYMTYPE, "/")], "neither a file nor a directory"),
        ([member("a/link", tarfile.SYMTYPE, ".."), member("a/link/out")], "neither a file nor a directory"),
        ([member("a/hard", tarfile.LNKTYPE, "/etc/passwd")], "neither a file nor a directory"),
        ([member("a/device", tarfile.CHRTYPE)], "neither a file nor a directory"),
        ([member("a/pipe", tarfile.FIFOTYPE)], "neither a file nor a directory"),
        ([member("a/twice"), member("a/twice")], "cannot be unpacked"),
        ([member("a/x"), member("b/x")], "holds 2 directories"),
        ([member("a/x")], "is no wheelhouse"),
    ],
)
def test_an_archive_with_a_trick_is_refused(
    opener: ModuleType, tmp_path: Path, members: list[tarfile.TarInfo], complaint: str
) -> None:
    archive = packed(tmp_path / "trick.tar", *members)
    with pytest.raises(opener.Refused, match=complaint):
        opener.open_wheelhouse(str(archive), tmp_path / "scratch")
    outside = {name for name in everything(tmp_path) if not name.startswith("scratch/unpacked/")}
    assert outside == {"trick.tar", "scratch", "scratch/unpacked"}


def test_an_archive_has_bounds(opener: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = packed(tmp_path / "large.tar", member("a/x"), member("a/y"), content=bytes(1_000))
    monkeypatch.setattr(opener, "MOST_BYTES", 1_999)
    with pytest.raises(opener.Refused, match="too large"):
        opener.open_wheelhouse(str(archive), tmp_path / "1")
    monkeypatch.setattr(opener, "MOST_BYTES", 2_000)
    monkeypatch.setattr(opener, "MOST_FILES", 1)
    with pytest.raises(opener.Refused, match="more than 1 files"):
        opener.open_wheelhouse(str(archive), tmp_path / "2")


def test_an_invalid_archive_is_reported(opener: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"no archive")
    with pytest.raises(opener.Refused, match="cannot be unpacked"):
        opener.open_wheelhouse(str(tmp_path / "x.tar"), tmp_path / "scratch")


def test_a_half_archive_is_refused(opener: ModuleType, archive: Path, tmp_path: Path) -> None:
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    with pytest.raises(opener.Refused):
        opener.open_wheelhouse(str(archive), tmp_path / "scratch")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda house: (house / "LICENSE").write_text("?"), "which its manifest does not name"),
        (lambda house: next(house.glob("wheels/echo*")).unlink(), "lacks wheels/echo_swarm"),
        (lambda house: next(house.glob("wheels/echo*")).write_bytes(b"?"), "is damaged"),
        (lambda house: (house / "installers" / "posix.sh").write_text("rm -rf ~"), "is damaged"),
        (lambda house: (house / "wheels" / "other").symlink_to("/etc/passwd"), "which its manifest does not name"),
        (lambda house: (house / "manifest.json").write_text("{"), "cannot be read"),
        (lambda house: (house / "manifest.json").write_text("[]"), "cannot be read"),
        (lambda house: (house / "manifest.json").unlink(), "is no wheelhouse"),
        (lambda house: (house / "manifest.json").write_bytes(bytes(2**20 + 1)), "is too large"),
    ],
)
def test_content_that_differs_from_the_manifest_is_refused(
    small_wheelhouse: Any, opener: ModuleType, spoil: Callable[[Path], object], complaint: str
) -> None:
    directory = small_wheelhouse("1.0")
    spoil(directory)
    with pytest.raises(opener.Refused, match=complaint):
        opener.check(directory)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"platform": "plan9-mips"}, "is for plan9-mips, and this machine is"),
        ({"glibc": "99.0"}, "needs glibc 99.0"),
        ({"format": 2}, "has format 2"),
        ({"files": {"../x": "0"}}, "does not stay inside|does not name"),
        ({"files": []}, "is no manifest"),
    ],
)
def test_a_wheelhouse_that_is_not_for_here_is_refused(
    small_wheelhouse: Any, opener: ModuleType, changed: dict[str, Any], complaint: str
) -> None:
    if "glibc" in changed and not os.confstr("CS_GNU_LIBC_VERSION"):
        pytest.skip("no glibc here")
    with pytest.raises(opener.Refused, match=complaint):
        opener.check(small_wheelhouse("1.0", extra=changed))


def test_the_program_prints_where_or_why_not(small_wheelhouse: Any, opener: ModuleType, tmp_path: Path) -> None:
    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, PROGRAM, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    directory = small_wheelhouse("1.0")
    assert run("platform").stdout.strip() == opener.this_platform()
    assert run("open", directory, tmp_path / "scratch").stdout.strip() == str(directory)
    assert run("requirements", directory).stdout.strip() == str(opener.requirements(directory))
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps({**manifest, "platform": "plan9-mips"}))
    refused = run("open", directory, tmp_path / "scratch")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("error: This wheelhouse is for")
