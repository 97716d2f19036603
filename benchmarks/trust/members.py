"""Attacks by who has joined, on what members share: passkeys, the swarm, the links between nodes.

`ATTACKS` are on the hub that all attacks share, `OWN` on one of their own, `ON_NODE` on a node.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote_from_bytes

import aiohttp
from yarl import URL

from benchmarks.driven_hub import DrivenHub
from benchmarks.trust.protocol import Unnoticed, Victim
from benchmarks.trust.site import open_site
from benchmarks.trust.stranger import Stranger
from benchmarks.trust.towards_nodes import Join, ready
from echo_node.net.mesh import Mesh
from echo_shared.identity import Identity
from echo_shared.messages import Have, Links, MeshPeer, NodeStatus, Piece, PolicyPublished, Way
from echo_shared.messages import Mesh as MeshMessage
from echo_shared.swarm import read_torrent

OPTIONS: Final = ("--backend", "llama_cpp", "--precision", "f32")
STRANGERS: Final = 200
"""That one member gives its passkey to."""
VERSIONS: Final = 6
"""That the liar has a chance to keep from others."""
WITHIN_S: Final = 90.0


async def shared_passkey(victim: Victim) -> str:
    """A member gives its passkey to strangers: they ask the tracker for its peers, make it tell others of them, and
    fetch."""
    member, other = await victim.stranger(), await victim.stranger()
    assert member.welcome is not None and other.welcome is not None
    info_hash = quote_from_bytes(read_torrent(member.welcome.base.torrent).info_hash, safe="")
    layout = read_torrent(member.welcome.base.torrent)
    heard = other.peers_told
    answers: Counter[str] = Counter()

    async def announce(http: aiohttp.ClientSession, path: str, event: str) -> bool:
        query = f"?info_hash={info_hash}&port=6881&left=1&compact=1&event={event}"
        async with http.get(URL(victim.url + path + query, encoded=True)) as answer:
            return b"failure reason" not in await answer.read()

    async def stranger(number: int) -> None:
        connector = aiohttp.TCPConnector(local_addr=(f"127.9.{number // 250}.{1 + number % 250}", 0))
        async with aiohttp.ClientSession(connector=connector) as http:
            assert member.welcome is not None
            for event in ("started", "stopped") * 5:
                answers["announced" if await announce(http, member.welcome.tracker_path, event) else "refused"] += 1
            path = f"{member.welcome.base.web_seed_path}{layout.name}/{layout.files[0][0]}"
            async with http.get(victim.url + path) as answer:
                answers[f"fetched: {answer.status}"] += 1

    async with aiohttp.ClientSession() as http:
        await announce(http, other.welcome.tracker_path, "started")
    await asyncio.gather(*(stranger(number) for number in range(STRANGERS)))
    await other.heard()
    told, turned = other.peers_told - heard, await victim.turned_away()
    for _ in range(50):  # Pages show nothing newer than half a second, and seldomer where the hub has much to do.
        if "passkey, shared_passkey" in turned:
            break
        await asyncio.sleep(0.2)
        turned = await victim.turned_away()
    for node in (member, other):
        await node.close()
    refused = turned.get("passkey, shared_passkey", 0)
    how = f"{dict(answers)}; {refused} counted as shared, others were told of {told} peers"
    if not refused or answers["announced"] > STRANGERS or told > 2:
        raise Unnoticed(how)
    return how


async def false_have(scratch: Path, seed: int) -> str:
    """A member that says it has every piece of every version, and is linked with all, and hands nothing on: the honest
    node beside it gets the versions all the same."""
    sections = {"dissemination": {"way": "broadcast"}}
    with open_site(scratch, seed=seed, sections=sections) as site:
        victim, honest = Victim(site=site), site.node(OPTIONS)
        await asyncio.to_thread(site.wait_for_step, 2, within_s=WITHIN_S)
        (others,) = site.rows("SELECT node_id FROM nodes WHERE name = ?", honest.name)
        sink = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        liar = await Stranger(site.url).join(mesh_port=sink.sockets[0].getsockname()[1])
        await liar.say(Links(node_ids=others))
        first, lied = liar.policy_version, 0
        behind = 0
        until = time.monotonic() + WITHIN_S
        while liar.policy_version < first + VERSIONS:
            if time.monotonic() > until:
                raise Unnoticed(f"no more than {liar.policy_version - first} versions in {WITHIN_S:.0f} s")
            for offer in liar.offers[lied:]:
                layout = read_torrent(offer.torrent)
                pieces = tuple(range(len(layout.piece_hashes)))
                await liar.say(Have(info_hash=layout.info_hash, pieces=pieces, wanted=True))
                lied += 1
            nodes = json.loads(await victim.operators("/api/v1/nodes"))["nodes"]
            held = next(node["policy_version"] for node in nodes if node["name"] == honest.name)
            behind = max(behind, liar.policy_version - (held or 0))
            await asyncio.sleep(0.1)
        await liar.close()
        sink.close()
    return f"{lied} versions lied about, the honest node was {behind} behind at most, and the run went on"


async def wrong_pieces(hub: DrivenHub, join: Join) -> str:
    """A member of the mesh hands on pieces that are not what the hub has signed."""
    node = await ready(hub, join)
    me, linked = Identity.generate(), asyncio.Event()
    liar = Mesh(me)
    await liar.open("127.0.0.1", 0, on_piece=lambda piece, sender: None, on_links=lambda ids: linked.set())
    try:
        liar.set_keys(hub.run_keys)
        assert hub.session is not None
        liar.set_peers([MeshPeer(node_id=hub.session.node_id, host="127.0.0.1", port=0, number=1)])
        await hub.send(MeshMessage(peers=(MeshPeer(node_id=me.node_id, host="127.0.0.1", port=liar.port, number=2),)))
        async with asyncio.timeout(30.0):
            await linked.wait()
        await hub.publish(1, announce=False, way=Way.BROADCAST)
        offer = hub.offers[1]
        for piece in hub.pieces(offer):
            wrong = Piece(info_hash=piece.info_hash, index=piece.index, data=bytes(len(piece.data)))
            liar.hand_on(wrong, [(1, b"")])
        await asyncio.sleep(0.5)
        await hub.send(PolicyPublished(policy_version=1, offer=offer))
        said = await node.says("is dropped")
        for piece in hub.pieces(offer):
            await hub.send(piece)
        await hub.until(lambda: any(status.policy_version == 1 for status in hub.all(NodeStatus)))
        node.check()
    finally:
        with suppress(Exception):
            await liar.close()
    return f"{said[-160:]}; the version came all the same"


Own = Callable[[Path, int], Awaitable[str]]
"""Below this directory, by a run's seed."""
ATTACKS: Final[Mapping[str, Callable[[Victim], Awaitable[str]]]] = {"a shared passkey": shared_passkey}
OWN: Final[Mapping[str, Own]] = {"false claims to have pieces": false_have}
ON_NODE: Final[Mapping[str, Callable[[DrivenHub, Join], Awaitable[str]]]] = {"wrong pieces in the mesh": wrong_pieces}
