"""The BitTorrent tracker: its state alone, and with real clients (libtorrent, aiohttp, and aria2 as an independent
one).
"""

import asyncio
import ipaddress
import shutil
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from echo_hub.net.passkey_use import MOST_PLACES
from echo_hub.net.tracker import (
    EXPIRES_AFTER_S,
    INTRODUCED_EVERY_S,
    MOST_PEERS,
    Announce,
    Tracker,
    reaches,
    read_query,
    routes,
)
from echo_shared.errors import RefusedError, SwarmError
from echo_shared.signing.identity import Identity
from echo_shared.swarm import PeerAddress, bencode

TORRENT = bytes(range(236, 256))
NODES = [f"{number:020x}" for number in range(200)]


@pytest.fixture(scope="module")
def identity() -> Identity:
    return Identity.generate()


@pytest.fixture
def tracker(identity: Identity) -> Tracker:
    tracker = Tracker(identity)
    tracker.register_self(TORRENT, 6881)
    return tracker


def announce(tracker: Tracker, node: int, *, now: float = 0.0, hub_host: str = "", **changes: object):
    values = {"info_hash": TORRENT, "ip": f"203.0.113.{node}", "port": 7000 + node, "left": 100, **changes}
    return tracker.announce(tracker.passkey(NODES[node]), Announce(**values), hub_host=hub_host, now=now)


def test_nodes_learn_of_each_other_and_of_the_hub_where_they_reach_it(tracker: Tracker) -> None:
    first = announce(tracker, 1, hub_host="hub.example.org")
    second = announce(tracker, 2, hub_host="198.51.100.7")
    assert first.peers == (("hub.example.org", 6881),)
    assert second.peers == (("198.51.100.7", 6881), ("203.0.113.1", 7001))
    assert (second.num_seeds, second.num_fetching) == (1, 1)
    assert tracker.peers(TORRENT, node_ip="203.0.113.9", hub_host="hub", now=0) == (
        ("hub", 6881),
        ("203.0.113.1", 7001),
        ("203.0.113.2", 7002),
    )


def test_a_seed_is_told_only_of_nodes_that_still_fetch(tracker: Tracker) -> None:
    announce(tracker, 1, left=0)
    announce(tracker, 2)
    answer = announce(tracker, 3, left=0, event="completed", hub_host="hub")
    assert answer.peers == (("203.0.113.2", 7002),)
    assert (answer.num_seeds, answer.num_fetching) == (2, 1)


def test_a_passkey_names_its_node(tracker: Tracker) -> None:
    assert tracker.node_of(tracker.passkey(NODES[1])) == NODES[1]
    for wrong in ("", "x", NODES[1], tracker.passkey(NODES[1])[:-1] + "x", "é" * 52):
        with pytest.raises(RefusedError) as refusal:
            tracker.node_of(wrong)
        assert refusal.value.code == "bad_token"


def test_a_passkey_that_was_given_away_is_of_no_use_to_many(tracker: Tracker) -> None:
    announce(tracker, 1)
    answered = 0
    for number in range(2, 200):
        try:
            answered += bool(announce(tracker, 1, ip=f"198.51.100.{number}"))
        except RefusedError as error:
            assert error.code == "bad_token"
    assert (answered, tracker.refused) == (MOST_PLACES - 1, {"shared_passkey": 198 - answered})
    assert announce(tracker, 1), "its own node continues"
    assert announce(tracker, 2, ip="198.51.100.199"), "other nodes continue too"


def test_a_node_that_restarts_constantly_is_introduced_rarely(tracker: Tracker) -> None:
    announce(tracker, 1)
    told = 0
    for step in range(1_000):
        now = step * INTRODUCED_EVERY_S / 500
        told += bool(announce(tracker, 2, now=now).introduce_to)
        announce(tracker, 2, event="stopped", now=now)
    assert told == 2


