import asyncio
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import libtorrent as lt
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from echo_shared.errors import CodecError, LocalProtocolError, StorageError, SwarmError
from echo_shared.swarm import FetchStats, Swarm, SwarmSettings, bencode, bittorrent, opening
from echo_shared.swarm.bittorrent import BitTorrentSwarm

Opener = Callable[..., Awaitable[Swarm]]
NEVER = 1_000.0


@pytest.fixture
async def open_swarm() -> AsyncIterator[Opener]:
    swarms: list[Swarm] = []

    async def opener(**settings: object) -> Swarm:
        swarm = await opening.open_swarm(SwarmSettings.model_validate({"listen_host": "127.0.0.1", **settings}))
        swarms.append(swarm)
        return swarm

    yield opener
    for swarm in swarms:
        await swarm.close()


def here(*swarms: Swarm) -> list[tuple[str, int]]:
    return [("127.0.0.1", swarm.port) for swarm in swarms]


async def test_an_offline_client_transfers_nothing_until_it_is_online(payload, open_swarm, tmp_path) -> None:
    hub, node = await open_swarm(), await open_swarm(web_seed_after_s=NEVER, download_limit_bytes_s=123_000)
    assert node._session.get_settings()["download_rate_limit"] == 123_000
    await hub.seed(payload.torrent.torrent, payload.directory)
    hub.set_online(False)
    fetch = asyncio.create_task(node.fetch(payload.torrent.torrent, tmp_path / "node", peers=here(hub)))
    while not await node.stats():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for _ in range(3):
        assert (await node.traffic())[1] < payload.total_bytes / 2
    hub.set_online(True)
    await fetch
    assert payload.matches(tmp_path / "node" / payload.directory.name)


async def test_two_nodes_fetch_from_the_hub_and_then_serve_a_third_node(payload, open_swarm, tmp_path) -> None:
    hub = await open_swarm()
    first, second, third = [await open_swarm(web_seed_after_s=NEVER) for _ in range(3)]
    assert isinstance(hub, BitTorrentSwarm)
    await hub.seed(payload.torrent.torrent, payload.directory)
    progress: list[tuple[int, int]] = []
    fetches = await asyncio.gather(
        first.fetch(
            payload.torrent.torrent,
            tmp_path / "first",
            peers=here(hub, second),
            on_progress=lambda done, total: progress.append((done, total)),
        ),
        second.fetch(payload.torrent.torrent, tmp_path / "second", peers=here(hub, first)),
    )
    for stats in fetches:
        assert stats.swarm_bytes >= payload.total_bytes
        assert stats.web_seed_bytes == 0
        assert stats.seconds > 0
    assert progress == sorted(progress)
    assert progress[-1] == (payload.total_bytes, payload.total_bytes)
    assert payload.matches(tmp_path / "first" / payload.directory.name)
    assert payload.matches(tmp_path / "second" / payload.directory.name)

    sent, _ = await hub.traffic()
    _, received = await first.traffic()
    assert sent >= payload.total_bytes / 2 and received >= payload.total_bytes
    before = await second.traffic()
    assert await second.traffic() >= before
    await hub.close()
    await third.fetch(payload.torrent.torrent, tmp_path / "third", peers=here(first, second))
    assert payload.matches(tmp_path / "third" / payload.directory.name)
    uploaded = [(await swarm.stats())[payload.torrent.info_hash].uploaded_bytes for swarm in (first, second)]
    assert sum(uploaded) >= payload.total_bytes


async def test_a_complete_directory_is_done_at_once(payload, open_swarm, tmp_path) -> None:
    node = await open_swarm(web_seed_after_s=NEVER)
    payload.copy_to(tmp_path / "node")
    stats = await node.fetch(payload.torrent.torrent, tmp_path / "node")
    again = await node.fetch(payload.torrent.torrent, tmp_path / "node")
    assert (stats.swarm_bytes, stats.web_seed_bytes) == (again.swarm_bytes, again.web_seed_bytes) == (0, 0)
    assert (await node.stats())[payload.torrent.info_hash].complete


