"""A connection to NATS and its JetStream, as hub and gateways use it; nothing else here knows the library.

The connection is made again by itself whenever it breaks, for ever. What was published meanwhile may be lost: who must
know uses `store`, which returns once JetStream has it on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from echo_hub.config.gateways_section import GatewaysConfig
from echo_shared.errors import ConfigError, ConnectError
from echo_shared.installation import how_to_install
from echo_shared.messages import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

log = logging.getLogger(__name__)

CONNECT_S: Final = 10
RETRY_S: Final = 0.5
STORE_S: Final = 5.0
"""JetStream has answered by then, or it is asked again."""
LEAST_PAYLOAD: Final = MAX_FRAME_BYTES + 2**16
"""The largest message to a node, and what is around it."""
BUFFER_BYTES: Final = 4 * LEAST_PAYLOAD
DUPLICATES_S: Final = 600.0
"""What JetStream is sent again within this time it has once."""
UNDER_WAY: Final = 64
"""Stored messages that the hub has been given and not settled."""
SETTLED_WITHIN_S: Final = 86_400.0
"""A hub that waits for room on its disk is not sent everything again meanwhile; one that connects again is."""
CONSUMER: Final = "hub"
_NO_SUCH_CONSUMER: Final = 10014
_FULL: Final = frozenset({10077, 10023, 10047, 10028})
"""JetStream's codes where it lacks room: of messages, bytes, resources, storage."""

Settle = Callable[[], Awaitable[None]]
"""Lets JetStream forget a stored message."""
TakeStored = Callable[[bytes, Settle], Awaitable[None]]


class BrokerFullError(ConnectError):
    """JetStream has no room for more."""


