"""The files that the pages load: this package's own and plotly's script, all from this hub.

A file's address carries its version, so that browsers keep it for good and still see a new one at once. Each is read
and compressed once, when it is first asked for.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from aiohttp import web

from echo_hub.dashboard.responses import SECURITY_HEADERS

PLOTLY: Final = "plotly.min.js"
CONTENT_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


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
        self._loaded: dict[str, _Loaded] = {}

    def address(self, name: str) -> str:
        return f"/static/{name}?v={self._versions[name]}"

    async def serve(self, request: web.Request) -> web.Response:
        """GET /static/{name}"""
        name = request.match_info["name"]
        if name not in self._paths:
            raise web.HTTPNotFound(headers=SECURITY_HEADERS)
        version = self._versions[name]
        tag = f'"{version}"'
        current = request.query.get("v") == version
        headers = {
            **SECURITY_HEADERS,
            "Cache-Control": "public, max-age=31536000, immutable" if current else "no-cache",
            "ETag": tag,
            "Vary": "Accept-Encoding",
        }
        if tag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        if name not in self._loaded:
            self._loaded[name] = await asyncio.to_thread(_load, self._paths[name])
        body = self._loaded[name].plain
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            body = self._loaded[name].compressed
            headers["Content-Encoding"] = "gzip"
        content_type = CONTENT_TYPES[self._paths[name].suffix]
        return web.Response(body=body, headers=headers, content_type=content_type, charset="utf-8")


def _load(path: Path) -> _Loaded:
    plain = path.read_bytes()
    return _Loaded(plain=plain, compressed=gzip.compress(plain, compresslevel=6, mtime=0))