def test_a_barred_node_is_refused_and_not_told_to_others(tracker: Tracker) -> None:
    announce(tracker, 1)
    announce(tracker, 2)
    tracker.bar([NODES[1]])
    with pytest.raises(RefusedError, match="banned") as refusal:
        announce(tracker, 1)
    assert refusal.value.code == "banned"
    assert announce(tracker, 3).peers == (("203.0.113.2", 7002),)
    assert tracker.peers(TORRENT, node_ip="203.0.113.9", hub_host="", now=0) == (
        ("203.0.113.2", 7002),
        ("203.0.113.3", 7003),
    )
    tracker.bar([NODES[2]])
    assert announce(tracker, 1).peers == (("203.0.113.3", 7003),), "the node may take part again"


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("203.0.113.1", "8.8.8.8", True),
        ("8.8.8.8", "192.168.1.2", False),
        ("192.168.1.1", "192.168.1.2", True),
        ("192.168.1.1", "8.8.8.8", True),
        ("127.0.0.1", "127.0.0.2", True),
        ("192.168.1.1", "127.0.0.1", False),
        ("::ffff:8.8.8.8", "::ffff:10.0.0.1", False),
        ("a name", "8.8.8.8", False),
    ],
)
def test_an_address_reaches_another(source: str, target: str, expected: bool) -> None:
    assert reaches(source, target) is expected


def test_a_new_peer_is_introduced_once_to_the_peers_that_it_is_told_of(tracker: Tracker) -> None:
    announce(tracker, 1, left=0)
    announce(tracker, 2)
    announce(tracker, 3, port=0)
    assert announce(tracker, 4).introduce_to == (NODES[1], NODES[2])
    assert announce(tracker, 4).introduce_to == ()
    assert announce(tracker, 5, ip="127.0.0.1").introduce_to == (), "its own loopback address is useless to others"


def test_in_a_large_swarm_both_ends_of_a_pair_hear_of_each_other(tracker: Tracker) -> None:
    for node in range(1, 2 * MOST_PEERS):
        announce(tracker, node)
    answer = announce(tracker, 150)
    assert len(answer.peers) == MOST_PEERS
    assert sorted(answer.introduce_to) == sorted(NODES[port - 7000] for _, port in answer.peers)


async def test_over_http_a_new_peer_is_introduced(tracker: Tracker) -> None:
    introduced: list[tuple[bytes, PeerAddress, tuple[str, ...]]] = []

    class Recorded:
        def introduce(self, info_hash: bytes, peer: PeerAddress, node_ids: tuple[str, ...]) -> None:
            introduced.append((info_hash, peer, node_ids))

    application = web.Application()
    application.add_routes(routes(tracker, introductions=Recorded()))
    query = f"info_hash={quote(TORRENT)}&left=1&port="
    async with TestClient(TestServer(application)) as client:
        for number, port in ((1, 7001), (2, 7002)):
            url = f"/announce/{tracker.passkey(NODES[number])}?{query}{port}"
            async with client.get(URL(url, encoded=True)) as answer:
                assert answer.status == 200
    assert introduced == [(TORRENT, ("127.0.0.1", 7002), (NODES[1],))]


def test_nodes_that_stop_or_are_silent_are_forgotten(tracker: Tracker) -> None:
    announce(tracker, 1)
    announce(tracker, 2, now=10.0)
    announce(tracker, 1, now=20.0, event="stopped")
    assert tracker.peers(TORRENT, node_ip="203.0.113.9", hub_host="", now=20.0) == (("203.0.113.2", 7002),)
    assert tracker.peers(TORRENT, node_ip="203.0.113.9", hub_host="", now=10.0 + EXPIRES_AFTER_S) == ()


def test_a_moved_node_is_known_only_at_its_new_address(tracker: Tracker) -> None:
    announce(tracker, 1)
    announce(tracker, 1, ip="203.0.113.200", port=9)
    announce(tracker, 2, port=0)  # Port 0: peers cannot connect to this node, but it may ask for peers.
    assert tracker.peers(TORRENT, node_ip="203.0.113.9", hub_host="", now=0) == (("203.0.113.200", 9),)


