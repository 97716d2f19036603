"""The node's client against a real websocket server with scripted messages, valid or not."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from websockets.asyncio.server import serve

from echo_node.core.events import Disconnected
from echo_node.core.troubles import Trouble, TroubleCode
from echo_node.host.address import HubAddress
from echo_node.host.clock import read_clocks
from echo_node.host.trouble_log import TroubleLog
from echo_node.lending.pairing import Pairing
from echo_node.net.client import HubClient, Introduction
from echo_shared.errors import ConnectError, EchoError, RefusedError, RemoteProtocolError
from echo_shared.installation import how_to_upgrade
from echo_shared.signing.identity import Identity
from echo_shared.wire.credentials import Credentials, challenge_header
from echo_shared.wire.messages import (
    FromHub,
    Mesh,
    NodeStatus,
    Piece,
    Proof,
    RefusalCode,
    Welcome,
)
from echo_shared.wire.sessions import UPGRADE_NODE, HubSession
from tests.echo_node.waiting import until

STATUS = NodeStatus(activity="waiting", capacity=1, policy_version=0, tokens_per_s=0.0)


def client_of(
    url: str,
    *,
    me: Identity | None = None,
    pinned: bytes | None = None,
    troubles: TroubleLog | None = None,
    stays: bool = False,
) -> HubClient:
    return HubClient(
        HubAddress.parse(url, insecure=False),
        me=me or Identity.generate(),
        introduction=Introduction(
            name="n", invite_token="token-1", backend="mlx", device="d", swarm_port=7, mesh_port=8
        ),
        pinned_hub_key=pinned,
        retry_first_s=0.01,
        troubles=troubles,
        stays=stays,
    )


class Events:
    def __init__(self) -> None:
        self.queue: asyncio.Queue[FromHub | Disconnected] = asyncio.Queue()
        self.pieces: asyncio.Queue[Piece] = asyncio.Queue()

    def take(self, piece: Piece, sender: str | None) -> None:
        """Record a piece that the client passes on. The test takes the place of the node's receiver."""
        assert sender is None, "the hub itself sent it"
        self.pieces.put_nowait(piece)

    async def next(self, kind: type) -> Any:
        async with asyncio.timeout(60):
            event = await self.queue.get()
        assert isinstance(event, kind), event
        return event


@asynccontextmanager
async def joined(client: HubClient) -> AsyncIterator[tuple[Events, asyncio.Future[EchoError]]]:
    """Run the client, and wait until it has joined the hub. Yield its events, and a future of the error that ends
    it.
    """
    events = Events()
    async with asyncio.timeout(60):
        ended = asyncio.ensure_future(failure(client, events=events))
        await events.next(Welcome)
        yield events, ended


@asynccontextmanager
async def running(client: HubClient, *, patient: bool = False) -> AsyncIterator[Events]:
    events = Events()
    task = asyncio.create_task(client.run(events.queue, events, patient=patient))
    try:
        yield events
    finally:
        task.cancel()
        await asyncio.wait({task})


async def failure(client: HubClient, *, patient: bool = False, events: Events | None = None) -> EchoError:
    events = events or Events()
    with pytest.raises(EchoError) as caught:
        async with asyncio.timeout(60):
            await client.run(events.queue, events, patient=patient)
    return caught.value


async def test_a_new_introduction_is_made_on_a_new_connection(hub: Any) -> None:
    client = client_of(hub.url)
    async with running(client) as events:
        await events.next(Welcome)
        await client.introduce(
            Introduction(name="n", invite_token=None, backend="vllm", device="e", swarm_port=7, mesh_port=8)
        )
        await events.next(Disconnected)
        await events.next(Welcome)
    assert [(proof.backend, proof.device) for proof in hub.all(Proof)] == [("mlx", "d"), ("vllm", "e")]


async def test_a_change_during_a_handshake_causes_another_connection(hub: Any) -> None:
    client = client_of(hub.url)
    new = Introduction(name="n", invite_token=None, backend="vllm", device="e", swarm_port=7, mesh_port=8)
    async with running(client) as events:
        await hub.until(lambda: hub.said != [])
        await client.introduce(new)
        await hub.until(lambda: "vllm" in [proof.backend for proof in hub.all(Proof)])
        while not isinstance(event := await events.queue.get(), Welcome):
            assert isinstance(event, Disconnected)


