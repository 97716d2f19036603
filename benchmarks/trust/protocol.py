"""Attacks on the protocol: strangers by hand, each against a running hub that has honest work to do.

Each says how the hub noticed it, or raises `Unnoticed`. What the hub must not do in any case: give a rollout credit
that was not leased to its sender, count one twice, or let the attack stand in an honest node's way.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgpack
import numpy as np
import websockets
from websockets.asyncio.client import ClientConnection

from benchmarks.trust.site import Site
from benchmarks.trust.stranger import Stranger, completion, part, parts
from echo_hub.config.file import load_config
from echo_hub.core.nodes.strangers import UNPROVEN_SHARE
from echo_shared.messages import (
    MAX_FRAME_BYTES,
    LeaseReturned,
    NodeStatus,
    ReceiptState,
)

BOMB_ITEMS: Final = 8_000_000
FRESH_KEYS: Final = 2_000
AT_ONCE: Final = 64
STORM_S: Final = 90.0
"""Keys that have not been tried by then are not tried any more."""
COUNT_S: Final = 0.1
ELSEWHERE: Final = "127.0.0.3"
"""Where somebody honest joins from meanwhile."""
HONEST_WITHIN_S: Final = 5.0
_TURNED_AWAY: Final = re.compile(r'^echo_turned_away_total\{reason="(\w+)",what="(\w+)"\} (\S+)$', re.MULTILINE)


class Unnoticed(Exception):
    """The attack has gone through, or nobody can see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """How, and what the row has besides."""

    how: str
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """The hub that is attacked."""

    site: Site

    @property
    def url(self) -> str:
        return self.site.url

    async def operators(self, path: str) -> str:
        """What the operator reads there."""
        operator = {"Authorization": f"Bearer {self.site.run.operator_token.read_text().strip()}"}
        trust = self.site.trust or True
        async with aiohttp.ClientSession(headers=operator) as http, http.get(self.url + path, ssl=trust) as answer:
            return await answer.text()

    async def stranger(self, **changes: Any) -> Stranger:
        """Joined, with a key of its own."""
        return await Stranger(self.url).join(**changes)

    async def turned_away(self) -> dict[str, int]:
        """What the hub says that it has turned away, as its operator reads it: counts by what and reason."""
        found = _TURNED_AWAY.findall(await self.operators("/metrics"))
        return {f"{what}, {reason}": int(float(count)) for reason, what, count in found}

    async def worker(self, capacity: int = 4) -> Stranger:
        """Joined, and holding a lease."""
        stranger = await self.stranger()
        await stranger.report(capacity)
        await stranger.lease()
        return stranger


Attack = Callable[[Victim], Awaitable[str | Noticed]]


def _expect(noticed: bool, how: str) -> str:
    if not noticed:
        raise Unnoticed(how)
    return how


async def _dropped(stranger: Stranger, sent: Any) -> str:
    await stranger.say(sent)
    outcome = await stranger.outcome(sent)
    await stranger.close()
    return _expect(outcome is ReceiptState.DROPPED, f"rollout {outcome.value}")


async def wrong_version(victim: Victim) -> str:
    """Tokens are said to be by a version that was not leased."""
    node = await victim.worker()
    lease = await node.lease()
    version = lease.policy_version + 1
    sent = completion(lease, lease.indices[0], policy_version_start=version, policy_version_end=version)
    return await _dropped(node, sent)


async def impossible_tokens(victim: Victim) -> str:
    """A token that the model does not have."""
    node = await victim.worker()
    lease = await node.lease()
    return await _dropped(node, completion(lease, lease.indices[0], [2**20]))


async def more_than_leased(victim: Victim) -> str:
    """An index that the lease does not have."""
    node = await victim.worker()
    lease = await node.lease()
    other = max(lease.indices) + 1
    sent = completion(lease, other)
    await node.say(sent)
    await node.heard()
    state = node.states.get(sent.rollout_id)
    await node.close()
    return _expect(state in (None, ReceiptState.DROPPED), f"receipt {state}")