@pytest.mark.parametrize("web_seed_after_s", [0.0, 0.05])
async def test_the_web_seed_serves_where_no_peer_does(
    payload, open_swarm, web_server, tmp_path, web_seed_after_s
) -> None:
    node = await open_swarm(web_seed_after_s=web_seed_after_s)
    closed = _unused_port()
    stats = await node.fetch(
        payload.torrent.torrent,
        tmp_path / "node",
        peers=[("127.0.0.1", closed), ("no-such-host.invalid", 1)],
        web_seed_url=web_server.url.replace("127.0.0.1", "localhost"),
    )
    assert payload.matches(tmp_path / "node" / payload.directory.name)
    assert stats.web_seed_bytes >= payload.total_bytes
    assert stats.swarm_bytes == 0


async def test_without_peers_the_web_seed_is_used_at_once(payload, open_swarm, web_server, tmp_path) -> None:
    node = await open_swarm(web_seed_after_s=NEVER)
    stats = await node.fetch(payload.torrent.torrent, tmp_path / "node", web_seed_url=web_server.url)
    assert payload.matches(tmp_path / "node" / payload.directory.name)
    assert stats.web_seed_bytes >= payload.total_bytes


async def test_the_web_seed_over_tls(payload, open_swarm, tls_web_seed, tmp_path) -> None:
    node = await open_swarm(web_seed_after_s=0)
    stats = await node.fetch(payload.torrent.torrent, tmp_path / "node", web_seed_url=tls_web_seed)
    assert payload.matches(tmp_path / "node" / payload.directory.name)
    assert (stats.swarm_bytes, stats.web_seed_bytes) == (0, payload.total_bytes)


async def test_the_web_seed_is_left_alone_while_peers_deliver(payload, open_swarm, web_server, tmp_path) -> None:
    hub, node = await open_swarm(), await open_swarm(web_seed_after_s=NEVER)
    await hub.seed(payload.torrent.torrent, payload.directory)
    stats = await node.fetch(payload.torrent.torrent, tmp_path / "node", peers=here(hub), web_seed_url=web_server.url)
    assert web_server.requests == []
    assert stats.web_seed_bytes == 0


async def test_a_partial_download_is_resumed(payload, open_swarm, web_server, tmp_path) -> None:
    partial = payload.copy_to(tmp_path / "node") / "adapter_model.safetensors"
    whole = partial.read_bytes()
    # A partial file: it has a hole, and its end is missing.
    partial.write_bytes(whole[:600_000] + bytes(1_000) + whole[601_000:900_000])
    node = await open_swarm(web_seed_after_s=0)
    stats = await node.fetch(payload.torrent.torrent, tmp_path / "node", web_seed_url=web_server.url)
    assert payload.matches(partial.parent)
    assert 0 < stats.web_seed_bytes < payload.total_bytes / 2


async def test_a_corrupt_peer_cannot_poison(payload, open_swarm, heard, tmp_path) -> None:
    corrupt, witness, honest, victim = [await open_swarm(web_seed_after_s=NEVER) for _ in range(4)]
    directory = payload.copy_to(tmp_path / "corrupt")
    await corrupt.seed(payload.torrent.torrent, directory)
    # By now the seeder has checked its pieces. It trusts the check, so it would send whatever the file contains later.
    await witness.fetch(payload.torrent.torrent, tmp_path / "witness", peers=here(corrupt))
    await witness.close()
    with (directory / "adapter_model.safetensors").open("r+b") as file:
        file.write(bytes(500_000))

    fetch = asyncio.create_task(victim.fetch(payload.torrent.torrent, tmp_path / "victim", peers=here(corrupt)))
    await heard("hash for piece")
    await honest.seed(payload.torrent.torrent, payload.directory)
    await victim.add_peers(payload.torrent.info_hash, here(honest))
    stats = await fetch
    assert payload.matches(tmp_path / "victim" / payload.directory.name)
    assert stats.swarm_bytes > payload.total_bytes


async def test_a_fetch_survives_the_death_of_its_only_peer(payload, open_swarm, partial_peer, tmp_path) -> None:
    node = await open_swarm(web_seed_after_s=NEVER)
    fetch, got_some = start_fetch(node, payload, tmp_path / "node", partial_peer)
    await got_some.wait()
    await partial_peer.close()
    hub = await open_swarm()
    await hub.seed(payload.torrent.torrent, payload.directory)
    await node.add_peers(payload.torrent.info_hash, [("localhost", hub.port)])
    stats = await fetch
    assert payload.matches(tmp_path / "node" / payload.directory.name)
    assert payload.total_bytes <= stats.swarm_bytes < 1.5 * payload.total_bytes


