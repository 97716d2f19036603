"""A running hub and unknown clients, which send valid and malformed requests: no request makes the hub fail, and its
health checks stay correct.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import pytest
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.net.tracker import Tracker
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.hub import Hub
from echo_hub.serving.opening import open_hub
from echo_shared.signing import key_file

pytestmark = pytest.mark.timeout(300)

NODE_ID: Final = "c0ffee" + "0" * 14
ODD: Final = ("x", "%00", "%ff%fe", "%ed%a0%80", "..%2f..%2fhub.key", "%2e%2e", "%zz", "%", "a" * 4_000, "%C2%B2", "-1")
QUERIES: Final = (
    *("since", "since=", "since=%ff", "since=%C2%B2", "since=-1", "since=" + "9" * 5_000, "width=1e400&since=%00"),
    *("sort=%ed%a0%80", "sort=-", "sort=--rank", "node=%ff%fe", "node=" + "%f0%9f%8c%8a" * 300, "v=%ff", "%ff=%ff"),
    *("&&==&;", "a=b=c", "?", "+", "since=1&since=2", "info_hash=%ff&port=9&left=" + "9" * 5_000),
    "info_hash=%ff&port=1_0&left=%C2%B2&event=%ff&compact=%ff",
)
HEADERS: Final = (
    *(b"Host: x:99999999", b"Host: x:y", b"Host: [", b"Host: ", b"Host: \xff\xfe", b"Host: a b", b"Host: %00"),
    *(b"Host: xn--a", b"Host: " + b"a" * 5_000, b"Host: [::1%\xff]:1", b"Host: x/../y"),
    *(b"Accept: application/openmetrics-text; version=zzz", b"Accept: application/openmetrics-text; version=2.\xff"),
    *(
        b"Accept: \xff;q=x,,;=",
        b"Accept-Encoding: \xff, gzip;q=x",
        b"Accept-Encoding: deflate;q=nan",
        b"Accept-Language: \0",
    ),
    *(b"Range: bytes=zz", b"Range: bytes=9-1", b"Range: bytes=-", b"Range: bytes=0-0,2-3", b"Range: \xff"),
    *(b"Range: bytes=" + b"9" * 5_000 + b"-", b"Range: bytes=-" + b"9" * 5_000),
    *(b'If-None-Match: "', b"If-None-Match: \xff", b"If-Match: W/", b"If-Range: \xff", b"If-Modified-Since: \xff"),
    *(b"If-Modified-Since: Mon, 99 Foo 99999 99:99:99 GMT", b"If-Unmodified-Since: Thu, 01 Jan 0000 00:00:00 +9999"),
    *(b"X-Forwarded-For: \xff", b"Cookie: \xff=\xff; ;;=", b"Last-Event-ID: \xff", b"Content-Type: \xff/;=;"),
    *(
        b"Content-Length: 5",
        b"Content-Length: x",
        b"Content-Length: -1",
        b"Content-Encoding: gzip\r\nContent-Length: 0",
    ),
    *(b"Transfer-Encoding: chunked\r\n\r\nzz", b"Transfer-Encoding: \xff", b"Expect: 100-continue", b"Expect: \xff"),
    *(
        b"Connection: Upgrade\r\nUpgrade: websocket",
        b"Upgrade: \xff\r\nConnection: upgrade",
        b"Authorization: Basic \xff",
    ),
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: \xff",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: x\r\nSec-WebSocket-Key: eA==",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"Sec-WebSocket-Extensions: permessage-deflate; server_max_window_bits=x",
)
METHODS: Final = (
    *(b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"PATCH"),
    b"FOO",
    b"G\xffT",
    b"get",
    b"PRI",
)
TARGETS: Final = (
    *(
        b"*",
        b"//",
        b"///..//%2f",
        b"http://x:99999999/",
        b"http://[/",
        b"http://\xff/",
        b"x",
        b"?",
        b"#",
        b"/\xff",
        b"/%",
    ),
    *(b"/static/", b"/announce/", b"/artefacts/", b"/api/v1/", b"/" + b"%2f" * 2_000, b"http:///metrics", b"/metrics/"),
)


PACES: Final = (
    *("connections_per_s", "connections_per_s_per_address"),
    *("requests_per_s", "requests_per_s_per_address"),
)


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator[Hub]:
    """Yield a hub in this process; only its learner is a separate process."""
    directory = RunDirectory(root / "run")
    make_run(directory, HubConfig())
    small = {
        # Rate limits so high that every request of this test is answered.
        "server": {"port": 0, **dict.fromkeys(PACES, 100_000)},
        "learner": {"threads": 1},
        "trust": {"verifier": "off"},
        "evaluation": {"problems": 16},
        "training": {"steps": 4, "groups_per_step": 8, "group_size": 4},
    }
    async with open_hub(load_config(directory.config, small), directory) as hub:
        served = asyncio.create_task(hub.serve())
        try:
            yield hub
        finally:
            served.cancel()
            await asyncio.wait([served])


async def status_of(hub: Hub, request: bytes) -> int:
    """Return the status of the answer to these bytes; 0 if the hub closes the connection without an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", hub.server.port)
    try:
        writer.write(request)
        async with asyncio.timeout(60):
            line = await reader.readline()
    except ConnectionError:
        return 0
    finally:
        writer.transport.abort()
    found = re.match(rb"HTTP/1\.[01] (\d{3}) ", line)
    return int(found[1]) if found else 0


