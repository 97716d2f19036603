from __future__ import annotations

import asyncio
import ssl

import pytest

from echo_node.host.address import HubAddress
from echo_node.net.tls import handshake_failure


async def failed_handshake(answer: bytes) -> ssl.SSLError:

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        with pytest.raises(ssl.SSLError) as caught:
            await asyncio.open_connection(
                "127.0.0.1", listening.sockets[0].getsockname()[1], ssl=ssl.create_default_context()
            )
    return caught.value


@pytest.mark.parametrize(
    ("origin", "plain"),
    [
        ("https://192.0.2.1:8710", "http://192.0.2.1:8710"),
        ("https://[2001:db8::1]:8710/echo", "http://[2001:db8::1]:8710/echo"),
        ("https://hub.example.org", "http://hub.example.org:443"),
    ],
)
async def test_an_error_for_a_plain_http_hub_names_the_option_insecure(origin: str, plain: str) -> None:
    error = await failed_handshake(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    told = handshake_failure(error, HubAddress.parse(origin, insecure=False))
    assert "does not speak TLS" in told.what and origin in (told.got or "")
    assert f"{plain} --insecure" in (told.do or "") and "trust" in (told.do or "")


async def test_a_tls_server_that_refuses_is_neither_untrusted_nor_without_tls() -> None:
    alert = bytes([21, 3, 3, 0, 2, 2, 40])  # Alert 40, handshake_failure (RFC 8446, section 6).
    told = handshake_failure(await failed_handshake(alert), HubAddress.parse("https://hub.example.org", insecure=False))
    assert told.what == "The TLS handshake with the hub failed."
    assert "HANDSHAKE_FAILURE" in (told.got or "")
