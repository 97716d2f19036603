"""Receipts beside the coordinator's own: those that it no longer has in memory, looked up in the store for nodes that
ask; and those of a trained batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from echo_hub.core import effects
from echo_hub.core.effects import LookUpReceipt, SendTrained
from echo_hub.store.async_store import AsyncStore
from echo_shared.contribution import sign
from echo_shared.identity import Identity
from echo_shared.messages import FromHub, Receipt, Receipts, ReceiptState

LOOK_UPS_WAITING: Final = 4_096
TOLD_AT_ONCE: Final = 512
"""Rollouts of a trained batch of which nodes are told before others have their turn."""


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


class TrainedReceipts:
    """Tells nodes what was trained, a part of a batch at a time: a large one does not hold up the hub. `send` gives a
    node a message, or drops it when the node is not connected."""

    def __init__(self, *, send: Callable[[str, FromHub], object]) -> None:
        self._send = send
        self._waiting: asyncio.Queue[SendTrained] = asyncio.Queue()

    def submit(self, action: SendTrained) -> None:
        """Queues a batch: one at most for each step, so the queue needs no bound of its own."""
        self._waiting.put_nowait(action)

    async def run(self) -> None:
        """Tells for ever."""
        while True:
            trained = await self._waiting.get()
            for start in range(0, len(trained.rollout_ids), TOLD_AT_ONCE):
                part = slice(start, start + TOLD_AT_ONCE)
                of_nodes: dict[str, list[effects.Receipt]] = {}
                for node_id, rollout_id in zip(trained.node_ids[part], trained.rollout_ids[part], strict=True):
                    of_nodes.setdefault(node_id, []).append(effects.Receipt(rollout_id, ReceiptState.TRAINED))
                for node_id, receipts in of_nodes.items():
                    self._send(node_id, as_message(receipts))
                await asyncio.sleep(0)


def as_message(receipts: Sequence[effects.Receipt]) -> Receipts:
    """What a node is told. Not validated: ids, states and reasons are this software's own."""
    return Receipts.model_construct(
        receipts=tuple(
            Receipt.model_construct(
                rollout_id=receipt.rollout_id,
                state=receipt.state,
                drop_reason=receipt.drop_reason,
                checked=receipt.checked,
            )
            for receipt in receipts
        )
    )


async def certify(store: AsyncStore, me: Identity, node_id: str, *, run_id: str, run_name: str) -> bytes | None:
    """What a node has done for the run, signed by the hub; None: it was never here."""
    found = await store.contribution(node_id, run_id=run_id, run_name=run_name, hub_key=me.public_key, now=time.time())
    return None if found is None else sign(found, me)
