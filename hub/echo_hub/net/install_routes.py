"""Routes that serve the installers: the `serve` directory that `make wheelhouse` writes.

`GET /install.sh` and `GET /install.ps1` return the scripts unchanged; the second exists only with a Windows archive.
`GET /install/{sha256}/{name}` returns an archive by the hash that the script names, so that a script and an archive of
different releases never mix. These routes are public; nothing else in the directory is served. Files may change while
the hub runs: each request reads them again.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Final

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter

from echo_shared.errors import ConfigError

SCRIPT: Final = "install.sh"
WINDOWS_SCRIPT: Final = "install.ps1"
ARCHIVES: Final = "echo-swarm-*.tar"
MOST_AT_ONCE: Final = 32
"""Maximum number of archive downloads at the same time. The limit leaves uplink for the training run."""

_LATER: Final = {hdrs.RETRY_AFTER: "10"}


def routes(directory: str) -> list[web.RouteDef]:
    """Return the installer routes. With an empty `directory` all of them answer 404. Raises ConfigError if the
    directory has no install.sh."""
    if directory and not (Path(directory) / SCRIPT).is_file():
        raise ConfigError(
            "There is nothing to install from.",
            got=f"server.install_from = {directory!r}, without {SCRIPT}",
            do="Run `make wheelhouse` and set it to dist/serve, or leave it empty.",
        )
    offered = _Offered(Path(directory) if directory else None)
    return [
        *(web.get(f"/{name}", offered.script) for name in (SCRIPT, WINDOWS_SCRIPT)),
        web.get("/install/{sha256}/{name}", offered.archive),
    ]


def is_for_windows(directory: str) -> bool:
    """Return True if the directory offers a Windows installer now."""
    return bool(directory) and (Path(directory) / WINDOWS_SCRIPT).is_file()


class _Offered:
    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._hashes: dict[tuple[str, int, int], str] = {}
        """SHA-256 of each archive by (name, size, mtime); a changed file is hashed again."""
        self._hashing = asyncio.Lock()
        self.under_way = 0

    async def script(self, request: web.Request) -> web.Response:
        """Answer GET /install.sh and GET /install.ps1."""
        if self._directory is None:
            raise web.HTTPNotFound
        try:
            text = await asyncio.to_thread((self._directory / request.path.removeprefix("/")).read_bytes)
        except FileNotFoundError as error:
            raise web.HTTPNotFound from error
        headers = {hdrs.CACHE_CONTROL: "no-cache"}
        return web.Response(body=text, headers=headers, content_type="text/plain", charset="utf-8")

    async def archive(self, request: web.Request) -> web.StreamResponse:
        """Answer GET /install/{sha256}/{name}."""
        path = await self._find(request.match_info["name"], request.match_info["sha256"])
        if path is None:
            raise web.HTTPNotFound(text="This hub does not offer that archive. Download the install script again.\n")
        if self.under_way >= MOST_AT_ONCE:
            raise web.HTTPServiceUnavailable(
                text="Too many downloads from this hub right now. Try again later.\n", headers=_LATER
            )
        return _Archive(path, self)

    async def _find(self, name: str, sha256: str) -> Path | None:
        """Return the archive's path if the archive exists and has this hash now, else None."""
        if self._directory is None or name not in await asyncio.to_thread(_names, self._directory):
            return None
        path = self._directory / name
        async with self._hashing:  # Concurrent requests share one hash computation.
            state = path.stat()
            key = (name, state.st_size, state.st_mtime_ns)
            if key not in self._hashes:
                self._hashes = {other: found for other, found in self._hashes.items() if other[0] != name}
                self._hashes[key] = await asyncio.to_thread(_hash_of, path)
        return path if self._hashes[key] == sha256 else None


class _Archive(web.FileResponse):
    def __init__(self, path: Path, offered: _Offered) -> None:
        super().__init__(path, headers={hdrs.CACHE_CONTROL: "public, max-age=31536000, immutable"})
        self._offered = offered

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        self._offered.under_way += 1
        try:
            return await super().prepare(request)
        finally:
            self._offered.under_way -= 1


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.glob(ARCHIVES) if path.is_file()}


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
