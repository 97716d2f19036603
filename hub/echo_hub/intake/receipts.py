"""Send receipts (states of rollouts) to nodes: receipts from the coordinator, answers to nodes' questions, and receipts
of trained batches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from echo_hub.core.accounting import effects
from echo_hub.core.accounting.effects import LookUpReceipt, SendTrained
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.live_nodes import NodeSender
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.reading import read_receipts
from echo_shared.wire.messages import MAX_BATCHED, Checked, DropReason, Receipts, ReceiptState
from echo_shared.wire.messages import Receipt as ReceiptMessage

log = logging.getLogger(__name__)

LOOK_UPS_WAITING: Final = 4_096
WAIT_S: Final = 2.0
GATHER_S: Final = 0.05
"""Pause between two rounds of sending, in seconds. After a trained step, receipts for all nodes become due together."""
ONE_IN: Final = 20
"""Divisor: a round sends waiting receipts to 1/20 of their nodes, and to at least `AT_LEAST` nodes."""
AT_LEAST: Final = 16
_CAN_WAIT: Final = frozenset({ReceiptState.SCORED, ReceiptState.TRAINED, ReceiptState.EVALUATED, ReceiptState.ANSWERED})
"""States whose receipts may be sent later: a node's work does not depend on these receipts."""
TOLD_AT_ONCE: Final = 512
"""Number of receipts of a trained batch that are queued before other tasks run."""


@dataclass(slots=True)
class _Waiting:
    """Receipts that wait to be sent to one node."""

    since: float
    """Time at which the first of the receipts began to wait, by the monotonic clock."""
    receipts: list[effects.RolloutReceipt] = field(default_factory=list)


class ReceiptsOut:
    """Sends receipts. Those of received and dropped rollouts are sent at once. Those of scored, trained, evaluated and
    answered rollouts wait at least `WAIT_S`, until a round serves their node, unless an urgent receipt of the node
    takes them along. That saves two messages for most rollouts."""

    def __init__(self, connections: NodeSender, nodes: Mapping[str, NodeInfo] | None = None) -> None:
        """`nodes`: the connected nodes, by id. None means that every node knows all receipt states."""
        self._connections = connections
        self._nodes = nodes
        self._waiting: dict[str, _Waiting] = {}
        """Receipts by node, the longest waiting first."""
        self._there_are = asyncio.Event()

    def tell(self, node_id: str, receipts: Sequence[effects.RolloutReceipt]) -> None:
        """Send receipts, or let them wait if none is urgent. At most MAX_BATCHED receipts of a node wait."""
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
        if waiting := self._waiting.pop(node_id, None):
            self._connections.send(node_id, self.for_node(node_id, as_message(waiting.receipts)))

    def for_node(self, node_id: str, message: Receipts) -> Receipts:
        """Return the receipts with only those states and drop reasons that the node's release knows. For older
        releases, EVALUATED replaces ANSWERED, and EXPIRED replaces SESSION_LOST."""
        node = None if self._nodes is None else self._nodes.get(node_id)
        if node is None or (node.knows_answered and node.knows_session_lost):
            return message
        return Receipts.model_construct(receipts=tuple(_in_known_words(one, node) for one in message.receipts))

    def flush_all(self) -> None:
        for node_id in tuple(self._waiting):
            self.flush(node_id)

    async def run(self) -> None:
        """Send the receipts that have waited for `WAIT_S`, a part of the nodes each round. Runs until cancelled."""
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
    """Reads receipts from the store for nodes that ask. The receipts that wait in `receipts` for the same node are sent
    first."""

    def __init__(self, *, store: AsyncStore, connections: NodeSender, receipts: ReceiptsOut) -> None:
        self._store = store
        self._connections = connections
        self._receipts = receipts
        self._waiting: asyncio.Queue[LookUpReceipt] = asyncio.Queue(LOOK_UPS_WAITING)

    def submit(self, action: LookUpReceipt) -> None:
        """Queue a look-up of receipts. It is dropped if the queue is full: the node asks again when it has
        reconnected."""
        if not self._waiting.full():
            self._waiting.put_nowait(action)

    async def run(self) -> None:
        while True:
            asked = await self._waiting.get()
            receipts = await self.answer(asked.node_id, (asked.rollout_id,))
            if asked.is_verdict:
                for receipt in receipts:
                    warn_if_delivered(asked.node_id, receipt)

    async def answer(self, node_id: str, rollout_ids: Sequence[str]) -> tuple[ReceiptMessage, ...]:
        """Send the node the receipts of these rollouts in one message, and return the receipts."""
        receipts = await self._store.read_counted(read_receipts, node_id, rollout_ids)
        self._receipts.flush(node_id)
        self._connections.send(node_id, self._receipts.for_node(node_id, Receipts(receipts=tuple(receipts))))
        return tuple(receipts)


def warn_if_delivered(node_id: str, receipt: ReceiptMessage) -> None:
    """Log a warning if a sample proved forged after it was delivered: its tenant cannot be told to forget it."""
    if receipt.state is ReceiptState.ANSWERED and receipt.checked is Checked.FAILED:
        extra = {"event": "forged_answer", "subject": node_id, "data": {"rollout": receipt.rollout_id}}
        log.warning("a tenant has a forged sample of node %s: rollout %s", node_id, receipt.rollout_id, extra=extra)


class TrainedReceipts:
    """Sends the receipts of trained batches in parts, so that a large batch does not hold up the hub."""

    def __init__(self, receipts: ReceiptsOut) -> None:
        self._receipts = receipts
        self._waiting: asyncio.Queue[SendTrained] = asyncio.Queue()

    def submit(self, action: SendTrained) -> None:
        """Queue a batch. The queue is not bounded: each step adds at most one batch."""
        self._waiting.put_nowait(action)

    async def run(self) -> None:
        while True:
            trained = await self._waiting.get()
            for start in range(0, len(trained.rollout_ids), TOLD_AT_ONCE):
                part = slice(start, start + TOLD_AT_ONCE)
                of_nodes: dict[str, list[effects.RolloutReceipt]] = {}
                for node_id, rollout_id in zip(trained.node_ids[part], trained.rollout_ids[part], strict=True):
                    of_nodes.setdefault(node_id, []).append(effects.RolloutReceipt(rollout_id, ReceiptState.TRAINED))
                for node_id, receipts in of_nodes.items():
                    self._receipts.tell(node_id, receipts)
                await asyncio.sleep(0)


def _in_known_words(receipt: ReceiptMessage, node: NodeInfo) -> ReceiptMessage:
    if receipt.state is ReceiptState.ANSWERED and not node.knows_answered:
        return receipt.model_copy(update={"state": ReceiptState.EVALUATED})
    if receipt.drop_reason is DropReason.SESSION_LOST and not node.knows_session_lost:
        return receipt.model_copy(update={"drop_reason": DropReason.EXPIRED})
    return receipt


def as_message(receipts: Sequence[effects.RolloutReceipt]) -> Receipts:
    """Return the receipts as a message. It is not validated, because ids, states and reasons come from the hub."""
    return Receipts.model_construct(
        receipts=tuple(
            ReceiptMessage.model_construct(
                rollout_id=receipt.rollout_id,
                state=receipt.state,
                drop_reason=receipt.drop_reason,
                checked=receipt.checked,
            )
            for receipt in receipts
        )
    )
