"""The run's private BitTorrent tracker: tells nodes the addresses of other nodes that fetch or seed the same torrent.

A node announces itself with its own passkey, which the hub issues when the node joins and which also opens the web seed
(`echo_hub.net.artefact_routes`). Unknown and barred passkeys are refused, and so is a passkey used from too many
addresses (`echo_hub.net.passkey_use`). The tracker uses the source address of a request and ignores claimed addresses.
The state is in memory: after a restart passkeys stay valid, and the next announces of the nodes fill the list again.

Protocol: https://www.bittorrent.org/beps/bep_0003.html, compact answers bep_0023, IPv6 bep_0007.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import random
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol
from urllib.parse import unquote_to_bytes

from aiohttp import web

from echo_hub.net.client_address import client_ip, hub_host
from echo_hub.net.passkey_use import PasskeyUse
from echo_shared.errors import RefusedError, RemoteProtocolError
from echo_shared.signing.identity import Identity
from echo_shared.swarm import PeerAddress, bencode
from echo_shared.wire.messages import RefusalCode

INTERVAL_S: Final = 120
"""Announce interval of nodes, in seconds. The hub itself tells nodes of new peers, so announces only show which peers
are still there."""
EXPIRES_AFTER_S: Final = 2.5 * INTERVAL_S
MOST_PEERS: Final = 50
"""Maximum number of peers in one answer; chosen at random if there are more."""
INTRODUCED_EVERY_S: Final = INTERVAL_S
"""Shortest interval between two messages about the same new peer, in seconds, however often the peer restarts."""
_NODE_ID_DIGITS: Final = 20
_MAC_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """A node's announcement for one torrent. `ip`: address that the request came from. `port`: 0 if the node cannot be
    reached."""

    info_hash: bytes
    ip: str
    port: int
    left: int
    """Bytes still missing; 0 means that the node has everything."""
    event: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerAnswer:
    peers: tuple[PeerAddress, ...]
    num_seeds: int
    """Seeds other than the asking node, the hub included."""
    num_fetching: int
    """Other nodes that still fetch. If there are none, Transmission takes all peers for seeds and asks them at once. It
    asks other peers only after their list of pieces, which with uTP it can overlook until they send something else."""
    introduce_to: tuple[str, ...] = ()
    """Node ids of those `peers` that do not know this new peer yet. The hub announces the new peer to them at once,
    because behind routers both peers must try to connect.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    address: PeerAddress
    is_seed: bool
    expires_at: float


