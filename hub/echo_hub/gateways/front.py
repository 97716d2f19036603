"""A gateway's inbox. It asks the hub about new nodes, stores what nodes send, and relays the hub's messages to nodes.

    node ──frame──► net.Gateway ──message──► Front ──► Uplink ──► JetStream ──► the hub, in order
                        ▲        ◄──received── as soon as JetStream has it on disk
                        └──frames── Front ◄── HubLine ◄── the hub

The gateway itself tells nodes that their rollouts were received. All other messages to nodes come from the hub. While
the hub is away, connected nodes stay connected, and the gateway stores what they send.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from echo_hub.gateways.hub_line import HubLine
from echo_hub.gateways.items import Item, ItemKind
from echo_hub.gateways.uplink import GatewayUplink
from echo_hub.net.gateway import Gateway, NodeInfo
from echo_hub.net.invitations import InviteEndedError
from echo_shared.errors import LocalProtocolError, RefusedError
from echo_shared.wire.codec import decode_from_hub
from echo_shared.wire.messages import (
    MAX_BATCHED,
    Checked,
    FromNode,
    Receipt,
    Receipts,
    ReceiptState,
    RefusalCode,
    Rollout,
    Welcome,
)

ANSWER_S: Final = 15.0
"""Seconds that a gateway waits for the hub's answer while a node joins."""
HUB_AGAIN: Final = "The hub has restarted. Your node reconnects."


@dataclass(slots=True)
class _Session:
    node_id: str
    number: int
    early: list[Item] | None = field(default_factory=list)
    """Items for this node that arrived before its Welcome was queued. None afterwards."""


@dataclass(frozen=True, slots=True)
class _Met:
    """The hub's answer about one node: its invite, and whether the hub knows it. Implements `GuestList`."""

    front: Front
    invite_id: int | None
    is_known: bool
    ended: str | None
    """Why the node's invite has ended. None if the invite has not ended."""

    async def about(self, node_id: str, token: str | None, nonce: bytes) -> _Met:
        return self

    def admit(self, node_id: str) -> None:
        self.front.admit(node_id)

    def knows(self, node_id: str) -> bool:
        return self.is_known

    def find_invite(self, node_id: str, token: str | None) -> int | None:
        if self.ended is not None:
            raise InviteEndedError(self.ended)
        return self.invite_id