@pytest.mark.parametrize(
    ("asking", "told"),
    [
        ("127.0.0.1", {"127.0.0.5", "192.168.1.5", "100.64.0.5", "8.8.8.8", "2001:4860::1"}),
        ("::ffff:127.0.0.1", {"127.0.0.5", "192.168.1.5", "100.64.0.5", "8.8.8.8", "2001:4860::1"}),
        ("100.64.0.9", {"192.168.1.5", "100.64.0.5", "8.8.8.8", "2001:4860::1"}),
        ("9.9.9.9", {"8.8.8.8", "2001:4860::1"}),
        ("", set()),
    ],
)
def test_local_addresses_stay_among_their_own(tracker: Tracker, asking: str, told: set[str]) -> None:
    for node, ip in enumerate(("127.0.0.5", "192.168.1.5", "100.64.0.5", "8.8.8.8", "2001:4860::1")):
        announce(tracker, node, ip=ip)
    peers = tracker.peers(TORRENT, node_ip=asking, hub_host="", now=0)
    assert {host for host, _ in peers} == told


def test_a_public_hub_does_not_tell_a_proxys_address(identity: Identity) -> None:
    tracker = Tracker(identity, public=True)
    tracker.register_self(TORRENT, 6881)
    announce(tracker, 1)
    for ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        answer = announce(tracker, 2, ip=ip, hub_host="hub")
        assert answer.peers == (("hub", 6881), ("203.0.113.1", 7001))
        assert (answer.introduce_to, answer.num_fetching) == ((), 1)
    assert tracker.peers(TORRENT, node_ip="127.0.0.1", hub_host="", now=0) == (("203.0.113.1", 7001),)
    announce(tracker, 1, ip="127.0.0.1")
    assert tracker.peers(TORRENT, node_ip="127.0.0.1", hub_host="", now=0) == (), "its old address no longer holds"


def test_an_answer_is_bounded(tracker: Tracker) -> None:
    for node in range(len(NODES)):
        announce(tracker, node, ip="8.8.8.8")
    assert len(announce(tracker, 0, hub_host="hub").peers) == MOST_PEERS + 1


def test_unknown_passkeys_and_torrents_are_refused(tracker: Tracker) -> None:
    wanted = Announce(info_hash=TORRENT, ip="8.8.8.8", port=1, left=0)
    for passkey in ("", NODES[1], NODES[1] + "0" * 32, tracker.passkey(NODES[1])[:-1], "\udcff" * 52, "ü" * 52):
        with pytest.raises(RefusedError, match="passkey"):
            tracker.announce(passkey, wanted, hub_host="", now=0)
    with pytest.raises(RefusedError, match="not published"):
        announce(tracker, 1, info_hash=bytes(20))
    tracker.forget(TORRENT)
    with pytest.raises(RefusedError, match="not published"):
        announce(tracker, 1)
    assert tracker.peers(TORRENT, node_ip="8.8.8.8", hub_host="hub", now=0) == ()


def test_passkeys_survive_a_restart_and_belong_to_one_hub(identity: Identity, tracker: Tracker) -> None:
    assert Tracker(identity).passkey(NODES[1]) == tracker.passkey(NODES[1])
    assert tracker.passkey(NODES[1]) != tracker.passkey(NODES[2])
    assert Tracker(Identity.generate()).passkey(NODES[1]) != tracker.passkey(NODES[1])


def test_a_hub_without_a_peer_is_not_handed_out(tracker: Tracker) -> None:
    tracker.register_self(TORRENT, 0)
    answer = announce(tracker, 1, hub_host="hub")
    assert (answer.peers, answer.num_seeds) == ((), 0)


async def ask(url: str, **query: str) -> bencode.Value:
    text = "&".join(f"{key}={value}" for key, value in query.items())
    async with aiohttp.ClientSession() as session, session.get(f"{url}?{text}", allow_redirects=False) as answer:
        assert answer.status == 200
        return bencode.decode(await answer.read())