class Broker:
    """Made by `open`."""

    def __init__(self, client: Client, settings: GatewaysConfig) -> None:
        self._client = client
        self._settings = settings
        self._streams = client.jetstream(timeout=STORE_S)
        self._is_closing = False
        self._num_lost = 0
        self.connected_again = asyncio.Event()
        """Set whenever a broken connection has been made again; whoever waits for it clears it."""

    @classmethod
    async def open(cls, settings: GatewaysConfig, *, name: str) -> Broker:
        """Raises ConfigError where there is no broker, or none of use."""
        try:
            from nats.aio.client import Client
            from nats.errors import Error
        except ImportError as error:
            raise ConfigError(
                "Gateways need the NATS client, which is not installed.",
                got=str(error),
                do=how_to_install("gateways"),
            ) from error
        client = Client()
        broker = cls(client, settings)
        try:
            await client.connect(
                settings.url.split(","),
                name=name,
                tls=_tls(settings),
                connect_timeout=CONNECT_S,
                max_reconnect_attempts=1,
                reconnect_time_wait=RETRY_S,  # type: ignore[arg-type]  # It sleeps for so long.
                ping_interval=10,
                pending_size=BUFFER_BYTES,
                error_cb=_say_error,
                disconnected_cb=broker._lost,
                reconnected_cb=broker._came_back,
                skip_subject_validation=True,
            )
        except (Error, OSError, TimeoutError) as error:
            await client.close()
            raise ConfigError(
                "The NATS server cannot be reached.",
                got=f"{without_password(settings.url)}: {error or type(error).__name__}",
                do="Start it (nats-server --jetstream), or correct gateways.url.",
            ) from error
        client.options["max_reconnect_attempts"] = -1  # From here on it is awaited for ever.
        if client.max_payload < LEAST_PAYLOAD:
            await client.close()
            raise ConfigError(
                "The NATS server takes no messages as large as Echo's.",
                got=f"max_payload of {client.max_payload} bytes",
                do=f"Set max_payload: {LEAST_PAYLOAD} or more in its configuration, and restart it.",
            )
        return broker

    async def _lost(self) -> None:
        self._num_lost += 1
        if not self._is_closing:
            log.warning("the connection to the NATS server is lost; it is made again by itself")

    async def _came_back(self) -> None:
        log.warning("the NATS server is there again")
        self.connected_again.set()

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    async def publish(self, subject: str, message: bytes) -> None:
        """Sends it to whoever listens now. Raises ConnectError where it cannot even wait to be sent."""
        from nats.errors import Error

        try:
            await self._client.publish(subject, message)
        except (Error, OSError) as error:
            raise ConnectError("Nothing can be sent to the NATS server.", got=str(error)) from error
        _heed_cancellation()

    async def subscribe(self, subject: str, take: Callable[[bytes], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """Gives `take` every message from now on, in order, one at a time; what is returned ends that. Raises
        ConnectError."""
        from nats.errors import Error

        async def taken(message: Msg) -> None:
            await take(message.data)

        async def end() -> None:
            with contextlib.suppress(Error):  # The connection has ended.
                await subscription.unsubscribe()

        try:
            subscription = await self._client.subscribe(subject, cb=taken, pending_bytes_limit=BUFFER_BYTES)
            await self._client.flush()
        except (Error, OSError, TimeoutError) as error:
            raise ConnectError("The NATS server does not answer.", got=str(error) or type(error).__name__) from error
        _heed_cancellation()
        return end

    async def make_stream(self, name: str, subject: str) -> None:
        """Makes the stream, or gives it the settings that hold now. Raises ConfigError where JetStream does not."""
        from nats.errors import Error
        from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
        from nats.js.errors import BadRequestError

        stream = StreamConfig(
            name=name,
            subjects=[subject],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            discard=DiscardPolicy.NEW,
            max_bytes=self._settings.max_bytes,
            num_replicas=self._settings.replicas,
            duplicate_window=DUPLICATES_S,
        )
        try:
            try:
                await self._streams.add_stream(stream)
            except BadRequestError:
                await self._streams.update_stream(stream)
        except (Error, TimeoutError) as error:
            raise ConfigError(
                "JetStream does not make the stream that gateways store into.",
                got=str(error),
                do="Enable JetStream (nats-server --jetstream), give it disk for gateways.max_bytes, and take a "
                "cluster for gateways.replicas above 1.",
            ) from error

    async def store(self, subject: str, message: bytes, *, message_id: str) -> None:
        """Returns once JetStream has it on disk; the same id again within DUPLICATES_S is the same message. Raises
        BrokerFullError, and ConnectError when it is not known whether it has."""
        from nats.errors import Error
        from nats.js.errors import APIError

        try:
            await self._streams.publish(subject, message, timeout=STORE_S, headers={"Nats-Msg-Id": message_id})
        except APIError as error:
            kind = BrokerFullError if error.err_code in _FULL else ConnectError
            raise kind("JetStream does not store what nodes send.", got=error.description) from error
        except (Error, OSError, TimeoutError, ValueError) as error:
            raise ConnectError("JetStream does not answer.", got=str(error) or type(error).__name__) from error
        _heed_cancellation()

    async def consume(self, stream: str, take: TakeStored) -> None:
        """Gives `take` for ever what is stored, oldest first and one at a time; from the oldest that is not settled
        again after each loss of the connection. Only the newest caller is given anything."""
        from nats.errors import Error

        while True:
            self.connected_again.clear()
            inbox = self._client.new_inbox()

            async def taken(message: Msg, number: int = self._num_lost) -> None:
                if number == self._num_lost:  # Else it comes again, in its turn.
                    await take(message.data, partial(_acknowledge, message))

            try:
                subscription = await self._client.subscribe(inbox, cb=taken, pending_bytes_limit=0)
                await self._deliver_to(stream, inbox)
            except (Error, OSError, TimeoutError) as error:
                log.warning("JetStream hands nothing out: %s", str(error) or type(error).__name__)
                await asyncio.sleep(RETRY_S)
                continue
            _heed_cancellation()
            await self.connected_again.wait()
            await subscription.unsubscribe()

    async def _deliver_to(self, stream: str, inbox: str) -> None:
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
        from nats.js.errors import NotFoundError

        try:
            await self._streams.delete_consumer(stream, CONSUMER)
        except NotFoundError as error:
            if error.err_code != _NO_SUCH_CONSUMER:
                raise
        consumer = ConsumerConfig(
            durable_name=CONSUMER,
            deliver_subject=inbox,
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=SETTLED_WITHIN_S,
            max_ack_pending=UNDER_WAY,
        )
        await self._streams.add_consumer(stream, consumer)

    async def waiting(self, stream: str) -> int:
        """Stored messages that are not settled. Raises ConnectError."""
        from nats.errors import Error

        try:
            return (await self._streams.stream_info(stream)).state.messages
        except (Error, OSError, TimeoutError) as error:
            raise ConnectError("JetStream does not answer.", got=str(error)) from error

    async def close(self) -> None:
        """Sends what waits to be sent, as far as it can be."""
        from nats.errors import Error

        self._is_closing = True
        try:
            async with asyncio.timeout(2.0):
                await self._client.flush()
        except (Error, OSError, TimeoutError) as error:
            log.info("the connection to NATS ends: %s", str(error) or type(error).__name__)
        await self._client.close()


async def _acknowledge(message: Msg) -> None:
    from nats.errors import Error

    try:
        await message.ack()
    except (Error, OSError) as error:  # It comes again, and is known then.
        log.info("JetStream was not told that something is settled: %s", error)
    _heed_cancellation()


def _heed_cancellation() -> None:
    """The library lets a cancellation go by that comes while it writes."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def without_password(url: str) -> str:
    """For people to read."""
    found = [urlsplit(one) for one in url.split(",")]
    return ",".join(f"{one.scheme}://{one.netloc.rpartition('@')[2]}" for one in found)


def _tls(settings: GatewaysConfig) -> ssl.SSLContext | None:
    """Raises ConfigError for files of no use."""
    if not (settings.tls_ca or settings.tls_certificate or "tls://" in settings.url):
        return None
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca or None)
        if settings.tls_certificate:
            context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    except OSError as error:  # ssl.SSLError is one, too.
        raise ConfigError(
            "A file of gateways.tls_ca, tls_certificate and tls_key is of no use.", got=str(error), do="Correct it."
        ) from error
    return context


async def _say_error(error: Exception) -> None:
    level = logging.INFO if isinstance(error, OSError | EOFError) else logging.WARNING  # That it is away is said once.
    log.log(level, "NATS: %s", str(error) or type(error).__name__)