async def test_handshake_introduces_the_node_and_pins_the_hub(hub: Any) -> None:
    client = client_of(hub.url)
    async with running(client) as events:
        welcome = await events.next(Welcome)
        assert welcome == hub.welcome()
        assert client.hub_key == hub.me.public_key
        await client.send(STATUS)
        await hub.until(lambda: hub.all(NodeStatus))
    (proof,) = hub.all(Proof)
    assert (proof.name, proof.invite_token, proof.backend, proof.device, proof.swarm_port, proof.mesh_port) == (
        "n",
        "token-1",
        "mlx",
        "d",
        7,
        8,
    )


async def test_pieces_do_not_wait_behind_the_rest(hub: Any) -> None:
    piece = Piece(info_hash=bytes(20), index=3, data=b"x", hand_on=b"\1\0\0")
    async with running(client_of(hub.url)) as events:
        await hub.until(lambda: hub.handshakes)
        await hub.send(Mesh(peers=()))
        await hub.send(piece)
        async with asyncio.timeout(60):
            assert await events.pieces.get() == piece
        await events.next(Welcome)
        await events.next(Mesh)


async def test_the_client_reconnects_after_a_loss_and_reports_it(hub: Any) -> None:
    client = client_of(hub.url)
    async with running(client) as events:
        await events.next(Welcome)
        await hub.close()
        await events.next(Disconnected)
        await client.send(STATUS)  # This message is dropped, because there is no connection.
        await hub.open()
        await events.next(Welcome)
    assert hub.handshakes == 2
    assert hub.all(NodeStatus) == []


async def test_the_key_pinned_at_first_use_holds_for_the_next_connection(hub: Any) -> None:
    async with joined(client_of(hub.url)) as (_, ended):
        await hub.close()
        hub.me = Identity.generate()
        await hub.open()
        assert (await ended).code == "hub_key_changed"


@pytest.mark.parametrize(
    "code",
    [
        RefusalCode.BAD_TOKEN,
        RefusalCode.BAD_SIGNATURE,
        RefusalCode.BANNED,
        RefusalCode.ALREADY_CONNECTED,
        RefusalCode.FINISHED,
    ],
)
async def test_some_refusals_are_the_end_even_for_the_patient(hub: Any, code: RefusalCode) -> None:
    hub.refusal = RefusedError("No.", do="Do this.", code=code)
    error = await failure(client_of(hub.url), patient=True)
    assert (error.code, error.what, error.do) == (code, "The hub says: No.", "Do this.")


@pytest.mark.parametrize("do", [UPGRADE_NODE, ""])
async def test_a_node_that_is_too_old_names_the_command_and_does_not_hammer(hub: Any, do: str) -> None:
    hub.refusal = RefusedError("Too old.", do=do, code=RefusalCode.PROTOCOL_VERSION)
    error = await failure(client_of(hub.url))
    assert error.do == how_to_upgrade()
    troubles = TroubleLog()
    client, before = client_of(hub.url, troubles=troubles), hub.closed
    async with running(client, patient=True) as events:
        await until(lambda: [trouble.code.value for trouble in troubles.now] == ["too_old"])
        assert how_to_upgrade() in troubles.now[0].sentence and "asks again every hour" in troubles.now[0].sentence
        assert client.too_old == "The hub says: Too old."
        assert hub.closed == before + 1, "once, at a backoff of hundredths of a second"
        hub.refusal = None
        client.reconnect(Trouble(TroubleCode.SLEPT, "It slept."))
        await events.next(Welcome)
        assert troubles.now == () and client.too_old == ""


async def test_a_hub_that_is_too_old_is_the_operator_s_to_upgrade(hub: Any) -> None:
    hub.refusal = RefusedError("Too old.", do="Ask the hub's operator.", code=RefusalCode.PROTOCOL_VERSION)
    error = await failure(client_of(hub.url))
    assert error.do == "Ask the hub's operator."
    troubles = TroubleLog()
    client = client_of(hub.url, troubles=troubles)
    async with running(client, patient=True):
        await until(lambda: bool(troubles.now))
        assert client.too_old == "", "the node needs no change"