async def leases_of_others(victim: Victim) -> str:
    """A result for what another node was given; the other's own still counts."""
    first, second = await victim.worker(), await victim.worker()
    lease = await first.lease()
    sent = completion(lease, lease.indices[0])
    await second.say(sent)
    await second.heard()
    stolen = second.states.get(sent.rollout_id)
    await first.say(sent)
    own = await first.outcome(sent)
    for node in (first, second):
        await node.close()
    _expect(stolen in (None, ReceiptState.DROPPED), f"the thief's receipt: {stolen}")
    return f"the thief's receipt: {stolen and stolen.value}, the owner's: {own.value}"


async def replayed_rollout(victim: Victim) -> str:
    """One result, sent a hundred times: it has one receipt, which says the same each time."""
    node = await victim.worker()
    lease = await node.lease()
    sent = completion(lease, lease.indices[0])
    await node.say(sent)
    first = await node.outcome(sent)
    for _ in range(100):
        await node.say(sent)
    await node.heard()
    again = node.states[sent.rollout_id]
    await node.close()
    final = (ReceiptState.SCORED, ReceiptState.TRAINED, ReceiptState.DROPPED)
    return _expect(again in final and (first is again or first is ReceiptState.SCORED), f"{first.value}, {again.value}")


async def captured_handshake(victim: Victim) -> str:
    """Somebody on the way repeats the request by which a node has proven itself."""
    node = await victim.stranger()
    repeated = await node.ask(node.credentials)
    await node.close()
    if isinstance(repeated, ClientConnection):
        repeated.transport.abort()
        raise Unnoticed("a second connection under the captured proof")
    return "the hub hangs up" if repeated is None else f"refused with status {repeated.status_code}"


async def stolen_name(victim: Victim) -> str:
    """A handshake under another node's key, without its secret."""
    node = await victim.stranger()
    thief = await Stranger(victim.url).join(signature=bytes(64))
    await node.close()
    return _expect(thief.refused is not None, f"refused: {thief.refused and thief.refused.code}")


async def racing_connections(victim: Victim) -> str:
    """Two connections of one key, both with the result of one lease."""
    node = await victim.worker()
    lease = await node.lease()
    sent = completion(lease, lease.indices[0])
    twin = await Stranger(victim.url, node.me).join()
    await twin.say(sent)
    await asyncio.gather(node.socket.send(msgpack.packb({})), return_exceptions=True)
    outcome = await twin.outcome(sent)
    await node.until(lambda: node.ended)
    await twin.close()
    code = node.refused.code if node.refused else "closed"
    return _expect(outcome is not ReceiptState.LEASED, f"the older one ended ({code}), one result {outcome.value}")


async def false_capacity(victim: Victim) -> str:
    """Keys that say that they hold 4,096 rollouts, and return none: all of them together get a handful."""
    nodes = [await victim.stranger() for _ in range(16)]
    for node in nodes:
        await node.report(4096)
    for node in nodes:
        await node.heard()
    held = sum(node.num_leased for node in nodes)
    for node in nodes:
        await node.close()
    return _expect(held <= 64, f"{held} rollouts leased to 16 keys")


async def false_speed(victim: Victim) -> str:
    """10³⁰⁸ tokens a second: nothing is given for what is said."""
    node = await victim.stranger()
    await node.report(4096, tokens_per_s=1e308)
    await node.heard()
    held = node.num_leased
    await node.close()
    return _expect(held <= 64, f"{held} rollouts leased")


async def false_cost(victim: Victim) -> str:
    """Costs that are no numbers, or less than nothing."""
    refused = [(await victim.stranger(cost_per_hour=cost)).refused for cost in (math.nan, -1.0, 1e308)]
    return _expect(all(refused), f"{sum(one is not None for one in refused)} of {len(refused)} refused")


async def nan_logprobs(victim: Victim) -> str:
    """A log-probability that is no number."""
    node = await victim.worker()
    lease = await node.lease()
    logprobs = np.full(4, math.nan, np.float32)
    await node.say(completion(lease, lease.indices[0], behavior_logprobs=logprobs))
    return await _cut_off(node)


async def _cut_off(node: Stranger) -> str:
    try:
        await node.until(lambda: node.ended, within_s=20.0)
    except TimeoutError as error:
        raise Unnoticed("the connection goes on") from error
    finally:
        await node.close()
    return f"disconnected: {node.refused.code if node.refused else 'closed'}"


async def invalid_text(victim: Victim) -> str:
    """A name that is no UTF-8."""
    node = await victim.stranger(name="\udcff")
    return _expect(node.refused is not None, f"refused: {node.refused and node.refused.code}")


