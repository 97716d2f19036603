"""What an operator offers to volunteers for installation: the directory `serve` that `make wheelhouse` leaves.

`GET /install.sh` is the script in it, word for word, and so is `GET /install.ps1`, which is for Windows and only there
if one of the archives is. `GET /install/{sha256}/{name}` is an archive beside them, by the hash that the script names,
so that a script and an archive of two releases never meet. Anybody may have them; nothing else of the directory is
served. Files may change while the hub runs: each request looks at them anew.
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
"""Archives under way: the rest of the hub's uplink is the run's."""

_LATER: Final = {hdrs.RETRY_AFTER: "10"}


def routes(directory: str) -> list[web.RouteDef]:
    """Empty: nothing is offered, and no address is found. Raises ConfigError when there is no script."""
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
    """Whether what is offered there now can be installed on Windows."""
    return bool(directory) and (Path(directory) / WINDOWS_SCRIPT).is_file()


class _Offered:
    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._hashes: dict[tuple[str, int, int], str] = {}
        """By name, size and time of change."""
        self._hashing = asyncio.Lock()
        self.under_way = 0

    async def script(self, request: web.Request) -> web.Response:
        """GET /install.sh, GET /install.ps1"""
        if self._directory is None:
            raise web.HTTPNotFound
        try:
            text = await asyncio.to_thread((self._directory / request.path.removeprefix("/")).read_bytes)
        except FileNotFoundError as error:
            raise web.HTTPNotFound from error
        headers = {hdrs.CACHE_CONTROL: "no-cache"}
        return web.Response(body=text, headers=headers, content_type="text/plain", charset="utf-8")

    async def archive(self, request: web.Request) -> web.StreamResponse:
        """GET /install/{sha256}/{name}"""
        path = await self._find(request.match_info["name"], request.match_info["sha256"])
        if path is None:
            raise web.HTTPNotFound(text="No such archive is offered here. Fetch the script anew.\n")
        if self.under_way >= MOST_AT_ONCE:
            raise web.HTTPServiceUnavailable(text="Too many install from here right now. Try again.\n", headers=_LATER)
        return _Archive(path, self)

    async def _find(self, name: str, sha256: str) -> Path | None:
        """The archive, if there is one of this name with this hash now."""
        if self._directory is None or name not in await asyncio.to_thread(_names, self._directory):
            return None
        path = self._directory / name
        async with self._hashing:  # However many ask for it at once, it is read once.
            state = path.stat()
            key = (name, state.st_size, state.st_mtime_ns)
            if key not in self._hashes:
                self._hashes = {other: found for other, found in self._hashes.items() if other[0] != name}
                self._hashes[key] = await asyncio.to_thread(_hash_of, path)
        return path if self._hashes[key] == sha256 else None


class _Archive(web.FileResponse):
    """Counted for as long as it is being sent."""

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