async def test_a_peer_that_is_not_up_yet_is_tried_again(payload, open_swarm, tmp_path) -> None:
    node, port = await open_swarm(web_seed_after_s=NEVER), _unused_port()
    fetch = asyncio.create_task(node.fetch(payload.torrent.torrent, tmp_path / "node", peers=[("127.0.0.1", port)]))
    hub = await open_swarm(port=port)
    assert hub.port == port
    await hub.seed(payload.torrent.torrent, payload.directory)
    await fetch
    assert payload.matches(tmp_path / "node" / payload.directory.name)


async def test_utp_is_tried_for_a_while_after_tcp_failed(payload, open_swarm, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bittorrent, "_UTP_S", 0.3)
    hub, node = await open_swarm(), await open_swarm(web_seed_after_s=NEVER)

    def tries_utp(client: Swarm) -> bool:
        assert isinstance(client, BitTorrentSwarm) and client._session is not None
        return bool(client._session.get_settings()["enable_outgoing_utp"])

    await hub.seed(payload.torrent.torrent, payload.directory)
    await node.fetch(payload.torrent.torrent, tmp_path / "node", peers=here(hub))
    assert not tries_utp(node), "peers that accept connections are connected by TCP"
    await hub.add_peers(payload.torrent.info_hash, [("127.0.0.1", _unused_port())])
    while not tries_utp(hub):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    while tries_utp(hub):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_a_cancelled_fetch_leaves_nothing_running_and_can_be_resumed(
    payload, open_swarm, partial_peer, tmp_path
) -> None:
    node = await open_swarm(web_seed_after_s=NEVER)
    fetch, got_some = start_fetch(node, payload, tmp_path / "node", partial_peer)
    await got_some.wait()
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    assert await node.stats() == {}

    hub = await open_swarm()
    await hub.seed(payload.torrent.torrent, payload.directory)
    stats = await node.fetch(payload.torrent.torrent, tmp_path / "node", peers=here(hub))
    assert payload.matches(tmp_path / "node" / payload.directory.name)
    assert 0 < stats.swarm_bytes < payload.total_bytes


async def test_only_one_fetch_at_a_time(payload, open_swarm, partial_peer, tmp_path) -> None:
    node = await open_swarm(web_seed_after_s=NEVER)
    fetch, got_some = start_fetch(node, payload, tmp_path / "node", partial_peer)
    await got_some.wait()
    with pytest.raises(LocalProtocolError, match="already"):
        await node.fetch(payload.torrent.torrent, tmp_path / "node")
    await node.remove(payload.torrent.info_hash)
    with pytest.raises(SwarmError, match="removed"):
        await fetch


async def test_closing_ends_a_fetch(payload, open_swarm, partial_peer, tmp_path) -> None:
    node = await open_swarm(web_seed_after_s=NEVER)
    fetch, got_some = start_fetch(node, payload, tmp_path / "node", partial_peer)
    await got_some.wait()
    await node.close()
    with pytest.raises(SwarmError, match="closed"):
        await fetch
    with pytest.raises(LocalProtocolError):
        await node.fetch(payload.torrent.torrent, tmp_path / "node")


async def test_removed_torrents_keep_their_files_and_can_be_added_again(payload, open_swarm, tmp_path) -> None:
    node = await open_swarm()
    first, second = payload.copy_to(tmp_path / "first"), payload.copy_to(tmp_path / "second")
    await node.seed(payload.torrent.torrent, first)
    await node.remove(payload.torrent.info_hash)
    await node.fetch(payload.torrent.torrent, second.parent)
    await node.remove(payload.torrent.info_hash)
    await node.remove(payload.torrent.info_hash)
    assert await node.stats() == {}
    assert payload.matches(first) and payload.matches(second)


