"""The connection of the hub and the gateways to NATS and JetStream, NATS's store of messages. Only this module uses the
NATS client library.

If the connection breaks, the client tries to reconnect, without a limit. Messages published in the meantime may be
lost. `store` is reliable: it returns only when JetStream has the message on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from echo_hub.config.gateways_section import GatewaysConfig
from echo_shared.errors import ConfigError, ConnectError
from echo_shared.installation import how_to_install
from echo_shared.wire.messages import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

log = logging.getLogger(__name__)

CONNECT_S: Final = 10
RETRY_S: Final = 0.5
STORE_S: Final = 5.0
"""Timeout of one request to JetStream, in seconds. After it, the caller repeats the request."""
LEAST_PAYLOAD: Final = MAX_FRAME_BYTES + 2**16
"""Message size, in bytes, that the NATS server must at least allow: the largest message to a node, plus its
overhead."""
BUFFER_BYTES: Final = 4 * LEAST_PAYLOAD
DUPLICATES_S: Final = 600.0
"""If JetStream has stored a message, it drops messages with the same id for this many seconds."""
UNDER_WAY: Final = 64
"""Largest number of messages that the hub has received from JetStream and whose effects it has not committed yet."""
SETTLED_WITHIN_S: Final = 86_400.0
"""Seconds until JetStream delivers an unsettled message again. The time is long, because a hub may wait for disk space
for hours."""
CONSUMER: Final = "hub"
_NO_SUCH_CONSUMER: Final = 10014
_FULL: Final = frozenset({10077, 10023, 10047, 10028})
"""JetStream error codes for lack of space: messages, bytes, resources, storage."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message that JetStream keeps until `settle` is called."""

    data: bytes
    _message: Msg

    async def settle(self) -> None:
        """Tell JetStream to delete the message, because its effects are committed."""
        from nats.errors import Error

        try:
            await self._message.ack()
        except (Error, OSError) as error:  # JetStream delivers the message again, and the hub recognises it.
            log.info("a stored message could not be settled: %s", error)
        _heed_cancellation()


class BrokerFullError(ConnectError):
    """JetStream has no space for more messages."""