@pytest.mark.parametrize(("code", "patient"), [(RefusalCode.SHUTTING_DOWN, True), (RefusalCode.TOO_SOON, False)])
async def test_other_refusals_are_retried_by_the_patient_and_too_soon_by_all(
    hub: Any, code: RefusalCode, patient: bool
) -> None:
    hub.refusal = RefusedError("Later.", code=code)
    async with running(client_of(hub.url), patient=patient) as events:
        await hub.until(lambda: len(hub.all(Proof)) == 0 and hub.closed >= 2)
        hub.refusal = None
        await events.next(Welcome)


async def test_other_refusals_end_the_first_attempt_of_the_impatient(hub: Any) -> None:
    hub.refusal = RefusedError("Later.", code=RefusalCode.SHUTTING_DOWN)
    assert (await failure(client_of(hub.url))).code == "shutting_down"


async def test_a_refusal_in_the_open_state_is_heard(hub: Any) -> None:
    async with joined(client_of(hub.url)) as (_, ended):
        await hub.refuse(RefusalCode.FINISHED, "The run is finished.")
        assert (await ended).code == "finished"


async def test_a_patient_node_waits_for_the_extension_of_a_run(hub: Any) -> None:
    async with joined(client_of(hub.url, stays=True)) as (events, ended):
        await hub.refuse(RefusalCode.FINISHED, "The run is finished.")
        await events.next(Disconnected)
        await events.next(Welcome)
        await hub.refuse(RefusalCode.BANNED, "This node is banned.")
        assert (await ended).code == "banned", "other refusals are not retried"


async def test_a_barred_node_gets_advice(hub: Any) -> None:
    hub.refusal = RefusedError("This node is banned.", code=RefusalCode.BANNED)
    error = await failure(client_of(hub.url), patient=True)
    assert error.code == "banned" and "operator" in (error.do or "")


async def test_a_missing_hub_is_reported(bare_hub: Any) -> None:
    await bare_hub.close()
    error = await failure(client_of(bare_hub.url))
    assert isinstance(error, ConnectError)
    assert "cannot be reached" in error.what and bare_hub.url in (error.got or "") and error.do


async def test_a_web_server_that_is_no_hub(bare_hub: Any) -> None:
    error = await failure(client_of(bare_hub.url + "/elsewhere"))
    assert isinstance(error, ConnectError) and "404" in (error.got or "")


async def test_https_to_a_hub_that_speaks_http(hub: Any) -> None:
    error = await failure(client_of(hub.url.replace("http://", "https://")))
    assert isinstance(error, ConnectError)
    assert "not trusted" not in str(error) and "does not speak TLS" in error.what
    assert error.do == f"Use {hub.url}"


async def test_https_to_a_server_that_hangs_up_in_the_handshake() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    listening = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with listening:
        error = await failure(client_of(f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"))
    assert isinstance(error, ConnectError) and "not trusted" not in str(error)


async def failure_with(certificate: Path) -> EchoError:
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate)
    async with serve(lambda _: asyncio.sleep(0), "127.0.0.1", 0, ssl=server_side) as listening:
        return await failure(client_of(f"https://127.0.0.1:{next(iter(listening.sockets)).getsockname()[1]}"))


async def test_an_untrusted_certificate_is_refused(tmp_path: Path) -> None:
    assert Pairing.load_or_create(tmp_path / "own.pem").code
    error = await failure_with(tmp_path / "own.pem")
    assert isinstance(error, ConnectError)
    assert "certificate is not trusted" in error.what and "self-signed" in (error.got or "")


@pytest.mark.parametrize(
    ("from_day", "to_day", "says", "code"),
    [(1, 2, "not valid yet by this machine's clock", "clock"), (-2, -1, "has expired by this machine's", "connect")],
)
async def test_a_certificate_of_another_day_is_put_down_to_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_day: int, to_day: int, says: str, code: str
) -> None:
    file = tmp_path / "own.pem"
    write_certificate(file, from_day=from_day, to_day=to_day)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    error = await failure_with(file)
    assert isinstance(error, ConnectError) and error.code == code
    assert says in error.what and f"{datetime.now():%Y-%m-%d}" in error.what
    assert "clock" in (error.do or "")