async def test_peers_for_a_torrent_that_is_being_removed_are_ignored(
    payload, open_swarm, tmp_path, monkeypatch
) -> None:
    async def at_once(peers: list[tuple[str, int]]) -> list[tuple[str, int]]:
        return peers

    monkeypatch.setattr(bittorrent, "resolve", at_once)
    node = await open_swarm()
    await node.seed(payload.torrent.torrent, payload.copy_to(tmp_path / "node"))
    handle = node._transfers[payload.torrent.info_hash].handle
    removal = asyncio.create_task(node.remove(payload.torrent.info_hash))
    await asyncio.sleep(0)
    # This loop blocks the event loop, so the swarm cannot process the alert about the removed torrent.
    while handle.is_valid():
        time.sleep(0.01)  # noqa: ASYNC251
    await node.add_peers(payload.torrent.info_hash, [("127.0.0.1", 1)])
    await removal


async def test_a_torrent_removed_while_its_last_blocks_are_written_ends_the_fetch(
    payload, open_swarm, tmp_path, monkeypatch
) -> None:
    node = await open_swarm()
    flushing = asyncio.Event()
    monkeypatch.setattr(lt.torrent_handle, "flush_cache", lambda _: flushing.set())
    fetch = asyncio.create_task(node.fetch(payload.torrent.torrent, payload.copy_to(tmp_path / "node").parent))
    await flushing.wait()
    await node.remove(payload.torrent.info_hash)
    with pytest.raises(SwarmError, match="removed"):
        async with asyncio.timeout(10):
            await fetch


async def test_a_torrent_removed_while_its_bytes_are_counted_ends_the_fetch(
    payload, open_swarm, tmp_path, monkeypatch
) -> None:
    node = await open_swarm()
    loop, counted = asyncio.get_running_loop(), bittorrent._received

    def removed_first(transfer: bittorrent.Transfer) -> tuple[int, int]:
        asyncio.run_coroutine_threadsafe(node.remove(payload.torrent.info_hash), loop).result()
        return counted(transfer)

    monkeypatch.setattr(bittorrent, "_received", removed_first)
    with pytest.raises(SwarmError, match="removed"):
        await node.fetch(payload.torrent.torrent, payload.copy_to(tmp_path / "node").parent)


async def test_a_fetch_without_any_source_reports_it(payload, open_swarm, web_server, tmp_path) -> None:
    web_server.root = tmp_path / "nowhere"
    node = await open_swarm(web_seed_after_s=0, stall_timeout_s=1.5)
    with pytest.raises(SwarmError, match="No peer and no web seed") as caught:
        await node.fetch(payload.torrent.torrent, tmp_path / "node", web_seed_url=web_server.url)
    assert "404" in str(caught.value)
    assert await node.stats() == {}


async def test_a_directory_that_cannot_be_written_is_a_storage_error(payload, open_swarm, tmp_path) -> None:
    hub, node = await open_swarm(), await open_swarm(web_seed_after_s=NEVER)
    await hub.seed(payload.torrent.torrent, payload.directory)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as caught:
        await node.fetch(payload.torrent.torrent, tmp_path / "file", peers=here(hub))
    assert str(tmp_path / "file") in str(caught.value)


@pytest.mark.parametrize("damage", ["vanished", "changed"])
async def test_a_seed_whose_files_are_damaged_can_be_fetched_again(
    payload, open_swarm, heard, tmp_path, damage
) -> None:
    hub, node, other = [await open_swarm(web_seed_after_s=NEVER) for _ in range(3)]
    await hub.seed(payload.torrent.torrent, payload.directory)
    directory = payload.copy_to(tmp_path / "node")
    await node.seed(payload.torrent.torrent, directory)
    for path in directory.iterdir():
        if damage == "vanished":
            path.unlink()
        else:
            path.write_bytes(bytes(path.stat().st_size))
    fetch = asyncio.create_task(other.fetch(payload.torrent.torrent, tmp_path / "other", peers=here(node)))
    await heard("changed or removed", "cannot be written or read")
    await node.fetch(payload.torrent.torrent, tmp_path / "node", peers=here(hub))
    assert payload.matches(directory)
    await other.add_peers(payload.torrent.info_hash, here(hub))
    await fetch


async def test_an_incomplete_directory_is_not_seeded(payload, open_swarm, tmp_path) -> None:
    node = await open_swarm()
    directory = payload.copy_to(tmp_path / "node")
    (directory / "adapter_config.json").unlink()
    with pytest.raises(SwarmError, match="does not match its torrent"):
        await node.seed(payload.torrent.torrent, directory)
    with pytest.raises(CodecError):
        await node.seed(b"no torrent", directory)


