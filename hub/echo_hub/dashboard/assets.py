"""The files that the pages load: this package's own and plotly's script, all from this hub.

A file's address carries its version, so that browsers keep it for good and still see a new one at once. Each is read
and compressed once, when it is first asked for.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from aiohttp import web

PLOTLY: Final = "plotly.min.js"
CONTENT_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PIECE_BYTES: Final = 65_536

_STYLE_OF_MAPS: Final = re.compile(rb'!document\.getElementById\("[0-9a-f]{64}"\)')
"""Whether the style element of plotly's maps is still to be made: never. The pages' policy refuses it, and they have no
maps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    plain: bytes
    compressed: bytes


class Assets:
    def __init__(self) -> None:
        own = sorted((Path(__file__).parent / "static").iterdir())
        plotly = distribution("plotly")  # Not imported: the package's Python half costs the hub half a second.
        self._paths = {path.name: path for path in own if path.suffix in CONTENT_TYPES}
        self._paths[PLOTLY] = Path(str(plotly.locate_file(f"plotly/package_data/{PLOTLY}")))
        self._versions = {
            name: plotly.version if name == PLOTLY else hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            for name, path in self._paths.items()
        }
        self._loaded: dict[str, asyncio.Task[_Loaded]] = {}

    def address(self, name: str) -> str:
        return f"/static/{name}?v={self._versions[name]}"

    async def serve(self, request: web.Request) -> web.Response:
        """GET /static/{name}"""
        name = request.match_info["name"]
        if name not in self._paths:
            raise web.HTTPNotFound
        version = self._versions[name]
        tag = f'"{version}"'
        current = request.query.get("v") == version
        headers = {
            "Cache-Control": "public, max-age=31536000, immutable" if current else "no-cache",
            "ETag": tag,
            "Vary": "Accept-Encoding",
        }
        if tag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        loaded = await self._load_once(name)
        body = loaded.plain
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            body = loaded.compressed
            headers["Content-Encoding"] = "gzip"
        content_type = CONTENT_TYPES[self._paths[name].suffix]
        headers["Content-Length"] = str(len(body))
        return web.Response(body=_in_pieces(body), headers=headers, content_type=content_type, charset="utf-8")

    async def _load_once(self, name: str) -> _Loaded:
        """However many ask for it at once: each answer would hold a copy of its own else."""
        loading = self._loaded.get(name)
        if loading is None or (loading.done() and loading.exception() is not None):
            loading = asyncio.create_task(asyncio.to_thread(_load, self._paths[name]), name=f"loading {name}")
            self._loaded[name] = loading
        return await asyncio.shield(loading)  # Who goes away does not take it from the others.


async def _in_pieces(body: bytes) -> AsyncIterator[memoryview]:
    """All of it, handed over at once, would wait in memory once for each client that does not read it."""
    for start in range(0, len(body), PIECE_BYTES):
        yield memoryview(body)[start : start + PIECE_BYTES]


def _load(path: Path) -> _Loaded:
    plain = path.read_bytes()
    if path.name == PLOTLY:
        plain = _STYLE_OF_MAPS.sub(b"false", plain)
    return _Loaded(plain=plain, compressed=gzip.compress(plain, compresslevel=6, mtime=0))