class Front:
    """The gateway's inbox. It receives what nodes send, and also what the hub sends."""

    def __init__(self, gateway: Gateway, line: HubLine, uplink: GatewayUplink, *, hub_host: str = "") -> None:
        """`hub_host` is the hub's own host, if nodes reach the gateway under another host."""
        self._gateway = gateway
        self._line = line
        self._uplink = uplink
        self._hub_host = hub_host
        self._requests = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Item]] = {}
        self._sessions: dict[int, _Session] = {}
        self._of_node: dict[str, _Session] = {}
        self._tasks: set[asyncio.Future[None]] = set()

    # --- the inbox

    async def about(self, node_id: str, token: str | None, nonce: bytes) -> _Met:
        answer = await self._ask(ItemKind.MEET, node_id, token, nonce)
        return _Met(self, invite_id=answer[2], is_known=answer[3], ended=answer[4])

    def admit(self, node_id: str) -> None:
        if not self._line.is_open:
            raise _hub_away()

    def knows(self, node_id: str) -> bool:
        return False

    def find_invite(self, node_id: str, token: str | None) -> int | None:
        return None

    async def node_joined(self, node: NodeInfo) -> Welcome:
        told = asdict(replace(node, hub_host=self._hub_host or node.hub_host))
        _, _, number, frame = await self._ask(ItemKind.JOIN, told)
        welcome = decode_from_hub(frame)
        session = self._sessions.get(number)
        if session is None:  # The node has reconnected, or the hub is away.
            raise _hub_away()
        assert isinstance(welcome, Welcome), "JOINED carries a Welcome"
        session.node_id = node.node_id
        self._of_node[node.node_id] = session
        # Open the session after its Welcome, which is queued as soon as this function returns.
        asyncio.get_running_loop().call_soon(self._open, session)
        return welcome

    async def node_said(self, node_id: str, message: FromNode, frame: bytes) -> None:
        session = self._of_node.get(node_id)
        number = 0 if session is None else session.number
        if isinstance(message, Rollout):
            item = [ItemKind.ROLLOUT, node_id, number, frame, message.rollout_id]
        else:
            item = [ItemKind.SAID, node_id, number, frame]
        await self._uplink.put(item, len(frame))

    async def node_left(self, node_id: str) -> None:
        session = self._of_node.pop(node_id, None)
        if session is not None:
            self._sessions.pop(session.number, None)
            await self._uplink.put([ItemKind.LEFT, node_id, session.number])

    # --- messages stored in JetStream

    def stored(self, items: Sequence[Item]) -> None:
        """Tell nodes that their rollouts are received, when JetStream has the rollouts on disk. The nodes need not send
        them again."""
        received: dict[str, list[Receipt]] = {}
        for item in items:
            if item[0] == ItemKind.ROLLOUT:
                session = self._of_node.get(item[1])
                if session is not None and session.number == item[2]:
                    received.setdefault(item[1], []).append(_received(item[4]))
        for node_id, receipts in received.items():
            for start in range(0, len(receipts), MAX_BATCHED):
                part = tuple(receipts[start : start + MAX_BATCHED])
                self._gateway.send(node_id, Receipts.model_construct(receipts=part))

    # --- items from the hub

    async def begun(self) -> None:
        """Disconnect all nodes, because another hub process runs now, or a message of the hub was lost."""
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(_hub_away())
        self._sessions.clear()
        await self._gateway.close(RefusalCode.SHUTTING_DOWN, HUB_AGAIN)

    def take(self, item: Item) -> None:
        match ItemKind(item[0]):
            case ItemKind.HERE:
                pass
            case ItemKind.MET | ItemKind.JOINED | ItemKind.REFUSED:
                self._answered(item)
            case ItemKind.SEND | ItemKind.PUSH | ItemKind.PART:
                session = self._sessions.get(item[1])
                if session is None:
                    return
                if session.early is not None:
                    session.early.append(item)
                else:
                    self._pass_on(session, item)
            case ItemKind.CLOSE:
                _, code, what = item
                self._begin(self._gateway.close(RefusalCode(code), what))
            case kind:
                raise LocalProtocolError("The hub sent an item of an unexpected kind to a gateway.", got=kind.name)

    def _answered(self, item: Item) -> None:
        waiting = self._answers.get(item[1])
        if waiting is None or waiting.done():
            self._not_wanted(item)
        elif item[0] == ItemKind.REFUSED:
            _, _, code, what, got, do = item
            waiting.set_exception(RefusedError(what, got=got, do=do, code=code))
        else:
            if item[0] == ItemKind.JOINED:
                self._sessions[item[2]] = _Session("", item[2])
            waiting.set_result(item)

    def _not_wanted(self, answer: Item) -> None:
        """Tell the hub that its answer came too late: the admitted node has no connection to this gateway any more."""
        if answer[0] == ItemKind.JOINED:
            self._sessions.pop(answer[2], None)
            self._begin(self._uplink.put([ItemKind.LEFT, "", answer[2]]))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _open(self, session: _Session) -> None:
        early, session.early = session.early or [], None
        for item in early:
            self._pass_on(session, item)

    def _pass_on(self, session: _Session, item: Item) -> None:
        if item[0] == ItemKind.PART:
            self._sessions.pop(session.number, None)
        if self._of_node.get(session.node_id) is not session:
            return
        if item[0] == ItemKind.PART:
            self._gateway.dismiss(session.node_id, RefusalCode(item[2]), item[3])
        elif item[0] == ItemKind.SEND:
            self._gateway.relay(session.node_id, item[2])
        else:
            self._gateway.relay(session.node_id, item[2], (item[3][0], bool(item[3][1])))

    async def _ask(self, kind: ItemKind, *content: Any) -> Item:
        """Send a request to the hub, and return the hub's answer. Raises RefusedError if the hub refuses, or does not
        answer within ANSWER_S."""
        if not self._line.is_open:
            raise _hub_away()
        request = next(self._requests)
        answer = self._answers[request] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._line.ask([kind, request, *content])
                item: Item = await answer
                return item
        except BaseException as error:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._not_wanted(answer.result())
            if isinstance(error, TimeoutError):
                raise _hub_away() from error
            raise
        finally:
            del self._answers[request]


def _received(rollout_id: str) -> Receipt:
    return Receipt.model_construct(
        rollout_id=rollout_id, state=ReceiptState.RECEIVED, drop_reason=None, checked=Checked.NO
    )


def _hub_away() -> RefusedError:
    return RefusedError(
        "The gateway works, but the hub cannot be reached right now.",
        do="The node tries again by itself.",
        code=RefusalCode.SHUTTING_DOWN,
    )