async def test_a_taken_port_is_reported(open_swarm) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(SwarmError, match="cannot listen") as caught,
    ):
        await open_swarm(port=taken.getsockname()[1])
    assert "swarm port" in str(caught.value)


async def test_an_address_of_another_machine_is_reported(open_swarm) -> None:
    with pytest.raises(SwarmError, match="cannot listen"):
        await open_swarm(listen_host="192.0.2.200")


async def test_one_port_on_all_interfaces(payload, open_swarm, tmp_path) -> None:
    hub, node = await open_swarm(listen_host="0.0.0.0"), await open_swarm(listen_host="::1", web_seed_after_s=NEVER)
    await hub.seed(payload.torrent.torrent, payload.directory)
    assert hub.port
    with socket.create_connection(("127.0.0.1", hub.port)):
        pass
    assert node.port


def start_fetch(node: Swarm, payload: Any, parent: Path, peer: Swarm) -> tuple[asyncio.Task[FetchStats], asyncio.Event]:
    """Start a fetch that `peer` can serve only in part. Return the fetch, and an event for the arrival of this part."""
    got_some = asyncio.Event()

    def on_progress(done: int, total: int) -> None:
        if done > 0.4 * total:
            got_some.set()

    fetch = asyncio.create_task(node.fetch(payload.torrent.torrent, parent, peers=here(peer), on_progress=on_progress))
    return fetch, got_some