class Tracker:
    """The members of each torrent's swarm. `now` is a monotonic clock in seconds; all calls must use the same clock.

    `public`: nodes reach the hub from other machines. A loopback address then belongs to an untrusted proxy: its
    announces get answers, but other nodes never learn its address.
    """

    def __init__(self, hub: Identity, *, public: bool = False) -> None:
        # Ed25519 signatures are deterministic, so this secret survives a restart without being stored.
        self._secret = hashlib.blake2b(hub.sign(b"echo tracker passkeys"), digest_size=32).digest()
        self._public = public
        self._hub_ports: dict[bytes, int] = {}
        self._swarms: dict[bytes, dict[str, _Member]] = {}
        self._introduced: dict[bytes, dict[str, float]] = {}
        """Time of the last introduction (message about a new peer), by torrent and node."""
        self._barred: frozenset[str] = frozenset()
        self._use = PasskeyUse()
        self.refused: Counter[str] = Counter()
        """Refused announces and fetches since the start, by reason."""

    def passkey(self, node_id: str) -> str:
        """Return the passkey that identifies the node in announces. Only this hub can compute it."""
        mac = hashlib.blake2b(node_id.encode(errors="replace"), key=self._secret, digest_size=_MAC_BYTES).hexdigest()
        return f"{node_id}{mac}"

    def node_of(self, passkey: str) -> str:
        """Return the owner of this passkey. Raises RefusedError if the passkey is invalid or its node is barred."""
        node_id = passkey[:_NODE_ID_DIGITS]
        if not hmac.compare_digest(passkey.encode(errors="replace"), self.passkey(node_id).encode(errors="replace")):
            self.refused["unknown_passkey"] += 1
            raise RefusedError("This passkey is unknown.", do="Join the hub again.", code=RefusalCode.BAD_TOKEN)
        if node_id in self._barred:
            self.refused["banned"] += 1
            raise RefusedError("This node is banned.", do="Ask the hub's operator.", code=RefusalCode.BANNED)
        return node_id

    def user_of(self, passkey: str, ip: str, *, now: float) -> str:
        """Return the owner of this passkey as `node_of` does, for a request from `ip`. Also raises RefusedError if too
        many addresses use the passkey."""
        node_id = self.node_of(passkey)
        if not self._use.may_use(node_id, ip, now=now):
            self.refused["shared_passkey"] += 1
            raise RefusedError(
                "This passkey is used from too many addresses.",
                do="Do not share a passkey: each node has its own.",
                code=RefusalCode.BAD_TOKEN,
            )
        return node_id

    def bar(self, node_ids: Collection[str]) -> None:
        """Refuse exactly these nodes from now on, and remove them from all swarms."""
        self._barred = frozenset(node_ids)
        for swarm in self._swarms.values():
            for node_id in self._barred & swarm.keys():
                del swarm[node_id]

    def register_self(self, info_hash: bytes, port: int) -> None:
        """Open the swarm of this torrent. `port`: port of the hub's own peer, which is always a member; 0 if the hub
        has none."""
        self._hub_ports[info_hash] = port
        self._swarms.setdefault(info_hash, {})

    def forget(self, info_hash: bytes) -> None:
        self._hub_ports.pop(info_hash, None)
        self._swarms.pop(info_hash, None)
        self._introduced.pop(info_hash, None)

    def announce(self, passkey: str, announce: Announce, *, hub_host: str, now: float) -> TrackerAnswer:
        """Record the announcement and return other peers. Raises RefusedError for a bad passkey or an unknown
        torrent."""
        node_id = self.user_of(passkey, announce.ip, now=now)
        swarm = self._swarms.get(announce.info_hash)
        if swarm is None:
            raise RefusedError("This torrent is not published here.", do="Fetch the newest version.")
        self._expire(swarm, now)
        is_new = False
        is_proxy = self._public and _parse_ip(announce.ip).is_loopback
        if announce.event == "stopped" or not announce.port or is_proxy:
            swarm.pop(node_id, None)
        else:
            told = self._introduced.setdefault(announce.info_hash, {})
            if node_id not in swarm and now - told.get(node_id, -INTRODUCED_EVERY_S) >= INTRODUCED_EVERY_S:
                is_new = True
                told[node_id] = now
            swarm[node_id] = _Member(
                address=(announce.ip, announce.port), is_seed=announce.left == 0, expires_at=now + EXPIRES_AFTER_S
            )
        others = {other: member for other, member in swarm.items() if other != node_id}
        # Two peers that have the whole torrent need no connection to each other.
        useful = {other: member for other, member in others.items() if announce.left or not member.is_seed}
        chosen = self._reachable(useful, node_ip=announce.ip)
        if not announce.left:
            hub_host = ""
        num_seeds = sum(member.is_seed for member in others.values()) + bool(self._hub_ports[announce.info_hash])
        return TrackerAnswer(
            peers=self._with_hub(announce.info_hash, chosen.values(), hub_host),
            num_seeds=num_seeds,
            num_fetching=sum(not member.is_seed for member in others.values()),
            introduce_to=tuple(other for other, (ip, _) in chosen.items() if is_new and reaches(ip, announce.ip)),
        )

    def peers(self, info_hash: bytes, *, node_ip: str, hub_host: str, now: float) -> tuple[PeerAddress, ...]:
        """Return the peers from which a node at `node_ip` can fetch this torrent. The hub's own peer, at `hub_host`, is
        first."""
        swarm = self._swarms.get(info_hash, {})
        self._expire(swarm, now)
        return self._with_hub(info_hash, self._reachable(swarm, node_ip=node_ip).values(), hub_host)

    @staticmethod
    def _reachable(members: Mapping[str, _Member], *, node_ip: str) -> dict[str, PeerAddress]:
        """Return the addresses of at most `MOST_PEERS` members that a node at `node_ip` may reach."""
        found = {node: member.address for node, member in members.items() if reaches(node_ip, member.address[0])}
        return found if len(found) <= MOST_PEERS else dict(random.sample(list(found.items()), MOST_PEERS))

    def _with_hub(self, info_hash: bytes, peers: Iterable[PeerAddress], hub_host: str) -> tuple[PeerAddress, ...]:
        hub_port = self._hub_ports.get(info_hash, 0)
        return ((hub_host, hub_port), *peers) if hub_host and hub_port else tuple(peers)

    @staticmethod
    def _expire(swarm: dict[str, _Member], now: float) -> None:
        for node_id in [node_id for node_id, member in swarm.items() if member.expires_at <= now]:
            del swarm[node_id]