async def test_over_http_hashes_are_raw_bytes_and_peers_are_packed(hub) -> None:
    hub.tracker.register_self(TORRENT, hub.swarm.port)
    wanted = {"info_hash": quote(TORRENT, safe=""), "left": "5", "compact": "1"}
    first = await ask(hub.announce_url(1), **wanted, port="7001")
    second = await ask(hub.announce_url(2), **wanted, port="7002", ip="8.8.8.8")
    here = ipaddress.ip_address("127.0.0.1").packed
    assert first["peers"] == here + hub.swarm.port.to_bytes(2)
    assert second["peers"] == here + hub.swarm.port.to_bytes(2) + here + (7001).to_bytes(2)
    assert second["peers6"] == b""
    assert second["interval"] > 0
    third = await ask(hub.announce_url(3), **{**wanted, "compact": "0"}, port="7003")
    assert {"ip": b"127.0.0.1", "port": 7002} in third["peers"]
    by_name = await ask(hub.announce_url(3).replace("127.0.0.1", "localhost"), **wanted, port="7003")
    assert {"ip": b"localhost", "port": hub.swarm.port} in by_name["peers"]


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"info_hash": "abc", "port": "1", "left": "0"},
        {"info_hash": quote(TORRENT), "port": "65536", "left": "0"},
        {"info_hash": quote(TORRENT), "port": "x", "left": "0"},
        {"info_hash": quote(TORRENT), "port": "1", "left": "-1"},
        {"info_hash": quote(TORRENT), "port": "1", "left": "0", "event": "%ff"},
        {"info_hash": quote(bytes(20)), "port": "1", "left": "0"},
    ],
)
async def test_over_http_a_bad_announce_gets_a_reason(hub, query: dict[str, str]) -> None:
    hub.tracker.register_self(TORRENT, 1)
    assert set(await ask(hub.announce_url(1), **query)) == {"failure reason"}