@pytest.fixture
async def tls_web_seed(payload: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Yield the URL of a web seed whose certificate is trusted only by Python's certificate file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2020, 1, 1))
        .not_valid_after(datetime(2120, 1, 1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = tmp_path / "server.pem"
    authority = certificate.public_bytes(Encoding.PEM)
    pem.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + authority)
    (tmp_path / "authorities.pem").write_bytes(authority)
    paths = ssl.get_default_verify_paths()._replace(cafile=str(tmp_path / "authorities.pem"))
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    app = web.Application()
    app.router.add_static("/artefacts", payload.directory.parent)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    yield f"https://localhost:{runner.addresses[0][1]}/artefacts/"
    await runner.cleanup()
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)


@pytest.fixture
async def partial_peer(payload: Any, open_swarm: Opener, tmp_path: Path) -> AsyncIterator[Swarm]:
    """Yield a peer that has half of the payload and cannot get the rest."""
    swarm = await open_swarm(web_seed_after_s=NEVER)
    weights = payload.copy_to(tmp_path / "partial") / "adapter_model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(500_000)
    checked = asyncio.Event()
    fetch = asyncio.create_task(
        swarm.fetch(payload.torrent.torrent, tmp_path / "partial", on_progress=lambda *_: checked.set())
    )
    await checked.wait()
    yield swarm
    fetch.cancel()
    await asyncio.wait({fetch})


async def test_only_our_own_web_seed_and_trackers_are_asked(payload, open_swarm, web_server, tmp_path) -> None:
    node = await open_swarm(web_seed_after_s=0, stall_timeout_s=1.0)
    decoded = bencode.decode(payload.torrent.torrent)
    assert isinstance(decoded, dict)
    more = {"announce": web_server.url, "httpseeds": [web_server.url], "url-list": web_server.url}
    with pytest.raises(SwarmError, match="has sent anything"):
        await node.fetch(bencode.encode({**decoded, **more}), tmp_path / "node")
    assert web_server.requests == []


@pytest.mark.parametrize(
    "changes",
    [
        {"files": [{"length": 5, "path": ["b"]}, {"length": 5, "path": ["B"]}]},
        {"files": [{"length": 10, "path": ["b\n"]}]},
        {"name": "a\x1b[2J"},
        {"name.utf-8": "other-base"},
    ],
)
async def test_torrents_that_libtorrent_reads_differently_are_refused(open_swarm, tmp_path, changes) -> None:
    node = await open_swarm(stall_timeout_s=1.0)
    files = [{"length": 10, "path": ["b"]}]
    info = {"files": files, "name": "a", "piece length": 16_384, "pieces": b"0" * 20, "private": 1, **changes}
    with pytest.raises(CodecError):
        await node.fetch(bencode.encode({"info": info}), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("call", "error"), [("load_torrent_buffer", CodecError), ("add", SwarmError)])
async def test_a_libtorrent_refusal_is_a_typed_error(payload, open_swarm, tmp_path, monkeypatch, call, error) -> None:
    node = await open_swarm()

    def refuse(*args: object) -> None:
        raise RuntimeError("not this one")

    if call == "add":
        monkeypatch.setattr(node, "_session", SimpleNamespace(add_torrent=refuse, session=node._session))
    else:
        monkeypatch.setattr(lt, call, refuse)
    with pytest.raises(error, match="not this one"):
        await node.fetch(payload.torrent.torrent, tmp_path)
    monkeypatch.undo()


async def test_control_characters_in_a_trackers_answer_are_not_logged(payload, open_swarm, tmp_path, heard) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(body=bencode.encode({"failure reason": "\x1b[2Jno\u202e"}))

    app = web.Application()
    app.add_routes([web.get("/announce", refuse)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    node = await open_swarm()
    await node.seed(payload.torrent.torrent, payload.directory, [f"http://127.0.0.1:{runner.addresses[0][1]}/announce"])
    async with asyncio.timeout(60):
        await heard("tracker error: ?[2Jno?")
    await runner.cleanup()


def has_other_devices() -> bool:
    """Return True if this machine can route from an IPv4 address other than 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # UDP's connect sends nothing: it only looks up a route.
        except OSError:
            return False
        return not probe.getsockname()[0].startswith("127.")


async def test_an_announce_from_an_address_without_a_route_is_not_a_warning(
    payload, open_swarm, caplog, monkeypatch
) -> None:
    """A machine with hub and node announces from every network device, but only one address reaches the tracker."""
    monkeypatch.setitem(bittorrent._TUNED, "tracker_completion_timeout", 1)
    caplog.set_level(logging.DEBUG, "echo_shared.swarm")
    asked = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        asked.set()
        return web.Response(body=bencode.encode({"interval": 120, "peers": b""}))

    app = web.Application()
    app.add_routes([web.get("/announce", answer)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    node = await open_swarm(listen_host="0.0.0.0")
    await node.seed(payload.torrent.torrent, payload.directory, [f"http://127.0.0.1:{runner.addresses[0][1]}/announce"])
    async with asyncio.timeout(60):
        await asked.wait()
        if has_other_devices():
            while "cannot be reached from" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG] == []
    await runner.cleanup()


async def test_a_tracker_that_cannot_be_reached_is_a_problem(payload, open_swarm, heard, monkeypatch) -> None:
    monkeypatch.setitem(bittorrent._TUNED, "tracker_backoff", 0)
    node = await open_swarm()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    await node.seed(payload.torrent.torrent, payload.directory, [f"http://127.0.0.1:{port}/announce"])
    async with asyncio.timeout(60):
        await heard("the tracker cannot be reached from 127.0.0.1: Connection refused")


@pytest.fixture
async def heard() -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """Yield a function that waits until the log has a record with one of the given texts."""
    loop, logger = asyncio.get_running_loop(), logging.getLogger("echo_shared.swarm")
    records: list[str] = []
    news = asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())
            loop.call_soon_threadsafe(news.set)

    async def wait_for(*texts: str) -> None:
        while not any(text in record for record in records for text in texts):
            news.clear()
            await news.wait()

    listener, level = Listener(), logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    yield wait_for
    logger.removeHandler(listener)
    logger.setLevel(level)


def _unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("host", ["a..b", "a\0b", "\u00e9" * 64, "nowhere.invalid\n\x1b[2J"])
async def test_peers_that_are_no_host_are_skipped(host: str, payload, open_swarm, tmp_path, caplog) -> None:
    hub, node = await open_swarm(), await open_swarm(web_seed_after_s=NEVER)
    await hub.seed(payload.torrent.torrent, payload.directory)
    with caplog.at_level(logging.INFO):
        await node.fetch(payload.torrent.torrent, tmp_path / "node", peers=[(host, 6881), *here(hub)])
        await node.add_peers(payload.torrent.info_hash, [(host, 6881)])
    assert payload.matches(tmp_path / "node" / payload.directory.name)
    skipped = [record.getMessage() for record in caplog.records if "does not resolve" in record.getMessage()]
    assert len(skipped) == 2 and all(text.isprintable() for text in skipped)
