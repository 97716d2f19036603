"""Receipts that the coordinator no longer has in memory: looked up in the store, for nodes that ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from echo_hub.core import effects
from echo_hub.core.effects import LookUpReceipt
from echo_hub.store.async_store import AsyncStore
from echo_shared.messages import FromHub, Receipt, Receipts

LOOK_UPS_WAITING: Final = 4_096


class ReceiptLookUps:
    """`send` gives a node a message."""

    def __init__(self, *, store: AsyncStore, send: Callable[[str, FromHub], object]) -> None:
        self._store = store
        self._send = send
        self._waiting: asyncio.Queue[LookUpReceipt] = asyncio.Queue(LOOK_UPS_WAITING)

    def submit(self, action: LookUpReceipt) -> None:
        """Queues a look-up; ignored when `LOOK_UPS_WAITING` wait: the node asks again after its next connection."""
        if not self._waiting.full():
            self._waiting.put_nowait(action)

    async def run(self) -> None:
        """Answers for ever."""
        while True:
            asked = await self._waiting.get()
            await self.answer(asked.node_id, (asked.rollout_id,))

    async def answer(self, node_id: str, rollout_ids: Sequence[str]) -> None:
        """Tells the node what became of these rollouts, in one message."""
        receipts = await self._store.receipts(node_id, rollout_ids)
        self._send(node_id, Receipts(receipts=tuple(receipts)))


def as_message(receipts: Sequence[effects.Receipt]) -> Receipts:
    """What a node is told. Not validated: ids, states and reasons are this software's own."""
    return Receipts.model_construct(
        receipts=tuple(
            Receipt.model_construct(rollout_id=receipt.rollout_id, state=receipt.state, drop_reason=receipt.drop_reason)
            for receipt in receipts
        )
    )
