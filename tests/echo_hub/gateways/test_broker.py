"""Streams between gateways and hub on a real NATS server: no stored message is lost, and none is stored twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from benchmarks.harness.broker import BrokerProcess, broker_process, lacking
from echo_hub.config.gateways_section import GatewaysConfig
from echo_hub.gateways.broker import Broker, BrokerFullError, StoredMessage, without_password
from echo_shared.errors import ConfigError, ConnectError
from tests.echo_hub.net.gateway_parts import DEADLINE_S

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path) as running:
        yield running


@pytest.fixture
async def broker(server: BrokerProcess) -> AsyncIterator[Broker]:
    opened = await Broker.open(GatewaysConfig(url=server.url, max_bytes=2**24), name="test")
    await opened.make_stream("stream", "subject")
    yield opened
    await opened.close()


async def test_the_same_id_is_the_same_message(broker: Broker) -> None:
    for _ in range(3):
        await broker.store("subject", b"x", message_id="1")
    await broker.store("subject", b"y", message_id="2")
    assert await broker.waiting("stream") == 2
    await broker.make_stream("stream", "subject")
    assert await broker.waiting("stream") == 2, "the stream is made once"


async def test_a_full_stream_refuses_messages_and_keeps_its_own(broker: Broker) -> None:
    await broker.store("subject", bytes(8_000_000), message_id="1")
    await broker.store("subject", bytes(8_000_000), message_id="2")
    with pytest.raises(BrokerFullError):
        await broker.store("subject", bytes(8_000_000), message_id="3")
    assert await broker.waiting("stream") == 2


async def test_unsettled_messages_come_again_in_order_after_a_server_crash(
    server: BrokerProcess, broker: Broker
) -> None:
    taken: list[bytes] = []
    news = asyncio.Condition()

    async def take(message: StoredMessage) -> None:
        if message.data == b"0":
            await message.settle()
        async with news:
            taken.append(message.data)
            news.notify_all()

    async def until(count: int) -> None:
        async with asyncio.timeout(DEADLINE_S), news:
            await news.wait_for(lambda: len(taken) >= count)

    consuming = asyncio.create_task(broker.consume("stream", take))
    for number in range(3):
        await broker.store("subject", str(number).encode(), message_id=str(number))
    await until(3)
    server.kill()
    with pytest.raises(ConnectError):
        await broker.store("subject", b"lost", message_id="lost")
    server.start()
    await until(5)
    await until(5 if taken[3] == b"1" else 6)
    again = taken[3:]
    assert again in ([b"1", b"2"], [b"0", b"1", b"2"]), "the server may have died before it removed the settled message"
    consuming.cancel()
    await asyncio.wait([consuming])


async def test_an_unusable_server_is_reported(server: BrokerProcess, tmp_path: Path) -> None:
    for url in (server.url.replace("echo:", "echo:wrong-"), "nats://127.0.0.1:1"):
        with pytest.raises(ConfigError, match="cannot be reached") as caught:
            await Broker.open(GatewaysConfig(url=url), name="test")
        assert "wrong-" not in str(caught.value)
    (tmp_path / "small").mkdir()
    with (
        broker_process(tmp_path / "small", max_payload=2**20) as small,
        pytest.raises(ConfigError, match="max_payload"),
    ):
        await Broker.open(GatewaysConfig(url=small.url), name="test")


async def test_invalid_tls_files_are_reported(server: BrokerProcess, tmp_path: Path) -> None:
    settings = GatewaysConfig(url=server.url, tls_ca=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="tls_ca"):
        await Broker.open(settings, name="test")


def test_errors_never_show_a_password() -> None:
    assert without_password("nats://u:p@one:4222,tls://two:4222") == "nats://one:4222,tls://two:4222"