def write_certificate(file: Path, *, from_day: int, to_day: int) -> None:
    """Write the certificate and key of a server at 127.0.0.1; `from_day` and `to_day` count from today."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a hub")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=from_day))
        .not_valid_after(now + timedelta(days=to_day))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(private + certificate.public_bytes(pem))


async def test_a_node_that_waits_for_its_hub_shows_the_reason(hub: Any) -> None:
    troubles = TroubleLog()
    await hub.close()
    async with running(client_of(hub.url, troubles=troubles), patient=True) as events:
        await until(lambda: [trouble.code.value for trouble in troubles.now] == ["hub"])
        assert "cannot be reached" in troubles.now[0].sentence
        await hub.open()
        await events.next(Welcome)
        assert troubles.now == ()


async def test_the_hub_tells_its_time(hub: Any) -> None:
    client = client_of(hub.url)
    now = read_clocks()
    assert client.hub_clock.ahead_s(replace(now, wall=0.0)) == 0.0 and client.own_address is None
    async with running(client) as events:
        await events.next(Welcome)
        assert client.own_address == "127.0.0.1"
    assert client.hub_clock.ahead_s(replace(now, wall=now.wall + 7_200)) == pytest.approx(7_200, abs=60)


async def test_a_server_that_speaks_no_websocket() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        assert isinstance(await failure(client_of(f"http://127.0.0.1:{port}")), ConnectError)


@asynccontextmanager
async def odd_hub(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Yield the address of a server whose websocket requests go to `handler`."""
    app = web.Application()
    app.add_routes([web.get("/node", handler)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def credentials_of(request: web.Request) -> Credentials:
    credentials = Credentials.of_header(request.headers["Authorization"])
    assert credentials is not None
    return credentials


def challenge(request: web.Request, session: HubSession) -> web.Response:
    session.receive(credentials_of(request).hello)
    return web.Response(status=401, headers={"WWW-Authenticate": challenge_header(session.challenge())})


@asynccontextmanager
async def proven_then(say: Callable[[web.WebSocketResponse], Awaitable[Any]]) -> AsyncIterator[str]:
    """Yield the address of a hub that is honest until the handshake is done, and then calls `say` in place of sending
    the Welcome.
    """
    me = Identity.generate()

    async def answer(request: web.Request) -> web.StreamResponse:
        if not credentials_of(request).proof:
            return challenge(request, HubSession(me=me, software_version="x", nonce=bytes(32)))
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await say(socket)
        async for _ in socket:
            pass
        return socket

    async with odd_hub(answer) as url:
        yield url


@pytest.mark.parametrize("nonsense", [b"", b"\xc1", b"\x81\xa4type\xa7welcome", "text", b"\x81\xa4type\xa4peer"])
async def test_nonsense_ends_the_connection(nonsense: bytes | str) -> None:
    async def say(socket: web.WebSocketResponse) -> None:
        await (socket.send_str(nonsense) if isinstance(nonsense, str) else socket.send_bytes(nonsense))

    async with proven_then(say) as url:
        assert isinstance(await failure(client_of(url)), RemoteProtocolError)


@pytest.mark.parametrize("header", ["Echo challenge=wQ", "Echo challenge=", "Echo challenge=a!", "Echo"])
async def test_nonsense_for_a_challenge_is_the_hubs_error(header: str) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=401, headers={"WWW-Authenticate": header})

    async with odd_hub(answer) as url:
        assert isinstance(await failure(client_of(url)), RemoteProtocolError)


@pytest.mark.parametrize("headers", [{}, {"WWW-Authenticate": "Basic realm=x"}, {"WWW-Authenticate": "Echo a=aA"}])
async def test_a_server_with_another_challenge_is_no_hub(headers: dict[str, str]) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=401, headers=headers, text="\x1b[2J")

    async with odd_hub(answer) as url:
        error = await failure(client_of(url))
    assert isinstance(error, ConnectError) and "HTTP status 401" in (error.got or "")


async def test_a_hub_that_asks_for_no_proof_is_too_old() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        await (socket := web.WebSocketResponse()).prepare(request)
        async for _ in socket:
            pass
        return socket

    async with odd_hub(answer) as url:
        error = await failure(client_of(url))
    assert error.code == RefusalCode.PROTOCOL_VERSION and "operator" in (error.do or "")


