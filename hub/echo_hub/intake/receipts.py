"""Receipts on their way to the nodes: the coordinator's own; those that it no longer has in memory, looked up in the
store for nodes that ask; and those of a trained batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from echo_hub.core import effects
from echo_hub.core.effects import LookUpReceipt, SendTrained
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.contribution import read_contribution
from echo_hub.store.reading import read_receipts
from echo_shared.contribution import sign
from echo_shared.identity import Identity
from echo_shared.messages import MAX_BATCHED, FromHub, Receipt, Receipts, ReceiptState

LOOK_UPS_WAITING: Final = 4_096
WAIT_S: Final = 2.0
GATHER_S: Final = 0.05
"""Between two times at which nodes are told: a trained step has news for all of them at the same moment."""
ONE_IN: Final = 20
"""Of the nodes that wait, so few are told at one time, or `AT_LEAST`."""
AT_LEAST: Final = 16
_CAN_WAIT: Final = frozenset({ReceiptState.SCORED, ReceiptState.TRAINED, ReceiptState.EVALUATED})
"""Nobody works differently for knowing it sooner."""
TOLD_AT_ONCE: Final = 512
"""Rollouts of a trained batch of which nodes are told before others have their turn."""


@dataclass(slots=True)
class _Waiting:
    """For one node."""

    since: float
    """By a clock that only goes forward, in seconds."""
    receipts: list[effects.Receipt] = field(default_factory=list)


class ReceiptsOut:
    """Acks and drops go out at once. That a rollout is scored, trained or evaluated waits for `WAIT_S`, and then for
    its node's turn: it goes along with the node's next receipts, so that most rollouts cost two messages less. `send`
    gives a node a message, or drops it when the node is not connected."""

    def __init__(self, *, send: Callable[[str, FromHub], object]) -> None:
        self._send = send
        self._waiting: dict[str, _Waiting] = {}
        """By node, the oldest first."""
        self._there_are = asyncio.Event()

    def tell(self, node_id: str, receipts: Sequence[effects.Receipt]) -> None:
        """In the order in which they are told; at most MAX_BATCHED at once."""
        waiting = self._waiting.get(node_id)
        if waiting is not None and len(waiting.receipts) + len(receipts) > MAX_BATCHED:
            self.flush(node_id)
            waiting = None
        if waiting is None:
            waiting = self._waiting[node_id] = _Waiting(time.monotonic())
        waiting.receipts.extend(receipts)
        if any(receipt.state not in _CAN_WAIT for receipt in receipts):
            self.flush(node_id)
        else:
            self._there_are.set()

    def flush(self, node_id: str) -> None:
        """Nothing more waits for this node."""
        if waiting := self._waiting.pop(node_id, None):
            self._send(node_id, as_message(waiting.receipts))

    def flush_all(self) -> None:
        """Nothing waits any more."""
        for node_id in tuple(self._waiting):
            self.flush(node_id)

    async def run(self) -> None:
        """Sends for ever what has waited for long enough."""
        while True:
            await self._there_are.wait()
            self._there_are.clear()
            while self._waiting:
                oldest = next(iter(self._waiting.values()))
                await asyncio.sleep(max(GATHER_S, oldest.since + WAIT_S - time.monotonic()))
                due = time.monotonic() - WAIT_S
                most = max(AT_LEAST, len(self._waiting) // ONE_IN)
                for node_id in [each for each, waiting in islice(self._waiting.items(), most) if waiting.since <= due]:
                    self.flush(node_id)


class ReceiptLookUps:
    """`send` gives a node a message; what `flush` still had for it goes before."""

    def __init__(
        self,
        *,
        store: AsyncStore,
        send: Callable[[str, FromHub], object],
        flush: Callable[[str], object] = lambda node_id: None,
    ) -> None:
        self._store = store
        self._send = send
        self._flush = flush
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
        receipts = await self._store.read_counted(read_receipts, node_id, rollout_ids)
        self._flush(node_id)
        self._send(node_id, Receipts(receipts=tuple(receipts)))


class TrainedReceipts:
    """Tells nodes what was trained, a part of a batch at a time: a large one does not hold up the hub."""

    def __init__(self, *, tell: Callable[[str, Sequence[effects.Receipt]], object]) -> None:
        self._tell = tell
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
                    self._tell(node_id, receipts)
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
    found = await store.read_counted(
        read_contribution, node_id, run_id=run_id, run_name=run_name, hub_key=me.public_key, now=time.time()
    )
    return None if found is None else sign(found, me)