async def oversize_frame(victim: Victim) -> str:
    """More than a message may have."""
    node = await victim.stranger()
    with suppress(websockets.ConnectionClosed):
        await node.socket.send(bytes(MAX_FRAME_BYTES + 1))
    return await _cut_off(node)


async def nested_frame(victim: Victim) -> str:
    """100,000 lists in each other."""
    node = await victim.stranger()
    await node.socket.send(b"\x91" * 100_000 + b"\xc0")
    return await _cut_off(node)


async def bomb(victim: Victim) -> str:
    """A valid status with 8 MiB of empty lists beside it."""
    node = await victim.stranger()
    status = msgpack.unpackb(
        node.session.send(NodeStatus(activity="waiting", capacity=0, policy_version=0, tokens_per_s=0))
    )
    packed = msgpack.packb({**status, "x": 0})
    frame = packed[:-1] + b"\xdd" + BOMB_ITEMS.to_bytes(4) + b"\x90" * BOMB_ITEMS
    with suppress(websockets.ConnectionClosed):
        for _ in range(10):
            await node.socket.send(frame)
    return await _cut_off(node)


async def contradicting_parts(victim: Victim) -> str:
    """A finished completion that is another than the one that was streamed."""
    node = await victim.worker()
    lease = await node.lease()
    await node.say(parts(part(lease, lease.indices[0], 0, [30, 31, 32])))
    return await _dropped(node, completion(lease, lease.indices[0], [20, 21, 22]))


async def never_returned(victim: Victim) -> str:
    """Takes a lease and says nothing of it any more: it is asked for less and less, then for nothing."""
    node = await victim.worker(64)
    lease = await node.lease()
    await node.until(lambda: lease.lease_id not in node.leases or node.standby is not None or node.ended)
    told = node.standby.reason if node.standby else "revoked"
    await node.close()
    return f"{node.num_leased} rollouts leased, then: {told}"


async def given_back(victim: Victim) -> str:
    """Gives back whatever it gets, at once."""
    node = await victim.stranger()
    await node.report(4096)
    for _ in range(20):
        try:
            await node.until(lambda: node.leases or node.ended, within_s=3.0)
        except TimeoutError:
            break
        for lease in list(node.leases.values()):
            del node.leases[lease.lease_id]
            await node.say(LeaseReturned(lease_id=lease.lease_id, indices=lease.indices, reason="no"))
    given = node.num_leased
    await node.close()
    return _expect(given <= 32, f"{given} rollouts in all; told: {node.standby and node.standby.reason}")


def _held(site: Site) -> dict[str, int]:
    """By node: rollouts within their deadlines, by the hub's books, as of the last lease."""
    query = (
        "WITH out AS (SELECT node_id, leased_at, deadline FROM rollouts WHERE state = ?)"
        " SELECT node_id, count(*) FROM out WHERE deadline > (SELECT max(leased_at) FROM out) GROUP BY node_id"
    )
    return dict(site.rows(query, ReceiptState.LEASED.value))


async def _most_held(site: Site, keys: Collection[str], over: asyncio.Event) -> tuple[int, int]:
    """The most rollouts that all nodes held at any time until it is over, and the most that these keys did."""
    most_of_all = most_of_keys = 0
    while not over.is_set():
        held = await asyncio.to_thread(_held, site)
        most_of_all = max(most_of_all, sum(held.values()))
        most_of_keys = max(most_of_keys, sum(number for node_id, number in held.items() if node_id in keys))
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), COUNT_S)
    return most_of_all, most_of_keys


def _stormed(counts: Counter[str], *, held: int, quota: int, honest_s: float) -> Noticed:
    """Raises Unnoticed where the keys got too much, or somebody honest did not get in."""
    how = f"{dict(counts)}, at most {held} rollouts at once where all strangers may have {quota}"
    _expect(held <= quota and honest_s <= HONEST_WITHIN_S, f"{how}; an honest node joined after {honest_s:.1f} s")
    return Noticed(how=how, figures={"held_at_once": held, "honest_joined_s": honest_s})


