"""Static files of the pages, all served by this hub: its own files, and uPlot, vendored by `scripts/vendor_uplot.py`.

A file's address contains the hash of its content. So browsers can cache files permanently, but load a changed file at
once. All files are read and compressed when the hub starts; together they take about 0.1 MB.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

CONTENT_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_STATIC: Final = Path(__file__).parent / "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asset:
    content_type: str
    version: str
    plain: bytes
    compressed: bytes


class Assets:
    def __init__(self) -> None:
        self._assets = {path.name: _read(path) for path in sorted(_STATIC.iterdir()) if path.suffix in CONTENT_TYPES}

    @property
    def version(self) -> str:
        """Return a hash of all files together. Browsers reload the page when it changes."""
        return hashlib.sha256("".join(asset.version for asset in self._assets.values()).encode()).hexdigest()[:12]

    def address(self, name: str) -> str:
        return f"/static/{name}?v={self._assets[name].version}"

    async def serve(self, request: web.Request) -> web.Response:
        """GET /static/{name}"""
        asset = self._assets.get(request.match_info["name"])
        if asset is None:
            raise web.HTTPNotFound
        tag = f'"{asset.version}"'
        current = request.query.get("v") == asset.version
        headers = {
            "Cache-Control": "public, max-age=31536000, immutable" if current else "no-cache",
            "ETag": tag,
            "Vary": "Accept-Encoding",
        }
        if tag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        body = asset.plain
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            body = asset.compressed
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, headers=headers, content_type=asset.content_type, charset="utf-8")


def _read(path: Path) -> _Asset:
    plain = path.read_bytes()
    return _Asset(
        content_type=CONTENT_TYPES[path.suffix],
        version=hashlib.sha256(plain).hexdigest()[:12],
        plain=plain,
        compressed=gzip.compress(plain, compresslevel=9, mtime=0),
    )