class Broker:
    """One connection to NATS. Create it with `open`."""

    def __init__(self, client: Client, settings: GatewaysConfig) -> None:
        self._client = client
        self._settings = settings
        self._streams = client.jetstream(timeout=STORE_S)
        self._is_closing = False
        self._num_lost = 0
        self.connected_again = asyncio.Event()
        """Set when a broken connection works again. The waiting task clears it."""

    @classmethod
    async def open(cls, settings: GatewaysConfig, *, name: str) -> Broker:
        """Connect to NATS. Raises ConfigError if no server answers, or if the server's limits are too small."""
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
                reconnect_time_wait=RETRY_S,  # type: ignore[arg-type]  # Used as a sleep time.
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
        client.options["max_reconnect_attempts"] = -1  # From here on, reconnect forever.
        if client.max_payload < LEAST_PAYLOAD:
            await client.close()
            raise ConfigError(
                "The NATS server's message size limit is too small for Echo.",
                got=f"max_payload of {client.max_payload} bytes",
                do=f"Set max_payload: {LEAST_PAYLOAD} or more in its configuration, and restart it.",
            )
        return broker

    async def _lost(self) -> None:
        self._num_lost += 1
        if not self._is_closing:
            log.warning("the connection to the NATS server is lost; reconnecting")

    async def _came_back(self) -> None:
        log.warning("the connection to the NATS server is re-established")
        self.connected_again.set()

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    async def publish(self, subject: str, message: bytes) -> None:
        """Send a message to the present subscribers. Raises ConnectError if the client cannot even buffer the message
        for sending."""
        from nats.errors import Error

        try:
            await self._client.publish(subject, message)
        except (Error, OSError) as error:
            raise ConnectError("A message cannot be sent to the NATS server.", got=str(error)) from error
        _heed_cancellation()

    async def subscribe(self, subject: str, take: Callable[[bytes], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """Pass every later message to `take`, in order, one at a time. Return a function that unsubscribes.

        Raises ConnectError.
        """
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
        """Create the stream, or update its settings. Raises ConfigError if JetStream refuses."""
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
                "JetStream cannot create the stream in which gateways store messages.",
                got=str(error),
                do="Enable JetStream (nats-server --jetstream), give it disk for gateways.max_bytes, and use a "
                "cluster for gateways.replicas above 1.",
            ) from error

    async def store(self, subject: str, message: bytes, *, message_id: str) -> None:
        """Store a message, and return when JetStream has it on disk. If a message id is repeated within DUPLICATES_S,
        the message is stored only once."""
        from nats.errors import Error
        from nats.js.errors import APIError

        try:
            await self._streams.publish(subject, message, timeout=STORE_S, headers={"Nats-Msg-Id": message_id})
        except APIError as error:
            kind = BrokerFullError if error.err_code in _FULL else ConnectError
            raise kind("JetStream does not store messages from nodes.", got=error.description) from error
        except (Error, OSError, TimeoutError, ValueError) as error:
            raise ConnectError("JetStream does not answer.", got=str(error) or type(error).__name__) from error
        _heed_cancellation()

    async def consume(self, stream: str, take: Callable[[StoredMessage], Awaitable[None]]) -> None:
        """Pass stored messages to `take` forever, the oldest first, one at a time.

        After a lost connection, delivery resumes with the oldest message for which `StoredMessage.settle` was not
        called. If several processes call this method, only the newest caller receives messages.
        """
        from nats.errors import Error

        while True:
            self.connected_again.clear()
            inbox = self._client.new_inbox()

            async def taken(message: Msg, number: int = self._num_lost) -> None:
                # Ignore messages that came over a lost connection: JetStream sends them again.
                if number == self._num_lost:
                    await take(StoredMessage(message.data, message))

            try:
                subscription = await self._client.subscribe(inbox, cb=taken, pending_bytes_limit=0)
                await self._deliver_to(stream, inbox)
            except (Error, OSError, TimeoutError) as error:
                log.warning("JetStream delivers no messages: %s", str(error) or type(error).__name__)
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
        """Return the number of messages in JetStream whose effects the hub has not committed yet. Raises
        ConnectError."""
        from nats.errors import Error

        try:
            return (await self._streams.stream_info(stream)).state.messages
        except (Error, OSError, TimeoutError) as error:
            raise ConnectError("JetStream does not answer.", got=str(error)) from error

    async def close(self) -> None:
        """Send the buffered messages, for at most 2 s, and disconnect."""
        from nats.errors import Error

        self._is_closing = True
        try:
            async with asyncio.timeout(2.0):
                await self._client.flush()
        except (Error, OSError, TimeoutError) as error:
            log.info("the connection to NATS ends: %s", str(error) or type(error).__name__)
        await self._client.close()


def _heed_cancellation() -> None:
    """Raise CancelledError if the current task was cancelled, because the NATS library swallows a cancellation that
    arrives while it writes."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def without_password(url: str) -> str:
    found = [urlsplit(one) for one in url.split(",")]
    return ",".join(f"{one.scheme}://{one.netloc.rpartition('@')[2]}" for one in found)


def _tls(settings: GatewaysConfig) -> ssl.SSLContext | None:
    """Return the TLS context, or None if the settings use no TLS. Raises ConfigError if a file cannot be used."""
    if not (settings.tls_ca or settings.tls_certificate or "tls://" in settings.url):
        return None
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca or None)
        if settings.tls_certificate:
            context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    except OSError as error:  # ssl.SSLError is an OSError, too.
        raise ConfigError(
            "One of the files gateways.tls_ca, tls_certificate and tls_key cannot be used.",
            got=str(error),
            do="Correct it.",
        ) from error
    return context


async def _say_error(error: Exception) -> None:
    # `_lost` has already logged the lost connection.
    level = logging.INFO if isinstance(error, OSError | EOFError) else logging.WARNING
    log.log(level, "NATS: %s", str(error) or type(error).__name__)