async def fresh_keys(victim: Victim) -> Noticed:
    """A new key for each lease, none of which comes back, and an honest node of elsewhere that joins meanwhile."""
    loop = asyncio.get_running_loop()
    keys: set[str] = set()
    counts: Counter[str] = Counter(joined=0, leased=0)
    limit, under_way, over = asyncio.Semaphore(AT_ONCE), asyncio.Event(), asyncio.Event()
    until = loop.time() + STORM_S

    async def one() -> None:
        async with limit:
            if loop.time() > until:
                counts["not tried"] += 1
                return
            try:
                node = Stranger(victim.url)
                keys.add(node.me.node_id)
                await node.join()
                counts["joined" if not node.ended else "turned away"] += 1
                if not node.ended:
                    await node.report(4096)
                    await node.heard()
                counts["leased"] += node.num_leased
                await node.close()
            except (OSError, websockets.WebSocketException):
                counts["not answered"] += 1
            if counts.total() > 2 * AT_ONCE:
                under_way.set()

    async def honest() -> float:
        await under_way.wait()
        began_at = loop.time()
        node = await Stranger(victim.url, host=ELSEWHERE).join()
        if node.ended:
            raise Unnoticed(f"an honest node was refused: {node.refused and node.refused.code}")
        joined_s = loop.time() - began_at
        await node.close()
        return joined_s

    joining, counting = asyncio.create_task(honest()), asyncio.create_task(_most_held(victim.site, keys, over))
    await asyncio.gather(*(one() for _ in range(FRESH_KEYS)))
    over.set()
    config = load_config(victim.site.run.config, {}).training
    most_of_all, held = await counting
    quota = max(config.groups_per_step * config.group_size, most_of_all) // UNPROVEN_SHARE
    return _stormed(counts, held=held, quota=quota, honest_s=await joining)


async def odd_names(victim: Victim) -> str:
    """Names that are markup, are invisible, turn what follows around, or imitate the hub: the public page shows none of
    them as it is, and all but the first are refused."""
    names = ("<script>alert(1)</script>", "\u202egnp.exe", "a\nb", "x\u0000y", "\u3164", "The Hub", "\u0430dmin")
    refused = 0
    for name in names:
        node = await victim.stranger(name=name)
        refused += node.refused is not None
        await node.close()
    async with aiohttp.ClientSession(victim.url) as http, http.get("/api/v1/leaderboard") as answer:
        shown = await answer.text()
    async with aiohttp.ClientSession(victim.url) as http, http.get("/leaderboard") as answer:
        shown += await answer.text()
    too_long = await victim.stranger(name="x" * 65)
    seen = [name for name in names if name in shown]
    is_noticed = not seen and too_long.refused is not None and refused == len(names) - 1
    return _expect(is_noticed, f"{refused} of {len(names)} refused, {len(seen)} shown as they are")


async def invented_engines(victim: Victim) -> str:
    """Engines and precisions that nobody knows, for which there could be no rule, or a gentle one."""
    engine = (await victim.stranger(backend="quantum")).refused
    node = await victim.stranger()
    status = NodeStatus(activity="waiting", capacity=4, policy_version=0, tokens_per_s=1.0)
    await node.say_raw(status, precision="q1_xxl")
    how = await _cut_off(node)
    return _expect(engine is not None and node.num_leased == 0, f"the engine is refused; of a precision: {how}")


async def scribbling(victim: Victim) -> str:
    """Messages out of turn."""
    node = await victim.stranger()
    await node.socket.send(msgpack.packb({"type": "hello"}))
    return await _cut_off(node)


ATTACKS: Final[Mapping[str, Attack]] = {
    "a version that was not leased": wrong_version,
    "tokens that do not exist": impossible_tokens,
    "more results than leased": more_than_leased,
    "answers to leases of others": leases_of_others,
    "replayed results": replayed_rollout,
    "captured handshake": captured_handshake,
    "false signature": stolen_name,
    "two connections racing on one lease": racing_connections,
    "false capacity": false_capacity,
    "false speed": false_speed,
    "false cost": false_cost,
    "claims that are no numbers": nan_logprobs,
    "invalid UTF-8": invalid_text,
    "oversize frames": oversize_frame,
    "nested frames": nested_frame,
    "bombs": bomb,
    "messages out of turn": scribbling,
    "parts that contradict the result": contradicting_parts,
    "leases that are never answered": never_returned,
    "leases that are given back": given_back,
    "fresh keys": fresh_keys,
    "names": odd_names,
    "invented engines": invented_engines,
}
"""By name."""
