"""A local server with the part of a model hub's HTTP API that an upload needs, for huggingface_hub's real client.

Files of more than 100 bytes are stored as large files, by their hash. `refused` holds parts of paths that are answered
with a status.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

TOKEN: Final = "hf_test"
LARGE: Final = 100


class ModelHub:
    """What the server has received."""

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        """The repositories: for each name, True if it is private."""
        self.blobs: dict[str, bytes] = {}
        """Large files by their SHA-256."""
        self.files: dict[str, bytes] = {}
        """Committed files by path."""
        self.uploads = 0
        self.refused: dict[str, int] = {}
        self.url = ""

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which huggingface_hub uses this server."""
        own = {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        return {**os.environ, **own}

    def answer(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, Any, dict[str, str]]:
        path = path.partition("?")[0]
        for part, status in self.refused.items():
            if part in path:
                return status, {"error": "refused here"}, {"X-Error-Message": "refused here"}
        if not path.startswith("/blob/") and headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}, {}
        if method == "PUT":
            self.blobs[path.rpartition("/")[2]] = body
            self.uploads += 1
            return 200, {}, {"ETag": "x"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}, {}
        repo = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2]).removesuffix(".git")
        if repo not in self.private:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        if path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": _mode(file), "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": files}, {}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"objects": [self._object(one) for one in json.loads(body)["objects"]]}, {}
        if path.endswith("/commit/main"):
            self._commit(body)
            return 200, {"success": True, "commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1" * 40}, {}
        return 200, {"id": repo, "private": self.private[repo], "sha": "0" * 40, "siblings": []}, {}

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        repo = f"{asked['organization']}/{asked['name']}"
        self.private[repo] = asked.get("private", asked.get("visibility") == "private")
        return 200, {"url": f"{self.url}/{repo}", "id": repo, "name": repo}, {}

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in self.blobs:
            return asked
        return {**asked, "actions": {"upload": {"href": f"{self.url}/blob/{asked['oid']}"}}}

    def _commit(self, body: bytes) -> None:
        for line in body.splitlines():
            part = json.loads(line)
            if part["key"] == "file":
                self.files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
            elif part["key"] == "lfsFile":
                data = self.blobs[part["value"]["oid"]]
                assert hashlib.sha256(data).hexdigest() == part["value"]["oid"]
                self.files[part["value"]["path"]] = data


def _mode(file: dict[str, Any]) -> str:
    return "lfs" if file["size"] > LARGE else "regular"


@contextmanager
def model_hub() -> Iterator[ModelHub]:
    """Serve until the block ends."""
    hub = ModelHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self._body()
            given = {name.lower(): value for name, value in self.headers.items()}
            status, answer, headers = hub.answer(self.command, self.path, body, given)
            data = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(data)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        do_GET = do_POST = do_PUT = _serve

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