async def test_a_hub_without_its_key_never_gets_the_token() -> None:
    honest, thief, asked = Identity.generate(), Identity.generate(), []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(credentials_of(request))
        session = HubSession(me=thief, software_version="x", nonce=bytes(32))
        session.receive(asked[-1].hello)
        frame = session.challenge().replace(thief.public_key, honest.public_key)
        return web.Response(status=401, headers={"WWW-Authenticate": challenge_header(frame)})

    async with odd_hub(answer) as url:
        error = await failure(client_of(url))
    assert isinstance(error, RemoteProtocolError) and "could not prove" in error.what
    assert [one.proof for one in asked] == [b""]


async def test_a_redirect_target_gets_no_credentials() -> None:
    told: list[str | None] = []

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        told.append(request.headers.get("Authorization"))
        return web.Response(status=404)

    async with odd_hub(elsewhere) as other:

        async def answer(request: web.Request) -> web.StreamResponse:
            if not credentials_of(request).proof:
                return challenge(request, HubSession(me=Identity.generate(), software_version="x", nonce=bytes(32)))
            raise web.HTTPFound(f"{other.replace('http', 'ws')}/node")

        async with odd_hub(answer) as url:
            error = await failure(client_of(url))
            assert isinstance(error, ConnectError) and f"{url} redirects to {other}" in str(error)
    assert told == []


async def test_a_connection_closed_before_the_welcome() -> None:
    async with proven_then(lambda socket: socket.close()) as url:
        error = await failure(client_of(url))
    assert isinstance(error, ConnectError) and "is lost" in error.what


@pytest.mark.parametrize("run", ["run-1", "{other}", "{other}-1", "{own}1", "x{own}", "{own}/../{other}"])
async def test_a_hub_may_not_name_another_hubs_run(hub: Any, monkeypatch: pytest.MonkeyPatch, run: str) -> None:
    run_id = run.format(own=hub.me.node_id, other=Identity.generate().node_id)
    monkeypatch.setattr(type(hub), "run_id", run_id)
    error = await failure(client_of(hub.url))
    assert isinstance(error, RemoteProtocolError) and "not its own" in error.what and error.do


async def test_a_run_id_may_be_the_hubs_key_alone(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(hub), "run_id", hub.me.node_id)
    async with running(client_of(hub.url)) as events:
        assert (await events.next(Welcome)).run_id == hub.me.node_id


async def test_a_hub_on_this_machine_is_reached_without_the_proxy(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with running(client_of(hub.url)) as events:
        await events.next(Welcome)


async def test_a_hubs_texts_outside_messages_cannot_control_the_terminal() -> None:
    async def close(socket: web.WebSocketResponse) -> None:
        await socket.close(code=4000, message="\x1b[2J\u202egone\r\n".encode())

    async def text(socket: web.WebSocketResponse) -> None:
        await socket.send_str("\x1b]0;title\x07\n" + 1_000 * "x")

    for say in (close, text):
        async with proven_then(say) as url:
            got = (await failure(client_of(url))).got or ""
        assert got.isprintable() and "?" in got and len(got) < 400


async def test_a_web_servers_texts_cannot_control_the_terminal() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 OK\r\nConnection: \x1b[2J\r\nUpgrade: \x1b[31m\r\n\r\n")
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        error = await failure(client_of(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"))
    assert (error.got or "").isprintable()


@pytest.mark.parametrize(
    "head",
    [
        "401 Unauthorized\r\nDate: Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
        "401 Unauthorized\r\nDate: Mon, 01 Jan 2024 00:00:00 +99999999999999999999",
        "403 Forbidden\r\nContent-Type: text/html\r\nContent-Type: text/plain",
        "302 Found\r\nLocation: ws://127.0.0.1:99999/node",
        "302 Found\r\nLocation: ws://[/node",
        "302 Found\r\nLocation: /a\r\nLocation: /b",
        "302 Found\r\nLocation: ws://a..b/node",
        "302 Found\r\nLocation: ws://\xe9..b/node",
    ],
)
async def test_odd_http_headers_are_the_servers_error(head: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {head}\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        error = await failure(client_of(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"))
    assert isinstance(error, ConnectError) and (error.got or "").isprintable()
