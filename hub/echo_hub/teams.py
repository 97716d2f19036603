"""What a node wants of its team, done in the books beside all else that the hub writes."""

from __future__ import annotations

import asyncio
import time

from echo_hub.store.credit_store import CreditStore
from echo_shared.messages import Team, TeamWanted


async def change_team(books: CreditStore, node_id: str, wanted: TeamWanted) -> Team:
    """How the node's team stands when it is done. Raises RefusedError where it cannot be."""
    now = time.time()
    if wanted.action != "show":
        await asyncio.to_thread(books.change_team, node_id, wanted, now)
    return await asyncio.to_thread(books.own_team, node_id, now)
