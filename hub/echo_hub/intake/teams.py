"""Team changes that a node asks for, written to the database on a thread."""

from __future__ import annotations

import asyncio
import time

from echo_hub.store.store import Store
from echo_hub.store.teams import change_team, read_own_team
from echo_shared.wire.messages import Team, TeamWanted


async def change_own_team(store: Store, node_id: str, wanted: TeamWanted) -> Team:
    """Create, join or leave a team for the node, and return its team. Raises RefusedError if the change is not
    possible."""
    now = time.time()
    if wanted.action != "show":
        await asyncio.to_thread(store.write, change_team, node_id, wanted, now)
    return await asyncio.to_thread(store.read, read_own_team, node_id, now)
