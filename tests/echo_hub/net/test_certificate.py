from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, WSMsgType, web
from cryptography.hazmat.primitives import serialization

from echo_hub.config.serving_sections import ServerConfig
from echo_hub.net.certificate import Certificate
from echo_hub.net.server import Server
from echo_shared.errors import ConfigError
from tests.echo_hub.net.certificates import Authority, Files


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def echo(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        await socket.send_str(message.data)
    return socket


def trusting(files: Files) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(files.authority))


async def shown(port: int, files: Files) -> Any:
    """Return the common name in the certificate that the server presents on a new connection."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(files))
    subject = dict(pair for part in writer.get_extra_info("peercert")["subject"] for pair in part)
    writer.close()
    await writer.wait_closed()
    return subject["commonName"]


def take(files: Files, over: Files) -> None:
    """Move the files of `over` to the paths of `files`, the certificate first and then the key, as a renewal does."""
    over.certificate.replace(files.certificate)
    over.key.replace(files.key)


async def test_a_renewed_certificate_serves_new_connections_and_drops_none(authority: Authority) -> None:
    files = authority.server("first")
    serving = Server(ServerConfig(port=0, tls_certificate=str(files.certificate), tls_key=str(files.key)))
    certificate = Certificate(files.certificate, files.key)
    context = certificate.load()
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    await serving.open([web.get("/node", echo)])
    assert serving.url == f"https://127.0.0.1:{serving.port}"
    async with ClientSession() as http, http.ws_connect(f"{serving.url}/node", ssl=trusting(files)) as node:
        await node.send_str("before")
        assert (await node.receive()).data == "before"
        assert await shown(port, files) == "first"
        certificate.renew()
        assert await shown(port, files) == "first"
        take(files, authority.server("second"))
        certificate.renew()
        assert await shown(port, files) == "second"
        await node.send_str("after")
        answer = await node.receive()
        assert (answer.type, answer.data) == (WSMsgType.TEXT, "after")
    server.close()
    await serving.close()


async def test_halfway_through_a_renewal_the_old_one_stays(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files, other = authority.server("first"), authority.server("second")
    certificate = Certificate(files.certificate, files.key)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=certificate.load())
    port = server.sockets[0].getsockname()[1]
    other.certificate.replace(files.certificate)
    for _ in range(3):
        certificate.renew()
        assert await shown(port, files) == "first"
    assert caplog.text.count("the old one stays") == 1 and "PRIVATE" not in caplog.text
    files.key.unlink()
    certificate.renew()
    assert await shown(port, files) == "first"
    other.key.replace(files.key)
    certificate.renew()
    assert await shown(port, files) == "second"
    server.close()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda files, _: files.key.unlink(), r"(?s)cannot be read.*server\.tls_key.*No such file"),
        (lambda files, _: files.certificate.unlink(), r"(?s)cannot be read.*server\.tls_certificate.*No such file"),
        (lambda files, other: other.key.replace(files.key), "does not belong to the certificate"),
        (lambda files, _: files.key.write_text("no key"), "cannot be used"),
        (lambda files, _: files.certificate.write_bytes(b""), "cannot be used"),
        (lambda files, _: encrypt(files.key), r"(?s)cannot be used.*without a password"),
    ],
)
async def test_files_of_no_use_are_named_and_nothing_is_served(authority: Authority, spoil: Any, said: str) -> None:
    files = authority.server("first")
    spoil(files, authority.server("other"))
    serving = Server(ServerConfig(port=0, tls_certificate=str(files.certificate), tls_key=str(files.key)))
    with pytest.raises(ConfigError, match=said):
        await serving.open([])
    await serving.close()


def encrypt(key: Path) -> None:
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    kept = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    key.write_bytes(private.private_bytes(serialization.Encoding.PEM, *kept))


def test_one_file_alone_is_no_setting() -> None:
    with pytest.raises(ValueError, match="set both"):
        ServerConfig(tls_certificate="x.pem")
