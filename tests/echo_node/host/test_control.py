import asyncio
import contextlib
import json
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from echo_node.host.control import MOST_OPEN, ask, control_server
from echo_shared.errors import ConfigError, ConnectError


def _pause(arguments: Mapping[str, object]) -> Mapping[str, object]:
    if arguments.get("length") == "soon":
        raise ConfigError("This is not a length of time.", got="soon", do="Write it like 2h.")
    return {"until": arguments.get("length")}


VERBS = {"status": lambda _: {"answer": 42}, "pause": _pause}


async def raw(port: int, request: str) -> dict[str, object]:
    async with connect(f"ws://127.0.0.1:{port}", proxy=None) as connection:
        await connection.send(request)
        reply: dict[str, object] = json.loads(await connection.recv())
        return reply


async def test_the_control_socket_answers_its_verbs(tmp_path: Path) -> None:
    file = tmp_path / "control.json"
    async with control_server(file, VERBS):
        assert await ask(file, "status") == {"answer": 42}
        assert await ask(file, "pause", {"length": "2h"}) == {"until": "2h"}
        with pytest.raises(ConfigError, match="not a length of time") as refused:
            await ask(file, "pause", {"length": "soon"})
        assert (refused.value.got, refused.value.do) == ("soon", "Write it like 2h.")
        assert await ask(file, "dance") == {"error": "unknown verb dance"}
        if sys.platform != "win32":
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not file.exists()


async def test_a_client_without_the_secret_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "control.json"
    async with control_server(file, VERBS):
        port = json.loads(file.read_text())["port"]
        assert await raw(port, json.dumps({"token": "guess", "verb": "status"})) == {"error": "wrong token"}
        for nonsense in ("", "[]", "nope", '{"verb": "status"}', "1", '{"token": "", "verb": "", "arguments": 1}'):
            assert await raw(port, nonsense) == {"error": "not a request"}
        assert await ask(file, "status") == {"answer": 42}


async def test_idle_connections_keep_no_client_out(tmp_path: Path) -> None:
    file = tmp_path / "control.json"
    async with control_server(file, VERBS):
        port = json.loads(file.read_text())["port"]
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MOST_OPEN)]
        assert await ask(file, "status") == {"answer": 42}
        async with asyncio.timeout(60):
            for reader, _ in held[: 2 * MOST_OPEN]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        assert not held[-1][0].at_eof()
        for _, writer in held:
            writer.close()


async def test_refuses_web_pages(tmp_path: Path) -> None:
    file = tmp_path / "control.json"
    async with control_server(file, VERBS):
        port = json.loads(file.read_text())["port"]
        with pytest.raises(InvalidStatus, match="403"):
            await connect(f"ws://127.0.0.1:{port}", proxy=None, origin="https://example.org")


@pytest.mark.parametrize("text", [None, "", "{}", '{"port": 1, "token": "x", "pid": 1}'])
async def test_a_missing_daemon_is_reported(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "control.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConnectError, match="No node is running") as caught:
        await ask(file, "status")
    assert caught.value.code == "not_running"