def paths(hub: Hub) -> Iterator[str]:
    """Yield the path of every route, with valid values and with malformed ones."""
    identity = key_file.load(hub.directory.key)
    carrier = next(hub.directory.artefacts.glob("*.manifest.json")).name.removesuffix(".manifest.json")
    file = next(path.name for path in sorted((hub.directory.artefacts / carrier).iterdir()))
    known = {"passkey": Tracker(identity).passkey(NODE_ID), "carrier": carrier, "path": file}
    known |= {"name": "charts.js", "action": "ban", "number": "1", "sha256": "0" * 64, "group": "1"}
    known |= {"node": NODE_ID[:10], "team": "The Herons", "rollout": "1-0"}
    for route in hub.server.routes:
        assert isinstance(route, web.RouteDef)
        names = re.findall(r"{(\w+)(?::[^}]*)?}", route.path)
        pattern = re.sub(r"{(\w+)(?::[^}]*)?}", r"{\1}", route.path)
        yield pattern.format(**known)
        for name in names:
            yield from (pattern.format(**{**known, name: odd}) for odd in ODD)


def requests(hub: Hub, who: bytes) -> Iterator[bytes]:
    """Yield complete requests, each malformed in one way; `who` is the header that identifies the client."""
    host = who + b"Host: 127.0.0.1"
    whole = sorted({path.encode() for path in paths(hub)})
    plain = [path for path in whole if not any(odd.encode() in path for odd in ODD if odd != "x")]
    assert len(plain) >= len({route.path for route in hub.server.routes if isinstance(route, web.RouteDef)})
    for path in whole:
        yield b"GET " + path + b" HTTP/1.1\r\n" + host + b"\r\n\r\n"
    for path in plain:
        yield b"GET " + path + b" HTTP/1.0\r\n" + who + b"\r\n"
        yield from (b"GET " + path + b"?" + query.encode() + b" HTTP/1.1\r\n" + host + b"\r\n\r\n" for query in QUERIES)
        for header in HEADERS:
            # Some headers declare a body, so each request has one. The announce has all required fields: the tracker
            # stops parsing at a missing one.
            whole_path = path + (b"?info_hash=%ff&port=1&left=1" if b"/announce/" in path else b"")
            named = who if header.startswith(b"Host:") else host + b"\r\n"
            yield b"GET " + whole_path + b" HTTP/1.1\r\n" + named + header + b"\r\n\r\n12345"
        yield from (method + b" " + path + b" HTTP/1.1\r\n" + host + b"\r\n\r\n" for method in METHODS)
    for target in TARGETS:
        yield b"GET " + target + b" HTTP/1.1\r\n" + host + b"\r\n\r\n"


@pytest.mark.slow
async def test_no_request_by_a_stranger_or_the_operator_makes_a_route_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as hub:
        operator = f"Authorization: Bearer {hub.guard.credentials.token}\r\n".encode()
        failed, answered = [], 0
        for request in (*requests(hub, b""), *requests(hub, operator)):
            status = await status_of(hub, request)
            answered += 200 <= status < 300
            if status >= 500 and not (status == 503 and b" /readyz" in request):
                failed.append((status, request[:200]))
    assert failed == []
    assert answered > 200, "most requests were understood"
    errors = [record.exc_info for record in caplog.records if record.levelno >= logging.ERROR]
    refused = HttpProcessingError  # aiohttp answers 400 to bytes that are not HTTP, and logs this error.
    assert [error for error in errors if error is None or not isinstance(error[1], refused)] == []


async def test_a_hub_is_live_at_once_ready_when_it_can_train_and_measured(tmp_path: Path) -> None:
    async with serving(tmp_path) as hub, aiohttp.ClientSession(hub.url) as http:
        async with http.get("/healthz") as live, http.get("/readyz") as starting:
            assert (live.status, await live.json()) == (200, {"status": "ok", "state": "starting"})
            said = {"status": "starting"}
            assert (starting.status, await starting.json()) == (503, said)
        async with asyncio.timeout(240), http.get("/api/v1/events") as changes:
            async for line in changes.content:
                if not line.startswith(b"data:"):
                    continue
                async with http.get("/readyz") as answer:
                    status, said = answer.status, await answer.json()
                if status != 503:
                    break
        assert (status, said) == (200, {"status": "ready"})
        operator = {"Authorization": f"Bearer {hub.guard.credentials.token}"}
        async with http.get("/metrics", headers=operator) as answer:
            text = await answer.read()
    assert b"echo_learner_step 0" in text
    if shutil.which("promtool") is None:
        pytest.skip("no promtool on this machine")
    promtool = await asyncio.create_subprocess_exec(
        *("promtool", "check", "metrics"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    complaints, _ = await promtool.communicate(text)
    assert (promtool.returncode, complaints.decode()) == (0, "")
