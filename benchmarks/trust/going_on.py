"""A forged beginning that is left for an honest node to go on from, on a hub of its own: who is blamed for it.

The forger is an `echo-node` that is honest until it is proven, and then a stranger by hand under its key: it streams
some tokens of each completion, gives its leases back and is gone. Another `echo-node` goes on with them. What the
forger drew must not be trained on, and the one that went on must not be quarantined, also where the hub is killed in
between and does not know any more who drew what.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.processes import ended
from benchmarks.trust.protocol import Unnoticed
from benchmarks.trust.site import Site, free_port, open_site
from benchmarks.trust.stranger import Stranger, part, parts
from echo_shared import key_file
from echo_shared.messages import Lease, LeaseReturned

OPTIONS: Final = ("--backend", "llama_cpp", "--precision", "f32")
GIVEN: Final = 24
"""Tokens of each forged beginning."""
FORGED: Final = 8
"""Beginnings."""
WITHIN_S: Final = 60.0
LOOK_S: Final = 0.05
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "run": {"mode": "async"},
    "sampling": {"temperature": 10.0, "max_tokens": 200},  # Nothing is likely, the end neither.
    "training": {"groups_per_step": 6, "group_size": 4},
    "trust": {"least_checked": 1.0},
}


async def _until(condition: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + WITHIN_S
    while not (found := await asyncio.to_thread(condition)):
        if time.monotonic() > until:
            raise Unnoticed(f"not within {WITHIN_S:.0f} s: {what}")
        await asyncio.sleep(LOOK_S)
    return found


def _standing(site: Site, node_id: str) -> str:
    found = site.rows("SELECT state FROM trust WHERE node_id = ?", node_id)
    return str(found[0][0]) if found else "new"


async def _proven(site: Site) -> Stranger:
    """A stranger by hand who has the key, and the good name, of a node that worked honestly until now."""
    node = site.node(OPTIONS)

    def is_proven() -> bool:
        return bool(site.rows("SELECT 1 FROM trust WHERE state = 'proven'"))

    await _until(is_proven, "the node that will forge is proven")
    with ended(node.process):
        pass
    (key,) = (site.scratch / node.name).rglob("identity.key")
    stranger = Stranger(site.url, key_file.load(key))
    stranger.precision = "f32"
    return stranger


async def _forge(stranger: Stranger) -> set[tuple[int, int]]:
    """Leaves forged beginnings, and goes; their groups and indices."""
    await stranger.join(name="node1")
    await stranger.report(FORGED)
    left: set[tuple[int, int]] = set()
    leases: dict[int, Lease] = {}
    with suppress(TimeoutError):
        await stranger.until(lambda: sum(len(one.indices) for one in stranger.leases.values()) >= FORGED, within_s=10.0)
    leases |= stranger.leases
    if not leases:
        raise Unnoticed("the forger was given no lease")
    for lease in leases.values():
        plain = np.array([token for token in range(3, 13) if token not in lease.stop_ids], np.int32)
        for index in lease.indices:
            await stranger.say(parts(part(lease, index, 0, np.resize(plain, GIVEN).tolist(), logprob=-2.0)))
            left.add((lease.group_id, index))
    await stranger.heard()
    for lease in leases.values():
        await stranger.say(LeaseReturned(lease_id=lease.lease_id, indices=lease.indices, reason="no time"))
    await stranger.heard()
    await stranger.close()
    return left


def _going_on(site: Site, forger: str, left: set[tuple[int, int]]) -> list[tuple[Any, ...]]:
    """Rollouts of others that were forged before: lease, index, state, reason, node, and who drew them."""
    rows = site.rows(
        'SELECT r.lease_id, r."index", r.group_id, r.state, r.drop_reason, r.node_id, p.spans FROM rollouts r'
        ' LEFT JOIN payloads p ON p.lease_id = r.lease_id AND p."index" = r."index" WHERE r.node_id != ?',
        forger,
    )
    return [row for row in rows if (row[2], row[1]) in left]


def _judged(site: Site, forger: str, honest: str, left: set[tuple[int, int]]) -> str:
    """Raises Unnoticed where the wrong one is blamed, or what was forged is trained on."""
    trained = [row for row in _going_on(site, forger, left) if row[3] == "trained" and row[6] and forger in row[6]]
    if trained:
        raise Unnoticed(f"{len(trained)} forged beginnings were trained on")
    standings = f"the forger is {_standing(site, forger)}, the one that went on {_standing(site, honest)}"
    if _standing(site, honest) == "quarantined":
        raise Unnoticed(standings)
    return f"{len(left)} forged beginnings left: {standings}"


async def _other(site: Site, forger: str) -> str:
    """An honest node that has joined; its id."""
    node = site.node(OPTIONS)
    (row,) = await _until(lambda: site.rows("SELECT node_id FROM nodes WHERE name = ?", node.name), "it joins")
    assert row[0] != forger
    return str(row[0])


async def forged_beginning(scratch: Path, seed: int) -> str:
    """Forged beginnings for an honest node to go on from."""
    with open_site(scratch, seed=seed, sections=SETTINGS) as site:
        stranger = await _proven(site)
        forger, left = stranger.me.node_id, await _forge(stranger)
        honest = await _other(site, forger)
        await _until(lambda: _standing(site, forger) == "quarantined", "the forger is quarantined")
        await _until(lambda: _standing(site, honest) in ("proven", "quarantined"), "the other is judged")
        return _judged(site, forger, honest, left)


async def forged_beginning_and_restart(scratch: Path, seed: int) -> str:
    """The same, and the hub is killed while the honest node goes on, and what has come in is checked."""
    fixed = {**SETTINGS, "server": {"port": free_port()}}
    with open_site(scratch, seed=seed, sections=fixed) as site:
        stranger = await _proven(site)
        forger, left = stranger.me.node_id, await _forge(stranger)
        honest = await _other(site, forger)
        await _until(
            lambda: any(row[3] == "leased" for row in _going_on(site, forger, left)), "the other goes on with them"
        )
        await asyncio.to_thread(site.start_again)
        open_at_restart = sum(row[3] == "leased" for row in _going_on(site, forger, left))
        await _until(lambda: _standing(site, honest) in ("proven", "quarantined"), "the other is judged")
        await _until(
            lambda: all(row[3] not in ("leased", "received") for row in _going_on(site, forger, left)), "all are done"
        )
        return f"{_judged(site, forger, honest, left)}; {open_at_restart} under way when the hub was killed"


Attack = Callable[[Path, int], Awaitable[str]]
"""Below this directory, by a run's seed."""
ATTACKS: Final[Mapping[str, Attack]] = {
    "a forged beginning": forged_beginning,
    "a forged beginning, and the hub killed meanwhile": forged_beginning_and_restart,
}
"""By name."""