async def ask_raw(hub, host: bytes, more_query: bytes = b"") -> bytes:
    """Send an announce byte for byte, and return the complete answer."""
    address = URL(hub.announce_url(1))
    query = b"info_hash=" + quote(TORRENT, safe="").encode() + b"&port=7001&left=5" + more_query
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"GET " + address.path.encode() + b"?" + query + b" HTTP/1.1\r\n")
    writer.write(b"Host: " + host + b"\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("host", [b"x:99999999", b"x:y", b"a b", b"\xff\xfe", b"x/y?z#w", b"%00", b"x\t:1", b"a" * 300])
async def test_over_http_an_invalid_host_gets_a_reason(hub, host: bytes) -> None:
    hub.tracker.register_self(TORRENT, 1)
    status, _, body = (await ask_raw(hub, host)).partition(b"\r\n")
    assert b" 400 " in status or b"14:failure reason" in body, status


@pytest.mark.parametrize(
    ("host", "told"),
    [
        (b"hub:80", b"hub"),
        (b"xn--mnchen-3ya.de", b"xn--mnchen-3ya.de"),
        (b"a_b.c-d:1", b"a_b.c-d"),
        (b"[2001:db8::1]:8710", b"2001:db8::1"),
        (b"[fe80::1%eth0]:8710", b"fe80::1%eth0"),
    ],
)
async def test_over_http_nodes_are_told_of_the_hub_as_they_reach_it(hub, host: bytes, told: bytes) -> None:
    hub.tracker.register_self(TORRENT, 6881)
    body = (await ask_raw(hub, host, b"&compact=0")).partition(b"\r\n\r\n")[2]
    assert bencode.decode(body)["peers"] == [{"ip": told, "port": 6881}]


@pytest.mark.parametrize("value", ["\udcff", "\udced\udca0\udc80", "%ff\udcff+"])
def test_a_query_is_read_byte_for_byte(value: str) -> None:
    expected = {"\udcff": b"\xff", "\udced\udca0\udc80": b"\xed\xa0\x80", "%ff\udcff+": b"\xff\xff "}
    assert read_query(f"/announce/x?key={value}&empty") == {"key": expected[value], "empty": b""}


async def test_over_http_an_unknown_passkey_gets_a_reason(hub) -> None:
    hub.tracker.register_self(TORRENT, 1)
    for passkey in ("wrong", "%ff%fe", quote("ü" * 52)):
        answer = await ask(f"{hub.url}/announce/{passkey}", info_hash=quote(TORRENT), port="1", left="0")
        assert answer == {"failure reason": b"This passkey is unknown."}


@pytest.mark.parametrize(
    ("trusted", "forwarded", "noted"),
    [
        (frozenset(), "8.8.8.8", "127.0.0.1"),
        (frozenset({"127.0.0.1"}), "1.1.1.1, 8.8.8.8", "8.8.8.8"),
        (frozenset({"127.0.0.1"}), "nonsense", None),
    ],
)
async def test_a_forwarded_address_counts_only_behind_a_trusted_proxy(tracker, trusted, forwarded, noted) -> None:
    app = web.Application()
    app.router.add_routes(routes(tracker, trusted_proxies=trusted))
    async with TestClient(TestServer(app)) as client:
        path = f"/announce/{tracker.passkey(NODES[1])}?info_hash={quote(TORRENT)}&port=7&left=1"
        await client.get(URL(path, encoded=True), headers={"X-Forwarded-For": forwarded})
    peers = tracker.peers(TORRENT, node_ip="127.0.0.1", hub_host="", now=0)
    assert peers == (((noted, 7),) if noted else ())


async def test_a_fetch_with_a_wrong_passkey_learns_of_no_peer(hub, make_adapter, open_swarm, tmp_path) -> None:
    await hub.publisher.publish_policy(1, make_adapter(1))
    torrent, node = hub.publisher.carrier(1).torrent, await open_swarm(stall_timeout_s=1.0)
    with pytest.raises(SwarmError) as caught:
        await node.fetch(torrent, tmp_path / "node", tracker_urls=[f"{hub.url}/announce/wrong"])
    assert "This passkey is unknown" in str(caught.value)
    assert "wrong" not in str(caught.value)


async def test_the_tracker_alone_brings_two_nodes_together(hub, make_adapter, open_swarm, tmp_path) -> None:
    await hub.publisher.publish_policy(1, make_adapter(1))
    carrier = hub.publisher.carrier(1)
    first, second = await open_swarm(), await open_swarm()
    await first.fetch(carrier.torrent, tmp_path / "first", tracker_urls=[hub.announce_url(1)])
    await hub.swarm.close()
    stats = await second.fetch(carrier.torrent, tmp_path / "second", tracker_urls=[hub.announce_url(2)])
    assert stats.swarm_bytes >= carrier.total_bytes
    assert stats.web_seed_bytes == 0


async def aria2(torrent: bytes, announce_url: str, directory: Path, *, patience_s: int) -> int:
    """Run aria2, which knows only this tracker's peers, and return its exit status. It gives up after `patience_s`
    seconds without data.
    """
    file = directory.with_suffix(".torrent")
    file.write_bytes(bencode.encode({**bencode.decode(torrent), "announce": announce_url}))
    options = ("--seed-time=0", "--enable-dht=false", "--bt-enable-lpd=false", "--quiet", "--no-conf")
    process = await asyncio.create_subprocess_exec(
        "aria2c", *options, "--summary-interval=0", f"--bt-stop-timeout={patience_s}", f"--dir={directory}", str(file)
    )
    return await process.wait()


@pytest.mark.skipif(shutil.which("aria2c") is None, reason="aria2c, an independent client, is not installed")
async def test_an_independent_client_fetches_through_the_tracker_as_a_member_alone(hub, make_adapter, tmp_path) -> None:
    await hub.publisher.publish_policy(1, make_adapter(1))
    carrier = hub.publisher.carrier(1)
    hub.publisher.bar({f"{2:020x}"})
    bad = (f"{hub.url}/announce/wrong", hub.announce_url(2))
    member, *refused = await asyncio.gather(
        aria2(carrier.torrent, hub.announce_url(1), tmp_path / "member", patience_s=30),
        *(aria2(carrier.torrent, url, tmp_path / f"refused{n}", patience_s=2) for n, url in enumerate(bad)),
    )
    assert member == 0
    hub.read(carrier.manifest, tmp_path / "member" / carrier.directory.name, tmp_path / "read")
    assert 0 not in refused
    for number in range(len(bad)):
        sealed = tmp_path / f"refused{number}" / carrier.directory.name / "payload.sealed"
        assert not sealed.exists() or not sealed.read_bytes().strip(b"\0")