def reaches(from_ip: str, to_ip: str) -> bool:
    """Return True if a machine at `from_ip` can use the address `to_ip`: loopback and private addresses are valid only
    on their own machine or network."""
    try:
        source, target = _parse_ip(from_ip), _parse_ip(to_ip)
    except ValueError:
        return False
    if target.is_loopback:
        return source.is_loopback
    return target.is_global or not source.is_global


@lru_cache(4_096)
def _parse_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


class Introductions(Protocol):
    """Tells nodes of new peers. Implemented by `echo_hub.net.distributor`."""

    def introduce(self, info_hash: bytes, peer: PeerAddress, node_ids: tuple[str, ...]) -> None: ...


def routes(
    tracker: Tracker, *, trusted_proxies: Collection[str] = (), introductions: Introductions | None = None
) -> list[web.RouteDef]:
    """Return the route `GET /announce/{passkey}`. `client_ip` explains `trusted_proxies`."""

    async def answer(request: web.Request) -> web.Response:
        try:
            query = read_query(request.raw_path)
            announce = read_announce(query, ip=client_ip(request, trusted_proxies))
            found = tracker.announce(
                request.match_info["passkey"], announce, hub_host=hub_host(request), now=time.monotonic()
            )
        except (RefusedError, RemoteProtocolError) as error:
            return _response({"failure reason": error.what})
        if found.introduce_to and introductions is not None:
            introductions.introduce(announce.info_hash, (announce.ip, announce.port), found.introduce_to)
        return _response(
            {
                "interval": INTERVAL_S,
                "complete": found.num_seeds,
                "incomplete": found.num_fetching,
                **_encode_peers(found.peers, compact=query.get("compact") != b"0"),
            }
        )

    return [web.get("/announce/{passkey}", answer, allow_head=False)]


def read_query(raw_path: str) -> dict[str, bytes]:
    """Decode the query to raw bytes. aiohttp would decode the bytes of a hash as text and so change them."""
    pairs = (part.partition("=") for part in raw_path.partition("?")[2].split("&"))
    return {key: unquote_to_bytes(value.replace("+", " ").encode(errors="surrogateescape")) for key, _, value in pairs}


def read_announce(query: Mapping[str, bytes], *, ip: str) -> Announce:
    """Parse the announcement of a peer at `ip`. Raises RemoteProtocolError."""
    try:
        announce = Announce(
            info_hash=query["info_hash"],
            ip=ip,
            port=int(query["port"]),
            left=int(query["left"]),
            event=query.get("event", b"").decode(),
        )
    except (KeyError, ValueError) as error:
        raise RemoteProtocolError("An announce must have info_hash, port and left.", got=repr(error)) from error
    if len(announce.info_hash) != 20 or not 0 <= announce.port <= 65535 or announce.left < 0:
        raise RemoteProtocolError("A value in an announce is out of bounds.", got=repr(announce))
    return announce


def _encode_peers(peers: Sequence[PeerAddress], *, compact: bool) -> dict[str, bencode.Encodable]:
    """Pack the addresses in compact form. If a host is a name, which cannot be packed, use the list form for all."""
    try:
        packed = [(ipaddress.ip_address(host).packed, port) for host, port in peers]
    except ValueError:
        compact = False
    if not compact:
        return {"peers": [{"ip": host, "port": port} for host, port in peers]}
    by_length = {
        length: b"".join(ip + port.to_bytes(2) for ip, port in packed if len(ip) == length) for length in (4, 16)
    }
    return {"peers": by_length[4], "peers6": by_length[16]}


def _response(value: Mapping[str, bencode.Encodable]) -> web.Response:
    return web.Response(body=bencode.encode(value), content_type="text/plain")
